"""What is known of a model before it is loaded, whatever serves it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.checkpoint_files import (
    check_files,
    download,
    model_digest,
    weights_digest,
    weights_stamp,
)
from experiment_core_utils.models.common.preferences import Preferences
from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes
from experiment_core_utils.models.hf.requests import DEFAULT_CHAT, ChatOptions
from experiment_core_utils.models.interface import Runnable, StagedModel
from experiment_core_utils.models.request_work import PlannedRequests
from experiment_core_utils.primitives.files import is_gguf
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.tasks.interface import PromptFamily, Task

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
# What variants of one model share.
_SIZES = ("kind of checkpoint", "taking of pictures", "number of blocks", "width", "number of experts")
MODEL_HINT = "give a folder with config.json and safetensors, a GGUF file, or a hub id such as allenai/MolmoE-1B-0924"


@dataclass(frozen=True)
class ModelSource(ABC):
    """A model that was found, before it is loaded; each family says in a class of its own how it is asked and loaded.

    Attributes:
        can_pause: whether the loaded model is a `PausableModel`.
        is_near_matmul: whether the model comes so near to the speed of a matrix product that this is a rough estimate
            of its own.
        may_lack_vision: whether it is not known before a request that the model takes pictures.
    """

    name: str  #: the path, hub id or name as given
    limits: KnobLimits  #: what can be set in it
    revision: str | None  #: commit of the hub, None for anything else

    can_pause = False
    is_near_matmul = False
    may_lack_vision = False

    @property
    @abstractmethod
    def model_type(self) -> str:
        """What transformers calls its architecture."""

    @property
    @abstractmethod
    def takes_pictures(self) -> bool:
        """Whether requests contain the samples' pictures."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether the model answers in a chat, and so in sentences."""

    @property
    @abstractmethod
    def prompt_family(self) -> PromptFamily:
        """How the model is asked."""

    @property
    @abstractmethod
    def chat_template_use(self) -> str:
        """Whether prompts go through a chat template: `applied`, `none` where there is none, or `off`."""

    @property
    def prompt_date(self) -> str | None:
        """The date that is today in every prompt; None where no chat template asks for it."""
        return None

    @property
    def no_energy_reason(self) -> str | None:
        """Why the energy of its requests cannot be measured here; None where it can."""
        return None

    @property
    def server_pids(self) -> Sequence[Sequence[int]] | None:
        """Of each server the processes of this machine that listen at its port, as far as they are seen now; None where
        no server runs the model.
        """
        return None

    @property
    def is_served(self) -> bool:
        """Whether it runs behind servers, in other processes than this one."""
        return bool(self.limits.variants)

    @property
    @abstractmethod
    def score_folder(self) -> Path | None:
        """Where scores of its blocks may lie beside it, a folder or a file; None where there is no such place."""

    @property
    @abstractmethod
    def weight_files(self) -> Sequence[tuple[str, int, int]]:
        """Name, size and time of change of each file of weights; none where they are out of sight."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it lies or runs."""

    @abstractmethod
    def digest(self) -> str:
        """What the model is known again by."""

    @abstractmethod
    def decoding_preferences(self) -> Preferences:
        """What the checkpoint prefers for decoding, and what of it is kept."""

    @abstractmethod
    def planned_requests(self, task: Task, sample_ids: Sequence[int], limit: int) -> PlannedRequests:
        """What requests with answers of at most `limit` tokens will be.

        Raises:
            ConfigurationError: none of the samples can be read.
        """

    def refuse_settings(self, settings: Sequence[Setting], task: Task, sample_ids: Sequence[int], limit: int) -> None:
        """Refuse, before anything is loaded, settings whose requests show that they cannot differ.

        Args:
            limit: of tokens of an answer.

        Raises:
            ConfigurationError: there are some.
        """
        return None

    def refuse_load(self, config: ModelConfig, device: torch.device) -> None:
        """Refuse what cannot be loaded as requested, before any weights are read; raises ConfigurationError."""
        return None

    @abstractmethod
    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> Runnable:
        """The model, ready to be measured.

        Args:
            is_profiled: whether PyTorch's profiler is used on it.
        """


@dataclass(frozen=True)
class CheckpointSource(ModelSource):
    """A checkpoint that was found, before any weight is read."""

    folder: Path  #: where the files lie; the file itself of a GGUF
    #: the native config of a Molmo, converted where the checkpoint has the published layout; else the one of
    #: transformers
    config: PreTrainedConfig

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)

    @property
    def score_folder(self) -> Path:
        return self.folder

    @property
    def weight_files(self) -> Sequence[tuple[str, int, int]]:
        return weights_stamp(self.folder)

    @property
    def place(self) -> str:
        return str(self.folder.resolve())

    def digest(self) -> str:
        """It is the `model_digest`, also for its error."""
        return model_digest(self.folder)

    @property
    def weights_sha256(self) -> str:
        """The digest of the bytes of all weights, wherever they lie."""
        return weights_digest(self.folder)

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """The id of each token of its tokenizer; raises ConfigurationError where that cannot be used."""

    def difference(self, variant: "CheckpointSource") -> str | None:
        """How another checkpoint is no variant of this model, which would answer the same requests with the same
        blocks; None where it is one.
        """
        for what, size, its in zip(_SIZES, self._sizes, variant._sizes, strict=True):
            if size != its:
                return f"its {what} is {its}, not {size}"
        own_ids, its_ids = self.vocabulary, variant.vocabulary
        changed = [token for token in own_ids.keys() | its_ids.keys() if own_ids.get(token) != its_ids.get(token)]
        count = counted(len(changed), "token")
        return f"{count} of the vocabulary have another id, such as {min(changed)!r}" if changed else None

    @property
    def _sizes(self) -> tuple[object, ...]:
        text = self.config.get_text_config(decoder=True)
        limits = self.limits
        return type(self).__name__, self.takes_pictures, limits.num_total_blocks, text.hidden_size, limits.num_experts

    @abstractmethod
    def memory_of(self, config: ModelConfig, device: torch.device) -> tuple[ModelSizes, Loading]:
        """Its sizes, and how it is to be loaded, for `memory_lines`."""

    @property
    def prepare_request(self) -> Callable[..., Any] | None:
        """What makes its requests without the loaded model; None where only that can."""
        return None

    @abstractmethod
    def load(self, config: ModelConfig, device: torch.device, *, is_profiled: bool = False) -> StagedModel:
        """The model on `device`, in the requested precision, ready to be measured.

        With `random_weights` the weights come from a fixed seed; config, tokenizer and image processor are read.

        Args:
            is_profiled: whether PyTorch's profiler is used on it.
        """


@dataclass(frozen=True)
class FoundFiles:
    """The files of a checkpoint, of which the config was read."""

    folder: Path  #: where they lie; the file itself of a GGUF
    revision: str | None  #: commit of the hub, None for a local folder
    config: Any  #: the content of `config.json`; empty for a GGUF file


@dataclass(frozen=True)
class RequestedModel:
    """A model as it was requested, of which no backend knows yet whether it serves it."""

    path: str
    cache_dir: Path | None = None
    chat: ChatOptions = DEFAULT_CHAT  #: what is requested of its chat template
    served: tuple[ServedModel, ...] = ()  #: the servers that answer for it; none for one that is loaded here
    limit_s: float | None = None  #: of the time of each request to these; None where none is set

    @cached_property
    def folder(self) -> Path:
        """Where its files lie, downloaded where it is a hub id; the file itself of a GGUF.

        Raises:
            ConfigurationError: no such folder or hub id.
        """
        folder = Path(self.path)
        if folder.is_dir() or is_gguf(folder):
            return folder
        return download(self.path, CHECKPOINT_FILES, MODEL_HINT, self.cache_dir)

    @cached_property
    def files(self) -> FoundFiles:
        """Its files; raises ConfigurationError as `folder`, or where there is no config that can be used."""
        revision = None if self.folder == Path(self.path) else self.folder.name
        return FoundFiles(self.folder, revision, check_files(self.folder))


class Backend(Protocol):
    """What serves models of one kind."""

    def __call__(self, requested: RequestedModel) -> ModelSource | None:
        """The requested model; None where another backend has to serve it.

        Raises:
            ConfigurationError: it is one of this kind, and cannot be measured.
        """


def eager_reason(config: ModelConfig, is_profiled: bool) -> str | None:
    """Why `--execution auto` leaves the modules in place, whatever the model: another flag is about them."""
    if config.execution != "auto":
        return None
    about_modules = (
        ("--use_profiler", is_profiled),
        ("--attn_implementation", config.attn_implementation is not None),
        ("--experts_implementation", config.experts_implementation is not None),
    )
    given = [flag for flag, is_given in about_modules if is_given]
    return f"only the model's modules follow {' and '.join(given)}" if given else None
