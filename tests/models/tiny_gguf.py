"""A llama of two blocks as a GGUF file, written by the package gguf, and the weights that were written into it."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants

WIDTH, MLP, HEADS, KV_HEADS, BLOCKS = 64, 128, 4, 2, 2
TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
_SPECIAL = ("<end>", "<start>", "<u>", "</u>", "<a>")


def _byte_tokens() -> list[str]:
    """The 256 symbols by which byte-level tokenizers write bytes: printable ones as themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in plain]
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def write_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    block_count: int = BLOCKS,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> dict[str, np.ndarray]:
    """Write the file: feed-forward weights of a type (blocks of 8 bits), all others in float32; returns the weights."""
    draws = np.random.default_rng(3)
    tokens = [*_SPECIAL, *_byte_tokens(), "he"]
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for block in range(BLOCKS):
        of_block = {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (kv, WIDTH),
            "attn_v": (kv, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (MLP, WIDTH),
            "ffn_up": (MLP, WIDTH),
            "ffn_down": (WIDTH, MLP),
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
        }
        shapes |= {f"blk.{block}.{name}": shape for name, shape in of_block.items()}
    weights = {name: draws.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(block_count)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(_SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        if "ffn_" in name and "norm" not in name:
            writer.add_tensor(f"{name}.weight", quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
