"""What a run says of its plan: knobs, rows that cannot be used, and results that were there before."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.facts.variables import shown_endpoints, variables_of
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, fewer_by_default
from experiment_core_utils.knobs.loading import loading_name
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.models.request_work import unusable_lines
from experiment_core_utils.planning.plan import (
    RequestedRun,
    block_caveats,
    chosen_blocks,
    knob_request,
    max_new_tokens_of,
)
from experiment_core_utils.primitives.texts import and_more, counted
from experiment_core_utils.primitives.units import span
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, RunPlan
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import Task


def unusable_lines_of(requested: RequestedRun, settings: Sequence[Setting]) -> list[str]:
    """`unusable_lines` of settings that are to be measured, by the first samples, before the model is loaded."""
    if not settings:
        return []
    source, limit = requested.source, max_new_tokens_of(requested.config.task, requested.task)
    planned = source.planned_requests(requested.task, requested.sample_ids, limit)
    return unusable_lines(planned, settings, reference_setting(source.limits))


def knob_lines(requested: RequestedRun) -> list[str]:
    """What the plan and the screen say of the knobs: the largest top-k; which blocks run by default and how to get
    scores, whose questions are left out, and the caveats.
    """
    config, source, sampling = requested.config, requested.source, requested.drawn.sampling
    lines = [*_server_lines(config), *(each.sentence for each in block_caveats(requested, requested.settings))]
    names = [*map(loading_name, requested.loadings)]
    if len(names) > 1:
        reason, copies = requested.in_turn_reason, f"{counted(len(names), 'model')} ({', '.join(names)})"
        runs = counted(config.measuring.num_runs_per_sample, "run")
        lines.append(
            f"weights: {copies} in memory together and by turns"
            if reason is None
            else f"weights: {copies} in memory one at a time ({reason}); each of {runs} of a sample is of a new load, "
            "in the order A B B A"
        )
    if source.limits.top_k_limit is not None:
        lines.append("top-k: at most {}, since {}".format(*source.limits.top_k_limit))
    is_set = ACTIVE_BLOCKS.name not in source.limits.unsupported and source.limits.num_total_blocks != 1
    if is_set and config.knobs.num_active_blocks_list is None and not fewer_by_default(knob_request(config, source)):
        lines.append(
            f"blocks: all {source.limits.num_total_blocks} run in every setting, because nothing says which matter "
            f"least; run `knobprof blocks --model_path {config.model.model_path} --method activation_change --output "
            "scores.json` (minutes) and give --importance_scores_file scores.json"
        )
    if sampling.num_left_out:
        choice = chosen_blocks(config, source)
        lines.append(
            f"blocks: {sampling.num_left_out} of the {counted(sampling.num_in_split, 'sample')} of "
            f"{requested.task.name} {requested.task.split} chose them ({choice.file}); {len(requested.drawn)} others "
            "are measured"
        )
    return lines


def _server_lines(config: ProfilingConfig) -> list[str]:
    """Which servers of `--serve` a plan would start, in which order; none without it."""
    commands = config.model.serve_commands
    if not commands:
        return []
    order = " ".join(each.name for each in (*commands, *commands[::-1]))
    times = "each twice" if len(commands) > 1 else "twice"
    return [
        f"servers: {len(commands)}, one at a time and {times} ({order}); at each start all settings are measured, and "
        "none was started now",
        *(f"  {each.name}: {shlex.join(each.words)}" for each in commands),
    ]


# By which a file server's clock may be ahead.
_CLOCK_SLACK_S = 120.0


def resumed_lines(plan: RunPlan, aside: Mapping[str, int], folder: Path) -> list[str]:
    """What of earlier runs counts in this one, what does not, and that the clock stepped back since.

    Args:
        aside: finished samples that were set aside, by their setting.
    """
    taken, lines = plan.num_samples_before, []
    if taken:
        whole = plan.num_samples * len(plan.due)
        lines.append(f"resumed: {taken} of {counted(whole, 'sample')} to measure had finished before, and are taken up")
    if any(aside.values()):
        lines.append(
            f"warning: {counted(sum(aside.values()), 'finished sample')} of {counted(len(aside), 'setting')} are set "
            "aside, measured with other flags, data, files or versions: that run's command takes them up again (or "
            f"remove {folder / PARTS_FOLDER}/*.jsonl.*)"
        )
    ahead_s = max((path.stat().st_mtime for path in folder.glob("*.json")), default=0.0) - plan.started_unix_s
    if ahead_s > _CLOCK_SLACK_S:
        lines.append(
            f"warning: the clock of this machine stepped back: {folder} has files from {span(ahead_s)} ahead of it; "
            "set it, or dates and what `status` says of times are wrong"
        )
    return lines


# Requested parameters that change no figure: results are recognised without them.
NOT_IN_FINGERPRINT = {
    "enable_memory_optimization", "max_config_retries", "sample_timeout_s", "sampling_strategy",
}  # fmt: skip


# Of broken rows the first so many are named.
_SHOWN_ROWS = 5


def broken_rows(task: Task, sample_ids: Sequence[int]) -> list[str]:
    """Where each row of a data file is that cannot be used, among these samples, and why; none where it is no file.

    Columns, answers and texts are checked, and that a picture is there and has a header that can be read.
    """
    return list(task.faults(sample_ids)) if isinstance(task, DataFileTask) else []


def data_remarks(task: Task) -> list[str]:
    """What to know of the rows of a data file before their scores are read; nothing where it is no file."""
    return task.remarks if isinstance(task, DataFileTask) else []


def broken_rows_lines(faults: Sequence[str], num_rows: int) -> list[str]:
    """How many of `num_rows` rows cannot be used, the first five with the reason, and how many more there are."""
    if not faults:
        return []
    more = and_more(len(faults) - _SHOWN_ROWS)
    return [
        f"{len(faults)} of {counted(num_rows, 'row')} of the data file cannot be used, and are failed samples in a "
        "run:",
        *[f"  {fault}" for fault in faults[:_SHOWN_ROWS]],
        *[f" {more}"] * bool(more),
    ]


def replaced_results_lines(requested: RequestedRun, ledger: Ledger, due: Collection[str]) -> list[str]:
    """Lines about results of another run in the folder, and what differs: of settings that are due, which this run
    replaces as it goes on, and of other settings, which are then no sweep with this run's.
    """
    folder, found = requested.config.machine.output_dir, ledger.contents_of_others(requested.task.name)
    replaced = [content for key, content in found if key in due]
    beside = [content for key, content in found if key not in due]
    lines = []
    if replaced:
        lines.append(
            f"{len(replaced)} of the {counted(len(due), 'setting')} to measure have results in {folder} that were "
            f"measured otherwise and will be replaced ({_differing(requested, replaced)}); give another --output_dir "
            "to keep them"
        )
    if beside:
        lines.append(
            f"{counted(len(beside), 'other result')} in {folder}, measured otherwise "
            f"({_differing(requested, beside)}): analyses refuse a folder of both; give another --output_dir"
        )
    return lines


def _differing(requested: RequestedRun, others: Sequence[Mapping[str, Any]]) -> str:
    unnamed = "the model's files, data, devices, versions or flags of knobs"
    return ", ".join(_differences(requested, others)) or unnamed


def _differences(requested: RequestedRun, others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What this run has and what others have in its place, by flag; keys that others lack are not compared."""
    config, source, task = requested.config, requested.source, requested.task
    choice = chosen_blocks(config, source)
    variables = variables_of(config, max_new_tokens_of(config.task, task), choice).content()
    own = {f"--{name}": ("experimental_variables", name, value) for name, value in variables.items()}
    own |= {"--model_path": ("model", "name", source.name), "--split": ("task", "split", task.split)}
    made = [each["provenance"] for each in others if isinstance(each.get("provenance"), dict)]
    for flag, (part, name, value) in own.items():
        parts = [each[part] for each in made if isinstance(each.get(part), dict)]
        found = [each[name] for each in parts if name in each]
        there = [each for each in (map(shown_endpoints, found) if name == "endpoint" else found) if each != value]
        if there and name not in NOT_IN_FINGERPRINT:
            yield f"{flag} {_as_given(value)}, there {' or '.join(dict.fromkeys(map(_as_given, there)))}"
    sources = [each["task"].get("source") for each in made if isinstance(each.get("task"), dict)]
    defined = {each.get("definition") for each in sources if isinstance(each, dict)}
    if defined - {None, task.source.get("definition")}:
        yield "the task's file or code has changed"
    yield from _other_data(requested.digests or {}, others)


def _other_data(digests: Mapping[int, str], others: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is known of samples of the same id that have another content in the results of others."""
    lists = [each["per_sample_results"] for each in others if isinstance(each.get("per_sample_results"), list)]
    samples = [each for found in lists for each in found if isinstance(each, dict) and each.get("sample_id") in digests]
    known = [sample for sample in samples if sample.get("data_sha256") is not None]
    changed = sorted({each["sample_id"] for each in known if each["data_sha256"] != digests[each["sample_id"]]})
    if changed:
        yield f"the data of {counted(len(changed), 'sample')} have changed, the first is sample {changed[0]}"


def _as_given(value: object) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def warnings_before(
    requested: RequestedRun, ledger: Ledger, due: Collection[str], unusable: Sequence[str]
) -> list[str]:
    """What a run warns of before it begins: rows of the data, results that it replaces, and `unusable` settings."""
    faults = broken_rows(requested.task, requested.sample_ids) if due else []
    broken = ["\n".join(broken_rows_lines(faults, len(requested.sample_ids)))] if faults else []
    replaced = replaced_results_lines(requested, ledger, due)
    return [f"warning: {line}" for line in (*broken, *data_remarks(requested.task), *replaced, *unusable)]
