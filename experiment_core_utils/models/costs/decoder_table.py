"""The shapes of text decoders, by an explicit table of `model_type`s.

A new family is an entry: a function that gives its MLPs from the config's fields. It comes with a tiny model of the
family in `tests/models/tiny_families.py`, on which its formulas are compared with counted operations.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.costs.decoder import BlockShape, DecoderShape, ExpertsShape, LatentShape, MlpShape
from experiment_core_utils.primitives.errors import ProfilerError


class NotInTable(ProfilerError):
    """No formula is known for an architecture, or for a way in which it is configured; the message says which."""


def unknown(model_type: str, known: Iterable[str]) -> NotInTable:
    """The error for a `model_type` that is not among those known."""
    return NotInTable(f"no formula is known for {model_type!r}; there are formulas for {', '.join(sorted(known))}")


# --- MLPs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mlps:
    """The MLPs of a decoder's blocks."""

    routed: Sequence[bool]  #: whether each block has experts, by its place
    dense: MlpShape | None = None  #: of blocks without experts; None where the config knows of none
    experts: ExpertsShape | None = None  #: of blocks with them; None in a dense model

    def of_blocks(self, model_type: str, routed: Sequence[bool] | None) -> list[MlpShape | ExpertsShape]:
        """The MLP of every block, by the places in the config or by what was seen of the modules (`routed`)."""
        seen = self.routed if routed is None else routed
        if len(seen) != len(self.routed):
            raise NotInTable(
                f"the {len(seen)} blocks of this {model_type} are not the {len(self.routed)} of its config"
            )
        found: list[MlpShape | ExpertsShape] = []
        for block, has_experts in enumerate(seen):
            mlp = self.experts if has_experts else self.dense
            if mlp is None:
                what = "experts" if has_experts else "no router with a readable top-k"
                raise NotInTable(f"block {block} of this {model_type} has {what}, which its config does not say")
            found.append(mlp)
        return found


def _gated(config: Any) -> _Mlps:
    return _Mlps([False] * config.num_hidden_layers, MlpShape(config.intermediate_size))


def _plain(config: Any) -> _Mlps:
    return _Mlps([False] * config.num_hidden_layers, MlpShape(config.intermediate_size, is_gated=False))


def _all_routed(config: Any, experts: ExpertsShape) -> _Mlps:
    return _Mlps([True] * config.num_hidden_layers, experts=experts)


def _olmoe(config: Any) -> _Mlps:
    return _all_routed(config, ExpertsShape(config.num_experts, config.num_experts_per_tok, config.intermediate_size))


def _mixtral(config: Any) -> _Mlps:
    return _all_routed(
        config, ExpertsShape(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    )


def _aria(config: Any) -> _Mlps:
    width = config.intermediate_size
    shared_width = config.moe_num_shared_experts * width
    return _all_routed(config, ExpertsShape(config.moe_num_experts, config.moe_topk, width, shared_width))


def _qwen2_moe(config: Any) -> _Mlps:
    return _qwen_moe(config, shared_width=config.shared_expert_intermediate_size, has_shared_gate=True)


def _qwen_moe(config: Any, shared_width: int = 0, has_shared_gate: bool = False) -> _Mlps:
    dense = MlpShape(config.intermediate_size)
    experts = ExpertsShape(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, shared_width, has_shared_gate
    )
    step, always_dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    routed = [
        experts.num_experts > 0 and (block + 1) % step == 0 and block not in always_dense
        for block in range(config.num_hidden_layers)
    ]
    return _Mlps(routed, dense, experts)


def _deepseek(config: Any) -> _Mlps:
    """The MLPs of DeepSeek models: the first blocks dense, the others with routed and shared experts."""
    width = config.moe_intermediate_size
    experts = ExpertsShape(
        config.n_routed_experts, config.num_experts_per_tok, width, shared_width=config.n_shared_experts * width
    )
    routed = [block >= config.first_k_dense_replace for block in range(config.num_hidden_layers)]
    return _Mlps(routed, MlpShape(config.intermediate_size), experts)


DECODERS: dict[str, Callable[[Any], _Mlps]] = {
    "llama": _gated,
    "mistral": _gated,
    "qwen2": _gated,
    "olmo2": _gated,
    "qwen3": _gated,
    "qwen2_5_vl_text": _gated,
    "qwen3_vl_text": _gated,
    "starcoder2": _plain,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "gpt_oss": _mixtral,
    "granitemoe": _mixtral,
    "aria_text": _aria,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen_moe,
    "qwen3_vl_moe_text": _qwen_moe,
    "deepseek_v3": _deepseek,
    "glm4v_text": _gated,
    "glm4v_moe_text": _deepseek,
}


# --- attention ----------------------------------------------------------------------------------------------------


def _grouped_block(config: Any, window: int | None, mlp: MlpShape | ExpertsShape) -> BlockShape:
    # Whether these fields exist depends on the family.
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_width = config.num_attention_heads * head_size
    kv_width = (config.num_key_value_heads or config.num_attention_heads) * head_size
    return BlockShape(query_width, kv_width, window, mlp)


def _latent_block(config: Any, window: int | None, mlp: MlpShape | ExpertsShape) -> BlockShape:
    heads, rotary = config.num_attention_heads, config.qk_rope_head_dim
    width = heads * (config.qk_nope_head_dim + rotary)
    latent = LatentShape(
        query_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        rotary_width=rotary,
        expanded_width=heads * (config.qk_nope_head_dim + config.v_head_dim),
        value_width=heads * config.v_head_dim,
    )
    return BlockShape(width, width, window, mlp, latent)


_LATENT = ("deepseek_v3",)


def _windows(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    unsupported = [f"{kind} in block {block}" for block, kind in enumerate(kinds) if kind not in known]
    if unsupported:
        raise NotInTable(f"no formula is known for the attention of this {config.model_type}: {', '.join(unsupported)}")
    return [known[kind] for kind in kinds]


# --- decoders -----------------------------------------------------------------------------------------------------


# What formulas read as one number for all blocks; configs of some families take a list too.
_NUMBERS = (
    "num_experts_per_tok moe_topk num_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts "
    "moe_num_shared_experts intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim "
    "num_attention_heads num_key_value_heads sliding_window hidden_size"
).split()


def decoder_of(config: Any, routed: Sequence[bool] | None = None, head_rows: int | None = None) -> DecoderShape:
    """The shape of a decoder.

    Args:
        config: of the text model.
        routed: whether each block has experts, where that is known of a model's modules; None for what follows from
            the places of the blocks.
        head_rows: where the head has not as many rows as the embedding.

    Raises:
        NotInTable: it is not known.
    """
    mlps_of = DECODERS.get(config.model_type)
    if mlps_of is None:
        raise unknown(config.model_type, DECODERS)
    if getattr(config, "is_heterogeneous", False):
        raise NotInTable(f"the config of this {config.model_type} says that its blocks differ in size")
    listed = [name for name in _NUMBERS if isinstance(getattr(config, name, None), list | tuple)]
    if listed:
        raise NotInTable(f"the config of this {config.model_type} gives {listed[0]} by block")
    mlps = mlps_of(config).of_blocks(config.model_type, routed)
    block_of = _latent_block if config.model_type in _LATENT else _grouped_block
    blocks = [block_of(config, window, mlp) for window, mlp in zip(_windows(config), mlps, strict=True)]
    return DecoderShape.of_blocks(config.hidden_size, blocks, head_rows or config.vocab_size)
