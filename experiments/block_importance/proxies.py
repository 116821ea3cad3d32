"""A cheap estimate of a block's importance, from one pass over each sample: how far it turns its hidden states.

This is 1 - cos(input, output), known as Block Influence (X. Men et al., "ShortGPT: Layers in Large Language Models are
More Redundant Than You Expect", 2024, arXiv:2403.03853).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import SampleError, library_faults_named
from experiment_core_utils.primitives.finite_logits import failure_named, refuse_not_finite
from experiment_core_utils.tasks.interface import Sample
from experiments.block_importance.answers import DrawnTask
from experiments.block_importance.importance import Measured, TaskValues, watched_blocks

Positions = Literal["all", "last"]
OfSample = Callable[[DrawnTask, Sample, Mapping[str, Any]], list[float]]


def activation_changes(
    model: StagedModel, drawn: Sequence[DrawnTask], setting: Setting, positions: Positions = "all"
) -> dict[int, Measured]:
    """Each block's 1 - cos(input, output) of each sample's prompt: the mean over its positions, or that of the last.

    Args:
        setting: of every block.
    """

    @torch.inference_mode()
    def of_sample(_: DrawnTask, __: Sample, inputs: Mapping[str, Any]) -> list[float]:
        changes = [0.0] * model.num_total_blocks

        def seen(block: int, given: torch.Tensor, output: torch.Tensor) -> None:
            start = 0 if positions == "all" else -1
            cosines = nn.functional.cosine_similarity(given[:, start:].float(), output[:, start:].float(), dim=-1)
            changes[block] = 1.0 - float(cosines.mean())

        with watched_blocks(model.decoder_blocks, seen):
            logits, _ = model.prefill(inputs, model.encode_image(inputs))
        refuse_not_finite(logits)
        return changes

    return of_all_samples(model, drawn, setting, of_sample)


def of_all_samples(
    model: StagedModel, drawn: Sequence[DrawnTask], setting: Setting, of_sample: OfSample
) -> dict[int, Measured]:
    """Each block's values of all samples at a setting; samples that cannot be read or used are left out.

    Raises:
        GenerationFailed: the logits of a sample are not finite.
    """
    blocks = tuple(range(model.num_total_blocks))
    model.apply(setting)
    found: dict[int, dict[str, TaskValues]] = {block: {} for block in blocks}
    for each in drawn:
        rows, image_ids = [], []
        for sample_id in tqdm(each.sample_ids, desc=each.task.name, unit="sample"):
            try:
                with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                    sample, request = each.requests.take(sample_id, vision_of(setting).crops)
                    with failure_named(f"sample {sample_id}", model.describe):
                        rows.append(of_sample(each, sample, model.to_device(request.inputs)))
            except SampleError:
                continue
            image_ids.append(sample.image_id)
        if not rows:
            raise SampleError(f"no sample of {each.task.name} could be used; look at its answers and pictures")
        for block, values in zip(blocks, zip(*rows, strict=True), strict=True):
            found[block][each.task.name] = TaskValues(values, tuple(image_ids))
    return dict(found)
