"""Whether a folder of results is what a run wrote: every figure from its samples, every table from the results.

knobprof verify results/core_exp
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.l_results_csv_cleaning import read_results_csv, table_paths, write_tables
from experiment_core_utils.primitives.errors import EXIT_CODE_INVALID, OtherVersion, ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import shortened
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.journal import journals_in, read_journal
from experiment_core_utils.records.ledger import PARTS_FOLDER, plan_path, read_plan
from experiment_core_utils.records.result_files import CONCLUSION_FILE, RESULT_FILES, read_json_object
from experiment_core_utils.records.sample_result import QUANTITIES
from experiment_core_utils.records.setting_result import SettingResult, read_setting, setting_file_name, setting_key
from experiment_core_utils.saved_results.result_caveats import caveats_of
from experiments.analyses.sweeps import results_folders
from experiments.core_exp.closing_lines import concluded

Word = Literal["VALID", "INVALID", "EDITED", "INCOMPLETE"]
STAGES = ("T_vision_total", "T_LLM_prefill", "T_LLM_decode")
# Times are printed with all digits; sums of them differ in their order.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Fault:
    """One place of a folder that is not what a run leaves."""

    word: Word
    place: str  #: file, and the place in it


@dataclass(frozen=True)
class Verified:
    """What a folder of results is."""

    faults: tuple[Fault, ...]
    num_results: int
    num_unchecked: int  #: results of commit dfe8f148, which have no digest

    @property
    def word(self) -> Word:
        """EDITED before INCOMPLETE before INVALID; VALID without any fault."""
        found = {each.word for each in self.faults}
        words: tuple[Word, ...] = ("EDITED", "INCOMPLETE", "INVALID")
        return next((word for word in words if word in found), "VALID")


def verify(folder: Path) -> Verified:
    """Check the results in a folder and in its direct sub-folders.

    Not checked: whether a sample's figures are those that were measured, and pictures, which are not in the folder.

    Raises:
        ResultsError: there are no results, or some of another version.
    """
    faults: list[Fault] = []
    num_results = num_unchecked = 0
    for each in results_folders(folder):
        results: dict[Path, SettingResult] = {}
        paths = sorted(each.glob(RESULT_FILES))
        for path in paths:
            try:
                results[path] = read_setting(path)
            except OtherVersion:
                raise
            except ResultsRefused as error:
                faults.append(Fault("EDITED", str(error)))
        num_results += len(paths)
        num_unchecked += sum(result.is_unchecked for result in results.values())
        for path, result in results.items():
            faults += [Fault("EDITED", f"{path}: {place}") for place in result_faults(path, result)]
        faults += _journal_faults(each)
        # Tables and conclusion are of all results.
        if len(results) == len(paths):
            faults += _run_faults(each, results)
    if num_results == 0:
        raise ResultsError(f"{folder} contains no results ({RESULT_FILES}); give the --output_dir of a profiling run")
    return Verified(tuple(faults), num_results, num_unchecked)


def result_faults(path: Path, result: SettingResult) -> Iterator[str]:
    """Figures of a result that are not those of its samples, and a name that is not that of its content."""
    if path.name != setting_file_name(result):
        yield f"its content belongs to {setting_file_name(result)}"
    for name, value in result.aggregate_stats.items():
        quantity = name.removesuffix("_mean")
        if quantity == name or quantity not in QUANTITIES:
            continue
        declared = QUANTITIES[quantity]
        # What a run has is known of the samples that were timed, and 0 of these where such a part did not run.
        samples = [each for each in result.per_sample_results if declared.of == "sample" or each.T_total is not None]
        found = declared.with_absent_parts([getattr(sample, quantity) for sample in samples])
        values = [each for each in found if each is not None]
        if not _is_equal(value, fmean(values) if values else None):
            yield f"aggregate_stats.{name} is {value}, and the samples' mean is {fmean(values) if values else None}"
    for sample in result.per_sample_results:
        stages = [getattr(sample, name) for name in STAGES]
        known = [each for each in stages if each is not None]
        if known and sample.T_total is not None and not _is_equal(sample.T_total, sum(known)):
            yield f"sample {sample.sample_id}: T_total is {sample.T_total}, and its stages add up to {sum(known)}"

    made, stored = map(_by_kind, (caveats_of(result), result.provenance.caveat_records))
    for place in [] if result.is_unchecked else _differences(made, stored):
        yield f"provenance.caveat_records are not those of its figures: {place}"


def _by_kind(caveats: Sequence[Caveat]) -> dict[str, Any]:
    return {each.kind: each.model_dump(mode="json") for each in caveats}


def _journal_faults(folder: Path) -> Iterator[Fault]:
    for path in journals_in(folder / PARTS_FOLDER):
        try:
            read_journal(path)
        except ResultsRefused as error:
            yield Fault("EDITED", str(error))


def _run_faults(folder: Path, results: Mapping[Path, SettingResult]) -> Iterator[Fault]:
    """What the folder of one task lacks, and its tables and conclusion that do not belong to its results."""
    planned = None
    if plan_path(folder).is_file():
        planned = read_plan(folder).keys
        present = {setting_key(each) for each in results.values()}
        if missing := [key for key in planned if key not in present]:
            yield Fault("INCOMPLETE", f"{folder}: no result of {', '.join(missing)}; the run's command measures them")
    unfinished = [
        path.name
        for path, each in results.items()
        if each.precision is not None and each.precision.stopped_by == "stopped"
    ]
    if unfinished:
        yield Fault("INCOMPLETE", f"{folder}: {counted(len(unfinished), 'result')} of a run that was stopped")
    yield from _table_faults(folder, list(results.values()))
    of_run = [each for each in results.values() if planned is None or setting_key(each) in planned]
    yield from _conclusion_faults(folder, of_run)


def _table_faults(folder: Path, results: Sequence[SettingResult]) -> Iterator[Fault]:
    for task in sorted({each.provenance.task.name for each in results}):
        own = [each for each in results if each.provenance.task.name == task]
        with tempfile.TemporaryDirectory() as scratch:
            write_tables(own, task, Path(scratch))
            for path in table_paths(task, folder):
                if not path.is_file():
                    yield Fault("INCOMPLETE", f"{path} is not there; `knobprof tables {folder}` writes it")
                    continue
                try:
                    found, made = read_results_csv(path), read_results_csv(Path(scratch) / path.name)
                except ResultsError as error:
                    yield Fault("EDITED", str(error))
                    continue
                if places := list(_differences(_by_setting(made), _by_setting(found))):
                    yield Fault("EDITED", f"{path} is not that of the results: {', '.join(places[:3])}")


def _by_setting(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows by setting, and sample where there is one: a run may have written them in another order."""
    return {f"{row.get('setting')} {row.get('sample_id', '')}".strip(): dict(row) for row in rows}


def _conclusion_faults(folder: Path, results: Sequence[SettingResult]) -> Iterator[Fault]:
    path = folder / CONCLUSION_FILE
    found = concluded(results, folder).conclusion
    if found is None:
        return
    if found.voided_by:
        yield Fault("INVALID", f"{folder}: {found.why}")
    if not path.is_file():
        # Results that were scored again have none.
        if plan_path(folder).is_file():
            yield Fault("INCOMPLETE", f"{path} is not there; the run's command writes it")
        return
    stored = read_json_object(path)
    made = json.loads(json.dumps({"sentence": found.sentence} | found.content()))
    if any(each.is_unchecked for each in results):
        # Words had other tests then.
        return
    if places := list(_differences(made, {name: each for name, each in stored.items() if name in made})):
        yield Fault("EDITED", f"{path} is not that of the results: {', '.join(places[:3])}")


def _differences(made: Any, found: Any, place: str = "") -> Iterator[str]:
    """The places, keys joined by dots, at which what a file contains is not what was made again."""
    if isinstance(made, Mapping) and isinstance(found, Mapping):
        for name in {**made, **found}:
            yield from _differences(made.get(name), found.get(name), f"{place}.{name}" if place else str(name))
    elif isinstance(made, list) and isinstance(found, list) and len(made) == len(found):
        for at, (one, other) in enumerate(zip(made, found, strict=True)):
            yield from _differences(one, other, f"{place}[{at}]")
    elif not _is_equal(made, found):
        yield f"{place} is {shortened(found)}, not {shortened(made)}"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(one == other)


@reporting_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print what the folder is. Exit code: 0 VALID, 4 INVALID, 1 EDITED or INCOMPLETE, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="verify_run.py",
        description="Whether a folder of results is what a run wrote: digests, figures from the samples, tables and "
        "conclusion from the results, checksums of journals.",
        examples=("knobprof verify results/core_exp",),
    )
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="the --output_dir of a profiling run")
    add_knob_module(parser)
    found = verify(parser.parse_args(argv).results_dir)
    for fault in found.faults:
        print(f"{fault.word}: {fault.place}")
    unchecked = f", {found.num_unchecked} of commit dfe8f148, without digests" if found.num_unchecked else ""
    intact = ", as the run wrote them" if found.word in ("VALID", "INVALID") else ""
    print(f"{found.word}: {counted(found.num_results, 'result')}{intact}{unchecked}")
    return {"VALID": 0, "INVALID": EXIT_CODE_INVALID}.get(found.word, 1)


if __name__ == "__main__":
    sys.exit(run_command(main))
