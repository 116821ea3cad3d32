"""A policy that chooses the most accurate setting of a lookup table that is predicted to meet the request's budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, vision_of
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import check_above
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.analyses.latency.features import COLUMN_KNOBS, RequestSetting
from experiments.analyses.latency.guardrail import is_admitted
from experiments.controller.lookup import Lookup
from experiments.controller.policies.interface import RequestFeatures, check_budget


@dataclass(frozen=True)
class GuardedLookup:
    """A lookup whose settings are admitted request by request.

    Of the table's settings, those are kept whose predicted `T_total` x (1 + margin) is within the budget for the very
    request; the most accurate of them is taken, of equally accurate ones the one predicted fastest. The table's own
    latencies and tolerance play no part. A setting with a knob that the estimator has not seen is not admitted. Where
    none is admitted, the one predicted fastest is taken.

    The answer's length is that of the request where it is known, else what the estimator expects of the task.

    Raises:
        ConfigurationError: a margin of -1 or less, or one that is not finite.
    """

    lookup: Lookup
    estimator: LatencyEstimator
    #: fraction of the prediction that is kept free; a negative one lets predictions over the budget pass
    margin: float = 0.0
    name: str = "lookup_guardrail"

    def __post_init__(self) -> None:
        check_above("--margin", self.margin, -1.0)

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        """See `Policy.choose`.

        Raises:
            ConfigurationError: a budget that is not above 0, a vision target whose shape is not known, a task of which
                the estimator knows no length, or a knob that it does not predict by.
        """
        check_budget(budget_s)
        predicted = self.estimator.predict(self.request_settings(request))
        total_ms = predicted.times["T_total"]
        admitted = np.flatnonzero(is_admitted(total_ms, 1000 * budget_s, self.margin) & ~predicted.unseen_knobs)
        entries = self.lookup.entries
        if not len(admitted):
            return entries[int(np.argmin(total_ms))].choice
        return entries[max(admitted, key=lambda place: (entries[place].accuracy, -total_ms[place]))].choice

    def request_settings(self, request: RequestFeatures) -> Sequence[RequestSetting]:
        """The estimator's request for each entry of the table, in their order."""
        length = request.output_tokens
        if length is None:
            expected = self.estimator.fitted.expected_output
            if request.task not in expected:
                raise ConfigurationError(
                    f"the estimator expects no answer length for {request.task} (it knows {', '.join(expected)}); fit "
                    "it on results of this task"
                )
            length = expected[request.task]
        settings = []
        for choice in (entry.choice for entry in self.lookup.entries):
            # Crops and vision tokens say what the vision of a choice is.
            if further := sorted(choice.values.keys() - {VISION_TOKENS.name, *COLUMN_KNOBS}):
                raise ConfigurationError(
                    f"the estimator does not predict by {', '.join(further)}, and the lookup has settings such as "
                    f"{choice.key}; drop --estimator, or give a lookup without that knob"
                )
            vision = vision_of(choice).value
            if vision not in request.shapes:
                raise ConfigurationError(
                    f"what sample {request.sample_id} of {request.task} becomes at the vision setting {vision} is "
                    "not known; give a grid that has every one of the lookup"
                )
            shape = request.shapes[vision]
            settings.append(
                RequestSetting(shape.vision_tokens, shape.crops, request.text_tokens, choice.levels, length)
            )
        return settings
