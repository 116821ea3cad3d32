"""`graph` gives eager's tokens at every setting, by whatever runs a stage here; what cannot run so says why."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines import batch_runner, runner
from experiment_core_utils.engines.answer_ends import NO_ENDS, AnswerEnds
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.decode import GraphedDecode
from experiment_core_utils.engines.gpu.triton.tuning import untuned_reason
from experiment_core_utils.engines.greedy import generate_async, generate_greedily
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.engines.select import decode_engine
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.meters.stages import StagedRequest
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.device import HostMarks, NoMarks, out_of_memory_named
from experiment_core_utils.primitives.errors import EngineRefused, GenerationFailed, OutOfMemory, SettingError
from experiment_core_utils.tasks.registry import load_task
from tests.conftest import tiny_config
from tests.models.molmoe.executions import eager_and_graph

NEW_TOKENS = 5
TARGET = tier_target("low")


def at(top_k: int, blocks: Sequence[int]) -> Setting:
    return Setting.of(vision=TARGET, top_k=top_k, num_active_blocks=RunningBlocks.of(tuple(blocks)))


SETTINGS = [at(4, range(4)), at(1, range(4)), at(2, (0, 2)), at(3, (0, 1, 3))]


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> dict[str, MolmoeStagedModel]:
    return eager_and_graph(tiny_checkpoint)


@pytest.fixture(scope="module")
def requests(models: dict[str, MolmoeStagedModel]) -> list[Mapping[str, Any]]:
    """Two with pictures, of different lengths, and one without."""
    task, model = load_task("reference_vqa", "validation"), models["eager"]
    found = []
    for sample in (task[0], task[5]):
        found.append(model.to_device(model.prepare(sample, task.prompt(sample), TARGET.crops).inputs))
    found[1] = {**found[1], "input_ids": torch.cat([found[1]["input_ids"], torch.tensor([[9, 8, 7]])], dim=1)}
    return [*found, {"input_ids": torch.tensor([[7, 20, 33, 46, 59]])}]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_tokens_are_those_of_eager(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], setting: Setting
) -> None:
    found = {}
    for execution, model in models.items():
        model.apply(setting)
        runs = []
        for inputs in requests:
            model.warm_up(inputs, NEW_TOKENS)
            runs.append(run_staged(model, inputs, NEW_TOKENS).token_ids)
        found[execution] = runs
    assert found["graph"] == found["eager"]
    assert all(len(tokens) == NEW_TOKENS for tokens in found["graph"])


def test_a_batch_gives_the_tokens_of_each_request_alone(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    model = models["graph"]
    model.apply(at(2, (0, 1, 3)))
    alone = [generate_greedily(model, inputs, NEW_TOKENS, NoMarks()).token_ids for inputs in requests]
    assert model.answer_batch(requests, NEW_TOKENS) == alone
    model.eos_token_ids = frozenset({alone[0][1]})
    ended = model.answer_batch(requests, NEW_TOKENS)
    model.eos_token_ids = frozenset()
    assert ended[0] == alone[0][:2]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_the_proof_counts_what_ran(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], setting: Setting
) -> None:
    model = models["graph"]
    for inputs in requests:
        proof = model.prove(setting, inputs)
        assert proof.blocks_run == proof.blocks_run_decode == blocks_of(setting)
        assert proof.experts_per_token == model.expected_experts(setting)
        assert proof.cache_layers == len(blocks_of(setting))
        assert proof.execution == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_graphed_stages_prove_themselves() -> None:
    torch.manual_seed(7)
    stages = EngineStages(MolmoeEngineModel(MolmoeForConditionalGeneration(tiny_config()).eval().to("cuda")))
    inputs = {"input_ids": torch.randint(6, 100, (1, 70), device="cuda")}
    for knobs in (EngineKnobs(4, (0, 1, 2, 3)), EngineKnobs(2, (0, 2))):
        proof = stages.prove(knobs, inputs)
        assert stages.engines.ways == dict.fromkeys(("vision", "prefill", "decode"), "cuda graph")
        assert proof.blocks_run == proof.blocks_run_decode == knobs.blocks
        assert proof.experts_per_token == tuple(knobs.top_k if block else 4 for block in knobs.blocks)
        assert proof.cache_layers == len(knobs.blocks)


def test_what_runs_is_recorded(models: dict[str, MolmoeStagedModel]) -> None:
    eager, graph = models["eager"].describe(), models["graph"].describe()
    assert (eager["execution_asked"], eager["execution"], eager["execution_reason"]) == ("eager", "eager", None)
    assert eager["execution_untuned"] is graph["execution_untuned"] is None
    assert (eager["cache"], graph["cache"]) == ("dynamic", "static")
    assert (graph["execution_asked"], graph["execution"]) == ("graph", "cpu")
    assert graph["execution_stages"] == {"vision": "reference", "prefill": "reference", "decode": "cpu step"}
    assert "decode: there are no CUDA graphs on the CPU;" in graph["execution_reason"]
    assert "prefill: there are no CUDA graphs on the CPU, and kernels are torch's own: " in graph["execution_reason"]
    assert "in multiples of 8 from 32 on, not 8" in graph["execution_reason"]


def staged(
    change: Callable[[Any], None], like: MolmoeStagedModel, execution: ExecutionMode = "graph"
) -> MolmoeStagedModel:
    config = tiny_config()
    change(config)
    torch.manual_seed(7)
    processor: MolmoeProcessor = like.processor
    return MolmoeStagedModel("tiny", MolmoeForConditionalGeneration(config).eval(), processor, execution)


def wide(config: Any) -> None:
    """Heads of 32, which the compiled kernels take."""
    config.text_config.hidden_size = config.vision_config.hidden_size = 64


def half_the_weights_lost(model: MolmoeStagedModel, stage: str) -> None:
    """As a kernel would compute that reads past its weights, or loses every other logit: all else, its noted experts
    among it, stays.
    """
    stages = model._engine_stages
    assert stages is not None
    engines: Any = stages.engines
    if stage != "decode":
        kernels = engines.vision.blocks.kernels if stage == "vision" else engines.prefill._kernels
        lost = kernels[0].block.qkv.clone()
        lost[::2] = 0
        kernels[0] = replace(kernels[0], block=replace(kernels[0].block, qkv=lost))
    else:
        step = engines.decode.step

        def halved(*given: Any) -> torch.Tensor:
            logits: torch.Tensor = step(*given)
            logits[:, ::2] = 0
            return logits

        engines.decode.step = halved


CPU_ENGINES = {"vision": "cpu blocks", "prefill": "cpu blocks", "decode": "cpu step"}


@pytest.mark.parametrize("execution", ["graph", "auto"])
@pytest.mark.parametrize("stage", CPU_ENGINES)
def test_an_engine_that_computes_something_else_is_refused(
    models: dict[str, MolmoeStagedModel],
    requests: list[Mapping[str, Any]],
    stage: str,
    execution: ExecutionMode,
) -> None:
    """The setting fails, whoever chose the engines; the modules run it only where they run all settings."""
    output = f"^the {CPU_ENGINES[stage]} engine of the {stage} is off by .* from the modules in float64, where the "
    model = staged(wide, models["eager"], execution)
    assert model.describe()["execution_stages"] == CPU_ENGINES
    assert model.has_next_way == (execution == "auto")
    half_the_weights_lost(model, stage)
    for setting in SETTINGS[1:3]:
        with pytest.raises(EngineRefused, match=f"{output}.*; run all settings with --execution eager$"):
            model.prove(setting, requests[0])
    model.run_next_way("as asked")
    eager = staged(wide, models["eager"], "eager")
    proof = model.prove(SETTINGS[2], requests[0])
    assert (proof.execution, proof.execution_reason, proof.engine_error) == ("eager", "as asked", None)
    assert proof.execution_stages == model.describe()["execution_stages"] == dict.fromkeys(CPU_ENGINES, "modules")
    for each in (eager, model):
        each.eos_token_ids = frozenset()
        each.apply(SETTINGS[2])
    assert run_staged(model, requests[0], 3).token_ids == run_staged(eager, requests[0], 3).token_ids


def test_right_engines_are_as_near_to_float64_as_the_modules(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    """Random weights in float32: both are off by some of its roundings of 6e-8 each."""
    model = staged(wide, models["eager"], "graph")
    for setting in SETTINGS:
        for inputs in requests:
            proof = model.prove(setting, inputs)
            assert proof.execution_stages == CPU_ENGINES
            assert proof.engine_error is not None and proof.modules_error is not None
            assert 1e-8 < proof.engine_error < 1e-5 and 1e-8 < proof.modules_error < 1e-5


@pytest.mark.parametrize("execution", ["auto", "graph", "eager"])
def test_logits_that_are_not_finite_fail_every_way_to_generate(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], execution: ExecutionMode
) -> None:
    """`auto` does not try the modules instead."""
    model = staged(wide, models["eager"], execution)
    stages = model._engine_stages
    with torch.no_grad():
        (model.model.lm_head.weight if stages is None else stages.decoder.head)[5] = float("inf")
    model.apply(SETTINGS[2])
    ways: dict[str, Callable[[], Any]] = {
        "proof": lambda: model.prove(SETTINGS[2], requests[0]),
        "alone": lambda: run_staged(model, requests[0], NEW_TOKENS),
        "batch": lambda: model.answer_batch(requests, NEW_TOKENS),
    }
    if stages is not None:
        ahead = stages.async_stages(model._knobs)
        ways["ahead"] = lambda: generate_async(ahead, requests[0], NEW_TOKENS, NO_ENDS, HostMarks())
    for way in ways.values():
        with pytest.raises(GenerationFailed, match="^logits are not finite$"):
            way()


def test_auto_takes_engines_where_every_stage_has_one(models: dict[str, MolmoeStagedModel]) -> None:
    """Heads of 8 have no compiled attention, so that vision and prefill would be plain torch."""
    found = staged(wide, models["eager"], "auto").describe()
    assert (found["execution_asked"], found["execution"], found["execution_stages"]) == ("auto", "cpu", CPU_ENGINES)
    narrow = staged(lambda config: None, models["eager"], "auto").describe()
    assert (narrow["execution"], narrow["cache"]) == ("eager", "dynamic")
    assert narrow["execution_stages"] == dict.fromkeys(CPU_ENGINES, "modules")
    assert "in multiples of 8 from 32 on, not 8" in narrow["execution_reason"]


def test_a_decoder_that_cannot_be_fused_runs_eagerly(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    def clipped(config: Any) -> None:
        config.text_config.clip_qkv = 8.0

    model = staged(clipped, models["eager"])
    described = model.describe()
    assert (described["execution_asked"], described["execution"], described["cache"]) == ("graph", "eager", "dynamic")
    assert "clip_qkv 8.0" in described["execution_reason"]
    model.warm_up(requests[0], NEW_TOKENS)
    assert len(run_staged(model, requests[0], NEW_TOKENS).token_ids) >= 1
    proof = model.prove(SETTINGS[0], requests[0])
    assert proof.execution == "eager" and "clip_qkv" in str(proof.execution_reason)


def test_a_tower_that_cannot_be_fused_runs_eagerly_before_a_reference_decoder(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    def gelu(config: Any) -> None:
        config.vision_config.hidden_act = "gelu"

    model = staged(gelu, models["eager"])
    described = model.describe()
    assert described["execution_stages"] == {"vision": "modules", "prefill": "reference", "decode": "cpu step"}
    assert "vision: the vision tower cannot be fused: its activation is gelu" in described["execution_reason"]
    assert len(run_staged(model, requests[0], NEW_TOKENS).token_ids) >= 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, NEW_TOKENS])
@pytest.mark.parametrize("ends_at", [0, 2, None])
def test_a_loop_that_does_not_wait_gives_the_same_tokens_and_spans(
    models: dict[str, MolmoeStagedModel],
    requests: list[Mapping[str, Any]],
    max_new_tokens: int,
    ends_at: int | None,
) -> None:
    """Also where the answer ends while one step more is under way: that step lies behind the last mark."""
    eager, knobs = models["eager"], EngineKnobs(2, (0, 2))
    eager.apply(SETTINGS[2])
    whole = generate_greedily(eager, requests[0], NEW_TOKENS, NoMarks()).token_ids
    ends = frozenset() if ends_at is None else frozenset({whole[ends_at]})
    eager.eos_token_ids = ends
    expected = generate_greedily(eager, requests[0], max_new_tokens, NoMarks())
    eager.eos_token_ids = frozenset()
    stages, marks = EngineStages(MolmoeEngineModel(eager.model)), HostMarks()
    found = generate_async(stages.async_stages(knobs), requests[0], max_new_tokens, AnswerEnds(ends), marks)
    assert found == expected
    assert len(marks.seconds()) == len(found.spans)


def test_stages_can_be_repeated_each_by_itself(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    """As their energy is measured: whole runs and prefills of the same request come between two decodes."""
    model, inputs = models["graph"], requests[0]
    model.apply(SETTINGS[2])
    expected = run_staged(model, inputs, NEW_TOKENS).token_ids
    model.warm_up(inputs, NEW_TOKENS)
    request = StagedRequest(model, inputs, NEW_TOKENS, model.rewind)
    for act in (request.decode, request.whole, request.decode, request.prefill, request.vision, request.decode):
        act()
    assert request.output_tokens == NEW_TOKENS
    assert run_staged(model, inputs, NEW_TOKENS).token_ids == expected


def test_a_setting_without_memory_is_refused(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    """A store of 10^13 slots is more than any address can reach; the one that another setting has stays.

    5 tokens above 10^13, a multiple of 512, are 512 slots above it; a slot's keys are 4 blocks x 2 heads x 16 floats.
    """
    model = staged(lambda config: None, models["eager"])
    stages, prompt = model._engine_stages, requests[2]
    assert stages is not None
    for first, cache_left in ((at(1, (0, 1)), 0), (at(2, (0, 1)), 512)):
        if cache_left:
            model.apply(SETTINGS[0])
            model.warm_up(prompt, NEW_TOKENS)
        model.apply(first)
        reason = (
            "the device has no memory left to make a prompt of 5 tokens and an answer of 10000000000000 ready "
            f"(DefaultCPUAllocator: can't allocate memory: you tried to allocate {(10**13 + 512) * 512} bytes); "
            "run all settings with --execution eager"
        )
        with pytest.raises(EngineRefused, match=f"^{re.escape(reason)}$"):
            model.warm_up(prompt, 10**13)
        assert stages.kv_cache.max_seq_len == cache_left
    assert model.prove(SETTINGS[0], prompt).execution == "cpu"
    model.apply(SETTINGS[0])
    with pytest.raises(EngineRefused, match="no memory left"):
        model.warm_up(prompt, 10**13)
    # The last that could run here is given up.
    assert stages.kv_cache.max_seq_len == 0


def test_batches_that_cannot_be_captured_are_refused(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that captures says of itself that it cannot here."""
    model = staged(lambda config: None, models["eager"])
    model.eos_token_ids = frozenset()
    monkeypatch.setattr(runner, "decode_engine", GraphedDecode)
    model.apply(SETTINGS[1])
    with pytest.raises(
        EngineRefused, match="^answers in batches: the decode step cannot be captured: CUDA graphs need"
    ):
        model.answer_batch(requests, NEW_TOKENS)


def test_a_store_without_memory_is_an_error_of_the_batch(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """10^13 slots are more than any address can reach; whoever gave several requests gives fewer."""
    model = staged(lambda config: None, models["eager"])
    monkeypatch.setattr(batch_runner, "SLOT_STEP", 10**13)
    model.apply(SETTINGS[0])
    for some in (requests, requests[2:]):
        with pytest.raises(OutOfMemory), out_of_memory_named():
            model.answer_batch(some, NEW_TOKENS)


def test_a_batch_steps_by_the_engine_of_one_request(models: dict[str, MolmoeStagedModel]) -> None:
    stages = models["graph"]._engine_stages
    assert stages is not None
    assert type(decode_engine(stages.decoder)) is type(stages.engines.decode)


def test_another_card_is_named() -> None:
    assert untuned_reason("NVIDIA H200") is None
    assert untuned_reason("NVIDIA A100-SXM4-80GB") == (
        "own kernels run with sizes that were tuned on an H200, not on an NVIDIA A100-SXM4-80GB"
    )


def test_a_state_is_lost_with_the_next_request(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    model = models["graph"]
    model.apply(SETTINGS[0])
    logits, state = model.prefill(requests[2], None)
    model.prefill({"input_ids": torch.tensor([[1, 2, 3]])}, None)
    with pytest.raises(SettingError, match="is used by another request"):
        model.decode_step(logits.argmax(dim=-1, keepdim=True), state)


def test_an_answer_longer_than_was_announced_finds_room() -> None:
    """Slots come in steps of 512: a prompt of 510 and 9 tokens behind it need a second step."""
    torch.manual_seed(7)
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    knobs = EngineKnobs(2, (0, 1, 2, 3))
    prompt = torch.randint(6, 100, (1, 510))
    stages = EngineStages(MolmoeEngineModel(model))
    stages.warm_up(knobs, {"input_ids": prompt}, 2)
    found, state = stages.prefill(knobs, {"input_ids": prompt}, None)
    with torch.inference_mode():
        expected, eager = model.prefill(prompt, top_k=2)
        for _ in range(8):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            token = expected.argmax(dim=-1, keepdim=True)
            found, expected = stages.decode_step(token, state), model.decode_step(token, eager)
    assert state.length == 518


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_steps_that_feed_themselves_give_the_same_tokens(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]], setting: Setting
) -> None:
    model = models["graph"]
    model.apply(setting)
    stages = model._engine_stages
    assert stages is not None
    for inputs in requests:
        expected = generate_greedily(model, inputs, NEW_TOKENS, NoMarks())
        marks = HostMarks()
        model.warm_up(inputs, NEW_TOKENS)
        found = generate_async(stages.async_stages(model._knobs), inputs, NEW_TOKENS, NO_ENDS, marks)
        assert found == expected
        assert len(marks.seconds()) == len(found.spans)
        # The step behind the end token is launched in vain, and its mark is taken back.
        ended = generate_async(
            stages.async_stages(model._knobs),
            inputs,
            NEW_TOKENS,
            AnswerEnds(frozenset({expected.token_ids[0]})),
            HostMarks(),
        )
        assert ended.token_ids == expected.token_ids[:1]


def test_what_was_prepared_is_given_back_and_prepared_anew(
    models: dict[str, MolmoeStagedModel], requests: list[Mapping[str, Any]]
) -> None:
    model, found = models["graph"], []
    assert model._engine_stages is not None
    for _ in range(2):
        model.apply(SETTINGS[1])
        model.warm_up(requests[0], NEW_TOKENS)
        assert model._engine_stages.kv_cache.max_seq_len >= requests[0]["input_ids"].shape[1] + NEW_TOKENS
        found.append(run_staged(model, requests[0], NEW_TOKENS).token_ids)
        model.release_prepared()
        assert model._engine_stages.kv_cache.max_seq_len == 0
    assert found[0] == found[1]
