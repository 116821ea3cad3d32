"""The model `knobprof` of lmms-eval: its answers about pictures at one setting of the knobs, with stages and joules.

python -m experiments.harnesses.lmms_eval_model --model knobprof --tasks TASK --log_samples --output_path OUTPUT \
    --model_args pretrained=MODEL,top_k=4,output_dir=results/knobprof

Where this project is installed, lmms-eval finds it by its entry point, which it loads while it imports its models:
nothing of `lmms_eval.models` itself is imported here. lmms-eval is an optional extra.
"""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.models.registry_v2 import ModelManifest
from PIL import Image

from experiment_core_utils.config.command import run_command
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.records.sample_result import QUANTITIES
from experiments.harnesses.requests_run import HarnessRequest, SettingRunner

# That of most of lmms-eval's own models.
MAX_NEW_TOKENS = 1024


class KnobprofLmms(lmms):
    """A model at one setting; arguments as of `SettingRunner`. The model's chat template is put around each prompt."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._runner = SettingRunner("lmms-eval", MAX_NEW_TOKENS, arguments, is_bare=False)

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Greedy answers, in order, with true counts of tokens; times and joules go into lmms-eval's `throughput`."""
        samples = self._runner.answers([self._request(instance) for instance in requests])
        timed = [sample for sample in samples if sample.T_total is not None]
        seconds = sum(sample.T_total or 0.0 for sample in timed) / 1000
        tokens = sum(sample.output_tokens for sample in timed)
        means = {key: mean_of([getattr(sample, key) for sample in samples]) for key in QUANTITIES}
        figures = {key: value for key, value in means.items() if value is not None}
        log_metrics(seconds, tokens, tokens / seconds if seconds else 0.0, figures)
        for request, sample in zip(requests, samples, strict=True):
            self.cache_hook.add_partial("generate_until", request.args[:2], sample.pred)
        return [GenerationResult(one.pred, TokenCounts(one.prompt_tokens, one.output_tokens)) for one in samples]

    def _request(self, instance: Instance) -> HarnessRequest:
        prompt, generation, doc_to_visual, doc_id, task, split = instance.args
        visuals = doc_to_visual(self.task_dict[task][split][doc_id]) or []
        if kinds := [type(visual).__name__ for visual in visuals if not isinstance(visual, Image.Image)]:
            raise ConfigurationError(
                f"{task} shows {kinds[0]}, and the model knobprof takes pictures; give another task"
            )
        return HarnessRequest(task, doc_id, prompt, generation, tuple(visuals))

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> NoReturn:
        """Refused: see the error."""
        raise ConfigurationError("the model knobprof answers tasks of one round; give such tasks")

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Refused: see the error."""
        raise ConfigurationError("the model knobprof answers generate_until tasks only; give such tasks")


def manifest() -> ModelManifest:
    """The entry point of lmms-eval's group `lmms_eval.models`."""
    return ModelManifest("knobprof", simple_class_path="experiments.harnesses.lmms_eval_model.KnobprofLmms")


if __name__ == "__main__":
    from lmms_eval.__main__ import cli_evaluate
    from lmms_eval.models import MODEL_REGISTRY_V2

    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    sys.exit(run_command(cli_evaluate))
