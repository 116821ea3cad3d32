"""The base class of the tasks on generated scenes: reproducible samples that need no download.

All families but `reference_knowledge` ask about the same pictures: image i of a split is one scene, whoever asks.
Sample n of a family depends on nothing but the family, split and n, so that every sample can be made again alone.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.datasets.files.data_file import CHOICE_STYLE, OPEN_STYLE
from experiment_core_utils.tasks.datasets.questions import check_template, fill
from experiment_core_utils.tasks.datasets.reference_scenes import (
    COLOURS,
    DEFAULT_H_REL,
    KINDS,
    Item,
    SceneContent,
    ScenePlan,
    plan_scene,
    render_plan,
)
from experiment_core_utils.tasks.interface import Sample

Split = Literal["train", "validation", "control"]
LETTERS_OF_OPTIONS = "ABCDEFGH"
# The seed of a split's first scene; those of two splits never meet.
_FIRST_SEED: MappingProxyType[Split, int] = MappingProxyType({"train": 0, "validation": 1 << 48, "control": 2 << 48})
_LENGTH: MappingProxyType[Split, int] = MappingProxyType({"train": 100_000, "validation": 2_000, "control": 2_000})


@dataclass(frozen=True)
class QuestionAnswer:
    """One question about a scene with what a perfect model says."""

    question: str
    answer: str  #: what a model is trained to say; the letter of a multiple-choice question
    question_type: str  #: one of its family's types
    #: `family` (the way of asking), `needs_text` (whether a label has to be read), and of the item in question, where
    #: there is exactly one: `text_height_px`, `h_rel`, `label`; None where there is none
    metadata: Mapping[str, Any] = field(default_factory=dict)
    references: tuple[str, ...] = ()  #: what a metric compares with, where the family gives them with the question
    #: options, answer_index: of a multiple-choice question
    options: tuple[str, ...] = ()
    answer_index: int | None = None


def scene_question(
    item: Item | None,
    question: str,
    answer: str,
    kind: str,
    family: str | None = None,
    *,
    text: bool,
    references: tuple[str, ...] = (),
) -> QuestionAnswer:
    """A question about one item, or, with None, about no single one.

    Args:
        kind: the question's type, which is its family too where no other is given.
        text: whether a label has to be read.
    """
    facts = {
        "family": family or kind,
        "needs_text": text,
        "label": item.label if item else None,
        "text_height_px": item.text_height_px if item else None,
        "h_rel": item.h_rel if item else None,
    }
    return QuestionAnswer(question, answer, kind, facts, references)


def reading_order(items: Sequence[Item]) -> list[Item]:
    """Rows from top to bottom, each from left to right.

    A row is the topmost item that is left together with all whose shape's centre is not below that item's box.
    """
    left = sorted(items, key=lambda item: (item.centre[1], item.centre[0]))
    ordered: list[Item] = []
    while left:
        bottom = left[0].box[3]
        row = [item for item in left if item.centre[1] < bottom]
        ordered += sorted(row, key=lambda item: item.centre[0])
        left = [item for item in left if item.centre[1] >= bottom]
    return ordered


def plural(kind: str) -> str:
    """The plural of a shape's name."""
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def counts_of_each(items: Sequence[Item], rng: random.Random) -> list[tuple[str, int, str]]:
    """Questions for the number of each kind and each colour that occurs, and of one of both that does not (if any is
    left), with that number and the family of the question."""
    kinds, colours = Counter(item.kind for item in items), Counter(item.colour for item in items)
    return [
        *(
            (f"how many {plural(kind)} are there?", kinds[kind], "count_kind")
            for kind in _and_absent(kinds, KINDS, rng)
        ),
        *(
            (f"how many {colour} shapes are there?", colours[colour], "count_colour")
            for colour in _and_absent(colours, COLOURS, rng)
        ),
    ]


def absent_names(items: Sequence[Item], rng: random.Random) -> list[str]:
    """The names that no item has, else in random order: those of which both words occur first, then one of them."""
    present = {item.name for item in items}
    colours, kinds = {item.colour for item in items}, {item.kind for item in items}
    absent = [(colour, kind) for colour in COLOURS for kind in KINDS if f"{colour} {kind}" not in present]
    rng.shuffle(absent)
    # The sort keeps the shuffled order among equals.
    absent.sort(key=lambda pair: -((pair[0] in colours) + (pair[1] in kinds)))
    return [f"{colour} {kind}" for colour, kind in absent]


def _and_absent(present: Iterable[str], names: Iterable[str], rng: random.Random) -> list[str]:
    absent = [name for name in names if name not in present]
    return [*present, *([rng.choice(absent)] if absent else [])]


def with_article(words: str) -> str:
    """The words with a or an before them."""
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def prompt_of(question: str, options: Sequence[str] = ()) -> str:
    """The template that the reference model is trained with; each option on a line of its own after its letter."""
    lines = "".join(f"\n{letter}: {option}" for letter, option in zip(LETTERS_OF_OPTIONS, options, strict=False))
    return f" User: {question}{lines}\n Assistant:" if options else f" User: {question} Assistant:"


def draw_by_type(
    pool: Sequence[QuestionAnswer],
    weights: Mapping[str, float],
    rng: random.Random,
    count: int,
    *,
    even_answers: bool = False,
) -> list[QuestionAnswer]:
    """`count` different questions: a type by its weight, then one of its questions.

    Types that the pool does not offer leave their part to the others. `even_answers` draws an answer that occurs in
    the type before a question with it, which keeps frequent answers from paying.
    """
    left = list(pool)
    chosen: list[QuestionAnswer] = []
    while len(chosen) < count and left:
        types = sorted({question.question_type for question in left})
        (kind,) = rng.choices(types, [weights[name] for name in types])
        of_type = [question for question in left if question.question_type == kind]
        if even_answers:
            answer = rng.choice(sorted({question.answer for question in of_type}))
            of_type = [question for question in of_type if question.answer == answer]
        picked = rng.choice(of_type)
        chosen.append(picked)
        left.remove(picked)
    return chosen


@lru_cache(maxsize=4096)
def _planned(
    split: Split, image_index: int, h_rel: tuple[float, float], codes: range | None
) -> tuple[ScenePlan, tuple[Any, ...]]:
    """A plan, and the state of its generator after it, from which `reference_vqa` continues to draw questions."""
    rng = random.Random(_FIRST_SEED[split] + image_index)
    plan = plan_scene(rng, h_rel, validation_labels=split == "validation", codes=codes)
    return plan, rng.getstate()


@lru_cache(maxsize=4)
def _painted(split: Split, image_index: int, h_rel: tuple[float, float], codes: range | None) -> Image.Image:
    """A picture; the last few are kept, for neighbouring samples share them."""
    return render_plan(_planned(split, image_index, h_rel, codes)[0])


class GeneratedTask:
    """What the families share; implements `Task`. A family says its questions and references.

    Args:
        split: one of the family's `splits`; they share no scene, and some labels do not occur in train.
        prompt_template: in place of the reference model's; its fields are {question}, {style} and {options}.

    Raises:
        ConfigurationError: another split, or a template that cannot be filled.
    """

    name: str
    metric: str
    max_new_tokens: int
    questions_per_image: int
    question_types: tuple[str, ...]
    type_weights: Mapping[str, float]  #: by which types of question are drawn; those without questions leave theirs
    even_answers = False  #: whether the answers of a type are drawn evenly; see `draw_by_type`
    splits: tuple[Split, ...] = ("train", "validation")
    h_rel: tuple[float, float] = DEFAULT_H_REL  #: range of the relative text height
    required_fields: tuple[str, ...] = ("question",)  #: of a prompt template
    is_generated = True
    pictures: str = ""  #: prefix of the pictures' names; families with the same one ask about the same pictures

    def __init__(self, split: str = "validation", prompt_template: str | None = None) -> None:
        if split not in self.splits:
            raise ConfigurationError(f"{self.name} has no split {split!r}: choose one of {', '.join(self.splits)}")
        if prompt_template is not None:
            check_template(prompt_template, self.required_fields)
        self.prompt_template = prompt_template
        self._split: Split = split
        self.split: str = split
        self._length = _LENGTH[self._split]
        self.source: Mapping[str, str] = {"read_from": "generated scenes", "seed": "0", "h_rel": str(self.h_rel)}

    @staticmethod
    def make_questions(scene: SceneContent, rng: random.Random) -> list[QuestionAnswer]:
        """Every question that is drawn from; a family says these, or how `draw_questions` gets them."""
        raise NotImplementedError

    @classmethod
    def codes(cls, split: Split) -> range | None:
        """Which of `item_codes` the labels in the pictures are; None for labels of all sorts."""
        return None

    @classmethod
    def draw_questions(cls, scene: SceneContent, rng: random.Random, count: int) -> list[QuestionAnswer]:
        """`count` different questions about a scene, fewer where it does not offer so many; needs no pixels."""
        questions = cls.make_questions(scene, rng)
        return draw_by_type(questions, cls.type_weights, rng, count, even_answers=cls.even_answers)

    @classmethod
    def references(cls, pair: QuestionAnswer, rng: random.Random) -> tuple[str, ...]:
        """The reference answers that a metric compares with."""
        return pair.references

    def extra_metadata(self, pair: QuestionAnswer) -> Mapping[str, Any]:
        """What a family keeps beside each result in addition."""
        return {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        pair, image_index = self._requested(index)
        scene, _ = self._plan(image_index)
        rng = random.Random(f"{self.name}:answers:{self.split}:0:{index}")
        return Sample(
            sample_id=index,
            image_id=f"{self.pictures}{self.split}-0-{image_index:06d}",
            question=pair.question,
            answers=self.references(pair, rng),
            image=_painted(self._split, image_index, self.h_rel, self.codes(self._split)),
            question_type=pair.question_type,
            metadata={
                **pair.metadata,
                "answer": pair.answer,
                "num_items": len(scene.items),
                "canvas_width": scene.width,
                "canvas_height": scene.height,
                **self.extra_metadata(pair),
            },
            options=pair.options,
            answer_index=pair.answer_index,
        )

    def about(self, image_index: int) -> range:
        """The samples of one picture."""
        first = image_index * self.questions_per_image
        return range(first, first + self.questions_per_image)

    def question_type(self, index: int) -> str:
        """The type of the question at `index`, from the scene's plan alone."""
        return self._requested(index)[0].question_type

    @property
    def prompt_form(self) -> Mapping[str, str]:
        """The template of an open question and of one with options."""
        given = self.prompt_template
        return {
            "open": given or prompt_of("{question}"),
            "choice": given or prompt_of("{question}", ("{first}", "{second}", "...")),
        }

    def prompt(self, sample: Sample) -> str:
        """The prompt text; the answer follows it as a space and the text."""
        if self.prompt_template is None:
            return prompt_of(sample.question, sample.options)
        style = CHOICE_STYLE if sample.options else OPEN_STYLE
        return fill(self.prompt_template, style, sample.question, sample.options)

    def _requested(self, index: int) -> tuple[QuestionAnswer, int]:
        if not 0 <= index < self._length:
            raise IndexError(f"{self.name} {self.split} has samples 0 to {self._length - 1}, not {index}")
        image_index, place = divmod(index, self.questions_per_image)
        return self.questions_of(image_index)[place], image_index

    def _plan(self, image_index: int) -> tuple[ScenePlan, tuple[Any, ...]]:
        return _planned(self._split, image_index, self.h_rel, self.codes(self._split))

    def questions_of(self, image_index: int) -> list[QuestionAnswer]:
        """The questions of one picture, always as many as `questions_per_image`: a small scene repeats its own."""
        plan, state = self._plan(image_index)
        drawn = self.draw_questions(plan, self._question_rng(state, image_index), self.questions_per_image)
        return (drawn * self.questions_per_image)[: self.questions_per_image]

    def _question_rng(self, state: tuple[Any, ...], image_index: int) -> random.Random:
        return random.Random(f"{self.name}:questions:{self.split}:0:{image_index}")


def same_pictures(tasks: Sequence[GeneratedTask]) -> list[list[GeneratedTask]]:
    """The tasks in groups that ask about the same pictures, in the order of their first ones."""
    groups: dict[str, list[GeneratedTask]] = {}
    for task in tasks:
        groups.setdefault(task.pictures, []).append(task)
    return list(groups.values())
