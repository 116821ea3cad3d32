"""MolmoE's published layout as a backend of text experiments."""

from pathlib import Path

import torch

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.text import validated
from experiment_core_utils.models.molmoe.text_source import published_molmoe
from experiment_core_utils.models.source import FoundFiles
from tests.models.molmoe.golden_model import golden_model
from tests.models.molmoe.published_folder import write_published_folder
from tests.same_floats import assert_same_floats


def test_a_text_experiment_loads_it_without_running_code_of_the_hub(tmp_path: Path) -> None:
    published = write_published_folder(tmp_path)
    model, tokenizer = load_model_tokenizer({"model_name": str(published), "device": "cpu", "fp_precision": "float32"})
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (50279, "left")
    ids = torch.tensor([[5, 9, 30]])
    with torch.inference_mode():
        assert_same_floats(model(ids).logits, golden_model()(ids).logits)


def test_other_layouts_are_left_to_other_backends(tmp_path: Path) -> None:
    for content in ({"model_type": "llama"}, {"model_type": "molmoe"}, {}):
        assert published_molmoe(validated({"device": "cpu"}), FoundFiles(tmp_path, None, content)) is None
