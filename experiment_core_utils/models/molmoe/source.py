"""Molmo checkpoints as a backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.models.common.checkpoint_files import refuse_hub_code
from experiment_core_utils.models.common.preferences import Preferences, preferences_in
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes
from experiment_core_utils.models.molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.checkpoint.published_config import PUBLISHED_MODEL_TYPE
from experiment_core_utils.models.molmoe.loader import (
    find_molmoe_config,
    load_molmoe,
    load_processor,
    memory_of,
    molmoe_limits,
)
from experiment_core_utils.models.molmoe.request_work import MolmoeWork
from experiment_core_utils.models.molmoe.staged_model import refuse_inductor
from experiment_core_utils.models.pausable import PausableModel
from experiment_core_utils.models.request_work import PlannedRequests
from experiment_core_utils.models.source import CheckpointSource, RequestedModel, eager_reason
from experiment_core_utils.primitives.device import choose_dtype
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import Task


@dataclass(frozen=True)
class MolmoeCheckpoint(CheckpointSource):
    """A Molmo, which has its own form of prompts and answers in short."""

    is_published_layout: bool  #: tensors have the published Hugging Face names

    is_near_matmul = True
    takes_pictures = True
    has_chat_template = False
    chat_template_use = "none"
    prompt_family = "molmo"

    @property
    def can_pause(self) -> bool:  # type: ignore[override]
        """The controller, which pauses, chooses experts."""
        return self.limits.num_experts is not None

    @property
    def model_type(self) -> str:
        return str(self.config.model_type) if self.can_pause else PUBLISHED_MODEL_TYPE

    @property
    def vocabulary(self) -> Mapping[str, int]:
        ids: dict[str, int] = load_processor(self).tokenizer.get_vocab()
        return ids

    def decoding_preferences(self) -> Preferences:
        """None of them is kept."""
        return preferences_in(self.folder, None, self.name).nothing_kept()

    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        return MolmoeWork(self, task, sample_ids, limit)

    def memory_of(self, config: ModelConfig, device: torch.device) -> tuple[ModelSizes, Loading]:
        return memory_of(self, choose_dtype(config.precision, device), device)

    def refuse_load(self, config: ModelConfig, device: torch.device) -> None:
        refuse_hub_code(config.attn_implementation, "--attn_implementation")
        refuse_inductor(config.execution)
        if config.quantization != "none":
            raise ConfigurationError(
                f"--quantization {config.quantization} is for models of transformers; Molmo runs in full precision "
                f"(engines take its weights as they are, and MolmoE's experts, most of them, are not the linear layers "
                f"that bitsandbytes quantises)"
            )

    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> PausableModel:
        """It raises ConfigurationError as `refuse_load` and `load_molmoe` do."""
        self.refuse_load(config, device)
        dtype = choose_dtype(config.precision, device)
        return load_molmoe(self, config, dtype, device, eager_reason(config, is_profiled))


def molmoe_checkpoint(requested: RequestedModel) -> MolmoeCheckpoint | None:
    """The requested model where its config is a Molmo's, in the native or the published layout.

    Raises:
        ConfigurationError: its config cannot be used, or anything is requested of a chat template.
    """
    files = requested.files
    model_type = files.config.get("model_type")
    if model_type not in (PUBLISHED_MODEL_TYPE, MolmoeConfig.model_type):
        return None
    config = find_molmoe_config(files.folder, files.config)
    requested.chat.refuse_without_template(requested.path)
    is_published = model_type == PUBLISHED_MODEL_TYPE
    return MolmoeCheckpoint(requested.path, molmoe_limits(config), files.revision, files.folder, config, is_published)
