"""In: a model that chooses its knobs on the way through a request; out: the same as a controller to be evaluated."""

from dataclasses import dataclass

from experiments.controller.adaptive_generation import AdaptiveModel, Request
from experiments.controller.live import AdaptiveAnswer, LiveRequest


@dataclass(frozen=True)
class ChosenWithin:
    """Two stages that choose inside the run: their time is part of its total.

    Attributes:
        name: in tables.
    """

    adaptive: AdaptiveModel
    max_new_tokens: int
    name: str = "learned"

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """See `Controller.answer`; the sample is prepared anew at the tier chosen, outside every time."""
        asked = Request(request.sample, request.prompt, self.max_new_tokens)
        run = self.adaptive.adaptive_generate(asked, budget_s)
        times = run.times
        return AdaptiveAnswer(run.choice, run.token_ids, times.total_s, times.controller_s, times.total_s)
