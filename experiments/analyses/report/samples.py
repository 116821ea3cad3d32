"""Samples of a run beside what each setting answered: picture, question, prompt, expected answers, right or wrong."""

import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO

from PIL import Image

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.errors import ProfilerError
from experiment_core_utils.primitives.texts import counted, first_of
from experiment_core_utils.records.provenance import Provenance
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.requests.drawing import open_task
from experiment_core_utils.tasks.content import with_picture_digest
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import GENERATED_TASKS, load_task, score_name
from experiments.analyses.charts.chart import thinned
from experiments.analyses.report.parts import SampleAnswer, SampleSection, ShownSample
from experiments.analyses.sweeps import StoredSetting

# Of all tasks together, and of one.
MOST_SAMPLES, MOST_OF_TASK, FEWEST_OF_TASK = 60, 24, 4
THUMBNAIL_PX = 240
# Settings that are named beside an answer, and in the list that a reader chooses from.
MOST_NAMED, MOST_LISTED = 6, 200

# A sample's results by the short name of the setting.
Answers = dict[str, SampleResult]


def sample_section(settings: Sequence[StoredSetting]) -> SampleSection:
    """Some samples of each task: those that settings differ in first, then those that are wrong, then right everywhere;
    each third evenly over the run.
    """
    tasks = list(dict.fromkeys(each.task for each in settings))
    most = max(min(MOST_OF_TASK, MOST_SAMPLES // len(tasks)), FEWEST_OF_TASK)
    names = [f"{setting.task} {setting.name}" if len(tasks) > 1 else setting.name for setting in settings]
    numbers = {(settings[at].task, _short(settings[at])): number for number, at in enumerate(_listed(settings))}
    shown, prompts, total = [], [], 0
    for task in tasks:
        own = [each for each in settings if each.task == task]
        provenance, best = shown_setting(own).result.provenance, own[0].result.metric_best
        pictures, samples = Pictures(provenance), _by_id(own)
        total += len(samples)
        score = score_name((own[0].result.metric, best))
        for sample_id in chosen_ids(samples, best, most):
            shown.append(_shown(task, sample_id, samples[sample_id], (score, best), numbers, pictures))
        final = final_prompt_of(provenance)
        prompts += [] if final is None else [(task, final)]
    intro = f"{len(shown)} of {counted(total, 'sample')}, those that settings differ in first."
    return SampleSection(intro, [names[at] for at in _listed(settings)], shown, prompts)


def _listed(settings: Sequence[StoredSetting]) -> list[int]:
    return thinned(len(settings), MOST_LISTED)


def shown_setting(settings: Sequence[StoredSetting]) -> StoredSetting:
    """The first reference among a task's settings; without one the most accurate setting, the first of equal ones."""
    reference = next((setting for setting in settings if setting.result.is_reference), None)
    return reference or max(settings, key=lambda each: each.result.accuracy or 0.0)


def _by_id(settings: Sequence[StoredSetting]) -> dict[int, Answers]:
    """The samples of one task by id."""
    found: dict[int, Answers] = {}
    for each in settings:
        for sample in each.result.per_sample_results:
            found.setdefault(sample.sample_id, {})[_short(each)] = sample
    return dict(sorted(found.items()))


def _short(setting: StoredSetting) -> str:
    """A setting's name beside an answer, as in pictures and tables."""
    return f"{setting.name}{' (reference)' * bool(setting.result.is_reference)}"


def chosen_ids(samples: Mapping[int, Answers], best: float, most: int) -> list[int]:
    """At most `most` ids: up to half of them of samples that settings differ in, then as many wrong as right ones."""
    kinds: dict[str, list[int]] = {"differs": [], "wrong": [], "right": []}
    for sample_id, answers in samples.items():
        are_right = {answer.accuracy == best for answer in answers.values() if answer.accuracy is not None}
        if are_right:
            kinds["differs" if len(are_right) > 1 else "right" if are_right == {True} else "wrong"].append(sample_id)
    chosen, left = [], most
    # What a kind lacks goes to the ones after it.
    for number, ids in enumerate(kinds.values()):
        others = sum(map(len, list(kinds.values())[number + 1 :]))
        part = max(-(-left // 2) if number < 2 else left, left - others)
        chosen += [ids[at] for at in thinned(len(ids), part)] if part > 1 else ids[:part]
        left = most - len(chosen)
    return chosen


def final_prompt_of(provenance: Provenance) -> str | None:
    """The text that the model was given of the run's first sample, with its ids; None in results without it."""
    final = getattr(provenance, "final_prompt", None)
    if final is None:
        return None
    fields: Mapping[str, object] = final if isinstance(final, Mapping) else final.content()
    ids = fields.get("token_ids")
    return f"{fields.get('text')}" if ids is None else f"{fields.get('text')}\n\nids: {ids}"


class Pictures:
    """The pictures of a run's samples, made or read again; only those that are what the run saw.

    A generated task is opened by its name, data on this machine by the flags of the run. Nothing is downloaded, and no
    module of a task is run.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._task: Task | None = None
        self._reason = ""
        try:
            self._task = _task_again(provenance)
        except (ProfilerError, ValueError) as error:
            self._reason = f"the data cannot be read again: {error}"
        if self._task is None and not self._reason:
            self._reason = f"the data of {provenance.task.name} are not read again for a page"

    def of(self, sample: SampleResult) -> tuple[str | None, str | None]:
        """A data URI of a small copy; else None and the reason."""
        if self._task is None:
            return None, self._reason
        try:
            again = with_picture_digest(self._task[sample.sample_id])
        except (ProfilerError, IndexError) as error:
            return None, f"the picture cannot be read again: {error}"
        if again.image is None:
            return None, None
        if sample.picture_sha256 != again.picture_sha256:
            return None, "the picture is another now than when it was measured"
        return data_uri(again.image), None


def _task_again(provenance: Provenance) -> Task | None:
    """The task whose data are here; None for one that is not looked for."""
    described = provenance.task
    if described.name in {task.name for task in GENERATED_TASKS}:
        return load_task(described.name, described.split)
    words = shlex.split(provenance.command or "")
    flags = words[next((at for at, word in enumerate(words) if word.startswith("--")), len(words)) :]
    names = {word.partition("=")[0] for word in flags}
    if not names & {"--data_file", "--data_dir"} or names & {"--task_module", "--knob_module"}:
        return None
    task = open_task(parse_config(flags).task)
    return task if (task.name, task.split) == (described.name, described.split) else None


def data_uri(image: Image.Image) -> str:
    """A small copy of a picture as a data URI."""
    small, content = image.convert("RGB"), BytesIO()
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    small.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{b64encode(content.getvalue()).decode()}"


def _shown(
    task: str,
    sample_id: int,
    answers: Answers,
    score_of: tuple[str, float],
    numbers: Mapping[tuple[str, str], int],
    pictures: Pictures,
) -> ShownSample:
    """A sample of a task whose score has a name and a highest value."""
    one, (score, best) = next(iter(answers.values())), score_of
    scored = [answer.accuracy for answer in answers.values() if answer.accuracy is not None]
    verdict = f"right at {sum(each == best for each in scored)} of {counted(len(scored), 'setting')}"
    if best != 1 and scored:
        verdict = f"{score} {min(scored):.3g} to {max(scored):.3g} at {counted(len(scored), 'setting')}"
    question, options = one.metadata.question, one.metadata.options
    picture, reason = pictures.of(one) if one.may_have_picture else (None, None)
    return ShownSample(
        title=f"{task}, sample {sample_id}",
        verdict=verdict,
        question=f"{question} ({' · '.join(options)})" if options else question,
        prompt=one.metadata.prompt if one.metadata.prompt != question else None,
        expected=" · ".join(dict.fromkeys(one.metadata.answers)) or "none",
        picture=picture,
        no_picture_reason=reason,
        answers=_answers(task, answers, best, numbers),
    )


def _answers(task: str, answers: Answers, best: float, numbers: Mapping[tuple[str, str], int]) -> list[SampleAnswer]:
    """Each answer once with the settings that gave it, the most frequent first; right or wrong where the best is 1."""
    same: dict[tuple[str, float | None], list[str]] = {}
    for name, sample in answers.items():
        same.setdefault((sample.pred, sample.accuracy), []).append(name)
    return [
        SampleAnswer(
            text=pred or "(empty)",
            is_right=None if score is None or best != 1 else score == best,
            score="no score" if score is None else f"{score:.3g} of {best:g}",
            settings="all settings" if len(names) == len(answers) else first_of(names, MOST_NAMED),
            numbers=[numbers[task, name] for name in names if (task, name) in numbers],
        )
        for (pred, score), names in sorted(same.items(), key=lambda each: -len(each[1]))
    ]
