"""The lines that the driver prints of a finished run."""

from experiment_core_utils.pipeline import RunReport
from experiment_core_utils.saved_results.terminal import (
    caveat_lines,
    closing_table,
    failed_sample_lines,
    few_samples_warning,
    positions_of,
    search_sentence,
)


def closing_lines(report: RunReport) -> list[str]:
    """The lines of a finished run: the table, caveats, what failed or was left out, and where the results are."""
    lines = []
    if report.results:
        lines.append(closing_table(report.results, positions_of(report.search)))
        warning = few_samples_warning(report.results)
        if warning is not None:
            lines.append(f"warning: {warning}")
    lines += [*caveat_lines(report.results), *failed_sample_lines(report.results)]
    for key, failure in report.failed.items():
        lines.append(f"failed: {key}: {failure.error} after {failure.attempts} attempts: {failure.reason}")
    for values in report.left_out:
        lines.append(f"left out by the sampling strategy: {values} (--sampling_strategy full measures all)")
    if report.search is not None:
        lines.append(search_sentence(report.search))
    measured = "nothing was left to measure" if report.experiment_id is None else f"run {report.experiment_id}"
    lines.append(f"{measured}: {len(report.results)} settings in {report.output_dir}")
    if report.csv_path is not None:
        lines.append(f"table of settings: {report.csv_path}")
    return lines
