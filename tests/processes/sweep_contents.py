"""What two runs of the same settings have in common: everything but times, ids of runs and dates."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

NO_RESULTS = (".parts", "conclusion.json", "recipe.yaml")
CSV_NAME = "reference-vqa_settings.csv"
SAMPLES_NAME = "reference-vqa_samples.csv"
NOT_COMPARED = {
    *("experiment_id", "experiment_ids", "run_uid", "run_uids", "timestamp", "digest"),
    *("process_rss_bytes", "cache_budget_bytes", "cache_used_bytes"),
    *("warmup", "conditions", "rounds", "precision", "compute_utilisation"),
    # What else the machine did.
    *("num_disturbed_samples", "disturbances", "num_discarded_runs", "share_discarded_runs"),
    # Settings that had finished a sample when the run was killed are in no round of it any more.
    "place_in_round",
}
# What says by how many processes a result was measured.
OF_THE_LAUNCH = {"num_processes", "caveats", "caveat_records", "fingerprint", "command"}

Contents = dict[str, Any]


def contents(folder: Path, left_out: set[str] = NOT_COMPARED) -> Contents:
    """Every result of a folder that nobody works in any more, by name; nothing else may lie there."""
    left = {path.name for path in (folder / ".parts").iterdir()}
    (ledger,) = (name for name in left if name.startswith("ledger_"))
    assert {"lock", "plan.json", ledger} <= left <= {"lock", "plan.json", ledger, "seen_by_all"}
    names = sorted(path.name for path in folder.iterdir() if path.name not in NO_RESULTS)
    tables = [name for name in names if name.endswith(".csv")]
    assert tables == [SAMPLES_NAME, CSV_NAME]
    results: Contents = {
        name: without(json.loads((folder / name).read_text()), left_out) for name in names if name not in tables
    }
    return results | {name: _without_times(pd.read_csv(folder / name)) for name in tables}


def _without_times(table: pd.DataFrame) -> str:
    of_a_run = {"experiment_id", "tokens_per_second", "requests_per_second", "process_rss_bytes", "num_discarded_runs",
                "share_discarded_runs"}  # fmt: skip
    times = [name for name in table if name in of_a_run or name.startswith("T_") or name.endswith("_ms")]
    return table.drop(columns=times).to_csv()


# Caveats that two runs of the same settings need not share: their sentences, and their kinds.
UNSTEADY = ("throttled", "background load", "foreign_load", "energy", "discarded", "runs_discarded")


def is_unsteady(entry: Any) -> bool:
    output = entry.get("kind") if isinstance(entry, dict) else entry
    return isinstance(output, str) and output.startswith(UNSTEADY)


def without(content: Any, left_out: set[str]) -> Any:
    if isinstance(content, list):
        return [without(each, left_out) for each in content if not is_unsteady(each)]
    if not isinstance(content, dict):
        return content
    return {
        key: without(value, left_out)
        for key, value in content.items()
        if key not in left_out and not (key.startswith("T_") and not key.endswith("_n"))
    }
