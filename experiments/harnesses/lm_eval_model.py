"""The model `knobprof` of lm-eval: answers and log-probabilities at one setting of the knobs, with stages and joules.

python -m experiments.harnesses.lm_eval_model run --model knobprof --tasks TASK --log_samples --output_path OUTPUT \
    --model_args pretrained=MODEL,num_active_blocks=24,output_dir=results/knobprof

In Python, importing this module registers it. lm-eval is an optional extra.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import lm_eval.models  # noqa: F401 : lm-eval registers its own only where none is registered
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS

from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.harnesses.requests_run import HarnessRequest, SettingRunner

T = TypeVar("T")


@register_model("knobprof")
class KnobprofLM(LM):
    """A model at one setting; arguments as of `SettingRunner`. Prompts are given as lm-eval makes them: only with
    `no_chat_template=False` is the model's chat template put around each.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._runner = SettingRunner("lm-eval", DEFAULT_MAX_GEN_TOKS, arguments, is_bare=True)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, in order."""
        samples = self._runner.answers(
            [HarnessRequest(each.task_name, each.doc_id, each.args[0], each.args[1]) for each in requests]
        )
        return self._cached("generate_until", requests, [sample.pred for sample in samples])

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The natural log-probability of each continuation of its context, and whether greedy decoding gives it.

        Those of one document and context are one measured request.
        """
        groups: dict[tuple[str, int, str], list[int]] = {}
        for place, each in enumerate(requests):
            groups.setdefault((each.task_name, each.doc_id, each.args[0]), []).append(place)
        samples = self._runner.answers(
            [
                HarnessRequest(*asked, continuations=tuple(requests[place].args[1] for place in places))
                for asked, places in groups.items()
            ]
        )
        found: dict[int, tuple[float, bool]] = {}
        for places, sample in zip(groups.values(), samples, strict=True):
            scores = [(each.logprob, each.is_greedy) for each in sample.continuations or ()]
            found |= dict(zip(places, scores, strict=True))
        return self._cached("loglikelihood", requests, [found[place] for place in range(len(requests))])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The natural log-probability of each text, in disjoint windows of the model's context."""
        samples = self._runner.answers(
            [HarnessRequest(each.task_name, each.doc_id, each.args[0], continuations=()) for each in requests]
        )
        sums = [math.fsum(each.logprob for each in sample.continuations or ()) for sample in samples]
        return self._cached("loglikelihood_rolling", requests, sums)

    def _cached(self, kind: str, requests: Sequence[Instance], found: list[T]) -> list[T]:
        """What was found, which lm-eval's cache of requests is given."""
        for each, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, each.args, value)
        return found

    def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> NoReturn:
        """Refused: see the error."""
        raise ConfigurationError(
            "the model knobprof puts the chat template around prompts itself; drop --apply_chat_template, and give "
            "no_chat_template=False in --model_args"
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval adds to `config` of its results: by task what was measured, see `own_content`."""
        return {"knobprof": self._runner.figures(), "knobprof_results": str(self._runner.folder)}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(run_command(cli_evaluate))
