"""In: a configuration; out: its model on its device: staged for the profiler, or causal with a tokenizer for text.

Before any weight is read, `find_model` returns the limits that a config sets to the knobs.
"""

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.a_distributed import leave_process_group
from experiment_core_utils.config.parts import only_model_in, say_only_model
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.config.text import validated
from experiment_core_utils.knobs.loading import Loading, config_of_loading, loading_name, loadings_of, variant_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.common.quantisation import supported_types
from experiment_core_utils.models.common.side_by_side import ModelsInTurn, ModelsSideBySide
from experiment_core_utils.models.endpoint.source import endpoint_source
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.requests import DEFAULT_CHAT, ChatOptions
from experiment_core_utils.models.hf.source import transformers_checkpoint
from experiment_core_utils.models.hf.tensor_parallel import LOAD, LeadingModel, follow
from experiment_core_utils.models.interface import Runnable, Switchable
from experiment_core_utils.models.molmoe.source import molmoe_checkpoint
from experiment_core_utils.models.source import Backend, CheckpointSource, ModelSource, RequestedModel
from experiment_core_utils.models.text_model import load_language_model, load_tokenizer, validate_loadable
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.in_step import Crew
from experiment_core_utils.primitives.progress import announced
from experiment_core_utils.records.text import QuantSupport

# What serves models, in the order in which they are asked; the last one takes every folder.
BACKENDS: list[Backend] = [endpoint_source, molmoe_checkpoint, transformers_checkpoint]


def register_backend(backend: Backend) -> None:
    """Let a backend serve models of profiling runs, but those behind `--endpoint`; it is asked before those that are
    registered already.

    The `load` of its `ModelSource` returns a `Runnable`, which may also be `Stepwise`, `Inspectable` or `Switchable`.
    No flag of the command line registers one: a script of your own does, and runs `kp.profile`, or `main` of
    `knob_profiler.__main__` with the arguments of `knobprof`.

    ```python
    import knob_profiler as kp
    from experiment_core_utils.b_model_loader import register_backend
    from tests.scripted.opaque_model import opaque_source  # yours

    register_backend(opaque_source)
    results = kp.profile("opaque", top_k=[1, 2], samples=3, output_dir="results/opaque")
    results.report()
    ```
    """
    BACKENDS.insert(0, backend)


def find_model(path: str, cache_dir: Path | None = None, chat: ChatOptions = DEFAULT_CHAT) -> CheckpointSource:
    """Find a checkpoint and read its config, no weights.

    Args:
        chat: what is requested of its chat template.

    Raises:
        ConfigurationError: no such folder or hub id, no config in it, or an architecture that is not supported.
    """
    return _checkpoint(_found(RequestedModel(path, cache_dir, chat)))


def _checkpoint(found: ModelSource) -> CheckpointSource:
    if not isinstance(found, CheckpointSource):
        raise ConfigurationError(
            f"this needs the weights of {found.name} in this process, and its backend does not show them; give the "
            "folder of a checkpoint as --model_path, and no --endpoint"
        )
    return found


def _found(requested: RequestedModel) -> ModelSource:
    asked = [endpoint_source] if requested.served else BACKENDS
    found = next(source for backend in asked if (source := backend(requested)) is not None)
    if isinstance(found, CheckpointSource):
        say_only_model(requested.path)
    return found


def find_requested_model(config: ProfilingConfig) -> ModelSource:
    """The model of a profiling run, to be asked as requested; raises what `find_model` does."""
    chat = ChatOptions(config.task.system_prompt, config.task.no_chat_template)
    limit_s = config.measuring.sample_timeout
    return _found(RequestedModel(config.model.model_path, config.task.hf_cache_dir, chat, config.model.served, limit_s))


def find_variants(config: ProfilingConfig, source: ModelSource) -> dict[str, CheckpointSource]:
    """The other checkpoints of the model of a profiling run, by name.

    Raises:
        ConfigurationError: as `find_model`; or one of them is another model, see `CheckpointSource.difference`.
    """
    chat = ChatOptions(config.task.system_prompt, config.task.no_chat_template)
    paths = config.knobs.variant_paths.items()
    checkpoints = {name: find_model(only_model_in(path), config.task.hf_cache_dir, chat) for name, path in paths}
    for name, variant in checkpoints.items():
        if (difference := _checkpoint(source).difference(variant)) is not None:
            raise ConfigurationError(
                f"--variant {name}={variant.name} is another model than {source.name}: {difference}; measure it in a "
                "run of its own, and compare the two"
            )
    return checkpoints


def find_requested_checkpoint(config: ProfilingConfig) -> CheckpointSource:
    """The same for what needs the model itself in this process; raises ConfigurationError where another serves it."""
    return _checkpoint(find_requested_model(config))


def detect_supported_quant_types() -> QuantSupport:
    """What this machine can quantise while loading, on the GPU where it has one, else on the CPU.

    4 bits are bitsandbytes' "nf4". 8 bits are its "int8"; where it is missing and the GPU has them (compute capability
    8.9 or more, with the package kernels) they are "fp8", which `fp_precision: float8` asks for. Never raises.
    """
    return supported_types(choose_device("auto"))


def load_model_tokenizer(configs: Any) -> tuple[PreTrainedModel, Any]:
    """The causal language model of a text experiment in evaluation mode on its device, and its tokenizer.

    Of a MolmoE checkpoint it is the language model alone, without vision tower and connector. The tokenizer pads on
    the left with its end-of-sequence token.

    Args:
        configs: in any form that `config.text.validated` takes.

    Raises:
        ConfigurationError: see `validate_loadable`; or weights are not there, or do not fit the config one to one.
        OutOfMemory: the model does not fit the device, or with `device_map` all GPUs together.
    """
    source = validate_loadable(validated(configs))
    tokenizer = load_tokenizer(source)
    model = load_language_model(source)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


class ModelWrapper(nn.Module):
    """A Hugging Face model as tools expect one that count operations: `forward(input_ids)` gives logits [B, T, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] ids, all of them real -> [B, T, V]; no cache is made."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def follow_run(config: ProfilingConfig, crew: Crew) -> None:
    """Load the model when the first process does, and make its calls until the run ends."""
    atexit.register(leave_process_group)
    if crew.hear() != LOAD:
        return
    source = find_requested_checkpoint(config)
    device = choose_device(config.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    set_cpu_threads(config.machine.num_threads, crew.size)
    model = source.load(config.model, device)
    assert isinstance(model, TransformersModel)
    follow(model, crew)


def load_requested(
    config: ProfilingConfig,
    source: ModelSource,
    settings: Sequence[Setting],
    device: torch.device,
    crew: Crew | None,
    variants: Mapping[str, ModelSource] = MappingProxyType({}),
    in_turn: bool = False,
    *,
    shown: bool,
    modules_reason: str | None = None,
) -> Runnable:
    """The model of a profiling run on its device, or behind its server; processes of `crew` load their parts of it.

    Where settings turn a loading knob, there is a model for each of its values, beside the one of the run's flags.

    Args:
        variants: other checkpoints of the model, by the names that settings have for them.
        in_turn: whether one model is in memory at a time, and not all of them.
        modules_reason: why its modules run it where the way was not requested; None for the fastest way.
    """
    loadings = [()] if source.is_served else loadings_of(settings)
    if crew is not None:
        crew.tell(LOAD)
    is_profiled = config.measuring.profiler is not None

    def load(loading: Loading) -> Any:
        of_loading = variants.get(variant_of(loading), source)
        asked = config.model.model_copy(update=config_of_loading(loading))
        name = source.name if len(loadings) == 1 else f"{of_loading.name} ({loading_name(loading)})"
        work = f"connecting to {source.name} at {source.place}"
        with announced(work if source.is_served else f"loading {name} on {device}", shown=shown):
            model = of_loading.load(asked, device, is_profiled=is_profiled)
        while modules_reason is not None and isinstance(model, Switchable) and model.has_next_way:
            model.run_next_way(modules_reason)
        return model

    if in_turn:
        return cast(Runnable, ModelsInTurn(load, _checkpoint(source).prepare_request))
    models = {loading: load(loading) for loading in loadings}
    if len(models) > 1:
        return cast(Runnable, ModelsSideBySide(models))
    model: Runnable = models[()]
    if crew is None:
        return model
    assert isinstance(model, TransformersModel)
    return cast(Runnable, LeadingModel(model, crew))
