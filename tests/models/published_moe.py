"""A checkpoint of Qwen3-MoE in the layout that is published: bfloat16, one tensor for each expert, one file for each
block. Its weights are made block by block, so that it may be larger than any memory.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from experiment_core_utils.models.common.checkpoint_files import INDEX_FILE
from tests.models.tiny_checkpoints import write_checkpoint

WRITERS = 8
Shapes = dict[str, torch.Size]


def num_parameters(config: PreTrainedConfig) -> int:
    """Of the whole model, none of whose weights are tied."""
    return sum(shape.numel() for shape in _shapes(config).values())


def write_published_moe(folder: Path, config: PreTrainedConfig, device: torch.device) -> Path:
    """A folder with random weights, made on `device`, and the tokenizer of tiny checkpoints; gives the folder.

    Rows of the head beyond that tokenizer's bytes are zero: bytes are answered, up to the limit.
    """
    write_checkpoint("olmoe", folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config.update({**marks, "dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"]})
    config.save_pretrained(folder)
    GenerationConfig(**marks).save_pretrained(folder)
    files: dict[str, Shapes] = {}
    for name, shape in _shapes(config).items():
        parts = name.split(".")
        key = f"block_{parts[2]}" if parts[1] == "layers" else parts[-2]
        files.setdefault(f"model-{key}.safetensors", {}).update(_as_published(name, shape))

    def write(numbered: tuple[int, str]) -> None:
        generator = torch.Generator(device).manual_seed(numbered[0])
        tensors = {}
        for name, shape in files[numbered[1]].items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensor.normal_(float(len(shape) == 1), config.initializer_range, generator=generator)
            if name == "lm_head.weight":
                tensor[min(marks.values()) :] = 0
            tensors[name] = tensor.cpu()
        save_file(tensors, folder / numbered[1], metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, enumerate(files)))
    places = {name: file for file, shapes in files.items() for name in shapes}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _shapes(config: PreTrainedConfig) -> Shapes:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: weight.shape for name, weight in model.named_parameters()}


def _as_published(name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Size]]:
    """The tensors of the files that a weight of the model consists of."""
    *_, last = name.split(".")
    of_experts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if len(shape) != 3:
        yield name, shape
        return
    experts, rows, columns = shape
    for expert in range(experts):
        for part in of_experts[last]:
            own = torch.Size((rows // len(of_experts[last]), columns))
            yield f"{name.removesuffix(last)}{expert}.{part}.weight", own
