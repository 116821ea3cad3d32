"""The published name of a setting's file, and the times of the samples in it."""

from typing import Any

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import token_target
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.requests import VisionGeometry
from experiment_core_utils.records.setting_result import SettingResult, setting_file_name
from tests.hand_made_records import measured_sample, part, result_of, staged_run

THREE_BY_ONE = VisionGeometry(3, (3, 1), (784, 336), 576)


def test_a_tiers_file_carries_the_mean_number_of_crops() -> None:
    # 2, 3 and 3 tiles: 2.67, rounded to 3.
    samples = [measured_sample(0), *(measured_sample(i, geometry=THREE_BY_ONE) for i in (1, 2))]
    result = result_of(part(*samples), task="reference_vqa")
    assert setting_file_name(result) == "reference-vqa_imgsizetier-low_crops3_topk2_blocks3.json"
    result = result_of(part(samples[0]), task="vqa_v2")
    assert setting_file_name(result) == "vqa-v2_imgsizetier-low_crops2_topk2_blocks3.json"


def test_a_token_targets_file_carries_the_target() -> None:
    setting = Setting.of(vision=token_target(1008), top_k=8, num_active_blocks=RunningBlocks.of(tuple(range(14))))
    result = result_of(part(measured_sample(0)), setting, "reference_vqa")
    assert setting_file_name(result) == "reference-vqa_imgsizetokens1008_topk8_blocks14.json"


def test_a_setting_without_pictures_has_no_crops() -> None:
    text = measured_sample(0, has_picture=False)
    assert "_crops0_" in setting_file_name(result_of(part(text)))
    assert "_crops0_" in setting_file_name(result_of(part()))


def content_with(total: float, **changes: Any) -> dict[str, Any]:
    """A result with a sample of two runs of 1 s and 2 s, whose own total is given in ms."""
    content = result_of(part(measured_sample(0, staged_run(), staged_run(vision_s=1.5)))).content()
    content["per_sample_results"] = [each | {"T_total": total} for each in content["per_sample_results"]]
    return content | changes


def test_times_of_a_sample_are_the_means_of_its_runs() -> None:
    found = SettingResult.from_content(content_with(1500.0), "a.json")
    assert found.per_sample_results[0].T_total == found.aggregate_stats["T_total_mean"] == 1500.0
    for total in (1000.0, 1600.0):
        with pytest.raises(ResultsRefused, match=rf"per_sample_results\[0\]\.T_total is {total}, and its runs' mean"):
            SettingResult.from_content(content_with(total), "a.json")
    with pytest.raises(ResultsRefused, match="protocol_version is 1"):
        SettingResult.from_content(content_with(1500.0, protocol_version=1), "a.json")
