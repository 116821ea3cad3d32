"""Requests of a harness as a run: answers as transformers gives them, in the harness's order, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.harnesses.requests_run import HarnessRequest, SettingRunner
from tests.models.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def greedy(folder: Path, prompt: str, limit: int, stop: str | None) -> str:
    """The text by transformers alone, up to the stop text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**ids, max_new_tokens=limit, do_sample=False)
    text = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text if stop is None else text.partition(stop)[0]


def test_answers_are_those_of_transformers_in_the_order_of_the_requests(tmp_path: Path, llama: Path) -> None:
    # "4" is in the first answer of this model, so that the stop text acts.
    asked = [
        ("capitals", 4, "Question: capital of France\nAnswer:", {"until": ["4"], "max_gen_toks": 8}),
        ("sums:all", 0, "2 plus 2", {"until": "\n", "do_sample": False, "temperature": 0.7}),
        ("capitals", 1, "Rome is the capital of", {"until": ["4"], "max_gen_toks": 8}),
        ("capitals", 2, "colour of the sky", {"until": [], "max_new_tokens": 3}),
    ]
    arguments = {"pretrained": str(llama), "output_dir": tmp_path, "device": "cuda:0", "batch_size": 1}
    runner = SettingRunner("lm-eval", 5, arguments, is_bare=True)
    found = runner.answers([HarnessRequest(*each) for each in asked])
    stops, limits = ["4", "\n", "4", None], [8, 5, 8, 3]
    expected = [greedy(llama, each[2], limit, stop) for each, limit, stop in zip(asked, limits, stops, strict=True)]
    assert [each.pred for each in found] == expected
    assert greedy(llama, asked[0][2], 8, None) != expected[0]
    assert list(runner.figures()) == ["lm_eval_capitals", "lm_eval_sums_all", "lm_eval_capitals-1"]
    assert runner.figures()["lm_eval_capitals"]["knobs"]["num_active_blocks"] == 3
    assert runner.figures()["lm_eval_capitals"]["quantities"]["T_LLM_prefill"]["mean"] > 0
    assert runner.figures()["lm_eval_capitals"]["accuracy"] is None
    # A later call, and a task whose name differs in a sign alone, take further names.
    runner.answers([HarnessRequest(name, 0, "2 plus 2", {"max_gen_toks": 2}) for name in ("sums all", "capitals")])
    assert list(runner.figures())[3:] == ["lm_eval_sums_all-1", "lm_eval_capitals-2"]
    assert {each.name for each in tmp_path.iterdir()} == set(runner.figures())


def test_a_knob_of_the_arguments_acts(tmp_path: Path, llama: Path) -> None:
    request = HarnessRequest("capitals", 0, "colour of the sky", {"max_gen_toks": 8})
    texts = []
    for blocks in (1, 3):
        arguments = {"pretrained": str(llama), "output_dir": tmp_path / str(blocks), "num_active_blocks": blocks}
        runner = SettingRunner("lm-eval", 8, arguments, is_bare=True)
        texts += [each.pred for each in runner.answers([request])]
        assert runner.figures()["lm_eval_capitals"]["knobs"]["num_active_blocks"] == blocks
    assert texts[0] != texts[1] == greedy(llama, request.prompt, 8, None)


def logprob(folder: Path, prompt: str, continuation: str) -> float:
    """The sum by transformers alone; a prompt of no text is the token for the beginning, else for the end, of one."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    before = tokenizer(prompt)["input_ids"] or [next(filter(None, (tokenizer.bos_token_id, tokenizer.eos_token_id)))]
    after = tokenizer(continuation, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor([after]).T).sum())


def test_log_probabilities_are_those_of_transformers_in_the_order_of_the_requests(tmp_path: Path, llama: Path) -> None:
    asked = [
        HarnessRequest("choices", 3, "The sea is", continuations=(" wet and wide", " dry")),
        HarnessRequest("texts", 0, "A text", continuations=()),
        HarnessRequest("choices", 1, "", continuations=("salt", "a number")),
        HarnessRequest("choices", 0, "Gold is", {"max_gen_toks": 3}),
        HarnessRequest("texts", 1, "another one", continuations=()),
    ]
    runner = SettingRunner("lm-eval", 5, {"pretrained": str(llama), "output_dir": tmp_path}, is_bare=True)
    found = runner.answers(asked)
    scores = [[each.logprob for each in sample.continuations or ()] for sample in found]
    expected = [
        [logprob(llama, each.prompt, text) for text in each.continuations] if each.continuations else []
        for each in asked
    ]
    expected[1], expected[4] = [logprob(llama, "", "A text")], [logprob(llama, "", "another one")]
    # Float32: another order of sums changes a log-probability below 100 by 1e-6 of it.
    assert scores == [pytest.approx(each, rel=1e-4) for each in expected]
    assert found[3].pred == greedy(llama, "Gold is", 3, None) and found[3].continuations is None
    assert list(runner.figures()) == ["lm_eval_choices", "lm_eval_texts", "lm_eval_choices-1"]
    measured = runner.figures()["lm_eval_choices"]
    assert measured["quantities"]["T_LLM_prefill"]["n"] == 2 and "T_LLM_decode" not in measured["quantities"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_active_blocks_list": [1, 3]}, "the model knobprof runs at one setting, and these are"),
        ({"batch_size": 8}, "one request at a time"),
        ({"pretrained": None}, "takes pretrained=MODEL"),
        ({"blocks": 2}, "there is no such key"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_loaded(
    tmp_path: Path, llama: Path, given: dict[str, Any], words: str
) -> None:
    arguments = {"pretrained": str(llama), "output_dir": tmp_path / "run", **given}
    with pytest.raises(ConfigurationError, match=words):
        SettingRunner("lm-eval", 8, arguments, is_bare=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{"do_sample": True}, {"num_beams": 4}, {"temperature": 0.7}])
def test_an_answer_that_is_not_greedy_is_refused(tmp_path: Path, llama: Path, more: dict[str, Any]) -> None:
    runner = SettingRunner("lm-eval", 8, {"pretrained": str(llama), "output_dir": tmp_path}, is_bare=True)
    with pytest.raises(ConfigurationError, match="answers here are greedy"):
        runner.answers([HarnessRequest("capitals", 0, "sky", {"max_gen_toks": 8, **more})])
