"""What a run says at its end: each line where there is something to say, the place of the results always."""

from dataclasses import replace
from pathlib import Path

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.records.settings import SettingFailure
from experiment_core_utils.saved_results.terminal import closing_table
from experiments.core_exp.closing_lines import closing_lines
from tests.hand_made_records import failed_sample, measured_sample, part, result_of, staged_run

NOTHING_LEFT = RunReport(None, True, (), {}, (), Path("results/signs"), None)


def stored(top_k: int, *failures: FailedSample) -> SettingResult:
    return result_of(
        part(measured_sample(0), measured_sample(1), failures=failures),
        Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1))),
    )


def test_a_run_with_nothing_left_says_where_the_results_are() -> None:
    assert closing_lines(NOTHING_LEFT) == ["nothing was left to measure: 0 settings in results/signs"]


def test_every_line_in_its_place() -> None:
    results = (stored(2), stored(4, failed_sample(7, "torn picture")))
    report = replace(
        NOTHING_LEFT,
        experiment_id="0007",
        results=results,
        failed={"tier-high_topk4_blocks2": SettingFailure("OutOfMemory", "no memory", 3)},
        left_out=("left out: --top_k_list 32 is more than the 8 experts",),
        csv_path=Path("results/signs/signs_settings.csv"),
    )
    failed, table, costs, *lines = closing_lines(report)
    assert failed == "failed: tier-high_topk4_blocks2: OutOfMemory after 3 attempts: no memory"
    assert table == closing_table(results)
    assert costs == (
        "GFLOP, MB, J: of a request; MB by formula: weights, KV cache, activations; –: not measured, or not applicable"
    )
    assert lines == [
        "conclusion: INVALID: failed samples: 1 of 3; repair them, or leave them out by --ids, and delete the result "
        "to measure it again (tier-low_topk4_blocks2; 1 of 2 settings)",
        "warning: only 2 samples per setting: use --num_samples 500 or more before comparing accuracy",
        "failed samples: tier-low_topk4_blocks2: 1 SampleError of 3; the first: torn picture",
        "left out: --top_k_list 32 is more than the 8 experts",
        "run 0007: 2 settings in results/signs, INVALID",
        "table of settings: results/signs/signs_settings.csv",
    ]


def test_requests_that_a_server_failed_are_not_to_be_repaired() -> None:
    result = stored(4, failed_sample(7, "answered with HTTP 500"))
    variables = result.provenance.experimental_variables.with_keys(endpoint=[{"variant": "m"}])
    served = result.with_keys(provenance=result.provenance.with_keys(experimental_variables=variables))
    (line,) = [each for each in closing_lines(replace(NOTHING_LEFT, results=(served,))) if "conclusion" in each]
    assert line.startswith(
        "conclusion: INVALID: failed requests: 1 of 3; see their reasons and the server's log, and delete the result "
        "to measure it again"
    )


def test_the_reference_is_in_the_table_with_a_line_on_what_it_is() -> None:
    own = stored(4).with_keys(is_reference=True, in_grid=False)
    table, _, meaning, *rest = closing_lines(replace(NOTHING_LEFT, results=(stored(2), own)))
    assert "of reference" in table.splitlines()[0]
    assert meaning.startswith(
        "of reference: total time in percent of that of tier-low_topk4_blocks2, the model as it is"
    )
    assert not any("of reference" in line for line in rest)


def test_samples_that_fail_in_every_setting_are_one_line() -> None:
    failures = failed_sample(7, "torn picture"), failed_sample(8, "no question")
    results = (stored(2, *failures), stored(4, *failures), stored(3, failures[1]))
    lines = closing_lines(replace(NOTHING_LEFT, results=results))
    assert [each for each in lines if each.startswith("failed samples")] == [
        "failed samples: each of 2 settings: 2 SampleError of 4; the first: torn picture",
        "failed samples: tier-low_topk3_blocks2: 1 SampleError of 3; the first: no question",
    ]


def test_a_run_that_cannot_be_analysed_says_why_in_one_line() -> None:
    # Of two metrics.
    results = (stored(2), stored(4).model_copy(update={"metric": "another"}))
    table, _, line, *_ = closing_lines(replace(NOTHING_LEFT, results=results))
    assert line == (
        "conclusion: no setting is named: ResultsError: settings of signs are scored by another and read_off; "
        "give results scored by one metric"
    )
    assert table == closing_table(results)


def test_settings_that_were_executed_in_different_ways_have_no_conclusion() -> None:
    eager, graph = stored(2), stored(4)
    for each, execution in ((eager, "eager"), (graph, "graph")):
        assert each.realised is not None
        each.realised["execution"] = execution
    table, _, line, *_ = closing_lines(replace(NOTHING_LEFT, results=(eager, graph)))
    assert line.startswith(
        "conclusion: INVALID: 1 of 2 settings ran as eager (tier-low_topk2_blocks2), the others as graph: "
    )
    assert table == closing_table((eager, graph))


def scored_texts(top_k: int, seconds: float, *scores: float) -> SettingResult:
    """By perplexity, of the same 30 texts at every setting."""
    samples = [
        measured_sample(at, staged_run(vision_s=seconds * (1 + at / 100)), question_type="text") for at in range(30)
    ]
    found = result_of(
        part(*samples), Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1)))
    )
    rows = [
        each.with_keys(pred="A text.", accuracy=scores[at % len(scores)])
        for at, each in enumerate(found.per_sample_results)
    ]
    mean = sum(each.accuracy or 0.0 for each in rows) / len(rows)
    provenance = found.provenance.with_keys(run_uid=None)
    order = {"how": "rounds", "seed": 1, "position": 0, "num_settings": 2}
    by = {"metric": "perplexity", "metric_best": 100.0, "accuracy": mean, "accuracy_ci95": [mean - 1, mean + 1]}
    return found.with_keys(**by, per_sample_results=rows, provenance=provenance, setting_order=order)


def test_a_score_that_is_no_accuracy_is_called_by_its_name() -> None:
    """The smaller top-k takes 2 of 2.5 s, and predicts texts worse by 10 of 100 and more: its answers are no equals."""
    own = scored_texts(4, 2.0, 40.0, 50.0, 45.0).with_keys(is_reference=True)
    lines = closing_lines(replace(NOTHING_LEFT, results=(scored_texts(2, 1.5, 30.0, 40.0, 31.0), own)))
    table, *rest = lines
    assert "100 / byte perplexity [95 %]" in table.splitlines()[0]
    about = [line for line in rest if not line.startswith("warning: only 30 samples per setting")]
    assert not any("accura" in line or "identical answers" in line for line in lines[:1] + about)
    (conclusion,) = [line for line in rest if line.startswith("conclusion: ")]
    assert "100 / byte perplexity 45.000" in conclusion
    assert any(line.startswith("prices, ") and "accepted loss of 100 / byte perplexity:" in line for line in rest)


def answered(top_k: int, *predictions: str) -> SettingResult:
    samples = [measured_sample(at, prediction=text) for at, text in enumerate(predictions)]
    return result_of(
        part(*samples), Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1)))
    )


def test_nothing_is_concluded_from_answers_that_most_could_not_be_read() -> None:
    results = (answered(2, *"???1"), answered(4, *"????"))
    table, _, *lines = closing_lines(replace(NOTHING_LEFT, results=results))
    assert lines[0].startswith(
        "conclusion: no setting is named: 75 to 100 % of the answers could not be read as an answer, or were cut; read "
    )
    assert not any("accuracy +" in each for each in lines)
    assert "front" not in table and "unparsed" in table
    # One that was broken by its knobs is no reason.
    kept = closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"????"), answered(4, *"1111"))))
    assert not any("could not be read as an answer" in each.split("; ")[0] and "conclusion" in each for each in kept)


def test_answers_that_were_cut_are_in_the_table_and_void_the_conclusion_where_they_are_wrong() -> None:
    def cut(top_k: int, *predictions: str) -> SettingResult:
        samples = [measured_sample(at, staged_run(ended=False), prediction=text) for at, text in enumerate(predictions)]
        return result_of(
            part(*samples),
            Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1))),
        )

    # Three of four are cut and wrong; cut behind the right answer, they say what they have to.
    table, _, *lines = closing_lines(replace(NOTHING_LEFT, results=(cut(2, *"0001"), cut(4, *"0001"))))
    assert lines[0].startswith("conclusion: no setting is named: 75 % of the answers")
    assert "cut" in table and "100 %" in table
    table, _, *lines = closing_lines(replace(NOTHING_LEFT, results=(cut(2, *"1111"), answered(4, *"1111"))))
    assert "of the answers" not in lines[0] and "cut" in table and "empty" not in table


def test_a_single_setting_says_that_no_answer_was_right() -> None:
    assert closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"0000"),)))[2].startswith(
        "conclusion: no setting is named: no answer was right at any setting; compare pred with answers"
    )
    unread = closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"????"),)))[2]
    assert unread.startswith("conclusion: no setting is named: 100 % of the answers could not be read")
    read = closing_lines(replace(NOTHING_LEFT, results=(stored(2),)))[2]
    assert read.endswith(": one setting was measured; a choice needs two or more")
