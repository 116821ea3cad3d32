"""`--execution graph` of a model of transformers: `generate()`'s tokens at every setting, and its description."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers.cache_utils import StaticLayer

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.cuda_graphs import GraphCapturer, Reruns
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.meters.stages import StagedRequest
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused, GenerationFailed, SettingError
from tests.engines.cpu_compiler import needs_compiler
from tests.models.hf.test_adapter import picture
from tests.models.tiny_checkpoints import write_checkpoint
from tests.same_floats import assert_same_floats

CPU = torch.device("cpu")
LOW = tier_target("low")
NEW_TOKENS = 6
T = TypeVar("T")
Loaded = Callable[[str], tuple[TransformersModel, TransformersModel]]
SETTINGS = {
    "olmoe": [
        Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 1, 2))),
        Setting.of(vision=LOW, top_k=4, num_active_blocks=RunningBlocks.of((0, 2))),
        Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))),
    ],
    "llava": [
        Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 2))),
        Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))),
    ],
    "qwen2_5_vl": [
        Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0,))),
        Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1, 2))),
    ],
    "llama": [Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1)))],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The same checkpoint eager, and with replays that run the work again."""

    @cache
    def both(family: str) -> tuple[TransformersModel, TransformersModel]:
        folder = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return read(folder), replayed_by(Reruns(), folder)

    return both


def read(folder: Path, execution: ExecutionMode = "eager") -> TransformersModel:
    """Its answers do not end by themselves."""
    config = parse_config(["--model_path", str(folder), "--device", "cpu", "--execution", execution])
    model = find_model(str(folder)).load(config.model, CPU)
    assert isinstance(model, TransformersModel)
    return endless(model)


def replayed_by(graph_capturer: GraphCapturer, folder: Path, execution: ExecutionMode = "graph") -> TransformersModel:
    model = read(folder)
    return endless(TransformersModel(model.name, model.model, model.requests, execution, graph_capturer))


def endless(model: TransformersModel) -> TransformersModel:
    model.eos_token_ids = frozenset()
    model.model.generation_config.eos_token_id = None
    return model


class Fails:
    """A recorder that fails behind so many recordings, so many `times`, and then no more."""

    def __init__(self, recordings: int, error: Exception, times: int = 1) -> None:
        self._left, self._times = recordings, times
        self._error = error

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        self._left -= 1
        if -1 - self._times < self._left < 0:
            raise self._error
        return Reruns().capture(work)


def inputs_of(model: TransformersModel, setting: Setting, question: str = "What is it?") -> Any:
    return model.to_device(model.prepare(picture(), question, vision_of(setting).bounds).inputs)


@pytest.mark.parametrize("family", SETTINGS)
def test_tokens_and_stages_are_those_of_generate_at_every_setting(loaded: Loaded, family: str) -> None:
    eager, replayed = loaded(family)
    for question in ("What is it?", "What is it that stands behind it?"):
        for setting in SETTINGS[family]:
            answers = []
            for model in (eager, replayed):
                model.apply(setting)
                inputs = inputs_of(model, setting, question)
                model.warm_up(inputs, NEW_TOKENS)
                answers.append(run_staged(model, inputs, NEW_TOKENS))
            assert answers[0].token_ids == answers[1].token_ids
            assert len(answers[1].token_ids) == NEW_TOKENS
            assert len(answers[1].inter_token_s) == NEW_TOKENS - 1
            assert (answers[1].vision_s is None) == (family in ("olmoe", "llama"))
            replayed.release_prepared()


@pytest.mark.parametrize("family", SETTINGS)
def test_the_proof_says_how_the_setting_ran(loaded: Loaded, family: str) -> None:
    _, model = loaded(family)
    setting = SETTINGS[family][0]
    model.apply(setting)
    inputs = inputs_of(model, setting)
    not_warmed_up = Setting.of(
        vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1) if len(blocks_of(setting)) == 1 else (0,))
    )
    assert model.prove(not_warmed_up, inputs).execution == "graph"
    model.apply(setting)
    model.warm_up(inputs, NEW_TOKENS)
    proof = model.prove(setting, inputs)
    assert proof.blocks_run == proof.blocks_run_decode == blocks_of(setting)
    assert (proof.execution, proof.execution_reason) == ("graph", None)
    vision = "modules" if family in ("olmoe", "llama") else "cuda graph"
    assert proof.execution_stages == {"vision": vision, "prefill": "cuda graph", "decode": "cuda graph"}
    assert proof.engine_error is not None and proof.modules_error is not None
    # Some roundings of float32, which are 6e-8 each.
    assert 1e-8 < proof.engine_error < 1e-5 and 1e-8 < proof.modules_error < 1e-5
    assert model.describe()["execution"] == "graph"


def test_an_answer_ends_at_its_end_token(loaded: Loaded) -> None:
    _, model = loaded("llama")
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    inputs = inputs_of(model, setting)
    model.warm_up(inputs, NEW_TOKENS)
    whole = run_staged(model, inputs, NEW_TOKENS).token_ids
    model.eos_token_ids = frozenset({whole[2]})
    ended = run_staged(model, inputs, NEW_TOKENS)
    model.eos_token_ids = frozenset()
    first = whole.index(whole[2])
    assert ended.token_ids == whole[: first + 1]
    assert len(ended.inter_token_s) == first


@pytest.mark.parametrize("execution", ["graph", "auto"])
def test_a_replay_that_differs_from_the_modules_is_refused(loaded: Loaded, execution: ExecutionMode) -> None:
    """The setting fails, whoever chose the graphs; the modules run it only where they run all settings."""
    eager, _ = loaded("llama")
    model = endless(TransformersModel(eager.name, eager.model, eager.requests, execution, Reruns()))
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    inputs = inputs_of(model, setting)
    model.warm_up(inputs, NEW_TOKENS)
    assert model._graphed is not None
    decode = model._graphed.decode_at(model._graph_key)
    right = decode._replay

    def wrong() -> None:
        right()
        assert decode._step is not None
        decode._step.logits.neg_()

    decode._replay = wrong
    # Steps are off by twice their norm, the prompt's position by rounding: 7 of 8 positions, 1.75.
    output = (
        "the graphed decode step is off by 1.75 from the modules in float64, where the modules in float32 are off by"
    )
    with pytest.raises(EngineRefused, match=f"^{output} .*; run all settings with --execution eager$"):
        model.prove(setting, inputs)
    assert model.has_next_way == (execution == "auto")
    reason, expected = "as asked", run_staged(eager, inputs, NEW_TOKENS).token_ids
    if execution == "auto":
        model.run_next_way("off by 1.75")
        model.warm_up(inputs, NEW_TOKENS)
        proof = model.prove(setting, inputs)
        kernels = "own kernels do not run it: the decode step cannot be captured: CUDA graphs need a GPU, and the model"
        lengths = f"{kernels} is on cpu; no graph of a decode step fits all lengths: off by 1.75"
        assert (proof.execution, proof.execution_reason) == ("graph", lengths)
        assert run_staged(model, inputs, NEW_TOKENS).token_ids == expected
        reason = f"{lengths}; graphs of its modules do not: as asked"
    model.run_next_way("as asked")
    proof = model.prove(setting, inputs)
    assert (proof.execution, proof.execution_reason) == ("eager", reason)
    assert run_staged(model, inputs, NEW_TOKENS).token_ids == expected


def test_auto_captures_modules_that_no_kernel_knows(tmp_path: Path) -> None:
    eager = read(write_checkpoint("glm4v_moe", tmp_path))
    asked: dict[ExecutionMode, dict[str, Any]] = {}
    for execution in ("auto", "graph", "kernels"):
        model = TransformersModel("m", eager.model, eager.requests, execution, Reruns())
        assert model.has_next_way == (execution == "auto")
        found = model.describe()
        asked[execution] = {name: found[f"execution{name}"] for name in ("", "_stages", "_reason")}
    reason = "engines do not know its decoder: its MLP has shared_experts"
    stages = {"vision": "cuda graph", "prefill": "cuda graph", "decode": "cuda graph"}
    assert asked["graph"] == {"": "graph", "_stages": stages, "_reason": None}
    assert asked["auto"] == {**asked["graph"], "_reason": f"own kernels do not run it: {reason}"}
    assert asked["kernels"] == {"": "eager", "_stages": dict.fromkeys(stages, "modules"), "_reason": reason}


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "olmoe", "glm4v_moe"])
def test_inductor_compiles_the_step_of_each_setting(tmp_path: Path, family: str) -> None:
    eager = read(write_checkpoint(family, tmp_path))
    model = replayed_by(Reruns(), tmp_path, "inductor")
    two_of_three = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 2)))
    for setting in SETTINGS["olmoe"][:2] if family == "olmoe" else [two_of_three]:
        for each in (eager, model):
            each.apply(setting)
        inputs = inputs_of(model, setting)
        model.warm_up(inputs, NEW_TOKENS)
        answer = run_staged(model, inputs, NEW_TOKENS).token_ids
        assert answer == run_staged(eager, inputs, NEW_TOKENS).token_ids
        proof = model.prove(setting, inputs)
        assert proof.compile_s is not None and proof.compile_s > 0
        assert proof.execution == model.describe()["execution"] == "inductor"
        vision = "cuda graph" if family == "glm4v_moe" else "modules"
        assert proof.execution_stages == {"vision": vision, "prefill": "cuda graph", "decode": "inductor graph"}
        assert proof.execution_reason == "prefill: Inductor would compile each length of a prompt by itself"
        # As without Inductor: some roundings of float32, and at no setting the work of another.
        assert proof.engine_error is not None and 1e-8 < proof.engine_error < 1e-5
    assert not model.has_next_way


def test_what_inductor_cannot_compile_is_refused(tmp_path: Path) -> None:
    eager = read(write_checkpoint("llama", tmp_path))
    eager.model.get_output_embeddings().register_forward_hook(lambda _, __, out: out if out.sum() > 0 else -out)
    model = TransformersModel("m", eager.model, eager.requests, "inductor", Reruns())
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    with pytest.raises(EngineRefused, match=r"^Inductor cannot compile the decode step \(.*; run all settings with"):
        model.warm_up(inputs_of(model, setting), NEW_TOKENS)


def test_inductor_has_the_refusals_of_graphs_and_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = read(write_checkpoint("llama", tmp_path))
    with pytest.raises(ConfigurationError, match="^--execution inductor cannot run m: it needs a GPU; give --exec"):
        TransformersModel("m", eager.model, eager.requests, "inductor")
    monkeypatch.setattr(StaticLayer, "is_compileable", False)
    with pytest.raises(ConfigurationError, match="run m: its cache has layers that count on the host"):
        TransformersModel("m", eager.model, eager.requests, "inductor", Reruns())


def test_lengths_are_graphed_by_themselves_where_no_cache_of_fixed_size_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = read(write_checkpoint("llama", tmp_path))
    monkeypatch.setattr(StaticLayer, "is_compileable", False)
    found = TransformersModel("m", eager.model, eager.requests, "auto", Reruns()).describe()
    reason = "no graph of a decode step fits all lengths: its cache has layers that count on the host"
    assert found["execution"] == "graph" and f"; {reason}" in found["execution_reason"]


def test_steps_can_be_repeated_and_another_request_ends_a_state(loaded: Loaded) -> None:
    _, model = loaded("llama")
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    inputs, other = inputs_of(model, setting), inputs_of(model, setting, "Why?")
    for each in (inputs, other):
        model.warm_up(each, NEW_TOKENS)
    with torch.inference_mode():
        logits, state = model.prefill(inputs, None)
        token = logits.argmax(dim=-1, keepdim=True)
        first = model.decode_step(token, state).clone()
        model.rewind(state, 1)
        assert_same_floats(model.decode_step(token, state), first)
        model.prefill(other, None)
        with pytest.raises(SettingError, match="another request"):
            model.decode_step(token, state)


def test_stages_can_be_repeated_for_their_energy(loaded: Loaded) -> None:
    _, model = loaded("llava")
    setting = SETTINGS["llava"][0]
    model.apply(setting)
    inputs = inputs_of(model, setting)
    model.warm_up(inputs, NEW_TOKENS)
    request = StagedRequest(model, inputs, NEW_TOKENS, model.rewind)
    assert request.output_tokens == NEW_TOKENS
    for act in ("prefill", "decode", "decode", "prefill", "prefill", "decode"):
        request.acts[act]()


@pytest.mark.parametrize("recordings", [0, 1], ids=["prompt", "step"])
def test_a_setting_without_memory_is_refused(loaded: Loaded, recordings: int) -> None:
    eager, _ = loaded("llava")
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    model = replayed_by(Fails(recordings, error), Path(eager.name))
    first, second = SETTINGS["llava"]
    model.apply(first)
    inputs = inputs_of(model, first)
    reason = f"a prompt of {inputs['input_ids'].shape[1]} tokens and an answer of {NEW_TOKENS} ready"
    with pytest.raises(
        EngineRefused, match=f"^the device has no memory left to make {reason} .CUDA out of memory.; run"
    ):
        model.warm_up(inputs, NEW_TOKENS)
    model.apply(second)
    inputs = inputs_of(model, second)
    model.warm_up(inputs, NEW_TOKENS)
    assert model.prove(second, inputs).execution == "graph"


def test_a_prompt_that_cannot_be_recorded_runs_so_at_all_settings(loaded: Loaded) -> None:
    """The steps are still replayed; the first prompt of all decides, until the execution is fixed."""
    eager, _ = loaded("olmoe")
    model = replayed_by(Fails(2, ConfigurationError("it asks")), Path(eager.name))
    stages = {"vision": "modules", "prefill": "modules", "decode": "cuda graph"}
    for setting in SETTINGS["olmoe"][:2]:
        for each in (eager, model):
            each.apply(setting)
        inputs = inputs_of(model, setting)
        model.warm_up(inputs, NEW_TOKENS)
        assert run_staged(model, inputs, NEW_TOKENS).token_ids == run_staged(eager, inputs, NEW_TOKENS).token_ids
    proofs = [model.prove(setting, inputs_of(model, setting)) for setting in SETTINGS["olmoe"][:2]]
    assert [(proof.execution, proof.execution_reason) for proof in proofs] == [("graph", "prefill: it asks")] * 2
    assert [proof.execution_stages for proof in proofs] == [model.describe()["execution_stages"]] * 2 == [stages] * 2


def test_steps_that_need_a_mask_of_the_whole_cache_say_so(loaded: Loaded) -> None:
    """The second recording, which is the first of a step, fails, and the one with a mask does not."""
    eager, _ = loaded("olmoe")
    model = replayed_by(Fails(1, ConfigurationError("it asks")), Path(eager.name))
    setting = SETTINGS["olmoe"][0]
    for each in (eager, model):
        each.apply(setting)
    inputs = inputs_of(model, setting)
    model.warm_up(inputs, NEW_TOKENS)
    assert run_staged(model, inputs, NEW_TOKENS).token_ids == run_staged(eager, inputs, NEW_TOKENS).token_ids
    reason = "decode: each step has a mask of the whole cache, without which it asks"
    assert model.prove(setting, inputs).execution_reason == model.describe()["execution_reason"] == reason
    assert model.describe()["execution_stages"]["decode"] == "cuda graph"


@pytest.mark.parametrize("recordings", [2, 3], ids=["prompt", "step"])
def test_what_cannot_be_recorded_later_is_refused(loaded: Loaded, recordings: int) -> None:
    """Settings of one run are compared, so that none may run otherwise than those before it."""
    eager, _ = loaded("olmoe")
    # Steps are tried with a mask, too.
    model = replayed_by(Fails(recordings, ConfigurationError("it asks"), times=recordings - 1), Path(eager.name))
    first, second = SETTINGS["olmoe"][:2]
    model.apply(first)
    model.warm_up(inputs_of(model, first), NEW_TOKENS)
    model.fix_execution()
    model.apply(second)
    with pytest.raises(EngineRefused, match="it asks; run all settings with --execution eager$"):
        model.warm_up(inputs_of(model, second), NEW_TOKENS)


def test_a_cache_without_memory_is_refused(loaded: Loaded) -> None:
    """One of 10^13 slots is more than any address can reach."""
    model = replayed_by(Reruns(), Path(loaded("llama")[0].name))
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    with pytest.raises(EngineRefused, match="no memory left .*can't allocate memory"):
        model.warm_up(inputs_of(model, setting), 10**13)


class Passes:
    """Counts a model's forward passes."""

    def __init__(self, model: TransformersModel) -> None:
        self._count = 0
        model.model.register_forward_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._count += 1

    def new(self) -> int:
        """Since the last call."""
        count, self._count = self._count, 0
        return count


def test_what_is_ready_is_not_made_again(loaded: Loaded) -> None:
    model = replayed_by(Reruns(), Path(loaded("llava")[0].name))
    passes, (first, second) = Passes(model), SETTINGS["llava"]
    inputs, other = inputs_of(model, first), inputs_of(model, first, "What is it that stands behind it?")
    assert inputs["input_ids"].shape != other["input_ids"].shape
    for setting in (first, second):
        model.apply(setting)
        model.warm_up(inputs, NEW_TOKENS)
        # One over the prompt, and one to record the step.
        assert passes.new() == 2
        model.warm_up(inputs_of(model, first), NEW_TOKENS)
        assert passes.new() == 0
        model.warm_up(other, NEW_TOKENS)
        assert passes.new() == 1
    model.apply(first)
    for each in (inputs, other):
        model.warm_up(each, NEW_TOKENS)
    assert passes.new() == 0
    # More slots than a cache of 256 has: it is made anew, and then serves the other shape after one pass.
    model.warm_up(inputs, 256)
    assert passes.new() == 2
    model.warm_up(other, NEW_TOKENS)
    assert passes.new() == 1
    with torch.inference_mode():
        assert model.prefill(inputs, model.encode_image(inputs))[0].isfinite().all()


def test_a_state_outlives_what_is_ready_already(loaded: Loaded) -> None:
    _, model = loaded("llama")
    setting = SETTINGS["llama"][0]
    model.apply(setting)
    inputs = inputs_of(model, setting)
    model.warm_up(inputs, NEW_TOKENS)
    with torch.inference_mode():
        logits, state = model.prefill(inputs, None)
        model.warm_up(inputs, NEW_TOKENS)
        assert model.decode_step(logits.argmax(dim=-1, keepdim=True), state).isfinite().all()


def test_a_shape_whose_recording_was_let_go_is_made_again(loaded: Loaded) -> None:
    """64 are kept."""
    model = replayed_by(Reruns(), Path(loaded("llama")[0].name))
    model.apply(SETTINGS["llama"][0])
    passes = Passes(model)
    prompts = [{"input_ids": torch.arange(20, 20 + length)[None]} for length in range(4, 4 + 65)]
    for prompt in prompts:
        model.warm_up(prompt, NEW_TOKENS)
    assert passes.new() == 65 + 1
    model.warm_up(prompts[1], NEW_TOKENS)
    assert passes.new() == 0
    model.warm_up(prompts[0], NEW_TOKENS)
    assert passes.new() == 1


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_logits_that_are_not_finite_fail_every_way_to_generate(loaded: Loaded, family: str) -> None:
    """The head's output is spoilt in the prefill, or from the third step of decoding on."""
    eager, replayed = loaded(family)
    setting = SETTINGS[family][0]
    for model in (eager, replayed):
        model.apply(setting)
        inputs = inputs_of(model, setting)
        model.warm_up(inputs, NEW_TOKENS)
        ways: list[Callable[[], Any]] = [
            lambda model=model, inputs=inputs: run_staged(model, inputs, NEW_TOKENS),
            lambda model=model, inputs=inputs: generate_greedily(model, inputs, NEW_TOKENS, NoMarks()),
            lambda model=model, inputs=inputs: model.answer_batch([inputs, inputs], NEW_TOKENS),
        ]
        for spoilt in (0, 3):
            for way in ways:
                way()
                with spoilt_head(model, spoilt), pytest.raises(GenerationFailed, match="^logits are not finite$"):
                    way()
        with spoilt_head(model, 0), pytest.raises(GenerationFailed, match="^logits are not finite$"):
            model.prove(setting, inputs)


@contextmanager
def spoilt_head(model: TransformersModel, call: int) -> Iterator[None]:
    """A context in which the model's head gives infinite logits from this call on."""
    calls = itertools.count()

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + float("inf") if next(calls) >= call else output

    handle = model.model.get_output_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def test_graphs_refuse_dynamic_experts(tmp_path: Path) -> None:
    """Once the modules run, they do; until then no stage gives what a graph of another setting would."""
    eager = read(write_checkpoint("olmoe", tmp_path))
    model = endless(TransformersModel("m", eager.model, eager.requests, "auto", Reruns()))
    setting = SETTINGS["olmoe"][2].replaced(expert_mass=0.5)
    inputs = inputs_of(model, setting)
    model.apply(setting)
    for run in (
        lambda: model.warm_up(inputs, NEW_TOKENS),
        lambda: model.prefill(inputs, None),
        lambda: run_staged(model, inputs, NEW_TOKENS),
        lambda: model.prove(setting, inputs),
    ):
        with pytest.raises(EngineRefused, match=r"expert mass 0.5 is set in the modules only; .* --execution eager"):
            run()
    assert model.has_next_way
    model.run_next_way("expert mass")
    assert model.prove(setting, inputs).execution == "eager"
    assert len(run_staged(model, inputs, NEW_TOKENS).token_ids) == NEW_TOKENS
