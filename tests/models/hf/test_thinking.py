"""Thoughts that are closed at a budget, by each way of generating, beside what `generate()` itself says after them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.planning.plan import plan_for
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused
from experiment_core_utils.tasks.interface import Sample
from tests.models.tiny_checkpoints import write_checkpoint

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>\n{BEHIND}{% endif %}"
)
BEHIND = {
    "opened": "<think>\n",
    "told": "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "plain": "",
}
STEPS = 16


def loaded(folder: Path, behind: str, *flags: str, marks: tuple[str, ...] = ("<think>", "</think>")) -> Any:
    """A tiny llama of random weights whose tokenizer has marks of thinking, and a template that ends so."""
    write_checkpoint("llama", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>", "<|im_start|>", *marks], special_tokens=True)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TURNS.replace("{BEHIND}", BEHIND[behind]))
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    config = parse_config(["--model_path", str(folder), "--device", "cpu", "--precision", "float32", *flags])
    source = find_model(str(folder))
    return source.load(config.model, torch.device("cpu"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, TransformersModel]:
    folder = tmp_path_factory.mktemp("thinking")
    return {behind: loaded(folder / behind, behind, "--execution", "eager") for behind in BEHIND}


def sample(question: str) -> Sample:
    return Sample(1, "p", question, ("red",), None, "colour")


def prompt_of(model: TransformersModel, question: str = "what?") -> dict[str, torch.Tensor]:
    return dict(model.prepare(sample(question), question, None).inputs)


def ids_of(model: TransformersModel, text: str) -> tuple[int, ...]:
    return tuple(model.requests.tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_answer(
    model: TransformersModel, inputs: Mapping[str, torch.Tensor], more: tuple[int, ...], steps: int
) -> Any:
    """What transformers' own greedy `generate()` says behind a prompt and further tokens."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([more], dtype=torch.long)], dim=1)
    found = model.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps)
    return tuple(found[0, ids.shape[1] :].tolist())


def answers(model: TransformersModel, inputs: Mapping[str, torch.Tensor], steps: int = STEPS) -> set[tuple[int, ...]]:
    """The answers by `generate()`, by the stages, alone in a batch and beside a longer prompt."""
    longer = prompt_of(model, "what is it, and how large?")
    return {
        run_staged(model, inputs, steps).token_ids,
        generate_greedily(model, inputs, steps, NoMarks()).token_ids,
        model.answer_batch([inputs], steps)[0],
        model.answer_batch([longer, inputs], steps)[1],
    }


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_is_closed_at_its_budget_and_the_answer_follows(
    models: Mapping[str, TransformersModel], budget: int
) -> None:
    model = models["opened"]
    inputs = prompt_of(model)
    thought, closing = plain_answer(model, inputs, (), budget) if budget else (), ids_of(model, "\n</think>\n\n")
    assert len(closing) == 4
    rest = plain_answer(model, inputs, (*thought, *closing), STEPS - budget - 4)
    with model.apply(Setting.of(thinking_budget=budget)):
        assert answers(model, inputs) == {(*thought, *closing, *rest)}
        run = run_staged(model, inputs, STEPS)
    # The setting is no longer in force where a sample is recorded.
    record = sample_record(
        model, Setting.of(thinking_budget=budget), sample("what?"), model.prepare(sample("w"), "w", None), (run,)
    )
    assert (record.thinking_forced, record.thinking_tokens) == (1, budget + 2)
    assert answers(model, inputs) == {plain_answer(model, inputs, (), STEPS)}


def test_no_thought_that_has_not_begun_or_has_ended_is_closed(models: Mapping[str, TransformersModel]) -> None:
    for behind in ("told", "plain"):
        model = models[behind]
        inputs, setting = prompt_of(model), Setting.of(thinking_budget=3)
        with model.apply(setting):
            assert answers(model, inputs) == {plain_answer(model, inputs, (), STEPS)}
            run = run_staged(model, inputs, STEPS)
        record = sample_record(model, setting, sample("what?"), model.prepare(sample("w"), "w", None), (run,))
        assert (record.thinking_forced, record.thinking_tokens) == (0, 0)
    ends = models["opened"].ends
    open_ids, closed_ids = ids_of(model, "ab"), ids_of(model, "a</think>b")
    assert ends.thinks_after(open_ids, 1) and not ends.thinks_after(open_ids, 2)
    assert not ends.thinks_after(closed_ids, 2)


def test_at_0_the_prompt_has_the_empty_thought_of_the_template(models: Mapping[str, TransformersModel]) -> None:
    model = models["told"]
    empty = ids_of(model, "<think>\n\n</think>\n\n")
    inputs, setting = prompt_of(model), Setting.of(thinking_budget=0)
    expected = plain_answer(model, inputs, empty, STEPS)
    assert expected != plain_answer(model, inputs, (), STEPS)
    with model.apply(setting):
        assert answers(model, inputs) == {expected}
        run = run_staged(model, inputs, STEPS)
        proof = model.prove(setting, inputs)
        assert (proof.prompt_tokens, proof.prefill_tokens) == (inputs["input_ids"].shape[1] + 6,) * 2
        assert check_proof(proof, setting, model) == {} and not proof.knobs_not_seen
    request = model.prepare(sample("what?"), "what?", None)
    record = sample_record(model, setting, sample("what?"), request, (run,))
    assert record.shape.prompt_tokens == request.shape.prompt_tokens + 6
    plain = model.count_flops(Setting({}), request.shape, 4)
    assert record.flops is not None and plain is not None and record.flops.prefill_flops > plain.prefill_flops
    assert (record.thinking_forced, record.thinking_tokens, record.prediction) == (1, 0, model.decode_text(expected))


def test_at_0_a_thought_that_no_template_closes_is_written_as_an_empty_one(
    models: Mapping[str, TransformersModel],
) -> None:
    model = models["plain"]
    empty = ids_of(model, "<think>\n\n</think>\n\n")
    inputs = prompt_of(model)
    with model.apply(Setting.of(thinking_budget=0)):
        assert answers(model, inputs) == {(*empty, *plain_answer(model, inputs, empty, STEPS - len(empty)))}
        shape = model.prepare(sample("what?"), "what?", None).shape
        assert shape.closed_thought_tokens == 0


def test_what_a_proof_sees_of_a_budget(models: Mapping[str, TransformersModel]) -> None:
    model = models["opened"]
    inputs = prompt_of(model)
    for budget, unseen in (
        (0, {}),
        (7, {"thinking_budget": "a proof is shorter than a thought; thinking_forced says"}),
    ):
        setting = Setting.of(thinking_budget=budget)
        with model.apply(setting):
            found = check_proof(model.prove(setting, inputs), setting, model)
        assert found.keys() == unseen.keys()
        assert all(found[name].startswith(reason) for name, reason in unseen.items())


def test_engines_do_not_close_thoughts_and_leave_them_to_the_modules(tmp_path: Path) -> None:
    model = loaded(tmp_path, "opened", "--execution", "auto")
    if not model.has_next_way:
        pytest.skip("no engine runs it here")
    model.apply(Setting.of(thinking_budget=4))
    with pytest.raises(EngineRefused, match="a thought is closed between the logits and the choice of a token"):
        model.refuse_setting()


def test_a_model_without_marks_of_thinking_has_no_budget(tmp_path: Path) -> None:
    model = loaded(tmp_path, "plain", marks=())
    source = find_model(str(tmp_path))
    given = ["--model_path", str(tmp_path), "--num_active_blocks_list", "2"]
    assert all(each.level("thinking_budget") == "free" for each in plan_for(parse_config(given), source))
    config = parse_config([*given, "--thinking_tokens_list", "0", "8"])
    reason = "--thinking_tokens_list 0 cannot be set in .*: its tokenizer and its chat template have no marks"
    with pytest.raises(ConfigurationError, match=reason):
        plan_for(config, source)
    with pytest.raises(ConfigurationError, match="a budget of thinking cannot be set: its tokenizer"):
        model.apply(Setting.of(thinking_budget=8))
