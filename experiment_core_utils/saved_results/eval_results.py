"""The accuracy of the model as it is in the form of the hub's `.eval_results` files, for a model's repository."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.records.setting_result import SettingResult, reference_of, setting_key
from experiment_core_utils.tasks.interface import Task

FOLDER = ".eval_results"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# With one of these the model was not asked as its task's protocol does.
_OWN_WORDS = ("prompt_template", "system_prompt", "no_chat_template", "stop", "ignore_eos")


def write_eval_results(results: Sequence[SettingResult], task: Task, folder: Path) -> Path | None:
    """Write `.eval_results/<task>.yaml` into the folder; returns its path.

    None where there is nothing to say on the hub: the reference was not measured, a task without a dataset there,
    random or quantised weights, words or ends of one's own, or no accuracy.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    hub = getattr(task, "hub", None)
    found = reference_of(results)
    if hub is None or found is None or found.accuracy is None:
        return None
    made, revision = found.provenance, task.source.get("revision", "")
    variables = made.experimental_variables
    is_quantised = getattr(variables, "quantization", "none") not in (None, "none")
    is_own = any(getattr(variables, name, None) not in (None, False) for name in _OWN_WORDS)
    if variables is not None and (variables.random_weights or is_quantised or is_own):
        return None
    entry = EvalResultEntry(
        dataset_id=hub.id,
        task_id=hub.config or "default",
        value=round(found.accuracy, 6),
        dataset_revision=revision if _COMMIT.fullmatch(revision) else None,
        date=made.timestamp,
        notes=_notes(found),
    )
    path = folder / FOLDER / f"{task.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    write_text_atomically(yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False), path)
    return path


def _notes(result: SettingResult) -> str:
    """The metric with its scale, the samples and the setting."""
    drawn, split = result.sampling or {}, result.provenance.task.split
    samples = f"{result.num_samples} of {drawn.get('num_in_split', 'the')} samples of {split}"
    how = "" if drawn.get("how", "all") == "all" else f" (by {drawn['how']}, seed {drawn['seed']})"
    failed = f", {result.num_failed_samples} failed" if result.num_failed_samples else ""
    return f"{result.metric}, 0 to {result.metric_best:g}; {samples}{how}{failed}; setting {setting_key(result)}"
