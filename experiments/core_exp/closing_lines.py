"""The lines that the driver prints of a finished run."""

from collections.abc import Mapping, Sequence

from experiment_core_utils.pipeline import RunReport
from experiment_core_utils.records.ledger import SearchRecord
from experiment_core_utils.records.setting_result import SettingResult, reference_of, setting_key
from experiment_core_utils.saved_results.terminal import (
    caveat_lines,
    closing_table,
    failed_sample_lines,
    few_samples_warning,
    fixed_length_line,
    reference_lines,
    share_of_reference,
)
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.findings import (
    ACCURACY_MARGIN,
    accuracy_says_nothing,
    conclusion,
    front_places,
    unreadable_answers,
)
from experiments.analyses.knobs.grid import grid_of
from experiments.analyses.knobs.objectives import LATENCY_MEAN
from experiments.analyses.sweeps import StoredSetting, mixed_executions, setting_order

# Enough for verdicts on knobs; intervals, which need more, are not printed.
NUM_DRAWS = 200


def closing_lines(report: RunReport) -> list[str]:
    """The lines of a finished run: settings that failed first, then the table, what it shows, caveats, what was left
    out, and where it is."""
    lines = [
        f"failed: {key}: {failure.error} after {failure.attempts} attempts: {failure.reason}"
        for key, failure in report.failed.items()
    ]
    if report.results:
        # A search has its own last sentence, and measures most settings on fewer samples than others.
        if report.search is not None:
            lines += [closing_table(report.results, report.search.places), *reference_lines(report.results)]
        else:
            fronts, found = _concluded(report)
            lines += [closing_table(report.results, fronts=fronts), *reference_lines(report.results), *found]
        fixed = {setting_key(each): each.T_fixed_length for each in report.results}
        line = fixed_length_line({key: time for key, time in fixed.items() if time is not None})
        lines += [] if line is None else [line]
        warning = few_samples_warning(report.results)
        if warning is not None:
            lines.append(f"warning: {warning}")
    lines += [*caveat_lines(report.results), *failed_sample_lines(report.results)]
    lines += report.left_out
    if report.search is not None:
        lines += _search_lines(report, report.search)
    measured = "nothing was left to measure" if report.experiment_id is None else f"run {report.experiment_id}"
    lines.append(f"{measured}: {len(report.results)} settings in {report.output_dir}")
    if report.csv_path is not None:
        lines.append(f"table of settings: {report.csv_path}")
    return lines


def _search_lines(report: RunReport, search: SearchRecord) -> list[str]:
    """What a search found, or why it says nothing: most of its answers could not be read."""
    settings = _stored(report)
    reason = unreadable_answers(grid_of(settings[0].task, settings)) if settings else None
    if reason is not None:
        return [f"no conclusion: {reason}"]
    return [search.sentence, *_search_saving(search, report.results)]


def _search_saving(search: SearchRecord, results: Sequence[SettingResult]) -> list[str]:
    """What the fastest setting of the front near its best accuracy takes of the reference's time, where it is known."""
    reference = reference_of(results)
    scored = [each for each in search.front if each.accuracy is not None]
    if reference is None or not scored:
        return []
    least = max(each.accuracy or 0.0 for each in scored) - ACCURACY_MARGIN * reference.metric_best
    near = [each for each in scored if (each.accuracy or 0.0) >= least]
    fastest = min(near, key=lambda each: each.T_total_mean)
    own = next(each for each in results if setting_key(each) == fastest.setting)
    share = share_of_reference(own, reference)
    against = "the reference"
    if own is not reference:
        of = f"of the time of the reference ({setting_key(reference)}) on the samples that both have"
        against = "without a sample in common with the reference" if share is None else f"{100 * share:.0f} % {of}"
    return [
        f"the fastest of the front within {ACCURACY_MARGIN * reference.metric_best:g} of its best accuracy is "
        f"{fastest.setting} with {fastest.accuracy:.3f}, {against}"
    ]


def _stored(report: RunReport) -> list[StoredSetting]:
    return [
        StoredSetting(each.provenance.task.name, setting_key(each), report.output_dir, each) for each in report.results
    ]


def _concluded(report: RunReport) -> tuple[Mapping[str, str], Sequence[str]]:
    """Each setting's place on the front and the lines of E2's conclusion, or one line that says why there are none."""
    provenance = report.results[0].provenance
    task, is_random = provenance.task.name, provenance.experimental_variables.random_weights
    settings = _stored(report)
    if len(settings) < 2:
        reason = None if is_random else accuracy_says_nothing(grid_of(task, settings))
        return {}, [] if reason is None else [f"no conclusion: {reason}"]
    mixed = mixed_executions(report.results)
    if mixed is not None:
        return {}, [f"no conclusion: {mixed}"]
    try:
        grid = grid_of(task, sorted(settings, key=setting_order))
        (analysis,) = analyse_knobs([grid], [LATENCY_MEAN], NUM_DRAWS).tasks
        return {} if is_random else front_places(analysis), conclusion(analysis, is_random)
    # The run is measured and saved: nothing that an analysis meets may end it.
    except Exception as error:
        return {}, [f"no conclusion: {type(error).__name__}: {error}"]
