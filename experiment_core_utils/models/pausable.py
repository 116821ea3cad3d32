"""The interface of models whose prefill can pause after a block, so that the rest of a setting is chosen inside it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from experiment_core_utils.engines.paused_runner import PausedPrefillShape, PausedPrefillStages, TracedPrefill
from experiment_core_utils.models.interface import StagedModel


class PromptTracer(Protocol):
    """Runs the first blocks over prompts that begin alike."""

    @property
    def reason(self) -> str | None:
        """Why modules run though there are engines; None where engines run, or there are none."""

    def trace(
        self, shared: torch.Tensor, features: Any, texts: Sequence[torch.Tensor], blocks: int, rows: torch.Tensor
    ) -> list[TracedPrefill]:
        """States after each of the first `blocks` blocks, of each text [S] after the shared ids [1, T] and of each of
        the rows [R, H] after that.
        """


class PausableModel(StagedModel, Protocol):
    """A `StagedModel` that can pause in its prefill."""

    @property
    def split(self) -> PausedPrefillStages:
        """The stages with a paused prefill, run by the same modules or engines as the whole stages."""

    @property
    def prompt_traces(self) -> PromptTracer:
        """Traces of the first blocks, by the same modules or engines as the whole requests."""

    @property
    def input_embeddings(self) -> torch.Tensor:
        """Token embeddings [V, H], where the model is."""

    @property
    def host_embeddings(self) -> np.ndarray:
        """Token embeddings [V, H] as float32 on the host."""

    def warm_up_paused_prefill(self, shapes: Sequence[PausedPrefillShape]) -> None:
        """Prepare everything that such requests need; raises EngineRefused where engines cannot run them."""

    def prompt_ids(self, prompt: str) -> torch.Tensor:
        """Ids [T] of the prompt's text on the host, without special tokens."""

    def check_prompt(self, prompt: str) -> None:
        """Raises SampleError for a text that the model cannot be asked."""

    def refuse_longer_prompt(self, sample_id: int, tokens: int) -> None:
        """Raises SampleError for a prompt that is longer than the model's context."""


def can_pause(model: StagedModel) -> TypeGuard[PausableModel]:
    """Whether a model is a `PausableModel`."""
    return hasattr(type(model), "warm_up_paused_prefill")
