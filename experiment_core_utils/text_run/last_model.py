"""The language model that was loaded last, kept for text experiments that share it."""

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.primitives.device import release_cached_memory

# What decides which model is in memory; experiments that share it share the model.
_OF_THE_MODEL = frozenset(
    {
        "model_name",
        "revision",
        "allow_pickled_weights",
        "trust_remote_code",
        "fp_precision",
        "quantization_config",
        "device_map",
        "attn_implementation",
    }
)


@dataclass
class LastModel:
    """The language model and tokenizer that were loaded last, for text experiments that share them."""

    accelerator: Accelerator
    _key: str | None = None
    _loaded: tuple[Any, Any] | None = None

    def get(self, config: TextConfig) -> tuple[Any, Any]:
        """Model and tokenizer, loaded where those in memory are others; raises what `load_model_tokenizer` does."""
        key = config.model_dump_json(include=set(_OF_THE_MODEL))
        if self._loaded is None or key != self._key:
            self.drop()
            model, tokenizer = load_model_tokenizer(config)
            if config.mixed_precision != "no":
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
            self._key, self._loaded = key, (model, tokenizer)
        return self._loaded

    def drop(self) -> None:
        """Forget the model, so that its memory is free for another."""
        self._key, self._loaded = None, None
        release_cached_memory(self.accelerator.device)
