"""How far engines and modules are from the modules in higher precision, at every setting, and whether faults are found.

    python -m experiments.benchmarks.kernels.engine_proof [--shape molmoe_1b] [--plant] [flags of acc_lat_profiling.py]

It prints a table: for each setting the mean relative distance of the logits over the prompt's last position and the
decode steps after it. With `--plant` every engine is then made wrong in three ways, one after the other, and each must
be refused: an expert of one block that changes places with one that a token uses, a head of one block that reads
another head's values, and a decode step that puts its token one position late. The exit code is 1 where a right engine
is refused or a wrong one is not.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.engines.cuda_graphs import CudaGraphs, GraphCapturer
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.engines.select import decoder_engines
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.knobs.patches import hooks_removed
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.planning.plan import plan_for
from experiment_core_utils.primitives.errors import EngineRefused
from experiment_core_utils.primitives.private_apis import computes_experts
from experiment_core_utils.records.requests import KnobProof
from experiment_core_utils.records.stages import PLAIN
from experiments.benchmarks.controller_overhead import shaped_model
from experiments.benchmarks.shared import first_inputs, loaded_model, parsed

FAULTS = ("expert", "head", "late")
STAGES = ("prefill", "decode")
Fault = tuple[str, str]


@reporting_errors
def main() -> int:
    """Print the table; returns the exit code."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--plant", action="store_true", help="also make every engine wrong, which must be found")
    parser.add_argument("--shape", help="molmoe_1b, or a folder whose config is taken; weights are random")
    own, config = parsed(parser, num_samples=1)
    if own.shape is None:
        source, model = find_model(config.model.model_path), loaded_model(config)
    else:
        _, rest = parser.parse_known_args()
        shaped = shaped_model(own.shape, rest)
        source, model = shaped.source, shaped.model
    described = model.describe()
    print(f"{described['model_class']}, {described['dtype']}, {described['execution_stages']}")
    if described["execution"] == "eager":
        print(f"error: no engine runs ({described['execution_reason']})", file=sys.stderr)
        return 1
    print(f"{'setting':40} {'engine':>10} {'modules':>10} {'ratio':>6} {'seconds':>8}  faults")
    num_bad = 0
    for setting in plan_for(config, source):
        inputs = first_inputs(model, config.task, vision_of(setting))
        started = time.perf_counter()
        try:
            proof = proved(model, setting, inputs)
        except EngineRefused as error:
            print(f"{setting.key:40} REFUSED: {error}", flush=True)
            num_bad += 1
            continue
        seconds = time.perf_counter() - started
        outcomes = {fault: found(model, setting, inputs, fault) for fault in planted(model)} if own.plant else {}
        num_bad += sum(not is_found for is_found in outcomes.values())
        named = " ".join(f"{' '.join(fault)} {'found' if ok else 'MISSED'};" for fault, ok in outcomes.items())
        errors = proof.engine_error or 0.0, proof.modules_error or 0.0
        ratio = errors[0] / errors[1]
        print(f"{setting.key:40} {errors[0]:10.3g} {errors[1]:10.3g} {ratio:6.2f} {seconds:8.2f}  {named}", flush=True)
    return int(num_bad > 0)


def proved(model: StagedModel, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
    """The proof of a setting, warmed up before it."""
    model.apply(setting)
    model.warm_up(inputs, 16)
    return model.prove(setting, inputs)


def planted(model: StagedModel) -> list[Fault]:
    """The faults that can be planted into the stages that engines run; a prompt that is late as a whole looks the same
    to rotary positions.
    """
    ways = model.describe()["execution_stages"]
    graphed = [stage for stage in STAGES if ways[stage] not in PLAIN]
    faults = [(fault, stage) for fault in FAULTS for stage in graphed if (fault, stage) != ("late", "prefill")]
    return [fault for fault in faults if fault[0] != "expert" or model.num_experts]


def found(model: StagedModel, setting: Setting, inputs: Mapping[str, Any], fault: Fault) -> bool:
    """Whether the proof refuses the engine of a stage after a fault was planted there; it is right again afterwards."""
    has_engines = isinstance(getattr(model, "_engine_stages", None), EngineStages)
    plant = _engine_with_fault if has_engines else _graphs_with_fault
    with plant(model, fault, inputs) as wrong:
        try:
            proved(wrong, setting, inputs)
        except EngineRefused:
            return True
    return False


@contextmanager
def _engine_with_fault(model: Any, fault: Fault, inputs: Mapping[str, Any]) -> Iterator[StagedModel]:
    kind, stage = fault
    stages = model._engine_stages
    right, decoder = stages.engines, stages.decoder
    block = model.active_setting[1][len(model.active_setting[1]) // 2]
    # Other faults before this one may have led to other tokens, and so to other experts.
    stages.prove(model._knobs, inputs)
    if kind == "late":
        engine = _LateDecode(right.decode)
    else:
        used = (right.prefill if stage == "prefill" else right.decode).topk_expert_ids[block]
        weights = decoder.blocks[block]
        changed = _experts_swapped(weights, used) if kind == "expert" else _heads_swapped(weights, decoder.head_width)
        blocks = tuple(changed if index == block else own for index, own in enumerate(decoder.blocks))
        engine = getattr(decoder_engines(replace(decoder, blocks=blocks)), stage)
    stages.engines = replace(right, **{stage: engine})
    stages._judged_knobs.clear()
    try:
        yield model
    finally:
        stages.engines = right


def _experts_swapped(weights: Any, used: torch.Tensor) -> Any:
    """A block in which the expert with the largest weight for the last token and one that it does not use change
    places.
    """
    one = int(used[-1, 0])
    other = next(expert for expert in range(len(weights.gate_up)) if expert not in used[-1].tolist())
    order = torch.arange(len(weights.gate_up), device=weights.gate_up.device)
    order[one], order[other] = other, one
    return replace(weights, gate_up=weights.gate_up[order], down=weights.down[order])


def _heads_swapped(weights: Any, head_width: int) -> Any:
    """A block whose output product reads the first two heads in each other's place."""
    output = weights.output.clone()
    output[:, :head_width], output[:, head_width : 2 * head_width] = (
        weights.output[:, head_width : 2 * head_width],
        weights.output[:, :head_width],
    )
    return replace(weights, output=output)


class _LateDecode:
    """A decode engine that puts each token one position later than the last one, and so leaves a gap."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, knobs: Any, kv_cache: Any) -> torch.Tensor:
        at = kv_cache.lengths[0]
        kv_cache.keys[:, :, :, at] = kv_cache.values[:, :, :, at] = 0
        kv_cache.set_lengths([at + 1])
        logits: torch.Tensor = self._engine.step(knobs, kv_cache)
        kv_cache.keys[:, :, :, at] = kv_cache.keys[:, :, :, at + 1]
        kv_cache.values[:, :, :, at] = kv_cache.values[:, :, :, at + 1]
        kv_cache.set_lengths([at])
        kv_cache.device_lengths += 1
        return logits


@contextmanager
def _graphs_with_fault(model: Any, fault: Fault, inputs: Mapping[str, Any]) -> Iterator[StagedModel]:
    """The model with graphs of its own, captured while its modules had the fault."""
    right = model._graphed.parts.graph_capturer
    capturer = _Faulty(right if model.device.type == "cpu" else CudaGraphs(model.device), fault)
    # What knobs there are is found out at the model's own setting.
    model.knobs.apply(None, range(model.num_total_blocks))
    wrong = TransformersModel(model.name, model.model, model.requests, "graph", capturer)
    wrong.eos_token_ids, capturer.model = model.eos_token_ids, wrong
    yield wrong
    wrong.knobs.apply(None, range(model.num_total_blocks))


class _Faulty(GraphCapturer):
    """Captures work while the modules of `model` have a fault in the passes of one stage."""

    model: TransformersModel

    def __init__(self, capturer: GraphCapturer, fault: Fault) -> None:
        self._capturer, self._fault = capturer, fault

    def capture(self, work: Callable[[], Any], constants: Sequence[torch.Tensor] = ()) -> Callable[[], Any]:
        def faulty() -> Any:
            with hooks_removed(list(_hooks(self.model, self._fault))):
                return work()

        return self._capturer.capture(faulty)


def _hooks(model: TransformersModel, fault: Fault) -> Iterator[Any]:
    kind, stage = fault
    block = model.decoder_blocks[model.active_setting[1][len(model.active_setting[1]) // 2]]
    in_stage = {"is_decode": False}

    def note(_module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        in_stage["is_decode"] = hidden.shape[1] == 1

    def is_due() -> bool:
        return in_stage["is_decode"] == (stage == "decode")

    def swap_heads(module: Any, args: Any) -> Any:
        text = model.model.config.get_text_config(decoder=True)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        states = args[0].clone()
        states[..., :width], states[..., width : 2 * width] = (
            args[0][..., width : 2 * width],
            args[0][..., :width],
        )
        return (states, *args[1:]) if is_due() else None

    def swap_experts(module: Any, args: Any, kwargs: Any) -> Any:
        if not is_due():
            return None
        arguments: list[Any] = [*args, *kwargs.values()]
        hidden, ids, rest = arguments[0], arguments[1], arguments[2:]
        # The last token's first choice and the expert after it change places.
        one = ids[-1:, :1]
        other = (one + 1) % model.num_experts
        swapped = torch.where(ids == one, other, torch.where(ids == other, one, ids))
        return (hidden, swapped, *rest), {}

    def late(_module: Any, args: Any, kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        is_step = positions is not None and positions.shape[-1] == 1
        return (args, {**kwargs, "position_ids": positions + 1}) if is_step else None

    yield block.register_forward_pre_hook(note, with_kwargs=True)
    for name, module in block.named_modules():
        if kind == "head" and name.rpartition(".")[2] in ("o_proj", "out_proj"):
            yield module.register_forward_pre_hook(swap_heads)
        if kind == "expert" and computes_experts(module):
            yield module.register_forward_pre_hook(swap_experts, with_kwargs=True)
    if kind == "late":
        yield model.model.register_forward_pre_hook(late, with_kwargs=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
