"""What requests to a MolmoE model will be at a setting, before any weight is read."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.models.common.text_generation import context_fault
from experiment_core_utils.models.costs.architecture import Architecture, shapes_of
from experiment_core_utils.models.costs.decoder import BlockShape
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.models.costs.memory_check import memory_lines
from experiment_core_utils.models.hf.requests import check_prompt
from experiment_core_utils.models.hf.tilings import Tiling, tilings_within
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.models.molmoe.costs import activation_elements, parameter_count
from experiment_core_utils.models.molmoe.loader import (
    FLAGS,
    MolmoeSource,
    load_processor,
    memory_of,
    molmoe_limits,
    refuse_several_devices,
)
from experiment_core_utils.models.molmoe.processing_molmoe import refuse_several_pictures
from experiment_core_utils.models.request_work import RequestWork, mean_flops, of_first_samples
from experiment_core_utils.primitives.device import choose_dtype
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import RequestShape, RequestSize
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for


@dataclass(frozen=True)
class PromptShape:
    """A sample's picture (height, width; None without one) and its tokens other than the picture's."""

    size: tuple[int, int] | None
    text_tokens: int


class MolmoeWork:
    """Work of MolmoE requests: a picture's size alone determines its crops."""

    no_formula: str | None = None  #: see `PlannedRequests`

    def __init__(self, source: MolmoeSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        self._source = source
        self._limit = limit
        self._processor = load_processor(source)
        self.weight_elements = parameter_count(source.config)
        self.shapes = of_first_samples(task, sample_ids, lambda sample: self._shape(task, sample))
        self.num_samples = len(self.shapes)
        self._first = of_first_samples(task, sample_ids, lambda sample: (sample, prompt_for(task, sample, "molmo")), 1)[
            0
        ]

    def elements_of_each(self, num_sharing: int) -> int:
        """No processes share them."""
        return self.weight_elements

    def memory_lines(self, config: ModelConfig, device: torch.device) -> list[str]:
        refuse_several_devices(config)
        return memory_lines(*memory_of(self._source, choose_dtype(config.precision, device), device), FLAGS)

    def final_prompt(self, setting: Setting) -> FinalPrompt:
        """What the model is given of the first sample that can be read."""
        sample, prompt = self._first
        inputs = self._processor(prompt, sample.image, vision_of(setting).bounds)
        return FinalPrompt.of_ids(sample.sample_id, prompt, inputs["input_ids"][0].tolist())

    def at(self, setting: Setting) -> RequestWork:
        """A request at the setting; elements contain the largest activations."""
        tokens, flops = [], []
        architecture = Architecture("molmoe", *shapes_of(self._source.config))
        architecture = architecture.at(setting)
        for shape in self.shapes:
            crops, image_tokens = 0, 0
            if shape.size is not None:
                tiling = self._processor.image_processor.tiling_for(*shape.size, vision_of(setting).bounds)
                crops, image_tokens = tiling[0] * tiling[1] + 1, image_part_tokens(self._processor, tiling, setting)
            tokens.append(shape.text_tokens + image_tokens)
            flops.append(architecture.request_flops(RequestSize(tokens[-1], self._limit, crops=crops)).stages)
        faults = [fault for each in tokens if (fault := context_fault(each, self._source.config)) is not None]
        reason = f"the prompt {faults[0]}" if faults else None
        if len(faults) == len(tokens):
            return RequestWork(None, None, None, reason)
        largest = self._largest_elements(setting, architecture.decoder.blocks)
        return RequestWork(statistics.fmean(tokens), setting.flops(mean_flops(flops)), largest, reason)

    def _shape(self, task: Task, sample: Sample) -> PromptShape:
        refuse_several_pictures(sample)
        prompt = prompt_for(task, sample, "molmo")
        check_prompt(prompt, self._processor.tokenizer, self._source.config)
        text_tokens = self._processor(prompt)["input_ids"].shape[1]
        size = None if sample.image is None else (sample.image.height, sample.image.width)
        return PromptShape(size, text_tokens)

    def _largest_elements(self, setting: Setting, blocks: Sequence[BlockShape]) -> int:
        """Cache and largest activations of the largest picture that the setting allows and the longest text seen."""
        text_tokens = max(shape.text_tokens for shape in self.shapes)
        crops, image_tokens = 0, 0
        if any(shape.size is not None for shape in self.shapes):
            vision, max_crops = vision_of(setting), self._processor.image_processor.max_crops
            # A fraction holds of all features, those of the whole picture and of the canvas' margin among them.
            of_own = CropRange(1, math.ceil((max_crops + 3) * vision.fraction) if vision.fraction else max_crops)
            allowed = vision.bounds if vision.bounds is not None and vision.bounds.counts_crops else of_own
            crops = allowed.max_crops + 1
            image_tokens = max(
                image_part_tokens(self._processor, tiling, setting) for tiling in tilings_within(allowed)
            )
        prompt_tokens = text_tokens + image_tokens
        own = molmoe_limits(self._source.config).default_top_k or 1
        top_k = max(own, experts_of(setting) or 0) if len(blocks_of(setting)) > 1 else own
        cache = cache_elements(blocks, prompt_tokens + self._limit)
        return cache + activation_elements(self._source.config, crops, prompt_tokens, top_k)


def image_part_tokens(processor: MolmoeProcessor, tiling: Tiling, setting: Setting | None = None) -> int:
    """Tokens that a picture of this tiling puts into the prompt, markers counted; as the decoder gets them at a
    setting.
    """
    images, ids = processor.image_processor, processor.image_tokens
    layout = ids.layout(images.features_per_side, images.stitched_features(tiling))
    features = layout.count(ids.patch)
    shape = RequestShape(None, None, features, len(layout) - features, 0, 0.0)
    return (shape if setting is None else setting.shape(shape)).prompt_tokens
