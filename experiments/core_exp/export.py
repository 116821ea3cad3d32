"""Write the results of a finished run in the layout of lm-eval or lmms-eval, a folder for each setting.

knobprof export results/core_exp --to lm-eval
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsRefused
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.saved_results.harness_layout import Harness, write_setting
from experiments.analyses.knobs.conclusion import invalid_lines, voiding_caveats
from experiments.analyses.sweeps import StoredSetting, load_sweep
from experiments.core_exp.verify_run import verify


def verdict_on(settings: Sequence[StoredSetting]) -> dict[str, Any]:
    """`verdict`, which is VALID or INVALID, and `voided_by`, the sentences that say why; for other programs' files."""
    sentences = list(voiding_caveats(settings).values())
    return {"verdict": "INVALID" if sentences else "VALID", "voided_by": sentences}


def export(folder: Path, to: Harness, output: Path) -> tuple[list[Path], list[str]]:
    """Write the settings of a run; returns their folders, and why the run is INVALID, a sentence each.

    Raises:
        ResultsError: no results, broken ones, or of several sweeps.
        ResultsRefused: they were edited.
        ConfigurationError: `output` is a file.
        ResultsNotSaved: the disk does not take a file.
    """
    if output.exists() and not output.is_dir():
        raise ConfigurationError(f"--output {output} is a file; give a folder")
    verified = verify(folder)
    edited = [fault.place for fault in verified.faults if fault.word == "EDITED"]
    if edited:
        raise ResultsRefused(f"{folder} was EDITED and is not exported: {edited[0]}; `knobprof verify {folder}`")
    settings = load_sweep(folder).settings
    verdict = verdict_on(settings)
    if lacking := [fault.place for fault in verified.faults if fault.word == "INCOMPLETE"]:
        verdict["incomplete"] = lacking
    by_setting: dict[str, list[SettingResult]] = {}
    for each in settings:
        by_setting.setdefault(each.key, []).append(each.result)
    return [write_setting(results, to, verdict, output) for results in by_setting.values()], verdict["voided_by"]


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Export. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong, or results were edited."""
    parser = OneLineParser(
        prog="export.py",
        description="Write a finished run as lm-eval or lmms-eval would, a folder for each setting.",
        examples=("knobprof export results/core_exp --to lm-eval --output exported",),
    )
    parser.add_argument("results_dir", type=Path, metavar="RESULTS_DIR", help="the --output_dir of a profiling run")
    parser.add_argument("--to", choices=get_args(Harness), required=True, help="whose layout")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="(default: RESULTS_DIR/<layout>)")
    add_knob_module(parser)
    flags = parser.parse_args(argv)
    folders, voided = export(flags.results_dir, flags.to, flags.output or flags.results_dir / flags.to)
    print("\n".join([*invalid_lines(voided), *map(str, folders)]))


if __name__ == "__main__":
    sys.exit(run_command(main))
