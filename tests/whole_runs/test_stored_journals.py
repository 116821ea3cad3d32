"""Journals and results that commit dfe8f148 wrote: this code makes the same results and tables of them.

`tests/data/at_dfe8f148/knobs` is a run of eight settings by two processes (7 samples and one
that failed in each), with energies that codecarbon estimated; `text` a grid of four text experiments.
"""

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.finishing.pooling import merge_parts, part_of
from experiment_core_utils.finishing.setting_results import summarise_and_save
from experiment_core_utils.l_results_csv_cleaning import json_to_csv, write_tables
from experiment_core_utils.planning.plan import requested_run
from experiment_core_utils.planning.run import loaded_run
from experiment_core_utils.records.journal import journal_path, read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.result_files import RESULT_FILES

STORED = Path(__file__).parents[1] / "data" / "at_dfe8f148"
OPTIONS = {
    "dataset_name": "reference_mixed",
    "num_samples": 8,
    "tier_list": ["low", "own"],
    "top_k_list": [2, 8],
    "num_active_blocks_list": [13, 16],
    "num_runs_per_sample": 1,
    "max_warmup_runs": 2,
    "energy": "optional",
    "device": "cpu",
}
FINGERPRINT = "01c795c777587bfd"
#: Keys whose values later commits changed by intent, each with its reason.
CHANGED = {
    r"(aggregate_stats|energy\.passes)\..*_ci95_(low|high)(_typical)?": "intervals of positive quantities are positive",
    r"energy\.passes\.j_per_request_by_pass": "new: energies are tested over passes",
    r"memory\.num_passes": "new: peaks of memory are the highest of passes",
    r"vision_fraction": "new: the vision knob takes fractions of the model's own tokens",
    r"digest": "new: edited files are known by it",
    r"drift": "gone: readings of a control setting, of which there were none any more",
}
#: Of this machine, this process and this moment.
PROVENANCE = r"provenance\..*"


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results and tables that this code makes of the stored journals."""
    folder = tmp_path_factory.mktemp("remade")
    requested = requested_run(ProfilingConfig.of(output_dir=folder, **OPTIONS))
    ledger = Ledger(folder, FINGERPRINT)
    run = loaded_run(requested, Accelerator(cpu=True), ledger, "0002", None, requested.settings, None)
    run.gather_facts()
    for setting in requested.settings:
        paths = [journal_path(STORED / "knobs" / "journals", setting.key, rank) for rank in (0, 1)]
        journals = [read_journal(path) for path in paths]
        parts = [part_of(each, rank, 2, "0002") for rank, each in enumerate(journals) if each is not None]
        summarise_and_save(run, setting, merge_parts(parts, requested.sample_ids))
    results = [result for each in requested.settings if (result := ledger.result(each.key)) is not None]
    write_tables(results, "reference_mixed", folder, "csv")
    return folder


def test_results_of_stored_journals_are_the_stored_ones(remade: Path) -> None:
    stored = sorted((STORED / "knobs").glob(RESULT_FILES))
    assert len(stored) == 8
    found = set()
    for path in stored:
        then, now = (json.loads(each.read_text()) for each in (path, remade / path.name))
        assert [key for key in now if key not in CHANGED] == [key for key in then if key not in CHANGED]
        found |= {re.sub(r"\[\d+\]", "", key) for key in differences(then, now)}
    patterns = [*CHANGED, PROVENANCE]
    assert [key for key in sorted(found) if not any(re.fullmatch(each, key) for each in patterns)] == []
    assert all(any(re.fullmatch(pattern, key) for key in found) for pattern in CHANGED)


@pytest.mark.parametrize("name", ["reference-mixed_settings.csv", "reference-mixed_samples.csv"])
def test_tables_of_stored_journals_are_the_stored_ones(remade: Path, name: str) -> None:
    then, now = (list(csv.DictReader((folder / name).open())) for folder in (STORED / "knobs", remade))
    assert len(then) == len(now) and list(then[0]) == list(now[0])
    found = {re.sub(r"^\[\d+\]\.", "", key) for key in differences(then, now)}
    # The model's folder is given as it lies here; for the intervals see CHANGED.
    assert found <= {"model_name", "energy_passes_j_per_request_ci95_low", "energy_passes_j_per_request_ci95_high"}


def test_the_table_of_a_stored_text_grid_is_the_stored_one(tmp_path: Path) -> None:
    path = tmp_path / "text_generation_results.csv"
    json_to_csv(STORED / "text" / "text_generation_results.json", path)
    then, now = (list(csv.DictReader(each.open())) for each in (STORED / "text" / path.name, path))
    assert len(then) == 4 and list(differences(then, now)) == []


def differences(then: Any, now: Any, key: str = "") -> Iterator[str]:
    """The keys, joined by dots, at which two contents differ by more than rounding."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in {**then, **now}:
            below = f"{key}.{name}" if key else str(name)
            if name in then and name in now:
                yield from differences(then[name], now[name], below)
            else:
                yield below
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from differences(one, other, f"{key}[{at}]")
    elif then != now and not is_rounding(then, now):
        yield key


def is_rounding(then: Any, now: Any) -> bool:
    """Whether two numbers, or texts of such, differ by a sum's order of addition only."""
    try:
        return math.isclose(float(then), float(now), rel_tol=1e-12)
    except (TypeError, ValueError):
        return False
