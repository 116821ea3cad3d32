"""The choice of the engine that runs each stage of a model, with the reason for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from experiment_core_utils.engines.api import DecodeEngine, PausedPrefillEngine, PrefillEngine, VisionEngine
from experiment_core_utils.engines.cpu.decode import CpuDecode
from experiment_core_utils.engines.cpu.panels import refuse_other_places
from experiment_core_utils.engines.cpu.prefill import CpuPrefill
from experiment_core_utils.engines.cpu.vision import CpuVision
from experiment_core_utils.engines.cuda_graphs import NO_GRAPHS, CudaGraphPool, GraphCapturer
from experiment_core_utils.engines.engine_model import EngineModel
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.prefill import GraphedPausedPrefill, GraphedPrefill
from experiment_core_utils.engines.gpu.vision import GraphedVision
from experiment_core_utils.engines.reference.decoder import (
    ReferenceDecode,
    ReferencePausedPrefill,
    ReferencePrefill,
)
from experiment_core_utils.engines.reference.vision import ReferenceVision
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageName
from experiment_core_utils.records.stages import CPU_BLOCKS, CPU_STEP, CUDA_GRAPH, MODULES, REFERENCE

# Of prefill and decode together, kept at a time: settings times prompt lengths, which is 130 a padded length for a
# controller that may choose everything; one takes about half a megabyte.
MOST_GRAPHS = 4096
OWN_KERNELS = NO_GRAPHS + ", and kernels are torch's own: {}"


@dataclass(frozen=True)
class Engines:
    """The engine of each stage."""

    prefill: PrefillEngine
    split: PausedPrefillEngine  #: the prefill with a pause; runs as the whole one does
    decode: DecodeEngine
    ways: Mapping[StageName, str]  #: the name of the engine of each stage; names are in `engines.api`
    reasons: Mapping[StageName, str]  #: of each stage that is not a CUDA graph, why
    vision: VisionEngine | None = field(default=None)  #: None where the modules run it


def choose_engines(model: EngineModel, decoder: DecoderWeights) -> Engines:
    """The fastest engine of each stage that takes this model on its device.

    Raises:
        ConfigurationError: on a GPU, decode steps cannot be captured; without that little is won over the modules.
    """
    chosen = decoder_engines(decoder)
    vision, way, reason = _vision_engine(model)
    reasons = dict(chosen.reasons) if reason is None else {**chosen.reasons, "vision": reason}
    return replace(chosen, vision=vision, ways={"vision": way, **chosen.ways}, reasons=reasons)


def decoder_engines(decoder: DecoderWeights, graph_capturer: GraphCapturer | None = None) -> Engines:
    """Engines without the vision stage; see `choose_engines`.

    Args:
        graph_capturer: makes the graphs of a GPU's kernels; None for CUDA graphs, and on the CPU for its own kernels.
    """
    if decoder.device.type != "cuda" and graph_capturer is None:
        prefill, way, why = _cpu_prefill(decoder)
        steps, way_steps, why_steps = _cpu_decode(decoder)
        ways: dict[StageName, str] = {"prefill": way, "decode": way_steps}
        reasons: dict[StageName, str] = {"prefill": why, "decode": why_steps}
        return Engines(prefill, ReferencePausedPrefill(decoder, prefill), steps, ways, reasons)
    # Not those of engines before: a graph's name is an address, which a new store can have again.
    graphs = CudaGraphPool(MOST_GRAPHS, graph_capturer)
    decode = GraphedDecode(decoder, graphs)
    try:
        whole, split = GraphedPrefill(decoder, graphs), GraphedPausedPrefill(decoder, graphs)
        return Engines(whole, split, decode, {"prefill": CUDA_GRAPH, "decode": CUDA_GRAPH}, {})
    except ConfigurationError as error:
        ways = {"prefill": REFERENCE, "decode": CUDA_GRAPH}
        reference = ReferencePrefill(decoder)
        return Engines(reference, ReferencePausedPrefill(decoder, reference), decode, ways, {"prefill": str(error)})


def decode_engine(decoder: DecoderWeights) -> DecodeEngine:
    """The decode engine alone, with its own graphs."""
    return GraphedDecode(decoder) if decoder.device.type == "cuda" else _cpu_decode(decoder)[0]


def _vision_engine(model: EngineModel) -> tuple[VisionEngine | None, str, str | None]:
    """The engine, its name, and why it is not a CUDA graph."""
    device = model.modules.device
    try:
        if device.type == "cuda":
            return GraphedVision(model.fused_vision()), CUDA_GRAPH, None
        refuse_other_places(device, model.modules.dtype)
        return CpuVision(model.fused_vision_modules()), CPU_BLOCKS, NO_GRAPHS
    except ConfigurationError as error:
        reason = str(error) if device.type == "cuda" else OWN_KERNELS.format(error)
    try:
        return ReferenceVision(model.fused_vision_modules()), REFERENCE, reason
    except ConfigurationError as error:
        return None, MODULES, str(error)


def _cpu_prefill(decoder: DecoderWeights) -> tuple[ReferencePrefill, str, str]:
    """The engine, its name, and why it is not a CUDA graph."""
    try:
        return CpuPrefill(decoder), CPU_BLOCKS, NO_GRAPHS
    except ConfigurationError as error:
        return ReferencePrefill(decoder), REFERENCE, OWN_KERNELS.format(error)


def _cpu_decode(decoder: DecoderWeights) -> tuple[ReferenceDecode, str, str]:
    """The engine, its name, and why it is not a CUDA graph."""
    try:
        return CpuDecode(decoder), CPU_STEP, NO_GRAPHS
    except ConfigurationError as error:
        return ReferenceDecode(decoder), REFERENCE, OWN_KERNELS.format(error)
