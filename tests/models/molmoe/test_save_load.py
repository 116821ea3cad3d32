"""Saving and loading in the native layout."""

from pathlib import Path

import torch

from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from tests.models.molmoe.golden_model import golden_model, load_goldens
from tests.models.molmoe.test_goldens import CASES, request_for
from tests.same_floats import assert_same_floats


@torch.no_grad()
def logits_of(model: MolmoeForConditionalGeneration) -> torch.Tensor:
    return model(**request_for(CASES["small"], load_goldens()), logits_to_keep=1).logits


def test_a_saved_model_loads_to_the_same_logits(tmp_path: Path) -> None:
    golden_model().save_pretrained(tmp_path, max_shard_size="5MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = MolmoeForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert_same_floats(logits_of(loaded), logits_of(golden_model()))
    assert loaded.config.vision_feature_layers == (-2, -4)


def test_the_image_processor_keeps_its_sizes(tmp_path: Path) -> None:
    MolmoeImageProcessor(max_crops=6, overlap_margins=(2, 2)).save_pretrained(tmp_path)
    loaded = MolmoeImageProcessor.from_pretrained(tmp_path)
    assert (loaded.max_crops, loaded.overlap_margins, loaded.window_size) == (6, (2, 2), 336 - 56)
