"""The ways to run a stage that the harness compares; each is a staged model over the same random weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.answer_ends import NO_ENDS
from experiment_core_utils.engines.cuda_graphs import CudaGraphPool, Reruns
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.prefill import GraphedPrefill
from experiment_core_utils.engines.gpu.vision import GraphedVision
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.engines.reference.vision import ReferenceVision
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.models.hf.batch import generate_batch
from experiment_core_utils.models.hf.generate import greedy_config
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.records.stages import (
    CPU_BLOCKS,
    CPU_STEP,
    CUDA_GRAPH,
    INDUCTOR_GRAPH,
    KERNEL_GRAPH,
    MODULES,
    REFERENCE,
    STAGES,
)
from experiments.benchmarks.kernels.shapes import MOLMOE
from experiments.benchmarks.molmoe_1b import staged_model


def _reference(stages: EngineStages) -> dict[str, Any]:
    return {
        "prefill": ReferencePrefill(stages.decoder),
        "decode": ReferenceDecode(stages.decoder),
        "vision": ReferenceVision(stages.model.fused_vision_modules()),
        "ways": dict.fromkeys(STAGES, REFERENCE),
    }


def _launched(stages: EngineStages) -> dict[str, Any]:
    pool = CudaGraphPool(graph_capturer=Reruns())
    prefill, vision = GraphedPrefill(stages.decoder, pool), GraphedVision(stages.model.fused_vision(), pool)
    return {"prefill": prefill, "decode": _without_pdl(stages, pool)["decode"], "vision": vision}


def _without_pdl(stages: EngineStages, pool: CudaGraphPool | None = None) -> dict[str, Any]:
    decode = GraphedDecode(stages.decoder, pool)
    decode._use_pdl = False
    return {"decode": decode}


@dataclass(frozen=True)
class StageWay:
    """A way to run all stages; `change` gives other engines in place of those that are chosen."""

    what: str
    ways: frozenset[str]  #: names of what may run the stage, so that nothing else is measured in its place
    change: Callable[[EngineStages], dict[str, Any]] | None = None
    is_rerun: bool = False  #: work of graphs is launched again, as it was before its capture

    def runs_on(self, device_type: str, model: str) -> bool:
        """Whether the device alone does not rule the way out; MolmoE's kernels, launched or captured, need a GPU."""
        if self.is_rerun:
            return device_type == "cuda" or model != MOLMOE
        if self.ways & {CUDA_GRAPH, KERNEL_GRAPH, INDUCTOR_GRAPH}:
            return device_type == "cuda"
        return device_type == "cpu" or not self.ways & {CPU_BLOCKS, CPU_STEP}


VARIANTS: Mapping[str, StageWay] = {
    "generate": StageWay("transformers' generate()", frozenset({MODULES})),
    "static": StageWay("generate() with a static cache, which compiles on a GPU", frozenset({MODULES})),
    "modules": StageWay("the model's modules", frozenset({MODULES})),
    "graph": StageWay("CUDA graphs, of engines where they serve the model, else of modules", frozenset({CUDA_GRAPH})),
    "kernels": StageWay("graphs of own kernels in place of a transformers decoder", frozenset({KERNEL_GRAPH})),
    "inductor": StageWay("graphs of modules that Inductor compiled", frozenset({INDUCTOR_GRAPH})),
    "no_pdl": StageWay("engines' graphs whose decode kernels do not overlap", frozenset({CUDA_GRAPH}), _without_pdl),
    "launched": StageWay("the graphs' work, launched kernel by kernel", frozenset({CUDA_GRAPH}), _launched, True),
    "cpu": StageWay("C++ kernels", frozenset({CPU_BLOCKS, CPU_STEP})),
    "reference": StageWay("plain torch on fused weights", frozenset({REFERENCE}), _reference),
}


# What is passed on to `generate()`; its logits are the modules'.
GENERATE: Mapping[str, Mapping[str, str]] = {"generate": {}, "static": {"cache_implementation": "static"}}


def refuse_other_devices(names: Sequence[str], device_type: str, model: str) -> None:
    """Raises ConfigurationError for variants that cannot run on the device, naming those that may."""
    here = [name for name, each in VARIANTS.items() if each.runs_on(device_type, model)]
    lacking = [name for name in names if name not in here]
    if lacking:
        raise ConfigurationError(
            f"--variant {' '.join(lacking)} cannot run {model} on {device_type}; give {', '.join(here)}, or "
            "another --device"
        )


def staged_variant(name: str, model: PreTrainedModel, stage: str, max_seq_len: int) -> tuple[StagedModel, str]:
    """The model run in that way, and the name of what runs the stage; answers do not end.

    Args:
        max_seq_len: tokens of the request, for which engines make room once.

    Raises:
        ConfigurationError: the stage does not run in that way here.
    """
    variant = VARIANTS[name]
    capturer = Reruns() if variant.is_rerun else None
    requested: Mapping[str, ExecutionMode] = {"kernels": "kernels", "inductor": "inductor"}
    mode = "eager" if variant.ways == {MODULES} else requested.get(name, "graph")
    staged: Any = staged_model(model, MolmoeProcessor.from_pretrained(EMBEDDED_MODEL), mode, capturer)
    staged.eos_token_ids = frozenset()
    if name in GENERATE:
        model.generation_config = greedy_config(model)
        model.generation_config.eos_token_id = None
        staged.generate_timed = lambda inputs, tokens, marks: (
            generate_batch(model, [{**inputs, **GENERATE[name]}], NO_ENDS, tokens, marks).first
        )
    stages: EngineStages | None = getattr(staged, "_engine_stages", None)
    described = staged.describe()
    ways = described["execution_stages"]
    if stages is not None and variant.change is not None:
        # Later room would take other engines.
        stages.reserve(max_seq_len)
        stages.engines = replace(stages.engines, **variant.change(stages))
        ways = stages.engines.ways
    is_own = stages is not None or variant.change is None or variant.is_rerun
    if not is_own or ways[stage] not in variant.ways:
        reason = described["execution_reason"] or "no engine serves this model"
        raise ConfigurationError(
            f"--variant {name} does not run here: the {stage} runs by {ways[stage]} ({reason}); give other variants"
        )
    return staged, "launched one by one" if variant.is_rerun else ways[stage]
