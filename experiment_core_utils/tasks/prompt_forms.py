"""What a model is asked: the words around a question, by the model's family, the task and its data.

The one place between a task and a model's chat template, which a model puts around these words by itself. The
instructions of published tasks are those by which others measure, so that their figures can be reproduced: lmms-eval's
`post_prompt` of vqav2, textvqa, docvqa, stvqa, ok_vqa, scienceqa (`Context:` before a hint), mmmu and coco_cap (no
instruction beside its question), and VLMEvalKit's of TallyQA. Questions stay as they are written: lmms-eval's
capitals in TextVQA are not followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.datasets.questions import lettered
from experiment_core_utils.tasks.interface import PromptFamily, Sample, Task
from experiment_core_utils.tasks.registry import is_own_task, scored_by
from experiment_core_utils.tasks.scoring.likelihood import Scored


@dataclass(frozen=True)
class PromptForm:
    """The words around an open question, and around one with options.

    {options} is a line for each, such as `A. text`, {choices} all in one line, `(A) text (B) text`; {context} is the
    line of a hint of ScienceQA, "" for none.
    """

    open: str
    choice: str


_SHORT = "Answer the question using a single word or phrase."
_LETTER = "Answer with the option's letter from the given choices directly."
_CHOICE = f"{{context}}{{question}}\n{{options}}{_LETTER}"
_SHORT_ANSWER = PromptForm(f"{{question}}\n{_SHORT}", _CHOICE)
# Measured with SmolLM2-135M-Instruct: right in 53 of 68 open questions, 46 with the bare question, 42 with the short
# answer's instruction; in 33 of 68 choices, 17 with lmms-eval's instruction, in answer to which it says A.
_CHAT_DEFAULT = PromptForm("{question}\nAnswer briefly.", "{question}\n{options}Answer:")
_CHAT: Mapping[str, PromptForm] = MappingProxyType(
    {
        "coco_2014_vqa": _SHORT_ANSWER,
        "text_vqa": _SHORT_ANSWER,
        "doc_qa": _SHORT_ANSWER,
        "st_qa": _SHORT_ANSWER,
        "okvqa": PromptForm(
            f"{{question}}\nWhen the provided information is insufficient, respond with 'Unanswerable'.\n{_SHORT}",
            _CHOICE,
        ),
        "tally_qa": PromptForm("{question}\nAnswer the question using a single number.", _CHOICE),
        "coco_caption": PromptForm("{question}", _CHOICE),
        "science_qa_img": _SHORT_ANSWER,
        "mmmu": PromptForm(f"{{question}}\n\n{_SHORT}", f"{{question}}\n{{options}}\n{_LETTER}"),
    }
)
_PLAIN = PromptForm("Question: {question}\nAnswer:", "{context}Question: {question}\n{options}Answer:")
# The prefixes of its training, which end in a line break that its processor adds: big_vision's transfers of PaliGemma
# to VQA v2 and to ScienceQA.
_PALIGEMMA = PromptForm("answer en {question}", "Question: {question}\n{context}Options: {choices}\nAnswer:")
_PALIGEMMA_CAPTION = PromptForm("caption en", "caption en")


def has_forms(task: Task) -> bool:
    """Whether the task is one of the project's own, whose words differ by family; any other has its own words."""
    return isinstance(task, DataFileTask) or is_own_task(task.name)


def form_of(task: Task, family: PromptFamily) -> PromptForm | None:
    """The words in which this project asks a task; None where the task's own are used: for Molmo, for tasks of users
    and of lmms-eval, and where `--prompt_template` gives them.
    """
    if family == "molmo" or not has_forms(task) or getattr(task, "prompt_template", None) is not None:
        return None
    if family == "plain":
        return _PLAIN
    if family == "paligemma":
        return _PALIGEMMA_CAPTION if task.name == "coco_caption" else _PALIGEMMA
    return _CHAT.get(task.name, _CHAT_DEFAULT)


def prompt_for(task: Task, sample: Sample, family: PromptFamily) -> str:
    """What the model is asked, before its chat template; without any placeholder of a picture.

    By a metric of log-probabilities it is the prompt of an open question, or the text itself; see `with_continuations`.

    Raises:
        SampleError: more options than letters.
    """
    scored = _scored(task)
    if scored == "text":
        return sample.question
    if scored == "options" and not _lists_options(task):
        sample = replace(sample, options=())
    form = form_of(task, family)
    if form is None:
        return task.prompt(sample)
    hint = sample.metadata["hint"] if task.name == "science_qa_img" else None
    choices = lettered(sample.options)
    return (form.choice if sample.options else form.open).format(
        question=sample.question.removeprefix(f"{hint}\n"),
        context=f"Context: {hint}\n" if hint else "",
        options="".join(f"{letter}. {option}\n" for letter, option in choices),
        choices=" ".join(f"({letter}) {option}" for letter, option in choices),
    )


def _scored(task: Task) -> Scored | None:
    """What the task's metric scores in place of an answer; None where it has none, or another."""
    return scored_by(getattr(task, "metric", ""))


def _lists_options(task: Task) -> bool:
    """Whether the prompt of a question whose options are scored has them, so that their letters are the answers."""
    return "{options}" in (getattr(task, "prompt_template", None) or "")


def with_continuations(task: Task, sample: Sample, family: PromptFamily) -> Sample:
    """The sample with what a metric of log-probabilities scores behind its prompt; the same by any other metric.

    Each option follows a space (lm-eval's `target_delimiter`, which a task may have otherwise), and nothing where a
    chat template ends the prompt. What the task itself gives stays.

    Raises:
        SampleError: more options than letters, or a question that is not the text to be scored.
    """
    scored = _scored(task)
    if scored is None or sample.continuations is not None:
        return sample
    if scored == "text":
        if sample.question != sample.answers[0]:
            raise SampleError(
                f"{task.metric} scores a text, and this is a question with an answer; of a file name the column of the "
                "texts: --columns question=COLUMN answer=COLUMN"
            )
        return replace(sample, continuations=())
    answers = [letter for letter, _ in lettered(sample.options)] if _lists_options(task) else sample.options
    between = "" if family == "chat" else getattr(task, "target_delimiter", " ")
    return replace(sample, continuations=tuple(between + answer for answer in answers))


def described_form(
    task: Task, family: PromptFamily, *, chat_template: str, system_prompt: str | None = None, date: str | None = None
) -> Mapping[str, Any]:
    """The form in force, for the record; of Molmo what the task says of itself, as before there were other forms.

    Args:
        chat_template: `applied`, `none` or `off`.
        date: that is today in every prompt; None where no template asks for it.
    """
    own = dict(getattr(task, "prompt_form", {}))
    if (scored := _scored(task)) is not None:
        own["scored"] = "letters" if scored == "options" and _lists_options(task) else scored
    if family == "molmo":
        return own
    form = form_of(task, family)
    words = own if form is None else {"open": form.open, "choice": form.choice}
    words.pop("style", None)
    words |= {name: own[name] for name in ("scored",) if name in own}
    more = {name: value for name, value in (("system_prompt", system_prompt), ("date", date)) if value is not None}
    return {"family": "own" if not has_forms(task) else family, **words, "chat_template": chat_template, **more}
