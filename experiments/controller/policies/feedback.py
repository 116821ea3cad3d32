"""A policy on a machine whose speed changes: its budget is divided by the running ratio of observed to predicted time.

A table predicts by the machine that it was measured on. Where that machine is now slower, by load, heat or a lower
clock, every setting takes longer by about the same factor, which the last answers show.
"""

import math
from collections.abc import Mapping

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.units import check_above
from experiments.controller.policies.interface import Policy, RequestFeatures, check_budget

# Answers after which a ratio counts half.
HALF_LIFE = 5.0
# An answer that took more than this multiple of its prediction, or less than its inverse, counts as if it took that.
MOST_RATIO = 4.0


class FeedbackPolicy:
    """A policy that is told how long its answers took.

    It has one number, the mean of log(observed / predicted time) over its answers, weighted by 1/2 for every
    `half_life` answers since; before the first answer it is 0. The policy inside sees budget / exp(that number, rounded
    to 0.01, so that what it keeps of a budget can be used again).

    Args:
        policy: chooses by budgets for the machine of the predictions.
        predicted_s: of each setting that it may choose, see `Lookup.typical_s`.
        half_life: in answers.

    Raises:
        ConfigurationError: a half-life that is not above 0.
    """

    def __init__(self, policy: Policy, predicted_s: Mapping[Setting, float], half_life: float = HALF_LIFE) -> None:
        check_above("half_life", half_life, 0.0)
        self.name = f"{policy.name}_feedback"
        self._policy = policy
        self._predicted_s = predicted_s
        self._kept = 0.5 ** (1 / half_life)
        self._log_ratio = 0.0

    @property
    def ratio(self) -> float:
        """The running ratio of observed to predicted time: above 1 on a machine that is slower."""
        return math.exp(round(self._log_ratio, 2))

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        check_budget(budget_s)
        return self._policy.choose(request, budget_s / self.ratio)

    def observe(self, choice: Setting, latency_s: float) -> None:
        """Count an answer at one of the policy's settings that took so long."""
        most = math.log(MOST_RATIO)
        observed = min(max(math.log(latency_s / self._predicted_s[choice]), -most), most)
        self._log_ratio += (1 - self._kept) * (observed - self._log_ratio)

    def restart(self) -> None:
        """Forget all answers: another stream of requests begins."""
        self._log_ratio = 0.0
