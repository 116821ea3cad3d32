"""The model `knobprof` of lm-eval: its generated answers at one setting of the knobs, with stages and joules.

python -m experiments.harnesses.lm_eval_model run --model knobprof --tasks TASK --log_samples --output_path OUTPUT \
    --model_args pretrained=MODEL,num_active_blocks=24,output_dir=results/knobprof

In Python, importing this module registers it. lm-eval is an optional extra.
"""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import lm_eval.models  # noqa: F401 : lm-eval registers its own only where none is registered
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.harnesses.requests_run import HarnessRequest, SettingRunner

# `HFLM.max_gen_toks`.
MAX_GEN_TOKS = 256


@register_model("knobprof")
class KnobprofLM(LM):
    """A model at one setting; arguments as of `SettingRunner`. Prompts are given as lm-eval makes them: only with
    `no_chat_template=False` is the model's chat template put around each.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._runner = SettingRunner("lm-eval", MAX_GEN_TOKS, arguments, is_bare=True)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, in order."""
        samples = self._runner.answers(
            [HarnessRequest(each.task_name, each.doc_id, each.args[0], each.args[1]) for each in requests]
        )
        for each, sample in zip(requests, samples, strict=True):
            self.cache_hook.add_partial("generate_until", each.args, sample.pred)
        return [sample.pred for sample in samples]

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Refused: see the error."""
        raise ConfigurationError("the model knobprof answers generate_until tasks only; give such tasks, or --model hf")

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> NoReturn:
        """Refused: see `loglikelihood`."""
        self.loglikelihood(requests)

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
