"""The private names of torch and transformers are there, in the releases that they were tried with."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from experiment_core_utils.primitives.private_apis import TRIED_WITH

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(
    r"torch\._C\b|_optimize_model_for_decode|_can_set_experts_implementation|\._experts_implementation"
    r"|_prepare_position_ids_for|_update_model_kwargs_for|_supports_default_dynamic_cache|_apply_gate|\._from_config"
    r"|cumulative_length|_model_mapping|_compatible_flash|\b_pytree\b|\._attn_implementation\b"
    r"|_heterogeneity_spec|per_layer_overrides|_get_default_group|_get_default_store"
    r"|\btorch\._[a-z]|\b_modules\b|\b_parameters\b"
)


# By who has them; without CUDA torch has none of its allocator's.
NAMES: dict[Any, tuple[str, ...]] = {
    PreTrainedModel: ("_from_config", "_can_set_experts_implementation", "_compatible_flash_implementations"),
    GenerationMixin: (
        *("_optimize_model_for_decode", "_prepare_position_ids_for_generation"),
        *("_update_model_kwargs_for_generation", "_supports_default_dynamic_cache"),
    ),
    PreTrainedConfig: ("_attn_implementation", "_experts_implementation"),
    AutoModelForCausalLM: ("_model_mapping",),
    OlmoeExperts: ("_apply_gate",),
    StaticLayer(max_cache_len=1): ("cumulative_length",),
    nn.Module(): ("_modules", "_parameters"),
    distributed.distributed_c10d: ("_get_default_group", "_get_default_store"),
}
if torch.version.cuda is not None:
    NAMES[torch._C] = ("_cuda_endAllocateToPool", "_cuda_releasePool")


def test_every_private_name_is_there() -> None:
    missing = [name for owner, names in NAMES.items() for name in names if not hasattr(owner, name)]
    installed = {name: ".".join(version(name).split(".")[:2]) for name in TRIED_WITH}
    tried = "; ".join(f"{name} {', '.join(releases)}" for name, releases in TRIED_WITH.items())
    assert not missing, f"installed {installed} lacks {', '.join(missing)}; tried with {tried}"
    assert all(installed[name] in releases for name, releases in TRIED_WITH.items()), (
        f"{installed} was not tried: run the tests of models/ and add it to TRIED_WITH ({tried})"
    )


def test_no_other_file_names_them() -> None:
    folders = (ROOT / "experiment_core_utils", ROOT / "experiments")
    files = [path for folder in folders for path in folder.rglob("*.py") if path.name != "private_apis.py"]
    named = [path.name for path in files if PRIVATE.search(path.read_text())]
    assert named == []
