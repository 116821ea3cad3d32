"""What a run says at its end: each line where there is something to say, the place of the results always."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.pipeline import RunReport
from experiment_core_utils.records.ledger import RemainingSetting, SearchRecord
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.setting_result import SettingResult, setting_key
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
    failed, table, *lines = closing_lines(report)
    assert failed == "failed: tier-high_topk4_blocks2: OutOfMemory after 3 attempts: no memory"
    assert table == closing_table(results, None, {setting_key(each): "within noise" for each in results})
    assert lines == [
        "not shown: which setting is faster: the mean end-to-end latency needs 6 pictures for a verdict and has 2; "
        "differences in accuracy of settings that agree on 99% of the scores, as the median pair, with 2 samples",
        "warning: only 2 samples per setting: use --num_samples 500 or more before comparing accuracy",
        "failed samples: tier-low_topk4_blocks2: 1 SampleError of 3; the first: torn picture",
        "left out: --top_k_list 32 is more than the 8 experts",
        "run 0007: 2 settings in results/signs",
        "table of settings: results/signs/signs_settings.csv",
    ]


def test_the_reference_is_in_the_table_with_a_line_on_what_it_is() -> None:
    own = stored(4).with_keys(is_reference=True, in_grid=False)
    table, meaning, *rest = closing_lines(replace(NOTHING_LEFT, results=(stored(2), own)))
    assert "of reference" in table.splitlines()[0]
    assert meaning.startswith(
        "of reference: total time in percent of that of tier-low_topk4_blocks2, the model as it is"
    )
    assert not any("reference" in line for line in rest)


@pytest.mark.parametrize(
    ("accuracies", "seconds", "text"),
    [
        # 600 of 800 ms; the slower one is as accurate, the faster one is not.
        (
            (1.0, 0.5),
            0.8,
            "tier-low_topk2_blocks2 with 1.000, 75 % of the time of the reference (tier-low_topk8_blocks2)",
        ),
        ((0.6, 0.605), 0.8, "tier-low_topk2_blocks2 with 0.600, 75 % of the time of the"),
        ((0.6, 0.62), 0.8, "tier-low_topk4_blocks2 with 0.620, 125 % of the time of the"),
    ],
)
def test_a_search_says_what_its_front_saves_against_the_reference(
    accuracies: tuple[float, float], seconds: float, text: str
) -> None:
    def timed(top_k: int, total_s: float) -> SettingResult:
        sample = measured_sample(0, staged_run(0.1, total_s - 0.1, ()))
        return result_of(
            part(sample), Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1)))
        )

    results = timed(2, 0.6), timed(4, 1.0), timed(8, seconds).with_keys(is_reference=True, in_grid=False)
    front = [
        RemainingSetting(
            setting=setting_key(each), result_file="file", num_samples=1, accuracy=accuracy, T_total_mean=600.0 + at,
            open_against=[],
        )
        for at, (each, accuracy) in enumerate(zip(results, accuracies, strict=False))
    ]  # fmt: skip
    search = SearchRecord(
        schema_version=1, fingerprint="f00d", rules={}, stopped="settled", share=0.5, T_model=1.0,
        T_model_full_grid=2.0, front=front, undecided=[], set_aside=[], eliminated=[], failed={}, rounds=[],
    )  # fmt: skip
    lines = closing_lines(replace(NOTHING_LEFT, results=results, search=search))
    (line,) = [each for each in lines if each.startswith("the fastest of the front within 0.01")]
    assert text in line
    without = closing_lines(replace(NOTHING_LEFT, results=results[:2], search=search))
    assert not any(each.startswith("the fastest of the front") for each in without)


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
    table, line, *_ = closing_lines(replace(NOTHING_LEFT, results=results))
    assert line == (
        "no conclusion: ResultsError: settings of signs are scored by another and read_off; give results scored by "
        "one metric"
    )
    assert table == closing_table(results)


def test_settings_that_were_executed_in_different_ways_have_no_conclusion() -> None:
    eager, graph = stored(2), stored(4)
    for each, execution in ((eager, "eager"), (graph, "graph")):
        assert each.realised is not None
        each.realised["execution"] = execution
    table, line, *_ = closing_lines(replace(NOTHING_LEFT, results=(eager, graph)))
    assert line.startswith(
        "no conclusion: 1 of 2 settings ran as eager (tier-low_topk2_blocks2), the others as graph: "
    )
    assert table == closing_table((eager, graph))


def answered(top_k: int, *predictions: str) -> SettingResult:
    samples = [measured_sample(at, prediction=text) for at, text in enumerate(predictions)]
    return result_of(
        part(*samples), Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1)))
    )


def test_nothing_is_concluded_from_answers_that_most_could_not_be_read() -> None:
    results = (answered(2, *"???1"), answered(4, *"????"))
    table, *lines = closing_lines(replace(NOTHING_LEFT, results=results))
    assert lines[0].startswith(
        "no conclusion: 75 to 100 % of the answers could not be read as an answer, or were cut; read pred in the CSV"
    )
    assert not any(each.startswith(("conclusion", "not shown")) or "accuracy +" in each for each in lines)
    assert "front" not in table and "unparsed" in table
    # One that was broken by its knobs is no reason.
    kept = closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"????"), answered(4, *"1111"))))
    assert not any(each.startswith("no conclusion") for each in kept)


def test_answers_that_were_cut_are_in_the_table_and_void_the_conclusion_where_they_are_wrong() -> None:
    def cut(top_k: int, *predictions: str) -> SettingResult:
        samples = [measured_sample(at, staged_run(ended=False), prediction=text) for at, text in enumerate(predictions)]
        return result_of(
            part(*samples),
            Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1))),
        )

    # Three of four are cut and wrong; cut behind the right answer, they say what they have to.
    table, *lines = closing_lines(replace(NOTHING_LEFT, results=(cut(2, *"0001"), cut(4, *"0001"))))
    assert lines[0].startswith("no conclusion: 75 % of the answers") and "cut" in table and "100 %" in table
    table, *lines = closing_lines(replace(NOTHING_LEFT, results=(cut(2, *"1111"), answered(4, *"1111"))))
    assert not any(each.startswith("no conclusion") for each in lines) and "cut" in table and "empty" not in table


def test_a_single_setting_says_that_no_answer_was_right() -> None:
    assert closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"0000"),)))[1].startswith(
        "no conclusion: no answer was right at any setting; compare pred with answers"
    )
    unread = closing_lines(replace(NOTHING_LEFT, results=(answered(2, *"????"),)))[1]
    assert unread.startswith("no conclusion: 100 % of the answers could not be read")
    assert not any(each.startswith("no") for each in closing_lines(replace(NOTHING_LEFT, results=(stored(2),)))[1:-1])
