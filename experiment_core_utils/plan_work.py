"""In: a model that was found, a task's first samples and a setting; out: what a request is there, by formula."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from experiment_core_utils.b_model_loader import ModelSource, load_processor
from experiment_core_utils.models.architecture_flops import UnknownArchitecture, architecture_of
from experiment_core_utils.models.foreign_model import ForeignSource, skeleton_of
from experiment_core_utils.models.memory_parts import cache_elements as decoder_cache_elements
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.models.molmoe.flops import request_flops
from experiment_core_utils.models.molmoe.image_processing_molmoe import Tiling, tilings_within
from experiment_core_utils.models.molmoe.memory import activation_elements, cache_elements, parameter_count
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.knobs import CropRange, KnobSetting
from experiment_core_utils.primitives.records import RequestShape, StageFlops
from experiment_core_utils.tasks.interface import Sample, Task

# Samples whose pictures are opened for their shape.
SAMPLES_LOOKED_AT = 8
T = TypeVar("T")


@dataclass(frozen=True)
class RequestWork:
    """A request of the mean size of those looked at; of the largest one the elements that are held beside the weights.

    Attributes:
        elements: cache and, where they are known, the largest activations.
    """

    prompt_tokens: float
    flops: StageFlops
    elements: int


class PlannedWork(Protocol):
    """What a model's requests are, without its weights."""

    @property
    def num_samples(self) -> int:
        """Samples that were looked at."""
        ...

    @property
    def weight_elements(self) -> int:
        """Parameters of the whole model."""
        ...

    def at(self, setting: KnobSetting) -> RequestWork:
        """A request at the setting."""
        ...


def work_of(source: ModelSource, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedWork:
    """What requests with answers of at most `limit` tokens are.

    Raises:
        ConfigurationError: none of the first samples can be read, or no formula is known for the architecture.
    """
    if source.foreign is not None:
        return TransformersWork(source.foreign, task, sample_ids, limit)
    return MolmoeWork(source, task, sample_ids, limit)


def of_first_samples(task: Task, sample_ids: Sequence[int], look: Callable[[Sample], T]) -> list[T]:
    """What is seen in the first few samples that can be read."""
    seen, reason = [], ""
    for sample_id in sample_ids[:SAMPLES_LOOKED_AT]:
        try:
            seen.append(look(task[sample_id]))
        except SampleError as error:
            reason = str(error)
    if not seen:
        raise ConfigurationError(
            f"none of the first {len(sample_ids[:SAMPLES_LOOKED_AT])} samples of {task.name} {task.split} can be read, "
            f"the last because: {reason}; give others with --seed or --ids"
        )
    return seen


def mean_flops(flops: Sequence[StageFlops]) -> StageFlops:
    """Of each stage, over requests; vision over those without a picture too."""
    vision = [each.vision_flops or 0 for each in flops]
    decode = [each.decode_flops_per_token for each in flops if each.decode_flops_per_token is not None]
    return StageFlops(
        vision_flops=round(statistics.fmean(vision)) if any(vision) else None,
        prefill_flops=round(statistics.fmean(each.prefill_flops for each in flops)),
        decode_flops_per_token=statistics.fmean(decode) if decode else None,
    )


@dataclass(frozen=True)
class PromptShape:
    """A sample's picture (height, width; None without one) and its tokens other than the picture's."""

    size: tuple[int, int] | None
    text_tokens: int


class MolmoeWork:
    """Of MolmoE: a picture's size alone says how it is cut."""

    def __init__(self, source: ModelSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        self._source = source
        self._limit = limit
        self._processor = load_processor(source)
        self.weight_elements = parameter_count(source.config)
        self.shapes = of_first_samples(task, sample_ids, lambda sample: self._shape(task, sample))

    @property
    def num_samples(self) -> int:
        """See `PlannedWork.num_samples`."""
        return len(self.shapes)

    def at(self, setting: KnobSetting) -> RequestWork:
        """See `PlannedWork.at`; elements hold the largest activations."""
        tokens, flops = [], []
        for shape in self.shapes:
            crops, image_tokens = 0, 0
            if shape.size is not None:
                tiling = self._processor.image_processor.tiling_for(*shape.size, setting.vision.crops)
                crops, image_tokens = tiling[0] * tiling[1] + 1, image_part_tokens(self._processor, tiling)
            tokens.append(shape.text_tokens + image_tokens)
            flops.append(request_flops(self._source.config, setting, crops, tokens[-1], self._limit))
        return RequestWork(statistics.fmean(tokens), mean_flops(flops), self._largest_elements(setting))

    def _shape(self, task: Task, sample: Sample) -> PromptShape:
        text_tokens = self._processor(task.prompt(sample))["input_ids"].shape[1]
        size = None if sample.image is None else (sample.image.height, sample.image.width)
        return PromptShape(size, text_tokens)

    def _largest_elements(self, setting: KnobSetting) -> int:
        """Cache and largest activations of the largest picture that the setting allows and the longest text seen."""
        text_tokens = max(shape.text_tokens for shape in self.shapes)
        crops, image_tokens = 0, 0
        if any(shape.size is not None for shape in self.shapes):
            allowed = setting.vision.crops
            crops = allowed.max_crops + 1
            image_tokens = max(image_part_tokens(self._processor, tiling) for tiling in tilings_within(allowed))
        prompt_tokens = text_tokens + image_tokens
        own = self._source.limits.default_top_k or 0
        top_k = max(own, setting.top_k or 0) if setting.num_active_blocks > 1 else own
        cache = cache_elements(self._source.config, prompt_tokens + self._limit, setting.num_active_blocks)
        return cache + activation_elements(self._source.config, crops, prompt_tokens, top_k)


def image_part_tokens(processor: MolmoeProcessor, tiling: Tiling) -> int:
    """Tokens that a picture of this tiling puts into the prompt, markers counted."""
    images = processor.image_processor
    return len(processor.image_tokens.layout(images.features_per_side, images.stitched_features(tiling)))


class TransformersWork:
    """Of a model of transformers: its processor makes the requests, and their tokens and crops are counted."""

    def __init__(self, source: ForeignSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        architecture = architecture_of(source.config)
        if isinstance(architecture, UnknownArchitecture):
            raise ConfigurationError(f"--dry_run has no estimate for {source.name}: {architecture.reason}")
        self._architecture = architecture
        self._task = task
        self._limit = limit
        self._requests = source.requests
        self._samples = of_first_samples(task, sample_ids, lambda sample: sample)
        self._shapes: dict[CropRange, list[RequestShape]] = {}
        self.weight_elements = sum(parameter.numel() for parameter in skeleton_of(source).parameters())

    @property
    def num_samples(self) -> int:
        """See `PlannedWork.num_samples`."""
        return len(self._samples)

    def at(self, setting: KnobSetting) -> RequestWork:
        """See `PlannedWork.at`; elements are the cache's alone, of the longest prompt seen."""
        shapes = self._shapes_at(setting.vision.crops)
        turned = self._architecture.at_setting(setting.top_k, setting.active_blocks)
        flops = [turned.request_flops(shape.size(self._limit)).stages for shape in shapes]
        tokens = [shape.prompt_tokens for shape in shapes]
        elements = decoder_cache_elements(turned.decoder.blocks, max(tokens) + self._limit)
        return RequestWork(statistics.fmean(tokens), mean_flops(flops), elements)

    def _shapes_at(self, crops: CropRange) -> list[RequestShape]:
        if crops not in self._shapes:
            made = [self._requests.make(sample, self._task.prompt(sample), crops) for sample in self._samples]
            self._shapes[crops] = [request.shape for request in made]
        return self._shapes[crops]
