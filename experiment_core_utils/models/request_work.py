"""What a request will be at a setting, before any weight is read."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, vision_of
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, library_faults_named
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.tasks.interface import PromptFamily, Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for

# Samples whose pictures are opened for their shape.
INSPECTED_SAMPLES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class RequestWork:
    """A request of the mean size of those looked at; of the largest one the elements held beside the weights."""

    prompt_tokens: float | None  #: None where none of those looked at can be run
    flops: StageFlops | None  #: None where no formula is known for the architecture
    elements: int | None  #: cache and, where they are known, the largest activations; None without a formula
    unusable_reason: str | None = None  #: why the first of those that cannot be run cannot, such as too long a prompt


class PlannedRequests(Protocol):
    """Requests of a task to a model, as the first samples that can be read show them."""

    no_formula: str | None  #: why there are no operations and no memory; None where there are
    weight_elements: int  #: of the whole model
    num_samples: int  #: that were looked at

    def elements_of_each(self, num_sharing: int) -> int:
        """Elements of the weights that each of so many processes has which share the model."""

    def memory_lines(self, config: ModelConfig, device: torch.device) -> list[str]:
        """The line that says that the model may not fit the device; none where it fits.

        Raises:
            ConfigurationError: it cannot fit, or cannot be spread over several devices as requested.
        """

    def final_prompt(self, setting: Setting) -> FinalPrompt | None:
        """What the model is given of the first sample that can be used; None where none can."""

    def at(self, setting: Setting) -> RequestWork:
        """A request at the setting."""


def unusable_lines(planned: PlannedRequests, settings: Sequence[Setting], reference: Setting | None) -> list[str]:
    """A line for each setting at which not all of the samples looked at can be run, with the first reason.

    Args:
        reference: without it no setting is compared with the model as it is; None where it is not measured.
    """
    lines = []
    for setting in settings:
        request = planned.at(setting)
        is_lost = request.prompt_tokens is None and setting == reference
        end = " (the reference, so that nothing is compared with the model as it is)" if is_lost else ""
        if request.unusable_reason is not None:
            lines.append(f"{setting.key}{end}: {request.unusable_reason}")
    return lines


def vision_lines(planned: PlannedRequests, settings: Sequence[Setting], reference: Setting) -> list[str]:
    """The line that compares the prompts of the requested pictures, and of all settings, with those of the model as it
    is; none where every setting has its own pictures, or the tokens are not known.
    """
    own_tokens = planned.at(reference).prompt_tokens
    targets = dict.fromkeys(filter(None, map(vision_of, settings)))
    if own_tokens is None or targets.keys() <= {own_target()}:
        return []
    by_label = {target.label: planned.at(reference.replaced(vision=target)).prompt_tokens for target in targets}
    shares = [f"{label} {100 * tokens / own_tokens:.0f} %" for label, tokens in by_label.items() if tokens is not None]
    num_larger = sum((planned.at(setting).prompt_tokens or 0) > own_tokens for setting in settings)
    enlarging = [label for label, tokens in by_label.items() if (tokens or 0) > own_tokens]
    beyond = f"{num_larger} of {counted(len(settings), 'setting')} take more"
    return [
        f"vision: prompts have {own_tokens:.0f} tokens in the model as it is, of these {', '.join(shares)}; {beyond}"
        + (f" (pictures are enlarged by {', '.join(enlarging)})" if enlarging else "")
    ]


def of_first_samples(
    task: Task, sample_ids: Sequence[int], look: Callable[[Sample], T], most: int = INSPECTED_SAMPLES
) -> list[T]:
    """What is seen in the first few samples that can be read."""
    seen: list[T] = []
    reason = ""
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"):
                seen.append(look(task[sample_id]))
        except SampleError as error:
            reason = str(error)
        if len(seen) == most:
            break
    if not seen:
        raise ConfigurationError(
            f"none of the {counted(len(sample_ids), 'sample')} of {task.name} {task.split} that were drawn can be "
            f"read, the last because: {reason}; give others with --seed or --ids"
        )
    return seen


class UncountedRequests:
    """Requests to a model that shows no tokens and no architecture before it is asked; a `PlannedRequests`.

    Args:
        family: how the model is asked.
        no_formula: why nothing is counted.
    """

    weight_elements = 0

    def __init__(self, task: Task, sample_ids: Sequence[int], family: PromptFamily, no_formula: str) -> None:
        def look(sample: Sample) -> tuple[int, str]:
            return sample.sample_id, prompt_for(task, sample, family)

        self.no_formula: str | None = no_formula
        self._seen = of_first_samples(task, sample_ids, look)
        self.num_samples = len(self._seen)

    def elements_of_each(self, num_sharing: int) -> int:
        """They are not known."""
        return self.weight_elements

    def memory_lines(self, config: ModelConfig, device: torch.device) -> list[str]:
        """Nothing: what the model needs is not known."""
        return []

    def final_prompt(self, setting: Setting) -> FinalPrompt | None:
        """The text for the first sample."""
        return FinalPrompt.of_ids(*self._seen[0], None)

    def at(self, setting: Setting) -> RequestWork:
        """Nothing of a request is known before it was sent."""
        return RequestWork(None, None, None)


def mean_flops(flops: Sequence[StageFlops]) -> StageFlops:
    """Mean FLOPs of each stage, over requests; vision over those without a picture too."""
    vision = [each.vision_flops or 0 for each in flops]
    decode = [each.decode_flops_per_token for each in flops if each.decode_flops_per_token is not None]
    return StageFlops(
        vision_flops=round(statistics.fmean(vision)) if any(vision) else None,
        prefill_flops=round(statistics.fmean(each.prefill_flops for each in flops)),
        decode_flops_per_token=statistics.fmean(decode) if decode else None,
    )
