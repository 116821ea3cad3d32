"""The results of settings, made by the main process of what all processes have measured."""

import sys
import time
from collections.abc import Sequence

from experiment_core_utils.finishing.noted_caveats import alone_caveats, served_caveats
from experiment_core_utils.finishing.pooling import collect_parts, merge_parts, shared_setting
from experiment_core_utils.finishing.setting_compute import setting_compute
from experiment_core_utils.finishing.setting_content import setting_result
from experiment_core_utils.finishing.setting_summary import summarise, summarise_accuracy
from experiment_core_utils.i_metrics_energy import setting_energy
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.meters.correct_answers import AnsweredRequest
from experiment_core_utils.meters.steadiness import steadiness_part
from experiment_core_utils.planning.plan import block_caveats
from experiment_core_utils.planning.run import ProfilingRun
from experiment_core_utils.primitives.errors import WorkerLost
from experiment_core_utils.primitives.interruption import signals_stop
from experiment_core_utils.primitives.texts import all_of, counted
from experiment_core_utils.records.journal import remove_journals
from experiment_core_utils.records.locks import MainProcessWatch
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.setting_result import save_setting_result, setting_file_name
from experiment_core_utils.records.settings import MeasuredSetting, SettingFailure
from experiment_core_utils.saved_results.result_caveats import with_caveats
from experiment_core_utils.tasks.interface import answer_of, scored

_POLL_S = 0.5


def save_stopped(run: ProfilingRun, settings: Sequence[Setting]) -> None:
    """Save results of the samples that all settings have at the stop of a run, and say so.

    They say that they are unfinished; the same command resumes, and replaces them.
    """
    context = run.context
    left = [setting for setting in settings if context.ledger.result(setting.key) is None]
    if context.is_main and len(left) > 1 and (saved := save_unfinished(run, left)) is not None:
        print(
            f"stopped: {run.config.machine.output_dir} has {counted(saved[0], 'sample')} of each of "
            f"{counted(saved[1], 'setting')}, as results of an unfinished run",
            file=sys.stderr,
            flush=True,
        )


def save_unfinished(run: ProfilingRun, settings: Sequence[Setting]) -> tuple[int, int] | None:
    """Main process only: results of these settings on the samples that every one of them has by now; of those that
    have none, none are saved.

    Returns:
        how many samples each has, and how many settings; None where no sample has run at all of them.
    """
    run.gather_facts()
    context = run.context
    parts = {
        setting: shared.parts_of(shared.own_journals())
        for setting in settings
        for shared in [shared_setting(context, setting.key)]
    }
    finished = {setting: set[int]().union(*map(_finished_ids, own)) for setting, own in parts.items()}
    begun = {setting: ids for setting, ids in finished.items() if ids}
    common = set.intersection(*begun.values()) if len(begun) > 1 else set()
    if not common:
        return None
    for setting in begun:
        merged = merge_parts([part.only(common) for part in parts[setting]], sorted(common))
        if merged.samples:
            summarise_and_save(run, setting, merged, is_stopped=True)
    return len(common), len(begun)


def _finished_ids(part: MeasuredSetting) -> set[int]:
    return {each.sample_id for each in part.samples} | {each.sample_id for each in part.failures}


def wait_for_main(context: RunContext, main_process: MainProcessWatch) -> None:
    """Other processes, at their end: wait until the main one has saved everything.

    Raises:
        WorkerLost: it has ended before, or shows no sign of life.
        Stopped: a stop was requested while waiting.
    """
    with signals_stop(context.stop):
        while not main_process.is_over(context.experiment_id):
            try:
                context.stop.raise_if_requested("while waiting for process 0")
            except WorkerLost:
                # It may have said so and ended between the two looks.
                if not main_process.is_over(context.experiment_id):
                    raise
            time.sleep(_POLL_S)


def pool_and_save(run: ProfilingRun, setting: Setting) -> SettingFailure | None:
    """Main process only: k waits for all shards and pools them, the next letters make the result of the whole."""
    context, config = run.context, run.config
    shared = shared_setting(context, setting.key)
    merged = merge_parts(collect_parts(shared, config.machine.worker_timeout, context.stop), run.requested.sample_ids)
    failure = merged.failure or failure_where_no_sample_ran(merged, config.measuring.max_config_retries + 1)
    if failure is None:
        summarise_and_save(run, setting, merged)
    else:
        context.ledger.mark_failed(setting.key, failure)
    if merged.failure is None:
        # Otherwise they stay: tried again by a later run, the setting resumes after the samples that did run.
        remove_journals(context.journals, setting.key)
    return failure


def failure_where_no_sample_ran(merged: MeasuredSetting, attempts: int) -> SettingFailure | None:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return None
    first = merged.failures[0]
    reason = f"{all_of(len(merged.failures), 'sample')} failed, the first with: {first.reason}"
    return SettingFailure(first.error, reason, attempts)


def summarise_and_save(
    run: ProfilingRun, setting: Setting, merged: MeasuredSetting, *, is_stopped: bool = False
) -> str:
    """Score all samples of a setting; g, h and i say what they come to, j saves the result; returns its file's name.

    Args:
        is_stopped: whether the samples are those that a run had finished when it was stopped.
    """
    requested, bench, ledger = run.requested, run.bench, run.context.ledger
    model, metric = bench.model, bench.metric
    config = run.config
    answers = [answer_of(sample) for sample in merged.samples]
    scoring = scored(answers, metric)
    accuracy = summarise_accuracy(answers, scoring, metric)
    summary = summarise(merged.samples, accuracy, len(merged.failures))
    facts = run.facts_at(setting)
    compute = setting_compute(setting, merged, model, facts.model.dtype)
    energy = setting_energy(
        merged,
        accuracy,
        [
            AnsweredRequest(sample.energy_j, score.value, sample.image_id)
            for sample, score in zip(merged.samples, scoring.scores, strict=True)
        ],
    )
    steadiness = steadiness_part(
        setting.key,
        requested.order,
        config.measuring.until_precision,
        merged,
        is_stopped=is_stopped,
    )
    places = {sample_id: place for place, sample_id in enumerate(requested.sample_ids)}
    as_measured = sorted(merged.samples, key=lambda sample: places[sample.sample_id])
    noted = block_caveats(requested, [setting]) + alone_caveats(merged.samples)
    noted += served_caveats(as_measured, have_waited=steadiness.open_loop is not None)
    provenance = facts.with_keys(
        experiment_ids=list(merged.experiment_ids),
        run_uids=list(merged.run_uids),
    ).with_caveats(noted)
    result = setting_result(
        setting,
        requested.source.limits.num_total_blocks,
        merged,
        scoring.scores,
        summary,
        requested.drawn,
        compute,
        energy,
        steadiness,
        provenance,
        is_reference=setting == reference_setting(requested.source.limits),
        in_grid=setting not in (requested.beside, requested.placebo),
    )
    result = with_caveats(result)
    name = setting_file_name(result)
    save_setting_result(result, config.machine.output_dir / name)
    if is_stopped:
        ledger.mark_unfinished(setting.key)
    else:
        ledger.mark_done(setting.key, name)
    ledger.remove_others(name)
    return name
