"""Small Molmo models as their folders on the hub are laid out: files, names of tensors, ids of special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from tests.models.molmoe.golden_model import load_goldens, published_tensors

SPECIAL_IDS = {
    "<|padding|>": 1,
    "<|endoftext|>": 50279,
    "<im_start>": 50280,
    "<im_end>": 50281,
    "<im_patch>": 50282,
    "<im_col>": 50283,
    "<|image|>": 50284,
}
SHARDS = 3
INDEX = "model.safetensors.index.json"


def golden_tensors() -> dict[str, torch.Tensor]:
    """The tensors of the goldens under their published names, each on its own."""
    return {name: tensor.contiguous() for name, tensor in published_tensors(load_goldens().spec).items()}


def write_published_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """Config, sharded weights with their index, and tokenizer; `config` changes keys of the goldens' config."""
    content = load_goldens().spec["config"] | config
    return write_folder(folder, content, golden_tensors() if tensors is None else tensors, SPECIAL_IDS)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], special_ids: Mapping[str, int]
) -> Path:
    """The folder with its files; `auto_map` is added to the config."""
    folder.mkdir(exist_ok=True)
    # The code that the hub's config names must never be fetched.
    code = {"AutoConfig": "config_molmo.MolmoConfig", "AutoModelForCausalLM": "modeling_molmo.MolmoForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code}))
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(list(tensors.items())[shard::SHARDS])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    write_published_tokenizer(folder, special_ids)
    return folder


def write_published_tokenizer(folder: Path, special_ids: Mapping[str, int] = SPECIAL_IDS) -> None:
    """The embedded model's vocabulary with special tokens at their ids; `added_tokens.json` is of another Molmo, as it
    is beside MolmoE's published tokenizer.
    """
    content = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for added in content["added_tokens"]:
        vocabulary.pop(added["content"], None)
        added["content"] = added["content"].replace("<|pad|>", "<|padding|>")
        added["id"] = special_ids[added["content"]]
        vocabulary[added["content"]] = added["id"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(added.pop("id")): added for added in content["added_tokens"]},
        "additional_special_tokens": [token for token in SPECIAL_IDS if token.startswith(("<im", "<|im"))],
        "auto_map": {"AutoProcessor": "preprocessing_molmo.MolmoProcessor"},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|padding|>",
        "tokenizer_class": "GPTNeoXTokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stale = {token: index + 50000 for token, index in SPECIAL_IDS.items() if index >= 50280}
    (folder / "added_tokens.json").write_text(json.dumps(stale))
