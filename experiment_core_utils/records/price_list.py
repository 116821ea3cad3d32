"""What a user pays and saves, as one record: for each accepted loss of accuracy the cheapest setting, and for budgets
the most accurate one, by type of question and over all. Every reader shows the lines that are made from it here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from experiment_core_utils.primitives.contrasts import Word
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import time_text

Interval = tuple[float, float]
OVERALL = "over all"
# What scores are called where the best is 1.
ACCURACY = "accuracy"
# The accepted loss of which a headline says what is sure.
HEADLINE_LOSS = 0.05


@dataclass(frozen=True)
class Price:
    """The setting that costs least at an accepted loss, against the reference, on the questions of one type."""

    loss: float  #: accuracy that may be lost, as a fraction of the metric's best score
    word: Word  #: whether it is faster and not worse by more than the loss; `yes` is sure
    setting: str | None  #: its key; where none is sure, what is nearest; None where no other setting is faster
    is_identical: bool  #: whether all its answers are those of the reference, by which a loss of 0 is meant
    time_ratio: float | None  #: geometric mean over samples of its time over the reference's; None without a setting
    time_ratio_ci95: Interval | None  #: together for all types and settings
    energy_ratio: float | None  #: the same of joules a request; None where these were not measured
    energy_ratio_ci95: Interval | None
    accuracy_difference: float | None  #: its accuracy less the reference's, in the metric's scores
    accuracy_difference_ci95: Interval | None
    samples_needed: int | None  #: samples of the type that would decide, were means as they are; None if decided
    requests_per_s: float | None = None  #: in its batches; None where no setting has batches


@dataclass(frozen=True)
class WithinBudget:
    """The most accurate setting that keeps to a budget, on the questions of one type."""

    budget: float  #: in `unit`
    unit: str  #: `ms` or `J`, of a request; of an accuracy `score`
    statistic: str  #: `mean` or `p95`, over samples
    word: Word  #: whether it keeps to it; of several settings together
    setting: str | None  #: its key; where none surely does, the one that is nearest
    cost: float | None  #: the statistic of its cost, in the unit
    time_ratio: float | None  #: as in `Price`
    accuracy: float | None  #: its mean score
    accuracy_ci95: Interval | None  #: of this setting alone
    requests_per_s: float | None = None  #: as in `Price`


@dataclass(frozen=True)
class TypePrices:
    """The prices of one type of question."""

    question_type: str  #: OVERALL for all questions, each counted once
    num_samples: int  #: that all settings have a score of
    reference_ms: float | None  #: mean total time of the reference; None where there are no prices
    reference_accuracy: float | None  #: its mean score; None where there are no prices
    #: the smallest loss that can be excluded where no answer changes, as a fraction of the metric's best score; None
    #: where there are no prices
    least_loss: float | None
    prices: tuple[Price, ...]  #: a row a loss, from the largest to the smallest; none where budgets alone are asked for
    budgets: tuple[WithinBudget, ...] = ()


@dataclass(frozen=True)
class Routing:
    """What it would give to use, for each type of question, the setting that is sure at a loss."""

    loss: float
    settings: Mapping[str, str]  #: type -> key of its setting; the reference where none is sure
    accuracy: float
    accuracy_difference: float
    time_ratio: float  #: weighted by the numbers of questions
    time_ratio_ci95: Interval


@dataclass(frozen=True)
class PriceList:
    """Prices by type of question, the row of all questions last."""

    task: str
    against: str | None  #: key of the reference; None where nothing can be said of it
    why: str | None  #: why there are no prices; None where there are, or budgets alone are asked for
    types: tuple[TypePrices, ...] = ()  #: without prices the answers to budgets, where these are asked for
    routing: Routing | None = None  #: None where one setting is the choice of all types
    metric_best: float = 1.0
    score: str = ACCURACY  #: as in `Conclusion`

    @property
    def lines(self) -> list[str]:
        """The prices as they are printed."""
        each_type = [line for each in self.types for line in self._of_type(each)]
        if self.why is not None:
            return [f"no prices: {self.why}", *each_type]
        of = f"percent of that of the reference {self.against}, the model as it is"
        if any(each.prices for each in self.types):
            head = f"prices, in {of}, by accepted loss of {self.score}:"
        else:
            head = "what fits:" if self.types[0].reference_ms is None else f"what fits, with the time in {of}:"
        return [head, *each_type, *self._routing()]

    @property
    def next_question(self) -> str | None:
        """Flags of `knobprof choose` for a question that the prices leave open; None without prices."""
        if self.why is not None or not self.types or self.types[-1].reference_ms is None:
            return None
        return f"--budget_ms {float(f'{self.types[-1].reference_ms / 2:.2g}'):g}"

    @property
    def headline(self) -> str | None:
        """What to take at HEADLINE_LOSS, by type of question; None where no saving is sure at it."""
        sure = [
            f"{price.setting} {'' if each.question_type == OVERALL else 'for '}{each.question_type} "
            f"({100 * price.time_ratio:.0f} % of the time)"
            for each in self.types
            for price in each.prices
            if price.loss == HEADLINE_LOSS and price.word == "yes" and price.time_ratio is not None
        ]
        return f"at a loss surely below {self._loss(HEADLINE_LOSS)} take {', '.join(sure)}" if sure else None

    def _of_type(self, found: TypePrices) -> list[str]:
        number = counted(found.num_samples, "question")
        reference = ""
        if found.reference_ms is not None and found.reference_accuracy is not None:
            reference = f"reference {self._score(found.reference_accuracy)} in {time_text(found.reference_ms)}; "
        if found.prices and found.least_loss is not None:
            number += f" can exclude losses down to {self._loss(found.least_loss)}"
        rest = found.num_samples - sum(each.num_samples for each in self.types if each.question_type != OVERALL)
        if found.question_type == OVERALL and len(self.types) > 1 and rest:
            number += f"; {rest} of them are of types too small to be shown"
        lines = [f"  {found.question_type}: {reference}{number}"]
        sure = {price.loss: price for price in found.prices if price.word == "yes"}
        same = sure.pop(0.0) if 0.0 in sure and sure[0.0].is_identical else None
        # A setting that is also the choice of a smaller loss is shown there.
        last = {price.setting: price for price in sure.values()}
        if same is not None:
            last.setdefault(same.setting, same)
        identical = None if same is None else same.setting
        lines += [f"    {self._sure(each, is_same=key == identical)}" for key, each in last.items()]
        left = next((price for price in found.prices if price.word != "yes"), None)
        if left is not None:
            lines.append(f"    {self._nearest(left)}")
        return lines + [f"    {self._budget(each)}" for each in found.budgets]

    def _sure(self, price: Price, *, is_same: bool) -> str:
        meanings = ["identical answers to all of these"] * is_same
        if price.loss > 0 or not is_same:
            meanings.insert(0, f"surely {f'not worse by {self._loss(price.loss)} or more' if price.loss else 'better'}")
        return f"{', '.join(meanings)}: {self._figures(price)}"

    def _nearest(self, price: Price) -> str:
        loss = "no loss" if price.loss == 0 else f"a loss below {self._loss(price.loss)}"
        if price.setting is None:
            return f"{loss}: none, no other setting is surely faster"
        needed = price.samples_needed
        more = "" if needed is None else f"; about {counted(needed, 'question')} would decide"
        return f"{loss}: {self._not_sure(price.word)} {self._figures(price)}{more}"

    def _not_sure(self, word: Word) -> str:
        """What comes before the nearest setting, by its word."""
        return f"none is sure, the nearest ({'surely not' if word == 'no' else word}) is"

    def _figures(self, price: Price) -> str:
        assert price.time_ratio is not None and price.accuracy_difference is not None
        joules = "" if price.energy_ratio is None else f", {_percent(price.energy_ratio, price.energy_ratio_ci95)} of J"
        change = change_text(price.accuracy_difference, self.metric_best)
        ends = [change_number(end, self.metric_best) for end in price.accuracy_difference_ci95 or ()]
        ends_text = f" [{', '.join(ends)}]" if ends else ""
        time = f"{_percent(price.time_ratio, price.time_ratio_ci95)} of the time"
        return f"{price.setting}, {time}{joules}{_throughput(price)}, {self.score} {change}{ends_text}"

    def _budget(self, found: WithinBudget) -> str:
        if found.unit == "score":
            asked = f"{self.score} of at least {self._score(found.budget)}"
        else:
            asked = f"{found.statistic} of {found.budget:g} {found.unit} or less"
        if found.setting is None:
            return f"{asked}: not measured"
        assert found.cost is not None and found.accuracy is not None
        cost = "" if found.unit == "score" else f"{found.cost:.4g} {found.unit}, "
        ends = "" if found.accuracy_ci95 is None else " [{}, {}]".format(*map(self._score, found.accuracy_ci95))
        time = "" if found.time_ratio is None else f", {100 * found.time_ratio:.0f} % of the time"
        figures = f"{found.setting}, {cost}{self.score} {self._score(found.accuracy)}{ends}{time}{_throughput(found)}"
        return f"{asked}: {'surely' if found.word == 'yes' else self._not_sure(found.word)} {figures}"

    def _routing(self) -> list[str]:
        found = self.routing
        if found is None:
            return []
        chosen = ", ".join(f"{name} {key}" for name, key in found.settings.items())
        return [
            f"  routed by type ({chosen}): {self.score} {self._score(found.accuracy)} "
            f"({change_text(found.accuracy_difference, self.metric_best)}) in "
            f"{_percent(found.time_ratio, found.time_ratio_ci95)} of the time; surely not worse by "
            f"{self._loss(found.loss)} or more in any type"
        ]

    def _score(self, score: float) -> str:
        return f"{score:.3f}"

    def _loss(self, loss: float) -> str:
        return f"{100 * loss:.3g} points" if self.metric_best == 1 else f"{loss * self.metric_best:.3g}"


def change_number(change: float, best: float) -> str:
    """A change of the accuracy in points, or of scores whose best one is not 1: `+16.4`."""
    scale, decimals = (100.0, 1) if best == 1 else (1.0, 3)
    # Not minus zero.
    return f"{round(scale * change, decimals) + 0.0:+.{decimals}f}"


def change_text(change: float, best: float) -> str:
    """The same with its unit: `+16.4 points`."""
    return f"{change_number(change, best)}{' points' if best == 1 else ''}"


def _throughput(of: Price | WithinBudget) -> str:
    return "" if of.requests_per_s is None else f", {of.requests_per_s:.3g} requests/s"


def _percent(ratio: float, ends: Interval | None) -> str:
    interval = "" if ends is None else f" [{100 * ends[0]:.0f}, {100 * ends[1]:.0f}]"
    return f"{100 * ratio:.0f} %{interval}"
