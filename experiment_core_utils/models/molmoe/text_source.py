"""Molmo's published layout as a backend of text experiments, which run its language model alone."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.models.common.checkpoint_files import loaded_weights
from experiment_core_utils.models.common.quantisation import own_method
from experiment_core_utils.models.molmoe.checkpoint.published import published_language_tensors
from experiment_core_utils.models.molmoe.checkpoint.published_config import (
    PUBLISHED_MODEL_TYPE,
    config_from_published,
    load_published_tokenizer,
)
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from experiment_core_utils.models.source import FoundFiles
from experiment_core_utils.models.text_model import LanguageModelSource


class PublishedMolmoe(LanguageModelSource):
    """A Molmo in its published layout; `config` is the native one."""

    def read_tokenizer(self, trust_remote_code: bool) -> Any:
        """None of the checkpoint's own code is run."""
        return load_published_tokenizer(self.folder, self.config)

    def read_model(self, folder: Path, config: TextConfig, **options: Any) -> PreTrainedModel:
        """Tensors of the vision part are not read."""
        model: PreTrainedModel = loaded_weights(folder, partial(self._assembled, folder), **options)
        model.name_or_path = str(folder)
        return model

    def _assembled(self, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
        tensors = published_language_tensors(folder, dtype)
        return MolmoeForCausalLM.from_pretrained(None, config=self.config, state_dict=tensors, dtype=dtype, **options)


def published_molmoe(config: TextConfig, files: FoundFiles) -> PublishedMolmoe | None:
    """The requested checkpoint where it has MolmoE's published layout; raises ConfigurationError as
    `config_from_published`.
    """
    if files.config.get("model_type") != PUBLISHED_MODEL_TYPE:
        return None
    native = config_from_published(files.config, files.folder)
    return PublishedMolmoe(config.model_name, files.folder, files.revision, native, own_method(files.config))
