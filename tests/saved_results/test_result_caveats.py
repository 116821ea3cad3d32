"""The caveats that follow from a result's figures, and the limits at which they begin."""

import pytest

from experiment_core_utils.finishing.setting_summary import summarise_accuracy
from experiment_core_utils.records.caveats import caveat
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.result_caveats import answer_caveats, caveats_of, cut_caveats, with_caveats
from experiment_core_utils.tasks.interface import Answer, Score, Scoring
from experiment_core_utils.tasks.registry import get_metric
from tests.experiments.hand_made_sweep import result as hand_made_result
from tests.experiments.hand_made_sweep import setting
from tests.hand_made_records import measured_sample, staged_run, summary_of


@pytest.mark.parametrize(("unparsed", "of", "kinds"), [(1, 20, []), (2, 20, ["answers_unparsed"]), (0, 3, [])])
def test_a_caveat_begins_above_one_answer_in_twenty(unparsed: int, of: int, kinds: list[str]) -> None:
    samples = [measured_sample(at, prediction="?" if at < unparsed else "1") for at in range(of)]
    found = answer_caveats(summary_of(samples).accuracy, of, None)
    assert [each.kind for each in found] == kinds
    assert all("10% could not be read as an answer by read_off, and count as wrong" in each.sentence for each in found)


def test_few_references_are_a_note() -> None:
    answers = [Answer("cat", ("cat",) * count) for count in (10, 3, 1, 4)]
    metric = get_metric("vqa_score")
    (found,) = answer_caveats(summarise_accuracy(answers, metric.score(answers), metric), 4, None)
    assert (found.kind, found.severity, found.figures) == (
        "few_references", "note", {"fraction": 0.5, "metric": "vqa_score"},
    )  # fmt: skip


def test_answers_without_a_score_are_named_once() -> None:
    scores = Score(1.0), Score(None), Score(None, parsed=False, parse_status="scoring_failed"), Score(0.5)
    scoring = Scoring(scores, 0.75, {"unscored": 2, "scoring_failed": 1})
    answers = [Answer("cat", ("cat",))] * 4
    accuracy = summarise_accuracy(answers, scoring, get_metric("em"))
    assert (accuracy.accuracy, accuracy.num_unparsed) == (0.75, 1)
    (found,) = answer_caveats(accuracy, 4, None)
    assert found.sentence.startswith("answers: 50% have no score by em and do not enter accuracy; see metric_details")


@pytest.mark.parametrize(
    ("num_cut", "num_answers", "warned"), [(0, 0, False), (1, 20, False), (2, 20, True), (3, 3, True)]
)
def test_more_than_a_twentieth_of_cut_answers_is_a_caveat(num_cut: int, num_answers: int, warned: bool) -> None:
    found = cut_caveats([False] * num_cut + [True] * (num_answers - num_cut), 64)
    assert [each.kind for each in found] == ["answers_cut"] * warned
    if warned:
        assert found[0].sentence.startswith(f"answers: {num_cut} of {num_answers} were cut at the limit of 64 tokens; ")
        assert "--stop" in found[0].sentence


def test_caveats_are_those_noted_then_those_of_the_figures() -> None:
    """A result of a run: a stale caveat of answers goes, three of three answers that were cut at 8 tokens come."""
    samples = [measured_sample(at, staged_run(ended=False), prediction="1") for at in range(3)]
    content = hand_made_result(setting("low", 2), samples, run_uid="1")
    made = SettingResult.model_validate(content)
    variables = made.provenance.experimental_variables.with_keys(max_new_tokens=8)
    stale = [caveat("answers_empty", fraction=0.5), caveat("shared_cores", num_processes=2)]
    provenance = made.provenance.with_keys(experimental_variables=variables).with_caveats(stale)
    found = caveats_of(made.with_keys(provenance=provenance))
    assert [each.kind for each in found] == ["shared_cores", "answers_cut"]
    assert found[1].figures == {"num_cut": 3, "num_answers": 3, "limit": 8}
    again = with_caveats(made.with_keys(provenance=provenance))
    assert caveats_of(again) == again.provenance.caveat_records == found
    # Commit dfe8f148 had other tests of all but answers.
    old = made.with_keys(provenance=provenance.with_keys(run_uid=None).with_caveats([caveat("energy_closure_unknown")]))
    assert "energy_closure_unknown" in [each.kind for each in caveats_of(old)]


@pytest.mark.parametrize(
    ("knobs", "own", "is_told"),
    [({}, "engine", True), ({}, "modules", False), ({"engine": "eager"}, "engine", False)],
)
def test_a_copy_that_something_else_runs_is_told(knobs: dict[str, str], own: str, is_told: bool) -> None:
    copied = setting().replaced(number_format="bfloat16", **knobs)
    stages = {"prefill": "modules", "decode": "modules"}
    loading = {"own_execution_stages": {"decode": own, "prefill": "modules"}}
    realised = {"execution_stages": stages, "counted": {"loading": loading}}
    given = SettingResult.model_validate(hand_made_result(copied) | {"realised": realised})
    found = [each for each in caveats_of(given) if each.kind == "copy_stages_differ"]
    assert [each.figures for each in found] == [
        {"stages": ["modules", "modules"], "own_stages": ["modules", "engine"]}
    ] * is_told


@pytest.mark.parametrize(
    ("batch_size", "decode", "is_told"), [(4, "reference", True), (4, "cpu step", False), (1, "reference", False)]
)
def test_requests_together_that_something_else_runs_are_told(batch_size: int, decode: str, is_told: bool) -> None:
    made = hand_made_result(setting().replaced(batch_size=batch_size))
    made["provenance"]["model"]["execution_stages"] = {
        "vision": "modules",
        "prefill": "cpu blocks",
        "decode": "cpu step",
    }
    realised = {"execution_stages": {"vision": "modules", "prefill": "cpu blocks", "decode": decode}}
    given = SettingResult.model_validate(made | {"realised": realised})
    found = [each for each in caveats_of(given) if each.kind == "batch_stages_differ"]
    assert [(each.figures["stages"][-1], each.figures["own_stages"][-1]) for each in found] == [
        ("reference", "cpu step")
    ] * is_told
