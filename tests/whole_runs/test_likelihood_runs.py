"""Multiple choice by log-probability and perplexity as whole runs, beside lm-eval's own runner on the same rows."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, weighted_perplexity
from lm_eval.api.task import PerplexityTask
from lm_eval.models.huggingface import HFLM

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.harness_layout import write_setting
from experiment_core_utils.saved_results.rescoring import rescored_result
from experiment_core_utils.tasks.registry import get_metric
from tests.models.tiny_checkpoints import write_checkpoint

# Prompts of odd lengths, one with white space at its end; options of several lengths, with letters of two bytes.
ROWS = (
    {"question": "Which is a colour?", "options": ["red", "seventeen", "a dog that runs"], "answer": "red"},
    {"question": "The sea is", "options": ["dry", "wet"], "answer": "wet"},
    {"question": "2 + 2 equals ", "options": ["four", "five and a half", "three"], "answer": "three"},
    {"question": "Zürich liegt in", "options": ["der Schweiz", "Österreich"], "answer": "Österreich"},
)
# One of 70 tokens of a byte each, longer than a context of 64.
TEXTS = ("A short  text.", "x", "Über den Wolken muss die Freiheit\nwohl " + "grenzenlos " * 3)
CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return made


def measured(folder: Path, rows: Sequence[Mapping[str, Any]], into: Path, *more: str) -> list[SettingResult]:
    into.mkdir(exist_ok=True)
    file = into / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        "--model_path",
        str(folder),
        "--device",
        "cpu",
        "--data_file",
        str(file),
        "--output_dir",
        str(into / "out"),
    ]
    few = ["--num_runs_per_sample", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--energy", "off"]
    report = run_profiling(parse_config([*given, *few, *more]))
    assert report.failed == {}
    return list(report.results)


@pytest.fixture(scope="module")
def choices(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[SettingResult]:
    template = ("--prompt_template", "{question}", "--num_latency_samples", "3")
    blocks = ("--num_active_blocks_list", "2", "3")
    return measured(folder, ROWS, tmp_path_factory.mktemp("choices"), "--metric", "acc_norm", *blocks, *template)


@pytest.fixture(scope="module")
def texts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SettingResult:
    rows = [{"text": text} for text in TEXTS]
    (result,) = measured(folder, rows, tmp_path_factory.mktemp("texts"), "--metric", "perplexity")
    return result


def logprobs(result: SettingResult) -> list[list[float]]:
    samples = sorted(result.per_sample_results, key=lambda each: each.sample_id)
    return [[each.logprob for each in sample.continuations or ()] for sample in samples]


def test_a_scored_request_has_a_prefill_and_no_decode(choices: list[SettingResult]) -> None:
    reference = next(result for result in choices if result.is_reference)
    assert reference.num_latency_samples == 3 and len(choices) == 2
    assert reference.share_truncated is None and reference.share_one_token is None
    for sample in reference.per_sample_results:
        assert sample.output_tokens == 0 and sample.output_ended is None and sample.decode_flops_per_token is None
        assert (sample.T_first_token, sample.T_LLM_decode, sample.T_decode_per_token) == (None, None, None)
        assert sample.T_total == sample.T_LLM_prefill and (sample.T_total is None) == (sample.runs == [])
        values = [each.logprob for each in sample.continuations or ()]
        assert sample.pred == sample.metadata.options[values.index(max(values))]
        assert sample.accuracy == (sample.score_details or {})["acc_norm"]
    for name in ("T_first_token_mean", "T_LLM_decode_mean", "T_decode_per_token_mean", "decode_flops_per_token_mean"):
        assert name not in reference.aggregate_stats
    assert "answers" not in " ".join(map(str, reference.provenance.caveats))
    prompts = [sample.metadata.prompt for sample in reference.per_sample_results]
    assert sorted(map(str, prompts)) == sorted(row["question"] for row in ROWS)
    form = reference.provenance.task.prompt_form or {}
    assert form["scored"] == "options"


def test_flops_are_of_the_prompt_and_of_each_further_token(choices: list[SettingResult]) -> None:
    """By the formulas of a plain request with an answer as long as the continuation, of each different one."""
    reference = next(result for result in choices if result.is_reference)
    sample = next(each for each in reference.per_sample_results if each.metadata.question == "The sea is")
    assert sample.prompt_tokens == 10 and [each.num_tokens for each in sample.continuations or ()] == [4, 4]
    # Llama's 3 blocks at 10 + 2 x 3 positions, its head at 1 + 2 x 3, and attention of 10 x 10 and 2 x (11 + 12 + 13)
    # pairs of positions.
    hidden, inner, kv, vocabulary = 32, 24, 16, 259
    block = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    attention = (100 + 72) * 3 * 4 * hidden
    assert sample.prefill_flops == 16 * 3 * block + 7 * 2 * hidden * vocabulary + attention


def test_scores_are_read_again_and_not_made_of_generated_answers(choices: list[SettingResult]) -> None:
    result = choices[0]
    again = rescored_result(result, "x.json", get_metric("acc"))
    assert (again.accuracy, result.accuracy) == (result.metric_details["acc"], result.metric_details["acc_norm"])
    # What was likeliest is also an answer.
    assert rescored_result(result, "x.json", get_metric("mc")).accuracy == again.accuracy
    generated = result.with_keys(
        per_sample_results=[each.with_keys(continuations=None) for each in result.per_sample_results]
    )
    with pytest.raises(
        ConfigurationError, match="acc reads 3 log-probabilities, and the answer has 0: measure it with"
    ):
        rescored_result(generated, "x.json", get_metric("acc"))
    # Scores of options are no score of a text.
    with pytest.raises(ConfigurationError, match="perplexity cannot score x.json, which was measured for acc_norm"):
        rescored_result(result, "x.json", get_metric("perplexity"))
    with pytest.raises(ConfigurationError, match="of acc_norm are of log-probabilities, whose layout in lm-eval"):
        write_setting([result], "lm-eval", {}, Path("nowhere"))


def test_what_only_generated_answers_have_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="--metric acc scores given answers, and generates none: --stop cannot"
    ):
        measured(folder, ROWS, tmp_path, "--metric", "acc", "--stop", "x")
    with pytest.raises(
        ConfigurationError, match="--metric perplexity scores a text as it is: --prompt_template cannot"
    ):
        measured(folder, [{"text": "a"}], tmp_path, "--metric", "perplexity", "--prompt_template", "{question}")


def test_perplexity_is_of_all_windows(texts: SettingResult) -> None:
    """The modules run it, since they alone score a text in one pass."""
    found, details = logprobs(texts), texts.metric_details
    assert [len(each) for each in found] == [1, 1, 2]
    in_all, num_bytes = sum(map(sum, found)), sum(len(text.encode()) for text in TEXTS)
    assert details["byte_perplexity"] == pytest.approx(math.exp(-in_all / num_bytes))
    assert texts.provenance.model.execution_reason == "the modules alone score a text in one pass"


def test_a_texts_tokens_are_those_of_its_prompt(texts: SettingResult) -> None:
    """A token a byte, and the one before the text; those that a later window sees again are counted once."""
    samples = sorted(texts.per_sample_results, key=lambda each: each.sample_id)
    expected = [1 + len(text.encode()) for text in TEXTS]
    assert [each.prompt_tokens for each in samples] == [each.input_text_tokens for each in samples] == expected
    assert texts.aggregate_stats["prompt_tokens_mean"] == pytest.approx(sum(expected) / 3)


def test_scores_are_those_of_lm_eval(choices: list[SettingResult], texts: SettingResult, folder: Path) -> None:
    """`loglikelihood` and `loglikelihood_rolling` of its runner of transformers models, on the same rows."""
    runner = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    asked = [(row["question"], f" {option}") for row in ROWS for option in row["options"]]
    expected = runner.loglikelihood([Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(asked)])
    reference = next(result for result in choices if result.is_reference)
    samples = sorted(reference.per_sample_results, key=lambda each: each.sample_id)
    found = [(each.logprob, each.is_greedy) for sample in samples for each in sample.continuations or ()]
    assert found == [(pytest.approx(logprob, rel=1e-4), is_greedy) for logprob, is_greedy in expected]

    instances = [Instance("loglikelihood_rolling", {}, (text,), place) for place, text in enumerate(TEXTS)]
    rolling = runner.loglikelihood_rolling(instances)
    assert [sum(each) for each in logprobs(texts)] == pytest.approx(rolling, rel=1e-4)
    words, num_bytes = (
        [(each, count(text)) for each, text in zip(rolling, TEXTS, strict=True)]
        for count in (PerplexityTask.count_words, PerplexityTask.count_bytes)
    )
    assert texts.metric_details == pytest.approx(
        {
            "word_perplexity": weighted_perplexity(words),
            "byte_perplexity": weighted_perplexity(num_bytes),
            "bits_per_byte": bits_per_byte(num_bytes),
            "unparsed": 0,
        },
        rel=1e-3,
    )
