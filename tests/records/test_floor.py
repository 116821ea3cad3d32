"""Results are read, checked and shown by records alone: no letter, engine, model, meter or task is imported for it."""

import re
import subprocess
import sys

from experiment_core_utils.primitives.files import REPOSITORY

READS_AND_SHOWS = """
import sys
from pathlib import Path
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.setting_result import SettingResult, read_setting
from experiment_core_utils.records.journal import read_journal
stored = Path("tests/data/at_dfe8f148/knobs")
result = read_setting(sorted(stored.glob("*_imgsize*.json"))[0])
print(result, "<table" in result._repr_html_())
try:
    SettingResult.from_content({**result.content(), "num_samples": 3}, "a.json")
except ResultsRefused as error:
    print(error)
journal = read_journal(next((stored / "journals").glob("*.jsonl")))
print(len(journal.finished))
print(*sys.modules)
"""
# What names the knobs of a setting imports no floor above it either.
BELOW = ("primitives", "records", "knobs")


def test_a_stored_result_is_read_checked_and_shown_without_what_measured_it() -> None:
    command = [sys.executable, "-c", READS_AND_SHOWS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    figures, fault, number, modules = done.stdout.splitlines()
    assert figures.startswith("SettingResult(reference_mixed ") and figures.endswith(" True")
    assert fault.startswith("a.json is broken: num_samples is 3, and per_sample_results contains 7")
    assert number == "4"
    named = set(modules.split())
    own = {name.split(".")[1] for name in named if name.startswith("experiment_core_utils.")}
    assert own == set(BELOW)
    assert not named & {"torch", "transformers", "accelerate", "pandas", "experiments", "knob_profiler"}


def test_records_name_no_module_of_a_floor_above() -> None:
    sources = list((REPOSITORY / "experiment_core_utils" / "records").rglob("*.py"))
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    rooms = set(re.findall(r"^ *(?:from|import) experiment_core_utils\.(\w+)", text, re.MULTILINE))
    assert len(sources) > 15 and rooms == set(BELOW)
