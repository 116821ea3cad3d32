"""A MolmoE of random weights that is small enough for tests of the trainer."""

from pathlib import Path

import torch
from transformers import CLIPVisionConfig, OlmoeConfig, PreTrainedTokenizerFast

from experiment_core_utils.models.molmoe import MolmoeConfig, MolmoeForConditionalGeneration, MolmoeImageProcessor

TOKENIZER = PreTrainedTokenizerFast.from_pretrained(Path(__file__).parents[3] / "checkpoints" / "molmoe_tiny")


def tiny_processor() -> MolmoeImageProcessor:
    """Crops of 56 pixels: 4 x 4 patches, 2 x 2 features, tiles 28 pixels apart."""
    return MolmoeImageProcessor(crop_size=56, overlap_margins=(2, 0))


def tiny_model() -> MolmoeForConditionalGeneration:
    """Two vision blocks and three decoder blocks, the weights spread enough for every part to matter."""
    torch.manual_seed(0)
    ids = TOKENIZER.convert_tokens_to_ids
    text = OlmoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_experts=8, num_experts_per_tok=4, norm_topk_prob=False, max_position_embeddings=1024,
        pad_token_id=TOKENIZER.pad_token_id, eos_token_id=TOKENIZER.eos_token_id,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14,
    )  # fmt: skip
    config = MolmoeConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layers=(-1, -2),
        projector_hidden_size=32,
        bos_token_id=TOKENIZER.eos_token_id,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        image_start_token_id=ids("<im_start>"),
        image_end_token_id=ids("<im_end>"),
        image_patch_token_id=ids("<im_patch>"),
        image_column_token_id=ids("<im_col>"),
    )
    model = MolmoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
