"""Saving and loading: the native layout, the published layout, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.published_checkpoint import load_published_checkpoint
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.molmoe.golden_model import golden_model, load_goldens, published_tensors
from tests.models.molmoe.test_goldens import CASES, request_for


@torch.no_grad()
def logits_of(model: MolmoeForConditionalGeneration) -> torch.Tensor:
    return model(**request_for(CASES["small"], load_goldens()), logits_to_keep=1).logits


def test_a_saved_model_loads_to_the_same_logits(tmp_path: Path) -> None:
    golden_model().save_pretrained(tmp_path, max_shard_size="5MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = MolmoeForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(loaded), logits_of(golden_model()))
    assert loaded.config.vision_feature_layers == (-2, -4)


def test_the_published_layout_loads_strictly(tmp_path: Path) -> None:
    spec = load_goldens().spec
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(spec).items()}
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(spec["config"]))
    loaded = load_published_checkpoint(tmp_path, torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(golden_model()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop", "missing|do not fit|has 15"),
        ("rename", "unknown names"),
    ],
)
@pytest.mark.parametrize(
    "name", ["model.transformer.ln_f.weight", "model.transformer.blocks.1.mlp.experts.3.up_proj.weight"]
)
def test_a_tensor_that_is_not_as_it_should_be_is_named(tmp_path: Path, change: str, message: str, name: str) -> None:
    spec = load_goldens().spec
    tensors = {key: tensor.contiguous() for key, tensor in published_tensors(spec).items()}
    removed = tensors.pop(name)
    if change == "rename":
        tensors[name + "_other"] = removed
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(spec["config"]))
    with pytest.raises(ConfigurationError, match=message):
        load_published_checkpoint(tmp_path, torch.float32)


def test_the_image_processor_keeps_its_sizes(tmp_path: Path) -> None:
    MolmoeImageProcessor(max_crops=6, overlap_margins=(2, 2)).save_pretrained(tmp_path)
    loaded = MolmoeImageProcessor.from_pretrained(tmp_path)
    assert (loaded.max_crops, loaded.overlap_margins, loaded.window_size) == (6, (2, 2), 336 - 56)
