"""In: a MolmoE model on its device; out: what runs each of its stages in place of its modules, and why that."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from experiment_core_utils.models.graph_capture import NO_GRAPHS
from experiment_core_utils.models.interface import (
    CPU_BLOCKS,
    CPU_ROWS,
    CPU_STEP,
    CUDA_GRAPH,
    MODULES,
    REFERENCE,
)
from experiment_core_utils.models.molmoe.captured_decode import CapturedDecode
from experiment_core_utils.models.molmoe.captured_graphs import CapturedGraphs
from experiment_core_utils.models.molmoe.captured_prefill import CapturedPrefill
from experiment_core_utils.models.molmoe.captured_split_prefill import CapturedSplitPrefill
from experiment_core_utils.models.molmoe.captured_vision import CapturedVision
from experiment_core_utils.models.molmoe.compiled_decode import CompiledDecode
from experiment_core_utils.models.molmoe.compiled_prefill import CompiledPrefill
from experiment_core_utils.models.molmoe.compiled_vision import CompiledVision, KernelVision
from experiment_core_utils.models.molmoe.cpu_kernels.products import MOST_BYTES, refuse_large
from experiment_core_utils.models.molmoe.engines import DecodeEngine, PrefillEngine, VisionEngine
from experiment_core_utils.models.molmoe.fused_prefill import FusedPrefill
from experiment_core_utils.models.molmoe.fused_vision import FusedVision
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder
from experiment_core_utils.models.molmoe.packed_vision import pack_vision
from experiment_core_utils.models.molmoe.split_engines import SplitPrefillEngine
from experiment_core_utils.models.molmoe.straight_decoder import StraightDecode, StraightPrefill
from experiment_core_utils.models.molmoe.straight_split_prefill import StraightSplitPrefill
from experiment_core_utils.models.molmoe.straight_vision import StraightVision
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageName

# Of prefill and decode together, kept at a time: settings times prompt lengths, which is 130 a padded length for a
# controller that may choose everything; one takes about half a megabyte.
MOST_GRAPHS = 4096
OWN_KERNELS = NO_GRAPHS + ", and kernels are torch's own: {}"
OWN_PRODUCTS = NO_GRAPHS + ", and products are torch's own: {}"


@dataclass(frozen=True)
class Engines:
    """What runs each stage.

    Attributes:
        split: the prefill with a pause; runs as the whole one does.
        vision: None where the modules run it.
        ways: the name of the engine of each stage; names are in `models.interface`.
        reasons: of each stage that is no CUDA graph, why.
    """

    prefill: PrefillEngine
    split: SplitPrefillEngine
    decode: DecodeEngine
    ways: Mapping[StageName, str]
    reasons: Mapping[StageName, str]
    vision: VisionEngine | None = field(default=None)


def choose_engines(
    model: MolmoeForConditionalGeneration, decoder: PackedDecoder, most_copied_bytes: int = MOST_BYTES
) -> Engines:
    """The fastest engine of each stage that takes this model where it is.

    Args:
        most_copied_bytes: of a tower's or a decoder's weights that a CPU's kernels may hold a second time.

    Raises:
        ConfigurationError: on a GPU, decode steps cannot be captured; without that little is won over the modules.
    """
    chosen = decoder_engines(decoder, most_copied_bytes)
    vision, way, reason = _vision_engine(model, most_copied_bytes)
    reasons = dict(chosen.reasons) if reason is None else {**chosen.reasons, "vision": reason}
    return replace(chosen, vision=vision, ways={"vision": way, **chosen.ways}, reasons=reasons)


def decoder_engines(decoder: PackedDecoder, most_copied_bytes: int = MOST_BYTES) -> Engines:
    """Without the vision stage; see `choose_engines`."""
    if decoder.device.type != "cuda":
        prefill, way, why = _cpu_prefill(decoder, most_copied_bytes)
        steps, way_steps, why_steps = _cpu_decode(decoder)
        ways: dict[StageName, str] = {"prefill": way, "decode": way_steps}
        reasons: dict[StageName, str] = {"prefill": why, "decode": why_steps}
        return Engines(prefill, StraightSplitPrefill(decoder, prefill), steps, ways, reasons)
    # Not those of engines before: a graph's name is an address, which a new store can have again.
    graphs = CapturedGraphs(MOST_GRAPHS)
    decode = CapturedDecode(decoder, graphs)
    try:
        whole, split = CapturedPrefill(decoder, graphs), CapturedSplitPrefill(decoder, graphs)
        return Engines(whole, split, decode, {"prefill": CUDA_GRAPH, "decode": CUDA_GRAPH}, {})
    except ConfigurationError as error:
        ways = {"prefill": REFERENCE, "decode": CUDA_GRAPH}
        straight = StraightPrefill(decoder)
        return Engines(straight, StraightSplitPrefill(decoder, straight), decode, ways, {"prefill": str(error)})


def decode_engine(decoder: PackedDecoder) -> DecodeEngine:
    """The decode step alone, with graphs of its own; what the whole choice makes beside it is large on the CPU."""
    return CapturedDecode(decoder) if decoder.device.type == "cuda" else _cpu_decode(decoder)[0]


def _vision_engine(
    model: MolmoeForConditionalGeneration, most_copied_bytes: int
) -> tuple[VisionEngine | None, str, str | None]:
    """The engine, its name, and why it is no CUDA graph."""
    try:
        if model.device.type == "cuda":
            return CapturedVision(pack_vision(model)), CUDA_GRAPH, None
        return _cpu_vision(model, most_copied_bytes)
    except ConfigurationError as error:
        reason = str(error) if model.device.type == "cuda" else OWN_KERNELS.format(error)
    try:
        return StraightVision(model), REFERENCE, reason
    except ConfigurationError as error:
        return None, MODULES, str(error)


def _cpu_vision(model: MolmoeForConditionalGeneration, most_copied_bytes: int) -> tuple[KernelVision, str, str]:
    """As `_cpu_prefill`; raises ConfigurationError where kernels are torch's own."""
    try:
        refuse_large(model.model.vision_tower.parameters(), most_copied_bytes)
    except ConfigurationError as error:
        return CompiledVision(model), CPU_ROWS, OWN_PRODUCTS.format(error)
    return FusedVision(model), CPU_BLOCKS, NO_GRAPHS


def _cpu_prefill(decoder: PackedDecoder, most_copied_bytes: int) -> tuple[StraightPrefill, str, str]:
    """The engine, its name, and why it is no CUDA graph; with it why its kernels or products are torch's own."""
    try:
        try:
            refuse_large((each for block in decoder.blocks for each in vars(block).values()), most_copied_bytes)
        except ConfigurationError as error:
            return CompiledPrefill(decoder), CPU_ROWS, OWN_PRODUCTS.format(error)
        return FusedPrefill(decoder), CPU_BLOCKS, NO_GRAPHS
    except ConfigurationError as error:
        return StraightPrefill(decoder), REFERENCE, OWN_KERNELS.format(error)


def _cpu_decode(decoder: PackedDecoder) -> tuple[StraightDecode, str, str]:
    """As `_cpu_prefill`."""
    try:
        return CompiledDecode(decoder), CPU_STEP, NO_GRAPHS
    except ConfigurationError as error:
        return StraightDecode(decoder), REFERENCE, OWN_KERNELS.format(error)
