"""MolmoE's decoder alone: the same answers as the whole model, from both layouts, and in padded batches."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.checkpoint.published import published_language_tensors
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from tests.models.molmoe.golden_model import golden_model, load_goldens, published_tensors
from tests.same_floats import assert_same_floats

PROMPTS = ((5, 9, 30), (7,), (40, 41, 42, 43, 44, 45), (11, 12))


@pytest.fixture(scope="module")
def language_model(tiny_checkpoint: Path) -> MolmoeForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint)


def test_the_auto_class_gives_the_decoder_without_the_vision_parts(
    language_model: MolmoeForCausalLM, tiny_checkpoint: Path
) -> None:
    assert isinstance(language_model, MolmoeForCausalLM)
    names = set(language_model.state_dict())
    assert names and all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
    whole = MolmoeForConditionalGeneration.from_pretrained(tiny_checkpoint)
    assert names == {name for name in whole.state_dict() if "vision_tower" not in name and "connector" not in name}
    ids = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        assert_same_floats(language_model(ids).logits, whole(ids).logits)
        assert_same_floats(language_model(ids, logits_to_keep=2).logits, whole(ids).logits[:, -2:])


def test_a_left_padded_batch_says_what_each_prompt_says_alone(language_model: MolmoeForCausalLM) -> None:
    longest = max(map(len, PROMPTS))
    pad = language_model.config.pad_token_id
    ids = torch.tensor([(pad,) * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([(0,) * (longest - len(prompt)) + (1,) * len(prompt) for prompt in PROMPTS])
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = language_model.generate(ids, attention_mask=mask, **options)[:, longest:]
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone = language_model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        assert row.tolist() == alone[0, len(prompt) :].tolist()
    assert len({tuple(row.tolist()) for row in together}) > 1


def test_the_published_layout_gives_the_same_logits(tmp_path: Path) -> None:
    spec = load_goldens().spec
    save_file(
        {name: each.contiguous() for name, each in published_tensors(spec).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(spec["config"]))
    tensors = published_language_tensors(tmp_path, torch.float32)
    loaded, found = MolmoeForCausalLM.from_pretrained(
        None, config=golden_model().config, state_dict=tensors, output_loading_info=True
    )
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([[5, 9, 30]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.eval()(ids).logits, golden_model()(ids).logits)
