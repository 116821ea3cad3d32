"""Checkpoints of transformers as a backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.models.common.checkpoint_files import refuse_hub_code
from experiment_core_utils.models.common.preferences import Preferences, preferences_in
from experiment_core_utils.models.common.quantisation import RequestedQuantisation
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes
from experiment_core_utils.models.hf.adapter import TransformersModel, no_inductor
from experiment_core_utils.models.hf.loader import (
    HFSource,
    LoadOptions,
    find_hf_model,
    limits_of,
    load_hf_model,
    memory_of,
    refuse_as_loaded,
    refuse_load,
)
from experiment_core_utils.models.hf.request_work import TransformersWork
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.request_work import PlannedRequests
from experiment_core_utils.models.source import CheckpointSource, RequestedModel, eager_reason
from experiment_core_utils.primitives.device import choose_dtype
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import compatible_attentions
from experiment_core_utils.tasks.interface import Task


@dataclass(frozen=True)
class TransformersCheckpoint(CheckpointSource):
    """A model of transformers."""

    hf: HFSource

    takes_pictures = property(attrgetter("hf.takes_pictures"))
    prompt_family = property(attrgetter("hf.requests.prompt_family"))
    chat_template_use = property(attrgetter("hf.requests.chat_template_use"))
    prompt_date = property(attrgetter("hf.requests.prompt_date"))
    prepare_request = property(attrgetter("hf.requests.make"))

    @property
    def has_chat_template(self) -> bool:
        return self.hf.requests.chat_template is not None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        ids: dict[str, int] = self.hf.requests.tokenizer.get_vocab()
        return ids

    def decoding_preferences(self) -> Preferences:
        return preferences_in(self.folder, self.hf.requests.tokenizer, self.name)

    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        return TransformersWork(self.hf, task, sample_ids, limit)

    def memory_of(self, config: ModelConfig, device: torch.device) -> tuple[ModelSizes, Loading]:
        dtype = choose_dtype(config.precision, device)
        return memory_of(self.hf, dtype, device, config.quantization, config.device_map, config.tensor_parallel or 1)

    def _load_options(self, config: ModelConfig, device: torch.device) -> LoadOptions:
        return LoadOptions(
            choose_dtype(config.precision, device),
            device,
            config.attn_implementation,
            config.experts_implementation,
            RequestedQuantisation.of(config),
            config.device_map,
            config.tensor_parallel or 1,
        )

    def refuse_load(self, config: ModelConfig, device: torch.device) -> None:
        compatible = compatible_attentions(self.hf.auto_class, self.hf.config)
        refuse_hub_code(config.attn_implementation, "--attn_implementation", compatible)
        if config.execution == "inductor" and device.type != "cuda":
            raise ConfigurationError(no_inductor(self.name, "it needs a GPU"))
        refuse_load(self.hf, self._load_options(config, device), config.random_weights)

    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> StagedModel:
        """It raises ConfigurationError as `refuse_load`, `load_hf_model` and `refuse_as_loaded` do."""
        self.refuse_load(config, device)
        model = load_hf_model(self.hf, self._load_options(config, device), config.random_weights)
        staged = TransformersModel(
            self.name, model, self.hf.requests, config.execution, eager_reason=eager_reason(config, is_profiled)
        )
        refuse_as_loaded(self.hf, self.limits, model, staged.knobs)
        return staged


def transformers_checkpoint(requested: RequestedModel) -> TransformersCheckpoint:
    """The requested model; raises ConfigurationError as `find_hf_model` and `limits_of` do."""
    files = requested.files
    found = find_hf_model(requested.path, files.folder, files.config, requested.chat)
    return TransformersCheckpoint(requested.path, limits_of(found), files.revision, files.folder, found.config, found)
