"""The content of a setting's result file."""

import json
from dataclasses import replace

import pytest

from experiment_core_utils.finishing.pooling import merge_parts
from experiment_core_utils.finishing.setting_content import aggregate_stats, sample_metadata, sample_result
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import token_target
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.statistics import describe
from experiment_core_utils.records.requests import StageFlops, VisionGeometry
from experiment_core_utils.tasks.interface import Score
from tests.hand_made_records import (
    SETTING,
    answered_sample,
    drawn,
    failed_sample,
    measured_sample,
    part,
    result_of,
    staged_run,
    stored_result,
)

FLOPS = StageFlops(vision_flops=700, prefill_flops=300, decode_flops_per_token=20.5)
THREE_BY_ONE = VisionGeometry(3, (3, 1), (784, 336), 576)
STATS = "mean std p50 p95 p99 min max ci95_low ci95_high n".split()


def test_every_key_of_a_sample() -> None:
    slow = staged_run(vision_s=2.0)
    sample = replace(measured_sample(3, staged_run(), flops=FLOPS), runs=(staged_run(), slow))
    sample = replace(sample, data_sha256="d0", picture_sha256="b1", round_places=(4, 0))
    result = sample_result(sample, Score(0.75, True, "letter", {"half": 0.375}), SETTING).content()
    # Seconds 0.5 + 0.25 + 2 * 0.125 become milliseconds.
    times = {
        "T_vision_total": 500.0,
        "T_LLM_prefill": 250.0,
        "T_LLM_decode": 250.0,
        "T_total": 1000.0,
        "T_decode_per_token": 125.0,
    }
    assert result == {
        "sample_id": 3,
        "data_sha256": "d0",
        "picture_sha256": "b1",
        "target_vision_tokens": 432,
        "target_crops": 2,
        "actual_vision_tokens": 384,
        "vision_tokens_diff": 48,
        "pooled_image_features": 432,
        "top_k": 2,
        "num_active_blocks": 3,
        "input_text_tokens": 10,
        "image_marker_tokens": 28,
        "prompt_tokens": 422,
        "output_tokens": 3,
        "output_ended": True,
        "theoretical_num_crops": 2,
        "theoretical_tiling": [1, 2],
        "theoretical_image_size": [336, 560],
        "theoretical_vision_tokens": 432,
        "actual_num_crops": 2,
        "actual_tiling": [1, 2],
        "actual_image_size": [336, 560],
        "accuracy": 0.75,
        "parse_status": "letter",
        "score_details": {"half": 0.375},
        "pred": "1.0",
        "question_type": "reading",
        "metadata": {"question": "what?", "answers": ["stop"], "image_id": "picture-3", "family": "signs"},
        **times,
        # Means of the two runs.
        "T_vision_total": 1250.0,
        "T_total": 1750.0,
        "T_first_token": 1500.0,
        "T_preprocess": 2.0,
        "T_transfer": 1.0,
        "answer": None,
        "thinking_tokens": 0,
        "T_thinking": None,
        "vision_flops": 700,
        "prefill_flops": 300,
        "decode_flops_per_token": 20.5,
        "energy_j": None,
        "energy_bound_j": None,
        "energy_method": None,
        "energy_source": None,
        "energy_reason": None,
        "outputs_identical": True,
        "outlier_runs": None,
        "accuracy_batch_size": None,
        "accuracy_batch_limit": None,
        "num_discarded_runs": 0,
        "disturbances": [],
        "runs": [
            {**times, "T_inter_token": [125.0, 125.0], "place_in_round": 4},
            {
                **times,
                "T_vision_total": 2000.0,
                "T_total": 2500.0,
                "T_inter_token": [125.0, 125.0],
                "place_in_round": 0,
            },
        ],
    }


def test_a_sample_without_picture_and_with_one_token_has_nulls_and_no_zeros() -> None:
    text = measured_sample(0, staged_run(vision_s=None, inter_token_s=()), has_picture=False)
    result = sample_result(text, Score(None), SETTING).content()
    absent = {name for name, value in result.items() if value is None}
    assert absent == {
        "target_vision_tokens", "target_crops", "vision_tokens_diff", "pooled_image_features", "theoretical_num_crops",
        "theoretical_tiling", "theoretical_image_size", "theoretical_vision_tokens", "actual_num_crops",
        "actual_tiling", "actual_image_size", "T_vision_total", "T_LLM_decode", "T_decode_per_token", "vision_flops",
        "prefill_flops", "decode_flops_per_token", "accuracy", "outlier_runs", "accuracy_batch_size",
        "accuracy_batch_limit", "energy_j", "energy_bound_j", "energy_method", "energy_source", "energy_reason",
        "data_sha256", "picture_sha256", "answer", "T_thinking",
    }  # fmt: skip
    assert (result["T_total"], result["T_first_token"], result["output_tokens"]) == (250.0, 250.0, 1)


def test_options_are_stored_where_there_are_any_and_what_the_task_says_does_not_replace_them() -> None:
    sample = replace(
        measured_sample(3),
        references=("blue",),
        options=("red", "blue"),
        answer_index=1,
        metadata={"question": "which?", "answers": ["?"], "image_id": "?", "subject": "art"},
    )
    assert sample_metadata(sample).content() == {
        "question": "which?", "answers": ["blue"], "image_id": "picture-3", "options": ["red", "blue"],
        "answer_index": 1, "subject": "art",
    }  # fmt: skip


def test_a_token_target_is_what_every_sample_aimed_at() -> None:
    setting = Setting.of(vision=token_target(1008), top_k=2, num_active_blocks=RunningBlocks.of((0,)))
    assert sample_result(measured_sample(0), Score(1.0), setting).target_vision_tokens == 1008


def test_only_times_become_milliseconds() -> None:
    spread = describe([1.0, 3.0])
    assert spread is not None
    stats = aggregate_stats({"prefill_s": spread, "output_tokens": spread})
    assert set(stats) == {f"{name}_{suffix}" for name in ("T_LLM_prefill", "output_tokens") for suffix in STATS}
    assert (stats["T_LLM_prefill_mean"], stats["output_tokens_mean"]) == (2000.0, 2.0)
    assert (stats["T_LLM_prefill_n"], stats["output_tokens_n"]) == (2, 2)
    assert stats["T_LLM_prefill_max"] == 3000.0
    assert stats["T_LLM_prefill_ci95_low"] == pytest.approx(1000 * (spread.ci_low or 0))


def test_the_spread_of_one_value_is_null() -> None:
    spread = describe([2.0])
    assert spread is not None
    stats = aggregate_stats({"e2e_s": spread})
    assert (stats["T_total_std"], stats["T_total_ci95_low"], stats["T_total_mean"]) == (None, None, 2000.0)


def test_every_key_of_a_setting() -> None:
    samples = (
        measured_sample(3, flops=FLOPS),
        measured_sample(5, staged_run(ended=False), prediction="?", geometry=THREE_BY_ONE, question_type="count"),
        measured_sample(8, prediction="0.5", geometry=THREE_BY_ONE),
    )
    failures = (failed_sample(9, "truncated file"),)
    merged = part(*samples, failures=failures, memory=MemoryReading(None, None, 1000, "no CUDA device"))
    content = json.loads(json.dumps(result_of(merged, requested=drawn(3, 5, 8, 9)).content()))
    stats = content.pop("aggregate_stats")
    per_sample = content.pop("per_sample_results")
    interval = content.pop("accuracy_ci95")
    assert 0.0 <= interval[0] <= 0.5 <= interval[1] <= 1.0
    assert content == {
        "schema_version": 1,
        "protocol_version": 2,
        "knobs": {"vision": "low", "top_k": 2, "num_active_blocks": 3},
        "fingerprint": "f00d",
        "tier": "low",
        "tier_range": {"min_crops": 1, "max_crops": 3},
        "vision_tokens_target": None,
        "vision_fraction": None,
        "selected_crops_mean": pytest.approx(8 / 3),
        "selected_crops_distribution": {"2": 1, "3": 2},
        "target_vision_tokens_mean": (432 + 576 + 576) / 3,
        "actual_vision_tokens_mean": 384.0,
        "max_crops": 3,
        "top_k": 2,
        "num_active_blocks": 3,
        "num_total_blocks": 4,
        "active_block_indices": [0, 1, 3],
        "metric": "read_off",
        "metric_best": 1.0,
        "metric_details": {"answers": 3},
        "accuracy": 0.5,
        "accuracy_std": 0.5,  # deviations 0.5, -0.5, 0: 0.5 / 2 = 0.25, root 0.5
        "accuracy_by_type": {
            "count": {"accuracy": 0.0, "num_samples": 1},
            "reading": {"accuracy": 0.75, "num_samples": 2},
        },
        "num_samples": 3,
        "num_failed_samples": 1,
        "num_latency_samples": 3,
        "num_unparsed": 1,
        "share_unparsed": pytest.approx(1 / 3),
        "share_empty": 0.0,
        "share_one_token": 0.0,
        "share_truncated": pytest.approx(1 / 3),
        "share_failed": 0.25,
        "share_outlier_runs": None,
        "share_outlier_runs_reason": "no sample has 3 runs",
        "num_discarded_runs": 0,
        "share_discarded_runs": 0.0,
        "num_disturbed_samples": 0,
        "is_reference": False,
        "in_grid": True,
        "sampling": {"how": "random", "seed": 42, "num_asked": 4, "num_in_split": 100, "num_left_out": 0},
        "sample_ids": [3, 5, 8, 9],
        "theoretical_num_crops": 3,  # of the most frequent geometry
        "theoretical_tiling": [3, 1],
        "theoretical_image_size": [784, 336],
        "theoretical_vision_tokens": 576,
        "realised": {
            "experts_per_token": [4, 2, 2],
            "blocks_run": [0, 1, 3],
            "blocks_run_decode": [0, 1, 3],
            "cache_layers": 3,
            "execution": None,
            "execution_reason": None,
            "experts_implementation": None,
            "experts_implementation_decode": None,
            "execution_stages": None,
            "engine_error": None,
            "modules_error": None,
            "compile_s": None,
        },
        "memory": {
            "peak_memory_bytes": None,
            "peak_reserved_bytes": None,
            "process_rss_bytes": 1000,
            "reason": "no CUDA device",
            "num_passes": None,
        },
        "compute_utilisation": [],
        "memory_timeline": None,
        "hardware_utilisation": {
            "peak_flops_per_s": None,
            "peak_bytes_per_s": None,
            "utilisation_reason": "no known card",
        },
        "energy": None,
        "failed_samples": [{"sample_id": 9, "error": "SampleError", "reason": "truncated file"}],
        "T_fixed_length": None,
        "provenance": {"run_uid": None, "task": {"name": "signs", "split": "validation", "metric": "read_off"}},
    }
    assert [entry["sample_id"] for entry in per_sample] == [3, 5, 8]
    assert (stats["T_total_mean"], stats["T_total_n"], stats["prefill_flops_n"]) == (1000.0, 3, 1)
    assert (stats["T_total_p95_typical"], "prefill_flops_n_typical" in stats) == (1000.0, False)


def test_runs_that_stand_out_are_marked_and_stay_in_the_statistics() -> None:
    usual = [staged_run(), staged_run(), staged_run()]
    odd = [staged_run(), staged_run(vision_s=1.5), staged_run()]
    samples = (measured_sample(1, *usual), measured_sample(2, *odd))
    result = result_of(part(*samples))
    assert [sample.outlier_runs for sample in result.per_sample_results] == [[], [1]]
    assert (result.share_outlier_runs, result.share_outlier_runs_reason) == (1 / 6, None)
    assert [run.T_total for run in result.per_sample_results[1].runs] == [1000.0, 2000.0, 1000.0]


def test_the_ids_are_the_requested_ones() -> None:
    samples = (measured_sample(3), measured_sample(7))
    merged = merge_parts([part(*samples, requested_ids=(7, 3))], (9, 7, 3))
    result = result_of(merged, requested=drawn(9, 7, 3))
    assert result.sample_ids == [3, 7]


def test_a_setting_in_which_every_sample_failed() -> None:
    merged = part(failures=(failed_sample(0, "unreadable"),), proof=None)
    result = result_of(merged).content()
    assert (result["num_samples"], result["num_failed_samples"], result["share_failed"]) == (0, 1, 1.0)
    for name in ("accuracy", "accuracy_ci95", "selected_crops_mean", "realised", "memory", "theoretical_tiling"):
        assert result[name] is None
    assert result["aggregate_stats"] == {}


def test_a_sample_answered_in_a_batch_has_no_times_in_its_file() -> None:
    result = stored_result(part(measured_sample(3), answered_sample(7)))
    measured, answered = result["per_sample_results"]
    assert (result["num_samples"], result["num_latency_samples"]) == (2, 1)
    times = [name for name in measured if name.startswith("T_")]
    assert [name for name in times if answered[name] is not None] == ["T_preprocess"]
    assert (answered["runs"], answered["outputs_identical"]) == ([], None)
    assert (answered["accuracy_batch_size"], answered["accuracy_batch_limit"]) == (3, 8)
    assert (measured["accuracy_batch_size"], measured["accuracy_batch_limit"]) == (None, None)
    assert (answered["output_tokens"], answered["output_ended"], answered["accuracy"]) == (4, True, 1.0)
    assert set(answered) == set(measured)
    assert result["aggregate_stats"]["T_total_n"] == 1
    json.dumps(result, allow_nan=False)
