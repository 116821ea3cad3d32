"""What a finished run comes to, and the lines that the driver prints of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiment_core_utils.config.parts import QuestionConfig
from experiment_core_utils.primitives.errors import EXIT_CODE_INVALID
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.conclusion import Conclusion, save_conclusion
from experiment_core_utils.records.price_list import PriceList
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.setting_result import SettingResult, setting_file_name, setting_key
from experiment_core_utils.saved_results.terminal import (
    caveat_lines,
    closing_table,
    column_lines,
    failed_sample_lines,
    few_samples_warning,
    fixed_length_line,
    reference_lines,
)
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.conclusion import conclude, front_words
from experiments.analyses.knobs.grid import grid_of
from experiments.analyses.knobs.objectives import LATENCY_MEAN
from experiments.analyses.knobs.prices import price_list
from experiments.analyses.sweeps import StoredSetting, setting_order

# Enough for verdicts on knobs; intervals, which need more, are not printed.
NUM_DRAWS = 200


@dataclass(frozen=True)
class Concluded:
    """The conclusion of a run, and how sure each setting's place on the front is."""

    conclusion: Conclusion | None  #: None without results
    front: Mapping[str, str] = field(default_factory=dict)  #: empty where there is none
    answer: PriceList | None = None  #: to the user's question; None without one, and where nothing is concluded

    def exit_code(self, report: RunReport, *, is_strict: bool) -> int:
        """The run's own, but for an INVALID run of which no setting failed, where the driver is strict."""
        is_invalid = self.conclusion is not None and bool(self.conclusion.voided_by)
        return EXIT_CODE_INVALID if is_strict and is_invalid and not report.failed else report.exit_code


def concluded(results: Sequence[SettingResult], folder: Path, question: QuestionConfig | None = None) -> Concluded:
    """The conclusion of the results of a finished run in its folder, and the answer to the user's question."""
    if not results:
        return Concluded(None)
    task = results[0].provenance.task.name
    settings = sorted(
        (StoredSetting(task, setting_key(each), folder / setting_file_name(each), each) for each in results),
        key=setting_order,
    )
    try:
        (analysis,) = analyse_knobs([grid_of(task, settings)], [LATENCY_MEAN], NUM_DRAWS).tasks
        found = conclude(analysis, settings)
        answer = None
        if question is not None and found.why is None and (question.has_budgets or question.accept_loss is not None):
            answer = price_list(analysis.grid, question)
    # The run is measured and saved: nothing that an analysis meets may end it.
    except Exception as error:
        return Concluded(Conclusion(task, f"{type(error).__name__}: {error}"))
    return Concluded(found, front_words(analysis) if found.why is None else {}, answer)


def concluded_and_saved(report: RunReport, tracker: str | None, question: QuestionConfig | None = None) -> Concluded:
    """The conclusion of a finished run, also in its folder and, with the settings, in an experiment tracker."""
    found = concluded(report.results, report.output_dir, question)
    if found.conclusion is not None:
        save_conclusion(found.conclusion, report.experiment_id, report.output_dir)
        if tracker is not None:
            # It needs accelerate, and so torch, which those who read results have no use for.
            from experiment_core_utils.saved_results.trackers import log_settings

            log_settings(report.results, tracker, report.output_dir, found.conclusion.sentence)
    return found


def closing_lines(report: RunReport, found: Concluded | None = None) -> list[str]:
    """The lines of a finished run: settings that failed first, then the table, the conclusion, caveats, what was left
    out, and where it is."""
    found = found or concluded(report.results, report.output_dir)
    lines = [
        f"failed: {key}: {failure.error} after {counted(failure.attempts, 'attempt')}: {failure.reason}"
        for key, failure in report.failed.items()
    ]
    if report.results:
        lines.append(closing_table(report.results, found.front))
        lines += [*column_lines(report.results, found.front), *reference_lines(report.results)]
        lines += [] if found.conclusion is None else found.conclusion.lines
        lines += [] if found.answer is None else found.answer.lines
        fixed = {setting_key(each): each.T_fixed_length for each in report.results if not each.is_placebo}
        line = fixed_length_line({key: time for key, time in fixed.items() if time is not None})
        lines += [] if line is None else [line]
        warning = few_samples_warning(report.results)
        if warning is not None:
            lines.append(f"warning: {warning}")
    voided_by = () if found.conclusion is None else found.conclusion.voided_by
    lines += [*caveat_lines(report.results, voided_by), *failed_sample_lines(report.results)]
    lines += report.left_out
    measured = "nothing was left to measure" if report.experiment_id is None else f"run {report.experiment_id}"
    validity = "" if found.conclusion is None else ", INVALID" if voided_by else ", VALID"
    lines.append(f"{measured}: {counted(len(report.results), 'setting')} in {report.output_dir}{validity}")
    if report.csv_path is not None:
        lines.append(f"table of settings: {report.csv_path}")
    return lines
