"""What requests to a model of transformers will be at a setting, before any weight is read."""

import statistics
from collections.abc import Sequence

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.models.common.placement import refuse_device_map
from experiment_core_utils.models.costs.architecture import UnknownArchitecture, architecture_of
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.models.costs.memory_check import memory_lines
from experiment_core_utils.models.hf.loader import FLAGS, FLAGS_OF_RANDOM, HFSource, memory_of, skeleton_of
from experiment_core_utils.models.hf.tensor_shards import elements_of_each, refuse_uneven_heads
from experiment_core_utils.models.request_work import RequestWork, mean_flops, of_first_samples
from experiment_core_utils.primitives.device import choose_dtype
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import PreparedRequest, RequestShape
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for, with_continuations


class TransformersWork:
    """Work of requests to a model of transformers: its processor makes the requests, and their tokens and crops are
    counted.
    """

    def __init__(self, source: HFSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        found = architecture_of(source.config)
        #: why there are no operations and no memory; None where there are
        self.no_formula = found.reason if isinstance(found, UnknownArchitecture) else None
        self._source = source
        self._architecture = None if isinstance(found, UnknownArchitecture) else found
        self._task = task
        self._limit = limit
        self._requests = source.requests
        self._samples = of_first_samples(task, sample_ids, lambda sample: sample)
        self.num_samples = len(self._samples)
        self._shapes: dict[CropRange | None, tuple[list[RequestShape], str | None]] = {}
        self.weight_elements = self.elements_of_each(1)

    def elements_of_each(self, num_sharing: int) -> int:
        return elements_of_each(skeleton_of(self._source), num_sharing)

    def memory_lines(self, config: ModelConfig, device: torch.device) -> list[str]:
        """It raises ConfigurationError as `refuse_uneven_heads` does, too."""
        dtype = choose_dtype(config.precision, device)
        refuse_device_map(config.device_map, device, "--device_map auto")
        flags = FLAGS_OF_RANDOM if config.random_weights else FLAGS
        shards = config.tensor_parallel or 1
        if shards > 1:
            refuse_uneven_heads(skeleton_of(self._source), self._source.name, shards)
        found = memory_of(self._source, dtype, device, config.quantization, config.device_map, shards)
        return memory_lines(*found, flags)

    def final_prompt(self, setting: Setting) -> FinalPrompt | None:
        """What the model is given of the first sample that can be used; None where none can."""
        for sample in self._samples:
            try:
                request = self._made(sample, vision_of(setting).bounds)
            except SampleError:  # not counted: `at` gives the reason
                continue
            return FinalPrompt.of_ids(sample.sample_id, request.text, request.inputs["input_ids"][0].tolist())
        return None

    def at(self, setting: Setting) -> RequestWork:
        """A request at the setting; elements are the cache's alone, of the longest prompt seen."""
        shapes, reason = self._shapes_at(vision_of(setting).bounds)
        if not shapes:
            return RequestWork(None, None, None, reason)
        shapes = [setting.shape(shape) for shape in shapes]
        tokens = [shape.prompt_tokens for shape in shapes]
        if self._architecture is None:
            return RequestWork(statistics.fmean(tokens), None, None, reason)
        architecture = self._architecture.at(setting)
        flops = [architecture.request_flops(shape.size(self._limit)).stages for shape in shapes]
        elements = cache_elements(architecture.decoder.blocks, max(tokens) + self._limit)
        return RequestWork(statistics.fmean(tokens), setting.flops(mean_flops(flops)), elements, reason)

    def _shapes_at(self, crops: CropRange | None) -> tuple[list[RequestShape], str | None]:
        """Those of the samples that can be run, and why the first that cannot be run cannot."""
        if crops not in self._shapes:
            shapes, reasons = [], []
            for sample in self._samples:
                try:
                    shapes.append(self._made(sample, crops).shape)
                except SampleError as error:
                    reasons.append(str(error))
            self._shapes[crops] = shapes, next(iter(reasons), None)
        return self._shapes[crops]

    def _made(self, sample: Sample, crops: CropRange | None) -> PreparedRequest:
        family = self._requests.prompt_family
        prompt = prompt_for(self._task, sample, family)
        return self._requests.make(with_continuations(self._task, sample, family), prompt, crops)
