"""The reference's accuracy in the hub's form, read back as the hub's library reads it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry
from huggingface_hub._eval_results import parse_eval_result_entries

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.eval_results import write_eval_results
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset
from tests.hand_made_records import failed_sample, measured_sample, part, result_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class OnHub:
    """A task whose rows are from the hub."""

    hub: HubDataset | None = field(default_factory=lambda: HubDataset("owner/signs", None, "main"))
    name: str = "signs"
    source: dict[str, str] = field(default_factory=lambda: {"revision": COMMIT})


def result(tier: str | None, *, is_reference: bool = False, **variables: object) -> SettingResult:
    """All experts and blocks; two samples that ran, worth 1.0 and 0.0, and one that failed."""
    samples = measured_sample(0, prediction="1.0"), measured_sample(1, prediction="0.0")
    setting = Setting.of(
        vision=own_target() if tier is None else tier_target(tier),
        top_k=4,
        num_active_blocks=RunningBlocks.of((0, 1, 2, 3)),
    )
    found = result_of(part(*samples, failures=(failed_sample(2, "no"),)), setting)
    requested = found.provenance.experimental_variables.with_keys(**variables)
    provenance = found.provenance.with_keys(experimental_variables=requested)
    return found.with_keys(is_reference=is_reference, provenance=provenance)


def entries(path: Path) -> list[EvalResultEntry]:
    return parse_eval_result_entries(yaml.safe_load(path.read_text()))


def test_the_reference_is_one_entry(tmp_path: Path) -> None:
    results = [result("high"), result(None, is_reference=True), result("low")]
    path = write_eval_results(results, OnHub(), tmp_path)  # type: ignore[arg-type]
    assert path == tmp_path / ".eval_results" / "signs.yaml"
    (entry,) = entries(path)
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("owner/signs", "default", COMMIT)
    assert entry.value == 0.5
    assert entry.notes == (
        "read_off, 0 to 1; 2 of 100 samples of validation (by random, seed 42), 1 failed; setting own_topk4_blocks4"
    )


def test_a_commit_is_named_where_it_is_known(tmp_path: Path) -> None:
    task = OnHub(HubDataset("owner/signs", "Signs", "main"), source={"read_from": "parquet files"})
    path = write_eval_results([result(None, is_reference=True)], task, tmp_path)  # type: ignore[arg-type]
    assert path is not None
    (entry,) = entries(path)
    assert (entry.task_id, entry.dataset_revision) == ("Signs", None)


@pytest.mark.parametrize(
    ("measured", "task"),
    [
        (result("high"), OnHub()),
        (result(None, is_reference=True, quantization="8bit"), OnHub()),
        (result(None, is_reference=True, random_weights=True), OnHub()),
        (result(None, is_reference=True), OnHub(hub=None)),
    ],
    ids=["the most crops", "quantised", "random weights", "no dataset on the hub"],
)
def test_nothing_is_said_of_a_changed_model_or_of_own_data(
    measured: SettingResult, task: OnHub, tmp_path: Path
) -> None:
    assert write_eval_results([measured], task, tmp_path) is None  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
