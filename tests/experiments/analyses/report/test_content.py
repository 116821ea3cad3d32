"""The page of a task without pictures says nothing of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target
from experiment_core_utils.records.conclusion import Conclusion
from experiments.analyses.knobs.prices import price_list
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.report.findings import price_table
from experiments.analyses.report.page import page_of
from tests.experiments.hand_made_grid import grid, point
from tests.experiments.hand_made_grid import reference as own_point
from tests.experiments.hand_made_sweep import reference, result, setting, write
from tests.hand_made_records import measured_sample, staged_run


def test_a_page_of_a_text_task_says_nothing_of_pictures(tmp_path: Path) -> None:
    for blocks in (3, 4):
        knobs = Setting.of(vision=own_target(), num_active_blocks=RunningBlocks.of(tuple(range(blocks))))
        samples = [
            replace(measured_sample(number, has_picture=False, image_id=f"row {number}"), data_sha256=str(number))
            for number in range(4)
        ]
        (tmp_path / f"signs_imgsize{knobs.key}.json").write_text(json.dumps(result(knobs, samples)))
    page = page_of(report_of(analyse([tmp_path])))
    shown = re.sub(r"<script.*?</script>|<style.*?</style>|save this picture as PNG", "", page, flags=re.DOTALL)
    assert "prefill" in shown
    assert re.findall(r"(?i)[^>\n]*(?:no picture|pictures|vision|image|crop)[^<\n]*", shown) == []


def test_a_page_calls_a_score_that_is_no_accuracy_by_its_name(tmp_path: Path) -> None:
    texts = [measured_sample(at, staged_run(vision_s=0.5 + at / 100), prediction="0.5") for at in range(8)]
    for stored in (result(setting(), texts), reference(texts)):
        by = {"metric": "perplexity", "metric_best": 100.0}
        write(tmp_path, stored | by)
    page = page_of(report_of(analyse([tmp_path])))
    headings = re.findall(r'title="[^"]*">([^<]*)</button>', page)
    assert "100 / byte perplexity" in headings and "accuracy" not in headings
    # Without the library that draws; caveats are in words for all metrics.
    shown, _, rest = page.partition('<script type="application/json" id="plots">')
    shown = re.sub(r'<div id="caveats">.*?</div>', "", shown, flags=re.DOTALL) + rest.partition("</script>")[0]
    assert re.findall(".{0,60}ccuracy.{0,60}", shown) == [] and "right at" not in shown
    assert "100 / byte perplexity 0.5 to 0.5 at 2 settings" in page


def test_changes_of_a_price_list_are_in_percent_of_the_best_score() -> None:
    """From 45 to 40 of 100 are -5 %."""
    scores = [[40.0] * 40, [45.0] * 40]
    times = [[40.0 + at / 10 for at in range(40)], [100.0 + at / 7 for at in range(40)]]
    made = grid([point("low"), own_point(in_grid=True)], scores, times, best=100.0)
    found = price_table([Conclusion("signs", prices=price_list(made), metric_best=100.0)], "score")
    assert found is not None
    at = [column.label for column in found.columns].index("score")
    assert {row[at].text for row in found.rows if row[at].text is not None} == {"-5.0"}
