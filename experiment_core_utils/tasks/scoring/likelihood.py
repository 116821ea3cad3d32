"""Scores by log-probability, as lm-eval 0.4.13 defines them (`ConfigurableTask.process_results`)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.records.requests import ScoredContinuation
from experiment_core_utils.tasks.interface import Answer, Score, Scoring

# What a metric of log-probabilities scores: each option of a question, or a text as a whole.
Scored = Literal["options", "text"]
_LENGTHS = {"acc": lambda _: 1, "acc_norm": len, "acc_bytes": lambda option: len(option.encode())}


def likeliest(scores: Sequence[ScoredContinuation], lengths: Sequence[int] | None = None) -> int:
    """The place of the largest log-probability, the first of equal ones; divided by `lengths` where they are given."""
    values = [score.logprob / length for score, length in zip(scores, lengths or [1] * len(scores), strict=True)]
    return values.index(max(values))


def _require_scores(name: str, answer: Answer, count: int) -> None:
    """Raises SampleError where an answer lacks the log-probabilities that its metric reads."""
    if len(answer.scores) != count:
        raise SampleError(
            f"{name} reads {count} log-probabilities, and the answer has {len(answer.scores)}: measure it with "
            f"--metric {name}"
        )


@dataclass
class OptionLikelihood:
    """Whether the right option is the likeliest continuation: its log-probability (`acc`) is the largest, or that over
    its characters (`acc_norm`) or bytes in UTF-8 (`acc_bytes`).
    """

    name: str
    best: float = 1.0
    scores_each_answer: bool = True
    scored: Scored = "options"

    def check(self, answer: Answer) -> None:
        """Raises SampleError for a question that cannot be scored, whatever its log-probabilities are."""
        if len(answer.options) < 2 or answer.answer_index is None:
            raise SampleError(f"{self.name} compares options, and needs two or more and which is right")
        if not all(answer.options):
            raise SampleError(f"{self.name} cannot score an empty option")

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """The scores of a run, their mean, and the means of all three as details.

        Raises:
            SampleError: a question has no options, or its answer was generated.
        """
        scores = [self._score(answer) for answer in answers]
        means = {name: mean_of([score.details[name] for score in scores]) for name in _LENGTHS if scores}
        return Scoring(tuple(scores), mean_of([score.value for score in scores]), {**means, "unparsed": 0})

    def _score(self, answer: Answer) -> Score:
        self.check(answer)
        _require_scores(self.name, answer, len(answer.options))
        details = {
            name: float(likeliest(answer.scores, [length(each) for each in answer.options]) == answer.answer_index)
            for name, length in _LENGTHS.items()
        }
        return Score(details[self.name], parse_status="likeliest", details=details)


@dataclass
class TextLikelihood:
    """How well a text is predicted: 100 / its perplexity per byte, so that more is better and 100 is the most."""

    name: str = "perplexity"
    label: str = "100 / byte perplexity"
    best: float = 100.0
    scores_each_answer: bool = True
    scored: Scored = "text"

    def check(self, answer: Answer) -> None:
        """Raises SampleError where there is no text."""
        if not answer.references or not answer.references[0]:
            raise SampleError(f"{self.name} needs a text: check the sample's `answers`")

    def score(self, answers: Sequence[Answer]) -> Scoring:
        """The scores of a run, their mean, and over the whole of it lm-eval's `word_perplexity`, `byte_perplexity` and
        `bits_per_byte`, which lay all texts end to end.

        Raises:
            SampleError: there is no text, or an answer was generated.
        """
        logprobs, texts = [], []
        for answer in answers:
            self.check(answer)
            if not answer.scores:
                _require_scores(self.name, answer, 1)
            logprobs.append(math.fsum(score.logprob for score in answer.scores))
            texts.append(answer.references[0])
        num_bytes = [len(text.encode()) for text in texts]
        scores = [
            Score(self.best * math.exp(logprob / count), parse_status="text", details={"logprob": logprob})
            for logprob, count in zip(logprobs, num_bytes, strict=True)
        ]
        details: dict[str, float] = {"unparsed": 0}
        if texts:
            words = sum(len(re.split(r"\s+", text)) for text in texts)
            per_byte = -math.fsum(logprobs) / sum(num_bytes)
            details |= {
                "word_perplexity": _exp(-math.fsum(logprobs) / words),
                "byte_perplexity": _exp(per_byte),
                "bits_per_byte": per_byte / math.log(2),
            }
        return Scoring(tuple(scores), mean_of([score.value for score in scores]), details)


def _exp(value: float) -> float:
    """The largest number there is where a perplexity exceeds it."""
    return math.exp(min(value, 709.0))


def right_scores(answer: Answer) -> tuple[ScoredContinuation, ...]:
    """Log-probabilities by which the right option, or the text, is certain."""
    certain, far = ScoredContinuation(0.0, 1, True), ScoredContinuation(-1e9, 1, False)
    return tuple(certain if place == answer.answer_index else far for place in range(len(answer.options))) or (certain,)
