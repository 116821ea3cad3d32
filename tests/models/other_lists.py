"""Tiny decoders whose list of blocks has another name than `layers` or lies deeper, and such as have none."""

from collections.abc import Callable
from typing import Any

from tests.models.tiny_families import config_class

NUM_BLOCKS = 3
_NAMED: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": NUM_BLOCKS, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
_MPT: dict[str, Any] = {"d_model": 32, "n_layers": NUM_BLOCKS, "n_heads": 4, "max_seq_len": 512}
_BLOOM: dict[str, Any] = {"hidden_size": 32, "n_layer": NUM_BLOCKS, "n_head": 4, "initializer_range": 0.3}
_MARKS = {"cls_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
_DBRX = {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
}


def _of(name: str, sizes: dict[str, Any], **chosen: Any) -> Callable[..., Any]:
    return lambda **changed: config_class(name)(**{"vocab_size": 300, **sizes, **chosen, **changed})


#: blocks can be skipped
OTHER_LISTS: dict[str, Callable[..., Any]] = {
    "gpt2": _of("GPT2Config", _GPT),
    "gpt_bigcode": _of("GPTBigCodeConfig", _GPT),
    "gptj": _of("GPTJConfig", _GPT, rotary_dim=4),
    "codegen": _of("CodeGenConfig", _GPT, rotary_dim=4),
    "openai-gpt": _of("OpenAIGPTConfig", _GPT),
    "ctrl": _of("CTRLConfig", _GPT, dff=24),
    "bloom": _of("BloomConfig", _BLOOM),
    "falcon": _of("FalconConfig", _NAMED, ffn_hidden_size=24),
    "mpt": _of("MptConfig", _MPT),
    "dbrx": _of("DbrxConfig", _MPT, **_DBRX),
    "opt": _of("OPTConfig", _NAMED, ffn_dim=24, word_embed_proj_dim=32),
    "gpt_neox": _of("GPTNeoXConfig", _NAMED),
    "bert": _of("BertConfig", _NAMED, is_decoder=True),
    "modernbert-decoder": _of("ModernBertDecoderConfig", _NAMED, **_MARKS, initializer_range=0.2),
}
#: one list runs several times, or its blocks keep their numbers under other names
NONE_LISTED: dict[str, Callable[..., Any]] = {
    "hrm_text": _of("HrmTextConfig", _NAMED),
    "gpt_neo": _of("GPTNeoConfig", _NAMED, num_hidden_layers=4, attention_types=[[["global", "local"], 2]]),
}
