"""Models with random weights for benchmarks: MolmoE-1B's shape, and whatever config is given."""

from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, PreTrainedConfig, PreTrainedModel

from experiment_core_utils.config.parts import ExecutionMode
from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.requests import HFRequests
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration, MolmoeProcessor
from experiment_core_utils.models.molmoe.loader import molmoe_limits
from experiment_core_utils.models.molmoe.source import MolmoeCheckpoint
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL


def shape_config(shape: str) -> MolmoeConfig:
    """The config of `--shape`: `molmoe_1b`, or that of a folder."""
    if shape == "molmoe_1b":
        return MolmoeConfig(head_vocab_size=50304)
    if not (Path(shape) / "config.json").is_file():
        raise ConfigurationError(f"--shape is {shape}; give molmoe_1b, or a folder with a config.json")
    return MolmoeConfig.from_pretrained(shape)


def tiny_config(decoder: PreTrainedConfig) -> MolmoeConfig:
    """A MolmoE with this decoder, and a tower of two layers for pictures of 56 pixels."""
    tower = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    return MolmoeConfig(decoder, tower, vision_feature_layers=(-1, -2))


def shape_source(shape: str) -> MolmoeCheckpoint:
    """The shape as a checkpoint that was found, with the embedded model's tokenizer and pictures."""
    config = shape_config(shape)
    return MolmoeCheckpoint(shape, molmoe_limits(config), None, EMBEDDED_MODEL, config, is_published_layout=False)


def staged_model(
    model: PreTrainedModel,
    processor: MolmoeProcessor,
    mode: ExecutionMode,
    graph_capturer: GraphCapturer | None = None,
) -> StagedModel:
    """A MolmoE, or a text model of transformers, as it is measured; answers of the latter do not end.

    Args:
        graph_capturer: of a text model; None for CUDA graphs.
    """
    if isinstance(model, MolmoeForConditionalGeneration):
        return MolmoeStagedModel("benchmark", model, processor, mode)
    requests = HFRequests(processor.tokenizer, model.config, "benchmark")
    found = TransformersModel("benchmark", model, requests, mode, graph_capturer)
    model.generation_config.eos_token_id = None
    found.eos_token_ids = frozenset()
    return found


def random_request(config: Any, tokens: int, crops: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Random inputs of so many prompt tokens, the same ones each time; features have places after the first token.

    Args:
        config: of a MolmoE, or of a text model, which takes no crops.
    """
    draws = torch.Generator().manual_seed(0)
    ids = getattr(config, "head_vocab_size", None) or config.vocab_size
    inputs = {"input_ids": torch.randint(0, ids, (1, tokens), generator=draws).to(device)}
    if crops:
        side, features = config.vision_config.image_size, crops * config.features_per_crop
        places = torch.arange(1, features + 1)
        places[places >= tokens] = -100
        pixels = torch.randn(1, crops, 3, side, side, generator=draws)
        inputs["pixel_values"] = pixels.to(device, dtype)
        inputs["image_masks"] = torch.ones(1, crops, config.patches_per_side**2, device=device, dtype=dtype)
        inputs["image_input_idx"] = places.view(1, crops, -1).to(device)
    return inputs
