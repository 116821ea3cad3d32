"""Baselines that a controller has to be better than: tables, one knob alone, a regression of the score in time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, own_target
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.texts import counted
from experiments.controller.evaluation.outcomes import late
from experiments.controller.evaluation.replay import replay
from experiments.controller.lookup import Aggregation, Lookup, build
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.interface import Policy, RequestFeatures, check_budget
from experiments.controller.policies.prompt_words import PromptWords
from experiments.fitting.held_out import left_out_masks

METHODS: tuple[Aggregation, ...] = ("mean", "p50", "p95", "p99", "in_time", "few_knobs")
# By the names of policies -> of `Setting`.
MAX_LATE = 0.05
NEIGHBOURHOOD = 0.2
CHOSEN_TABLE = "chosen_table"
FOLDS = 5
# Penalties among which leave-one-out errors of the calibration samples choose.
PENALTIES = tuple(10.0**power for power in range(-2, 4))


@dataclass(frozen=True)
class Renamed:
    """A policy under another name."""

    name: str
    policy: Policy

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        return self.policy.choose(request, budget_s)


class InTimeRegression:
    """The setting of the highest predicted score in time: a ridge regression on the words of the prompt, per budget.

    A request's target at a setting is score / best score, 0 for runs that were late there: cost-sensitive
    classification with all costs known. The penalty is chosen by leave-one-out errors among `PENALTIES`.

    Args:
        grid: of complete requests with prompts.
    """

    name = "regression"

    def __init__(self, grid: MeasuredGrid) -> None:
        self._grid = grid
        self._words = PromptWords([text or "" for text in grid.prompts or ()])
        self._inputs = self._words.vectors([text or "" for text in grid.prompts or ()])
        self._predicted = cache(self._predict)
        self._fitted = cache(self._fit)

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        check_budget(budget_s)
        return self._grid.choices[int(np.argmax(self._predicted(request.prompt or "", budget_s)))]

    def _predict(self, prompt: str, budget_s: float) -> np.ndarray:
        return np.asarray(self._fitted(budget_s).predict(self._words.vectors([prompt]))[0])

    def _fit(self, budget_s: float) -> Any:
        from sklearn.linear_model import RidgeCV

        return RidgeCV(PENALTIES).fit(self._inputs, self._grid.in_time(budget_s).T)


def tables(calibration: MeasuredGrid) -> list[Lookup]:
    """Lookups by every method, one that keeps lateness with confidence, and, with prompts, one of similar prompts."""
    made = [build(calibration, method) for method in METHODS]
    made.append(build(calibration, "mean", max_late=MAX_LATE))
    if calibration.prompts is not None:
        made.append(build(calibration, "in_time", neighbourhood=NEIGHBOURHOOD))
    return made


def one_knob_tables(calibration: MeasuredGrid) -> list[Policy]:
    """Lookups by the score in time that turn one knob alone; the others stay at the highest requested values.

    There is none of a knob that the model does not have, or that every choice leaves as it is in the model.
    """
    whole, full = build(calibration, "in_time"), calibration.largest
    found: list[Policy] = []
    for knob in all_knobs():
        name = knob.name
        if {choice.value(name) for choice in calibration.choices} <= {None, knob.neutral, own_target()}:
            continue
        entries = tuple(
            entry for entry in whole.entries if full.replaced(**{name: entry.choice.value(name)}) == entry.choice
        )
        policy = "only_tier" if knob is VISION_TOKENS else f"only_{name}"
        found.append(Renamed(policy, replace(whole, entries=entries)))
    return found


def chosen_table(calibration: MeasuredGrid, budgets_s: Sequence[float]) -> Policy:
    """The best of `tables` by mean score in time over the budgets, by five folds of the calibration pictures alone.

    Raises:
        ResultsError: no sample is complete, or all are of one picture.
    """
    known = calibration.complete()
    pictures = np.array(known.pictures)
    if len(set(known.pictures)) < 2:
        raise ResultsError(
            f"tables are chosen by folds of the calibration pictures, and {counted(len(known), 'sample')} of one "
            "picture cannot be split; measure more samples, or drop --baselines"
        )
    totals: dict[str, float] = {}
    for left_out in left_out_masks(pictures, min(FOLDS, len(set(known.pictures)))):
        validation = known.take(left_out)
        for table in tables(known.take(~left_out)):
            found = replay(table, validation, budgets_s)
            in_time = found.scores / validation.best * (1 - late(found, budgets_s))
            totals[table.name] = totals.get(table.name, 0.0) + float(in_time.sum())
    best = max(totals, key=lambda name: totals[name])
    return Renamed(CHOSEN_TABLE, next(table for table in tables(calibration) if table.name == best))


def baselines(calibration: MeasuredGrid, budgets_s: Sequence[float]) -> list[Policy]:
    """All of them, made of the calibration samples alone; without prompts none that needs these."""
    found: list[Policy] = [*tables(calibration), *one_knob_tables(calibration)]
    if calibration.prompts is not None:
        found.append(InTimeRegression(calibration.complete()))
    return [*found, chosen_table(calibration, budgets_s)]
