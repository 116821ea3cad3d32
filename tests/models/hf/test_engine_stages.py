"""Prefill and decode by the engines of a decoder, against its modules."""

import json
import shutil
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.hf.engine_stages import EngineParts
from experiment_core_utils.models.hf.generate import GenerateStages, greedy_config
from experiment_core_utils.models.hf.graphed_stages import GraphedGeneration
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.primitives.errors import EngineRefused
from tests.engines.cpu_compiler import needs_compiler
from tests.models.described_families import TEXT, VISION, WINDOW, pictured, text_model
from tests.models.hf.test_graphed_stages import LOW, inputs_of, read
from tests.models.tiny_checkpoints import write_checkpoint
from tests.models.tiny_families import VOCABULARY
from tests.same_floats import assert_same_floats

NEW_TOKENS = 5
EVERY = (0, 1, 2, 3)


def prompt_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def sent(host_inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other tensors of the same numbers, as a device has them."""
    return {name: tensor.clone() for name, tensor in host_inputs.items()}


class Beside:
    """A model's stages by its modules, and by the engines on the same weights; `new_capturer` as of `EngineParts`."""

    def __init__(self, model: PreTrainedModel, new_capturer: Callable[[], GraphCapturer] | None = None) -> None:
        model.generation_config = greedy_config(model)
        self.knobs = DecoderKnobs(model)
        self.modules = GenerateStages(model)
        self.parts = EngineParts(model, lambda: self.knobs.in_force, new_capturer=new_capturer)
        self.engines = GraphedGeneration(model.device, self.modules, self.parts)

    @torch.inference_mode()
    def compare(self, top_k: int | None, blocks: tuple[int, ...], inputs: dict[str, torch.Tensor]) -> None:
        """Logits of the prompt and of a few steps, two of which are taken back and done again."""
        self.knobs.apply(top_k, blocks)
        setting = top_k, blocks
        self.engines.warm_up(setting, inputs, NEW_TOKENS)
        features = self.modules.encode_image(inputs)
        expected, state = self.modules.prefill(inputs, features)
        found, engine_state = self.engines.prefill(setting, inputs, features)
        assert_same_floats(found, expected)
        kept: Any = None
        for step in range(NEW_TOKENS):
            token = expected.argmax(dim=-1, keepdim=True)
            expected, found = self.modules.decode_step(token, state), self.engines.decode_step(token, engine_state)
            assert_same_floats(found, expected)
            if step == NEW_TOKENS - 2:
                kept = token
        self.engines.rewind(engine_state, 2)
        self.engines.decode_step(kept, engine_state)
        assert_same_floats(self.engines.decode_step(token, engine_state), expected)


@pytest.mark.parametrize("name", TEXT)
def test_logits_of_prompts_of_several_lengths_are_those_of_the_modules(name: str) -> None:
    beside = Beside(text_model(name))
    assert "modules" not in (beside.engines.ways["prefill"], beside.engines.ways["decode"])
    # The longest is in the middle: what it leaves in the cache must not be read by the next.
    for tokens in (WINDOW - 1, 4 * WINDOW, 1, WINDOW):
        beside.compare(None, EVERY, prompt_of(tokens))


def test_the_cache_that_settings_share_is_given_back_with_what_was_prepared() -> None:
    beside = Beside(text_model("llama"))
    beside.compare(None, EVERY, prompt_of(WINDOW))
    shared = weakref.ref(beside.parts.kv_cache.keys)
    beside.engines.release_prepared()
    assert beside.parts.kv_cache.max_seq_len == 0 and shared() is None
    beside.compare(None, EVERY, prompt_of(9))


@pytest.mark.parametrize("name", TEXT)
def test_fewer_blocks_and_other_experts(name: str) -> None:
    beside = Beside(text_model(name))
    top_ks = (None,) if beside.knobs.num_experts is None else (1, 5)
    for top_k in top_ks:
        for blocks in (EVERY, (0, 1, 3), (1, 2)):
            beside.compare(top_k, blocks, prompt_of(9))


@pytest.mark.parametrize("name", VISION)
def test_prompts_with_a_picture(name: str) -> None:
    model, inputs = pictured(name)
    beside = Beside(model)
    on_device = sent(inputs)
    beside.modules.note(inputs, on_device)
    for blocks in (EVERY, (0, 2), (1,)):
        for prompt in (inputs, on_device, prompt_of(7)):
            beside.compare(None, blocks, prompt)


@torch.inference_mode()
def test_what_the_host_knows_is_not_asked_of_the_device() -> None:
    """Which is seen where the device's mask is another one, as it never is."""
    beside, host_inputs = Beside(text_model("llama")), prompt_of(9)
    inputs = sent(host_inputs)
    beside.modules.note(host_inputs, inputs)
    beside.engines.warm_up("all", inputs, NEW_TOKENS)
    expected = beside.engines.prefill("all", inputs, None)[0].clone()
    inputs["attention_mask"].zero_()
    assert_same_floats(beside.engines.prefill("all", inputs, None)[0], expected)


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_padded_prompt_is_refused(is_noted: bool) -> None:
    beside, host_inputs = Beside(text_model("llama")), prompt_of(9)
    host_inputs["attention_mask"][0, :2] = 0
    inputs = sent(host_inputs)
    if is_noted:
        beside.modules.note(host_inputs, inputs)
    beside.engines.warm_up("all", inputs, NEW_TOKENS)
    assert beside.engines.prefill_unsupported_reason == "a prompt is padded or masked"


def test_a_new_shape_at_a_ready_setting_is_not_run_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured, so that there is only room to be made; another kind of request is run once."""
    model, pictured_inputs = pictured("qwen2_5_vl")
    beside, ran = Beside(model), list[int]()
    prefill = beside.modules.prefill

    def noted(inputs: Any, features: Any, by_engine: bool) -> Any:
        ran.append(inputs["input_ids"].shape[1])
        return prefill(inputs, features, by_engine)

    monkeypatch.setattr(beside.modules, "prefill", noted)
    for tokens in (9, 40, 11):
        beside.engines.warm_up("all", prompt_of(tokens), NEW_TOKENS)
    assert ran == [9]
    beside.engines.warm_up("all", pictured_inputs, NEW_TOKENS)
    assert ran == [9, pictured_inputs["input_ids"].shape[1]]


SETTINGS = {
    "olmoe": [
        Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 1, 2))),
        Setting.of(vision=LOW, top_k=4, num_active_blocks=RunningBlocks.of((0, 2))),
    ],
    "qwen3_vl_moe": [
        Setting.of(vision=LOW, top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 2))),
        Setting.of(vision=LOW, top_k=1, num_active_blocks=RunningBlocks.of((0, 2)), visual_token_keep=KeptTokens(0.5)),
    ],
    "llava_next": [
        Setting.of(
            vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 1)), visual_token_keep=KeptTokens(0.5)
        ),
    ],
    "qwen2_5_vl": [
        Setting.of(
            vision=LOW,
            top_k=None,
            num_active_blocks=RunningBlocks.of((0, 1, 2)),
            visual_token_keep=KeptTokens(0.25, "random", 3),
        ),
    ],
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_checkpoint(family, tmp_path_factory.mktemp(family)))


@needs_compiler
@pytest.mark.parametrize("family", SETTINGS)
def test_answers_and_proofs_of_a_model_that_may_choose(folder_of: Callable[[str], Path], family: str) -> None:
    """`--execution auto` on a CPU: tokens are those of the modules, and each proof judges the engine."""
    eager, chosen = read(folder_of(family)), read(folder_of(family), "auto")
    assert (chosen.describe()["execution"], chosen.describe()["timed_inside"]) == ("cpu", "stages")
    for question in ("What is it?", "What is it that stands behind it?"):
        for setting in SETTINGS[family]:
            answers = []
            for model in (eager, chosen):
                model.apply(setting)
                inputs = inputs_of(model, setting, question)
                model.warm_up(inputs, NEW_TOKENS)
                answers.append(run_staged(model, inputs, NEW_TOKENS).token_ids)
            assert answers[0] == answers[1]
            proof = chosen.prove(setting, inputs)
            assert not check_proof(proof, setting, chosen)
            assert proof.engine_error is not None and proof.modules_error is not None
            assert proof.execution_stages == chosen.describe()["execution_stages"]
            assert proof.execution_stages["decode"] == "cpu step" and proof.execution_stages["vision"] == "modules"
            assert "there are no CUDA graphs on the CPU" in str(proof.execution_reason)


@needs_compiler
def test_a_window_that_is_shorter_than_the_prompt_is_proven(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The weights of a Llama are those of a Mistral, whose own cache forgets what is before the window."""
    folder = shutil.copytree(folder_of("llama"), tmp_path / "mistral")
    content = json.loads((folder / "config.json").read_text())
    changed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (folder / "config.json").write_text(json.dumps(content | changed))
    model = read(folder, "auto")
    setting = Setting.of(vision=LOW, top_k=None, num_active_blocks=RunningBlocks.of((0, 2)))
    model.apply(setting)
    inputs = inputs_of(model, setting)
    assert inputs["input_ids"].shape[1] > 8
    proof = model.prove(setting, inputs)
    assert proof.engine_error is not None and proof.execution == "cpu"
    with torch.inference_mode():
        logits, state = model.prefill(inputs, None)
        once = model.decode_step(logits.argmax(-1, keepdim=True), state)
        # No key is forgotten here, so that steps can be taken back.
        model.rewind(state, 1)
        assert_same_floats(model.decode_step(logits.argmax(-1, keepdim=True), state), once)


@needs_compiler
def test_an_engine_that_computes_something_else_is_refused(folder_of: Callable[[str], Path]) -> None:
    """A weight that the modules have no longer in common with the engine."""
    model, setting = read(folder_of("olmoe"), "auto"), SETTINGS["olmoe"][0]
    model.apply(setting)
    output = model.decoder_blocks[1].self_attn.o_proj
    output.weight = torch.nn.Parameter(output.weight * 1.01)
    with pytest.raises(EngineRefused, match="prefill is off by .* --execution eager"):
        model.prove(setting, inputs_of(model, setting))
    model.run_next_way("it is off")
    described = model.describe()
    assert (described["execution"], described["execution_reason"]) == ("eager", "it is off")
    assert set(described["execution_stages"].values()) == {"modules"}


def test_expert_mass_is_refused_by_engines(folder_of: Callable[[str], Path]) -> None:
    model, setting = read(folder_of("olmoe"), "graph"), SETTINGS["olmoe"][0].replaced(expert_mass=0.5)
    model.apply(setting)
    with pytest.raises(EngineRefused, match=r"expert mass 0.5 is set in the modules only"):
        model.prove(setting, inputs_of(model, setting))


def test_a_decoder_of_another_form_is_run_by_its_modules(folder_of: Callable[[str], Path]) -> None:
    described = read(folder_of("glm4v_moe"), "graph").describe()
    assert described["execution"] == "eager"
    assert described["execution_reason"] == (
        "there are no CUDA graphs on the CPU, and engines do not know its decoder: its MLP has shared_experts"
    )
