"""A few right and wrong samples of a run: picture, question, prompt, answer and reference answers."""

import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO

from PIL import Image

from experiment_core_utils.c_prompt_processing import open_task
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.errors import ProfilerError
from experiment_core_utils.primitives.texts import first_of
from experiment_core_utils.records.provenance import Provenance
from experiment_core_utils.records.sample_result import SampleResult
from experiment_core_utils.records.setting_result import SettingResult, setting_key
from experiment_core_utils.tasks.content import with_picture_digest
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, load_task
from experiments.analyses.charts.chart import thinned
from experiments.analyses.report.parts import SampleSection, ShownSample
from experiments.analyses.sweeps import StoredSetting

MOST_RIGHT, MOST_WRONG = 3, 3
THUMBNAIL_PX = 320
# Settings that are named beside a sample.
MOST_NAMED = 6


def sample_section(settings: Sequence[StoredSetting]) -> SampleSection:
    """A few right and wrong samples of each task: of the reference, without one of the most accurate setting.

    Where that one has no wrong sample, the wrong ones are of the least accurate setting.
    """
    shown: list[ShownSample] = []
    prompts = []
    for task in dict.fromkeys(each.task for each in settings):
        own = [each for each in settings if each.task == task]
        setting = shown_setting(own)
        results = [each.result for each in own if each.sweep == setting.sweep]
        pictures = Pictures(setting.result.provenance)
        right, wrong = chosen_samples(setting.result)
        shown += [_shown(setting, sample, results, pictures) for sample in right]
        if not wrong:
            setting = min(own, key=lambda each: _accuracy(each.result))
            wrong = chosen_samples(setting.result)[1]
        shown += [_shown(setting, sample, results, pictures) for sample in wrong]
        final = final_prompt_of(setting.result.provenance)
        prompts += [] if final is None else [(task, final)]
    intro = (
        f"At most {MOST_RIGHT} samples with the best score and {MOST_WRONG} with less of each task, evenly over the "
        "run, at the reference (the model as it is); where it was not measured, at the most accurate setting. Where "
        "nothing is wrong there, the wrong ones are of the least accurate setting."
    )
    return SampleSection(intro, shown, prompts)


def shown_setting(settings: Sequence[StoredSetting]) -> StoredSetting:
    """The first reference among a task's settings; without one the most accurate setting, the first of equal ones."""
    reference = next((each for each in settings if each.result.is_reference), None)
    return reference or max(settings, key=lambda each: _accuracy(each.result))


def _accuracy(result: SettingResult) -> float:
    return 0.0 if result.accuracy is None else result.accuracy


def chosen_samples(result: SettingResult) -> tuple[list[SampleResult], list[SampleResult]]:
    """Right samples, and wrong ones with the lowest scores first; those without a score are left out."""
    scored = [each for each in result.per_sample_results if each.accuracy is not None]
    right = [each for each in scored if each.accuracy == result.metric_best]
    wrong = sorted((each for each in scored if each not in right), key=lambda each: each.accuracy or 0.0)
    return [right[at] for at in thinned(len(right), MOST_RIGHT)], [wrong[at] for at in thinned(len(wrong), MOST_WRONG)]


def final_prompt_of(provenance: Provenance) -> str | None:
    """The text that the model was given of the run's first sample, with its ids; None in results without it."""
    final = getattr(provenance, "final_prompt", None)
    if final is None:
        return None
    fields: Mapping[str, object] = final if isinstance(final, Mapping) else final.content()
    ids = fields.get("token_ids")
    return f"{fields.get('text')}\n\nids: {ids}"


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
            return None, "a question without a picture"
        if sample.picture_sha256 != again.picture_sha256:
            return None, "the picture is another now than when it was measured"
        return data_uri(again.image), None


def _task_again(provenance: Provenance) -> Task | None:
    """The task whose data are here; None for one that is not looked for."""
    described = provenance.task
    if described.name in {task.name for task in REFERENCE_TASKS}:
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
    small.save(content, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{b64encode(content.getvalue()).decode()}"


def _shown(
    setting: StoredSetting, sample: SampleResult, results: Sequence[SettingResult], pictures: Pictures
) -> ShownSample:
    best = setting.result.metric_best
    is_right = sample.accuracy == best
    picture, reason = pictures.of(sample)
    facts = [
        ("question", sample.metadata.question),
        *([("options", " · ".join(sample.metadata.options))] if sample.metadata.options else []),
        ("prompt", sample.metadata.prompt or "not in this file"),
        ("answer", sample.pred or "(empty)"),
        ("reference", " · ".join(dict.fromkeys(sample.metadata.answers)) or "none"),
        ("other settings", _elsewhere(sample, setting.result, results)),
    ]
    return ShownSample(
        verdict=f"{'right' if is_right else 'wrong'}: {setting.result.metric} {sample.accuracy:.3f} of {best:g}",
        is_right=is_right,
        title=f"{setting.task}, sample {sample.sample_id}, {setting.name}",
        picture=picture,
        no_picture_reason=reason,
        facts=facts,
    )


def _elsewhere(sample: SampleResult, shown: SettingResult, results: Sequence[SettingResult]) -> str:
    """At how many of the other settings the sample is right, and at which ones this differs from the shown one."""
    others = {
        setting_key(result): other.accuracy == result.metric_best
        for result in results
        if result is not shown
        for other in result.per_sample_results
        if other.sample_id == sample.sample_id and other.accuracy is not None
    }
    if not others:
        return "none"
    is_right = sample.accuracy == shown.metric_best
    differing = [key for key, was_right in others.items() if was_right != is_right]
    text = f"right at {sum(others.values())} of {len(others)}"
    if not differing:
        return text
    return f"{text}; {'wrong' if is_right else 'right'} at {first_of(differing, MOST_NAMED)}"
