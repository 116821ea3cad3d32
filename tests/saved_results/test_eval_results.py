"""The unmodified setting's accuracy in the hub's form, read back as the hub's library reads it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry
from huggingface_hub._eval_results import parse_eval_result_entries

from experiment_core_utils.primitives.knobs import KnobLimits, KnobSetting, VisionTarget, own_target, tier_target
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.eval_results import write_eval_results
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from tests.hand_made_records import failed_sample, measured_sample, part, result_of

LIMITS = KnobLimits(num_total_blocks=4, num_experts=8, default_top_k=4)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class OnHub:
    """A task whose rows are from the hub."""

    hub: HubDataset | None = field(default_factory=lambda: HubDataset("owner/signs", None, "main"))
    name: str = "signs"
    source: dict[str, str] = field(default_factory=lambda: {"revision": COMMIT})


def result(vision: VisionTarget, top_k: int | None = 4, blocks: int = 4) -> SettingResult:
    """Two samples that ran, worth 1.0 and 0.0, and one that failed."""
    samples = measured_sample(0, prediction="1.0"), measured_sample(1, prediction="0.0")
    setting = KnobSetting(vision, top_k, tuple(range(blocks)))
    return result_of(part(*samples, failures=(failed_sample(2, "no"),)), setting)


def entries(path: Path) -> list[EvalResultEntry]:
    return parse_eval_result_entries(yaml.safe_load(path.read_text()))


def test_the_whole_model_is_one_entry(tmp_path: Path) -> None:
    results = [result(tier_target("high"), top_k=2), result(tier_target("high")), result(tier_target("low"))]
    path = write_eval_results(results, LIMITS, OnHub(), tmp_path)  # type: ignore[arg-type]
    assert path == tmp_path / ".eval_results" / "signs.yaml"
    (entry,) = entries(path)
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("owner/signs", "default", COMMIT)
    assert entry.value == 0.5
    assert entry.notes == (
        "read_off, 0 to 1; 2 of 100 samples of validation (by random, seed 42), 1 failed; setting "
        "tier-high_topk4_blocks4"
    )


def test_a_model_without_the_knobs_is_unmodified(tmp_path: Path) -> None:
    dense = KnobLimits(num_total_blocks=4, num_experts=None, default_top_k=None)
    task = OnHub(HubDataset("owner/signs", "Signs", "main"), source={"read_from": "parquet files"})
    path = write_eval_results([result(own_target(), top_k=None)], dense, task, tmp_path)  # type: ignore[arg-type]
    assert path is not None
    (entry,) = entries(path)
    assert (entry.task_id, entry.dataset_revision) == ("Signs", None)


@pytest.mark.parametrize(
    ("measured", "task"),
    [
        (result(tier_target("high"), blocks=3), OnHub()),
        (result(tier_target("medium")), OnHub()),
        (result(tier_target("high")), OnHub(hub=None)),
    ],
    ids=["fewer blocks", "fewer crops", "no dataset on the hub"],
)
def test_nothing_is_said_of_a_changed_model_or_of_own_data(
    measured: SettingResult, task: OnHub, tmp_path: Path
) -> None:
    assert write_eval_results([measured], LIMITS, task, tmp_path) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
