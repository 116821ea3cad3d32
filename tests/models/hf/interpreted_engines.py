"""Transformers models by a GPU's own kernels, in Triton's interpreter beside the modules: a line of JSON with what ran.

Run with TRITON_INTERPRET=1, which has to be set before Triton is imported. Logits are compared as the CPU's are; a
difference is an error.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.gpu.triton import tuning
from experiment_core_utils.engines.gpu.triton.tuning import ReadTile
from tests.models.hf.test_engine_stages import Beside, prompt_of
from tests.models.knob_families import VISION_FAMILIES, enlarge_norms
from tests.models.tiny_families import IMAGE_TOKEN, VOCABULARY, build, config_class

# 4 query heads of 2 key heads; widths that a prompt's products take.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
QWEN = {"image_token_id": IMAGE_TOKEN, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
TOWER = {"depth": 3, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}


def _text(name: str, **chosen: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: config_class(name)(**{**SIZES, **chosen})


def _qwen3_vl_moe() -> PreTrainedConfig:
    tower = {**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    return config_class("Qwen3VLMoeConfig")(text_config={**SIZES, **EXPERTS, **MROPE}, vision_config=tower, **QWEN)


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": _text("Qwen2Config", use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "olmoe": _text("OlmoeConfig", hidden_size=64, intermediate_size=16, num_experts=6, num_experts_per_tok=3),
    "qwen3_moe": _text("Qwen3MoeConfig", **EXPERTS, mlp_only_layers=[0], norm_topk_prob=True),
    "qwen3_vl_moe": _qwen3_vl_moe,
}


def take_few_programs() -> None:
    """From now on kernels have few programs, each of which takes long here."""
    wide = ReadTile(kibibytes=16, warps=4)
    usual = tuning.TUNINGS[tuning.DEFAULT]
    products = dict.fromkeys(("qkv", "output", "gate_up", "dense_gate_up", "head"), wide)
    tuning.TUNINGS[tuning.DEFAULT] = replace(usual, **products, attention=ReadTile(1, 2), most_splits=2)


def main() -> None:
    torch.set_num_threads(1)
    take_few_programs()
    found = {}
    for name in sys.argv[1:]:
        beside = Beside(enlarge_norms(build(CONFIGS[name]())), Reruns)
        top_k = None if beside.knobs.num_experts is None else 1
        prompts = [prompt_of(7)]
        if name in VISION_FAMILIES:
            prompts.insert(0, VISION_FAMILIES[name].picture())
        for prompt in prompts:
            beside.compare(None, (0, 1, 2), prompt)
        beside.compare(top_k, (0, 2), prompts[0])
        found[name] = beside.engines.ways
    print(json.dumps(found))


if __name__ == "__main__":
    main()
