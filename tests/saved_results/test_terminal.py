"""The closing table against the reference: its row, the fractions of its time, and runs without it."""

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.records.compute import Memory
from experiment_core_utils.records.conclusion import VERDICT_LEGEND
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.terminal import (
    closing_table,
    column_lines,
    reference_lines,
    share_of_reference,
)
from tests.hand_made_records import answered_sample, measured_sample, part, result_of, staged_run


def result(tier: str | None, *seconds: float, is_reference: bool = False) -> SettingResult:
    """A sample of each total time from the id 0 on, and one that was answered in a batch."""
    samples = [measured_sample(at, staged_run(each - 0.5, 0.25)) for at, each in enumerate(seconds)]
    setting = Setting.of(
        vision=own_target() if tier is None else tier_target(tier), top_k=2, num_active_blocks=RunningBlocks.of((0, 1))
    )
    found = result_of(part(*samples, answered_sample(len(seconds))), setting)
    return found.with_keys(is_reference=is_reference, in_grid=not is_reference)


def column(table: str, name: str) -> list[str]:
    """The cells of a column that ends where its heading does."""
    head, *rows = table.splitlines()
    end = head.index(name) + len(name)
    return [row[:end].rsplit("  ", 1)[-1].strip() for row in rows]


def test_times_are_in_percent_of_the_references_on_the_same_samples() -> None:
    reference = result(None, 1.0, 3.0, is_reference=True)
    # 5 of 4 s; 0.75 of the reference's 1 s on the only sample with both.
    results = [result("high", 2.0, 3.0), reference, result("low", 0.75), result("medium")]
    assert column(closing_table(results), "of reference") == ["125 %", "reference", "75 %", "–"]
    assert column(closing_table(results), "vision") == ["high", "own", "low", "medium"]
    assert reference_lines(results) == [
        "of reference: total time in percent of that of own_topk2_blocks2, the model as it is, on the same samples"
    ]
    assert share_of_reference(results[3], reference) is None


def test_the_fraction_of_the_reference_is_that_of_the_means_beside_it() -> None:
    """Two runs a sample: a mean of 1.05 s against 1 s is slower, though the faster run of each sample is not."""
    low, own = tier_target("low"), own_target()
    runs = {own: ((0.9, 1.1), (0.7, 1.3)), low: ((0.8, 1.4), (0.6, 1.4))}
    results = []
    for vision, totals in runs.items():
        samples = [measured_sample(at, *(staged_run(each - 0.5) for each in own)) for at, own in enumerate(totals)]
        setting = Setting.of(vision=vision, top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))
        results.append(result_of(part(*samples), setting).with_keys(is_reference=vision is own))
    table = closing_table(results)
    assert column(table, "total ms") == ["1000.0", "1050.0"]
    assert column(table, "of reference") == ["reference", "105 %"]
    assert share_of_reference(results[1], results[0]) == pytest.approx(1.05)


def test_without_the_reference_there_is_no_such_column() -> None:
    results = [result("high", 2.0), result(None, 1.0)]
    assert "reference" not in closing_table(results) and reference_lines(results) == []


def cells(table: str, row: int = 0) -> dict[str, str]:
    """The cells of a row of a table of single words, by heading; `p95 ms` is `p95`."""
    head, *rows = (line.replace(" ms ", " ").replace("ms/token", "ms/token").split() for line in table.splitlines())
    return dict(zip(head, rows[row], strict=True))


def test_costs_that_were_not_measured_are_dashes_and_memory_is_that_of_the_formula() -> None:
    sample = measured_sample(0, staged_run(0.5, 0.25))
    found = result_of(part(sample))
    without = closing_table([found.with_keys(memory=None)])
    assert "MB" in without and cells(without.replace("accuracy [95 %]", "accuracy low high"))["MB"] == "–"
    memory = Memory.model_construct(peak_memory_bytes=None, process_rss_bytes=9e9, counted_memory_bytes=31_400_000)
    (flops,) = (each.request_flops for each in found.per_sample_results)
    row = cells(closing_table([found.with_keys(memory=memory)]).replace("accuracy [95 %]", "accuracy low high"))
    assert (row["MB"], row["J"]) == ("31", "–")
    assert row["GFLOP"] == ("–" if flops is None else f"{flops / 1e9:.1f}")


def test_a_knob_that_the_model_lacks_has_no_column() -> None:
    dense = Setting.of(vision=tier_target("low"), num_active_blocks=RunningBlocks.of((0, 1)))
    head = closing_table([result_of(part(measured_sample(0)), dense)]).splitlines()[0].split()
    assert head[:2] == ["vision", "blocks"] and "top-k" not in head
    assert "failed" not in head and "unparsed" not in head
    # Of a language model, which sees no picture.
    own = Setting.of(vision=own_target(), num_active_blocks=RunningBlocks.of((0, 1)))
    text = result_of(part(measured_sample(0, has_picture=False)), own)
    assert closing_table([text]).split()[:2] == ["blocks", "tokens"]


def test_the_words_of_the_front_have_a_legend() -> None:
    found = result("low", 1.0)
    assert column_lines([found], {})[-1].endswith("–: not measured, or not applicable")
    assert column_lines([found], {"tier-low_topk2_blocks2": "yes"})[-1] == VERDICT_LEGEND
    assert column_lines([found.with_keys(metric="relaxed")], {})[-1] == (
        "accuracy: relaxed reads sentences, and scores 479 of 515 labelled replies as they are labelled"
    )
