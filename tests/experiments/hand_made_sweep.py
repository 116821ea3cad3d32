"""A run's folder with round numbers, for tests of what reads one."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.result_files import content_digest
from experiment_core_utils.records.settings import MeasuredSample
from tests.hand_made_records import measured_sample, part, staged_run, stored_result

PROVENANCE: dict[str, Any] = {
    "experiment_id": "0001",
    "command": "python3 acc_lat_profiling.py",
    "git_commit": "c0ffee",
    "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
    "hardware": {"device": "cuda:0", "gpu_name": "Scripted GPU", "cpu": "Scripted CPU"},
    "model": {
        "name": "folder/tiny",
        "model_class": "Tiny",
        "total_parameters": 1000,
        "dtype": "bfloat16",
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
        "execution": "eager",
    },
    "run_uid": None,
    "task": {"name": "signs", "split": "validation", "metric": "read_off"},
    "experimental_variables": {"random_weights": False},
    "caveats": ["a comparison is based on 2 samples"],
}
UTILISATION: dict[str, Any] = {
    "mfu_vision": 0.1,
    "mfu_prefill": 0.1,
    "mfu_decode": 0.1,
    "mbu_decode": 0.1,
    "peak_flops_per_s": 1e12,
    "peak_bytes_per_s": 1e11,
    "peak_dtype": "bfloat16",
    "utilisation_reason": None,
}
FLOPS = StageFlops(vision_flops=10**9, prefill_flops=2 * 10**9, decode_flops_per_token=10.0**7)

# Of a run at a rate.
_COUNTS = {"num_batches": 1, "num_requests": 1, "num_answered": 1, "most_under_way": 1, "num_late": 0}
ARRIVED = {"open_loop": {"request_rate": 2.0, "achieved_rate": None, "late_max_ms": 0.5, **_COUNTS}}


def setting(tier: str = "low", top_k: int = 2, blocks: int = 3) -> Setting:
    """A tier, top-k and the first blocks of a model of 4."""
    return Setting.of(vision=tier_target(tier), top_k=top_k, num_active_blocks=RunningBlocks.of(tuple(range(blocks))))


def result(
    knobs: Setting, samples: Sequence[MeasuredSample] | None = None, fingerprint: str = "f00d", **provenance: Any
) -> dict[str, Any]:
    """The content of a setting's file; by default two samples of 0.5 s vision, 0.25 s prefill, 0.25 s decode."""
    ran = samples or (measured_sample(0, staged_run(), flops=FLOPS), measured_sample(1, staged_run(), flops=FLOPS))
    stored = stored_result(part(*ran, key=knobs.key, fingerprint=fingerprint), knobs)
    return stored | {
        "provenance": copy.deepcopy(PROVENANCE) | provenance,
        "hardware_utilisation": dict(UTILISATION),
        "setting_order": {"how": "rounds", "seed": 1, "position": 0, "num_settings": 2},
    }


def reference(
    samples: Sequence[MeasuredSample] | None = None, *, in_grid: bool = False, **provenance: Any
) -> dict[str, Any]:
    """The content of the file of the model as it is: its own crops, top-k 4 and all 4 blocks."""
    stored = result(
        Setting.of(vision=own_target(), top_k=4, num_active_blocks=RunningBlocks.of((0, 1, 2, 3))),
        samples,
        **provenance,
    )
    return stored | {"is_reference": True, "in_grid": in_grid}


def write(folder: Path, *results: dict[str, Any]) -> Path:
    """Each result as its file in `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in results:
        tokens = each["vision_tokens_target"]
        vision = "own" if tokens is None else f"tokens{tokens}"
        vision = vision if each["tier"] is None else f"tier-{each['tier']}_crops2"
        experts = "" if each["top_k"] is None else f"topk{each['top_k']}_"
        name = f"signs_imgsize{vision}_{experts}blocks{each['num_active_blocks']}.json"
        # Results that have a run's id have a digest, too.
        if each["provenance"]["run_uid"] is not None:
            write_signed(folder / name, each)
        else:
            (folder / name).write_text(json.dumps(each))
    return folder


def write_signed(path: Path, content: dict[str, Any]) -> None:
    """A result with the digest of its content, as a run writes it."""
    path.write_text(json.dumps(content | {"digest": content_digest(content)}))
