"""Small dense Molmo models in the layout of allenai/Molmo-7B-D-0924 and Molmo-7B-O-0924, with hand-made shapes.

The keys of the configs are the published ones; only `vision_backbone` and `vit_layers`, which the published code has as
constants, are added to make the tower small.
"""

import zlib
from pathlib import Path
from typing import Any

import torch

from tests.models.molmoe.published_folder import write_folder

_BOTH = {
    "architectures": ["MolmoForCausalLM"],
    "clip_qkv": None,
    "hidden_size": 128,
    "initializer_range": 0.02,
    "layer_norm_type": "rms",
    "layer_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "model_type": "molmo",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_position_ids": True,
    "weight_tying": False,
    "vision_backbone": {
        "image_default_input_size": [336, 336],
        "image_emb_dim": 64,
        "image_mlp_activations": "quick_gelu",
        "image_mlp_dim": 80,
        "image_norm_eps": 1e-5,
        "image_num_heads": 2,
        "image_num_layers": 4,
        "image_patch_size": 14,
    },
    "vit_layers": [-2, -4],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "7B-D": {
        **_BOTH, "attention_layer_norm": False, "embedding_size": 512, "intermediate_size": 2 * 88,
        "norm_after": False, "num_key_value_heads": 2, "qkv_bias": True, "rope_theta": 1e6, "vocab_size": 512,
    },
    "7B-O": {
        **_BOTH, "attention_layer_norm": True, "embedding_size": 544, "intermediate_size": 2 * 72,
        "norm_after": True, "num_key_value_heads": None, "qkv_bias": False, "rope_theta": 5e5, "vocab_size": 519,
    },
}  # fmt: skip
# Behind the embedding's own rows in the one, among them in the other, as in the published tokenizers.
SPECIAL_IDS = {
    "7B-D": {"<im_start>": 512, "<im_end>": 513, "<im_patch>": 514, "<im_col>": 515, "<|image|>": 516},
    "7B-O": {"<im_start>": 520, "<im_end>": 522, "<im_patch>": 521, "<im_col>": 523, "<|image|>": 524},
}
for _ids in SPECIAL_IDS.values():
    _ids.update({"<|endoftext|>": 0, "<|padding|>": 1})


def dense_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a published dense checkpoint."""
    width, rows, inner = config["hidden_size"], config["embedding_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv = width // heads * (config["num_key_value_heads"] or heads)
    shapes: dict[str, tuple[int, ...]] = {
        "wte.embedding": (rows, width), "wte.new_embedding": (128, width), "ln_f.weight": (width,),
        "ff_out.weight": (rows, width),
    }  # fmt: skip
    for block in range(config["num_hidden_layers"]):
        of_block: dict[str, tuple[int, ...]] = {
            "att_proj.weight": (width + 2 * kv, width), "attn_out.weight": (width, width),
            "ff_proj.weight": (inner, width), "ff_out.weight": (width, inner // 2),
            "attn_norm.weight": (width,), "ff_norm.weight": (width,),
        }  # fmt: skip
        if config["qkv_bias"]:
            of_block["att_proj.bias"] = (width + 2 * kv,)
        if config["attention_layer_norm"]:
            of_block |= {"q_norm.weight": (width,), "k_norm.weight": (kv,)}
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in of_block.items()}
    vision = _vision_shapes(config["vision_backbone"], len(config["vit_layers"]), width, inner // 2)
    return {f"model.transformer.{name}": shape for name, shape in shapes.items()} | {
        f"model.vision_backbone.{name}": shape for name, shape in vision.items()
    }


def _vision_shapes(vision: dict[str, Any], layers: int, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    own, mlp = vision["image_emb_dim"], vision["image_mlp_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "pad_embed": (2, layers * own),
        "image_vit.class_embedding": (own,), "image_vit.positional_embedding": (577, own),
        "image_vit.patch_embedding.weight": (own, 588),
        "image_projector.w1.weight": (inner, own), "image_projector.w3.weight": (inner, own),
        "image_projector.w2.weight": (width, inner),
    }  # fmt: skip
    with_bias: dict[str, tuple[int, ...]] = {"image_vit.pre_ln": (own,), "image_pooling_2d.wo": (own, own)}
    with_bias |= {f"image_pooling_2d.w{letter}": (own, layers * own) for letter in "qkv"}
    for block in range(vision["image_num_layers"]):
        at = f"image_vit.transformer.resblocks.{block}."
        with_bias |= {f"{at}attention.w{letter}": (own, own) for letter in "qkvo"}
        with_bias |= {f"{at}feed_forward.w1": (mlp, own), f"{at}feed_forward.w2": (own, mlp)}
        with_bias |= {f"{at}attention_norm": (own,), f"{at}ffn_norm": (own,)}
    for name, shape in with_bias.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def dense_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights; norms around 1, so that a norm in another place shows."""
    tensors = {}
    for name, shape in dense_shapes(config).items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        is_norm = "norm.weight" in name or name.endswith(("ln_f.weight", "pre_ln.weight"))
        scale = 0.3 if is_norm or len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = noise * scale + is_norm
    return tensors


def write_dense_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """The folder of a `7B-D` or `7B-O`; `changes` are of its config."""
    return write_folder(folder, CONFIGS[kind] | changes, dense_tensors(CONFIGS[kind]), SPECIAL_IDS[kind])
