"""The metrics by name, over the answers of a whole run."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.tasks.answers import unwrapped
from experiment_core_utils.tasks.interface import Answer, Metric, Score, Scoring
from experiment_core_utils.tasks.scoring.anls import anls, docvqa_anls
from experiment_core_utils.tasks.scoring.cider_score import BEST, DocumentFrequencies, score_captions
from experiment_core_utils.tasks.scoring.em import em, em_lenient
from experiment_core_utils.tasks.scoring.likelihood import OptionLikelihood, TextLikelihood
from experiment_core_utils.tasks.scoring.mc import UNPARSED, mc_molmo, require_index, select_mc_option
from experiment_core_utils.tasks.scoring.mmmu_score import mmmu_open_score
from experiment_core_utils.tasks.scoring.published import (
    chartqa_relaxed,
    gsm8k_boxed,
    gsm8k_flexible,
    mmmu_open,
    mmmu_option,
)
from experiment_core_utils.tasks.scoring.relaxed import UNREADABLE, read_answer, relaxed
from experiment_core_utils.tasks.scoring.vqa_score import matching_fraction, vqa_score, vqa_score_molmo

EMPTY, RELAXED = "empty", "relaxed"
# References from which on an answer can have the full VQA accuracy.
VQA_LEAST, VQA_MOLMO_LEAST = 4, 3


@dataclass
class AnswerMetric:
    """A metric that looks at each answer alone."""

    #: name, best, scores_each_answer: as in `Metric`
    name: str
    score_answer: Callable[[Answer], Score]  #: the score of one answer
    best: float = 1.0
    scores_each_answer: bool = True
    least_references: int = 0  #: with fewer the score is over the most that so many can give

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """The scores of a run, their mean, the means of their details, and `unparsed`: how many could not be read.

        `few_references` is how many answers have fewer than `least_references`; not there where none has.

        Raises:
            SampleError: an answer has no references, or a choice no options or right one.
        """
        few = sum(len(answer.references) < self.least_references for answer in answers)
        return _scoring([self.score_answer(answer) for answer in answers], {"few_references": few} if few else {})


@dataclass
class CiderMetric:
    """CIDEr-D over a whole run; two outputs for one picture are two scores, and the picture counts once in the IDF."""

    #: document frequencies of a larger corpus; None takes those of the references of the run
    frequencies: DocumentFrequencies | None = None
    name: str = "cider_score"
    best: float = BEST
    scores_each_answer: bool = False

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """The scores of a run, their mean, `idf`: where the document frequencies are from, and `unparsed`.

        Outputs of one picture may have different references; each is scored against its own, and the picture has
        an n-gram if any of them has it. With document frequencies of fewer than two pictures no answer has a value.

        Raises:
            SampleError: an answer has no references or no image id.
        """
        if any(not answer.image_id for answer in answers):
            raise SampleError("cider_score counts pictures: every answer needs its `image_id`")
        numbers: dict[tuple[str, tuple[str, ...]], int] = {}
        set_of = [numbers.setdefault((answer.image_id, answer.references), len(numbers)) for answer in answers]
        values, empty, source = score_captions(
            [unwrapped(answer.prediction) for answer in answers], set_of, list(numbers), self.frequencies
        )
        scores = [
            Score(
                value=None if values is None else float(values[at]),
                parsed=not is_empty,
                parse_status=EMPTY if is_empty else "text",
            )
            for at, is_empty in enumerate(empty)
        ]
        return _scoring(scores, {"idf": source})


def _scoring(scores: Sequence[Score], beside: dict[str, object]) -> Scoring:
    sums: Counter[str] = Counter()
    for score in scores:
        sums.update(score.details)
    return Scoring(
        scores=tuple(scores),
        overall=mean_of([score.value for score in scores]),
        details={
            **{name: total / len(scores) for name, total in sums.items()},
            "unparsed": sum(not score.parsed for score in scores),
            **beside,
        },
    )


def _unless_empty(score: Callable[[Answer], Score]) -> Callable[[Answer], Score]:
    """Any text is an answer, of `<answer>` tags what is in them; an output without one scores 0 in all its figures,
    even where a reference is empty.
    """

    def checked(answer: Answer) -> Score:
        answer = replace(answer, prediction=unwrapped(answer.prediction))
        scored = score(answer)
        if not answer.prediction.strip():
            return Score(0.0, parsed=False, parse_status=EMPTY, details=dict.fromkeys(scored.details, 0.0))
        return scored

    return checked


def _text_score(value_of: Callable[[str, Sequence[str]], float]) -> Callable[[Answer], Score]:
    return _unless_empty(lambda answer: Score(value_of(answer.prediction, answer.references)))


def _vqa_score(answer: Answer) -> Score:
    rules = (vqa_score, VQA_LEAST), (vqa_score_molmo, VQA_MOLMO_LEAST)
    value, molmo = (
        (rule if len(answer.references) >= least else matching_fraction)(answer.prediction, answer.references)
        for rule, least in rules
    )
    return Score(value, details={"vqa_score_molmo": molmo})


def _vqa_score_molmo(answer: Answer) -> Score:
    return Score(_vqa_score(answer).details["vqa_score_molmo"])


def _ansl_em_score(answer: Answer) -> Score:
    """The two figures of the document tasks; the metric's name is published misspelt."""
    value = anls(answer.prediction, answer.references)
    return Score(value, details={"anls": value, "em": em(answer.prediction, answer.references)})


def _right_option(answer: Answer) -> int:
    if answer.answer_index is None:
        raise SampleError("a multiple-choice answer needs to know the right option: check the sample's `answer_index`")
    return answer.answer_index


def _mc_score(answer: Answer) -> Score:
    right = _right_option(answer)
    require_index(answer.options, right)
    chosen, status = select_mc_option(answer.prediction, answer.options)
    return Score(float(chosen == right), parsed=status != UNPARSED, parse_status=status)


def _mc_molmo_score(answer: Answer) -> Score:
    # Every output chooses an option here, an empty one too: that is what this variant is kept to show.
    return Score(
        mc_molmo(unwrapped(answer.prediction), answer.options, _right_option(answer)), parse_status="nearest_letter"
    )


def _mmmu_score(answer: Answer) -> Score:
    return _mc_score(answer) if answer.options else _text_score(mmmu_open_score)(answer)


def _open_score(decides: Callable[[str, Sequence[str]], float]) -> Callable[[Answer], Score]:
    """An open answer by `decides`, with what the other rules for exact and contained answers say beside it."""

    def scored(answer: Answer) -> Score:
        rules = {"em": em, "em_lenient": em_lenient, RELAXED: relaxed}
        values = {name: rule(answer.prediction, answer.references) for name, rule in rules.items() if rule != decides}
        if decides is not relaxed:
            return Score(decides(answer.prediction, answer.references), details=values)
        value, status = read_answer(answer.prediction, answer.references)
        return Score(value, parsed=status != UNREADABLE, parse_status=status, details=values)

    return _unless_empty(scored)


def _relaxed_score(answer: Answer) -> Score:
    return _mc_score(answer) if answer.options else _open_score(relaxed)(answer)


def _mmmu_published(answer: Answer) -> Score:
    if not answer.options:
        return _text_score(mmmu_open)(answer)
    right = _right_option(answer)
    require_index(answer.options, right)
    chosen = mmmu_option(unwrapped(answer.prediction), answer.options)
    if chosen is None:
        return Score(0.0, parsed=False, parse_status=UNPARSED)
    return Score(float(chosen == right), parse_status="letter")


# Of labelled replies that no rule was written on, how many are scored as they are labelled.
LABELLED_REPLIES = 515
AGREED_REPLIES = {RELAXED: 479, "in_sentence": 479}

METRICS: tuple[Metric, ...] = (
    AnswerMetric("vqa_score", _unless_empty(_vqa_score), least_references=VQA_LEAST),
    AnswerMetric("vqa_score_molmo", _unless_empty(_vqa_score_molmo), least_references=VQA_MOLMO_LEAST),
    AnswerMetric("mc", _mc_score),
    AnswerMetric("mc_molmo", _mc_molmo_score),
    AnswerMetric("em", _text_score(em)),
    AnswerMetric("em_lenient", _open_score(em_lenient)),
    AnswerMetric(RELAXED, _relaxed_score),
    AnswerMetric("in_sentence", _relaxed_score),
    AnswerMetric("ansl_em", _unless_empty(_ansl_em_score)),
    AnswerMetric("anls", _text_score(anls)),
    CiderMetric(),
    AnswerMetric("mmmu_score", _mmmu_score),
    AnswerMetric("vqa_v2", _text_score(vqa_score)),
    AnswerMetric("chartqa_relaxed", _text_score(chartqa_relaxed)),
    AnswerMetric("docvqa_anls", _text_score(docvqa_anls)),
    AnswerMetric("mmmu", _mmmu_published),
    AnswerMetric("gsm8k_boxed", _text_score(gsm8k_boxed)),
    AnswerMetric("gsm8k_flexible", _text_score(gsm8k_flexible)),
    *map(OptionLikelihood, ("acc", "acc_norm", "acc_bytes")),
    TextLikelihood(),
)
