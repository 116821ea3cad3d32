"""The page of a task without pictures says nothing of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.report.page import page_of
from tests.experiments.hand_made_sweep import result
from tests.hand_made_records import measured_sample


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
