"""A decoder's and a vision tower's weights as plain tensors, fused for few products a block, and rotary factors.

A family of models fills them in. Layers that are fused (`fused_rows`) become views of one tensor, so nothing is stored
twice.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from experiment_core_utils.engines.description import DecoderDescription
from experiment_core_utils.primitives.errors import ConfigurationError


def fusing_unsupported_reason(layers: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> str | None:
    """The reason why weights cannot be fused, to follow on "cannot be fused: "; None where they can.

    Args:
        layers: what has to be a plain `nn.Linear`.
        weights: all that is fused, of layers and of anything else.
    """
    weights = list(weights)
    if any(type(layer) is not nn.Linear for layer in layers) or not all(map(torch.is_floating_point, weights)):
        return "its weights are quantised"
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if devices == ["meta"]:
        return "its weights are not loaded"
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    return f"its weights are in several dtypes ({', '.join(dtypes)})" if len(dtypes) > 1 else None


@torch.inference_mode(False)
@torch.no_grad()
def fused_rows(layers: list[nn.Linear], name: str = "weight") -> torch.Tensor:
    """The layers' weights (or biases) one below the other; each layer's own becomes a view of its rows."""
    fused = torch.cat([getattr(layer, name).detach() for layer in layers])
    parts = fused.split([layer.out_features for layer in layers])
    for layer, own in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(own, requires_grad=getattr(layer, name).requires_grad))
    return fused


@dataclass(frozen=True)
class BlockWeights:
    """One decoder block: H wide, Q query and KV key heads of width D, E experts of width I; of a dense block E is 1.

    All tensors are contiguous, on one device, in one dtype. Those that a block has not are None; `Any` is such a tensor
    that most blocks have.
    """

    input_norm: Any  # [H], before attention
    qkv: torch.Tensor  # [(Q + 2 * KV) * D, H], rows: queries, keys, values
    query_norm: Any  # [Q * D], one norm over the whole width, or [D], one of each head alone
    key_norm: Any  # [KV * D] or [D]
    output: torch.Tensor  # [H, Q * D]
    ffn_norm: Any  # [H], before the experts
    router: Any  # [E, H]; None in a dense block, whose one expert has weight 1
    gate_up: torch.Tensor  # [E, 2 * I, H], rows: gate, up
    down: torch.Tensor  # [E, H, I]
    qkv_bias: torch.Tensor | None = None  # [(Q + 2 * KV) * D]
    shared_gate_up: torch.Tensor | None = None  # [2 * J, H], of an expert that every token uses
    shared_down: torch.Tensor | None = None  # [H, J]
    shared_gate: torch.Tensor | None = None  # [1, H]; its sigmoid is the weight of the shared expert, else 1
    post_attention_norm: torch.Tensor | None = None  # [H], of what attention adds to the states
    post_ffn_norm: torch.Tensor | None = None  # [H], of what the experts add
    has_rope: bool = True
    window: int | None = None  # positions that one sees, itself the last of them; None for all before it

    @property
    def num_experts(self) -> int:
        """E of this block."""
        return int(self.gate_up.shape[0])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights that the block has, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class DecoderWeights(DecoderDescription):
    """Every block of the whole decoder, whatever is active, with embedding, final norm and head."""

    blocks: tuple[BlockWeights, ...]
    embedding: torch.Tensor  # [V_in, H]
    final_norm: torch.Tensor  # [H]
    head: torch.Tensor  # [V, H]
    inverse_frequencies: torch.Tensor  # [D / 2] float32; angle = position * frequency
    rotary_scale: float = 1.0  # of cosines and sines (yarn)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.head.dtype

    @cached_property
    def routed_blocks(self) -> tuple[int, ...]:
        """The blocks with experts."""
        return tuple(index for index, block in enumerate(self.blocks) if block.router is not None)

    def experts_of(self, index: int, top_k: int) -> int:
        """Experts per token of a block at a setting's top-k: the model's own in the first block with experts, 1 in a
        dense one.
        """
        if self.blocks[index].router is None:
            return 1
        return self.default_top_k if index == self.routed_blocks[0] else top_k

    def norms_of_heads(self, block: BlockWeights) -> int:
        """0 where queries and keys of a block have no norm, 1 for one over all heads, 2 for one of each head."""
        if block.query_norm is None:
            return 0
        return 2 if len(block.query_norm) == len(block.key_norm) == self.head_width else 1

    @classmethod
    def of(cls, description: DecoderDescription, **tensors: Any) -> "DecoderWeights":
        """The weights of a decoder so described; raises ConfigurationError where their sizes are others."""
        weights = cls(**vars(description), **tensors)
        for name, found, expected in weights._sizes():
            if tuple(found.shape) != expected:
                raise ConfigurationError(
                    f"the decoder cannot be fused: {name} is of {tuple(found.shape)}, its config says {expected}; run "
                    "it with --execution eager"
                )
        return weights

    def _sizes(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that the sizes are of, with their names and the shapes that the sizes say."""
        width, queries = self.width, self.num_heads * self.head_width
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_width
        yield "the head", self.head, (self.head_rows, width)
        for place, block in enumerate(self.blocks):
            yield f"qkv of block {place}", block.qkv, (rows, width)
            yield f"output of block {place}", block.output, (width, queries)
            experts, inner = self.num_experts, self.expert_width
            if block.router is None:
                experts, inner = 1, int(block.down.shape[2])
            else:
                yield f"router of block {place}", block.router, (experts, width)
            yield f"gate_up of block {place}", block.gate_up, (experts, 2 * inner, width)
            yield f"down of block {place}", block.down, (experts, width, inner)


@dataclass(frozen=True)
class RotaryTable:
    """Rotary factors of T positions, in the decoder's dtype.

    A head [D] turns by x * cosine + (its halves swapped) * sine.
    """

    cosine: torch.Tensor  # [T, 1, D]
    sine: torch.Tensor  # [T, 1, D], negative in the first half

    @classmethod
    @torch.inference_mode(False)
    def of(cls, decoder: DecoderWeights, positions: int) -> "RotaryTable":
        """The table of positions 0 to T - 1, with angles in float32, as transformers computes them."""
        steps = torch.arange(positions, dtype=torch.float32, device=decoder.device)
        angles = torch.outer(steps, decoder.inverse_frequencies).repeat(1, 2)
        scale = decoder.rotary_scale
        return cls.given((angles.cos() * scale).to(decoder.dtype), (angles.sin() * scale).to(decoder.dtype))

    @classmethod
    def given(cls, cosines: torch.Tensor, sines: torch.Tensor) -> "RotaryTable":
        """The table of cosines and sines [T, D], both halves of D alike, as transformers hands them to a block."""
        sign = torch.ones_like(sines[:1])
        sign[:, : sines.shape[1] // 2] = -1
        return cls(cosines[:, None].contiguous(), (sines * sign)[:, None])

    def rows(self, which: slice | torch.Tensor) -> "RotaryTable":
        """The factors of some positions."""
        return RotaryTable(self.cosine[which], self.sine[which])

    def applied(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads [T, N, D] with rotary positions, row t by position t."""
        halves = heads.unflatten(2, (2, heads.shape[2] // 2)).flip(2).flatten(2)
        return torch.addcmul(heads * self.cosine, halves, self.sine)


# Products on tensor cores want the inner width in multiples of this.
ALIGNMENT = 16
# x * sigmoid(1.702 * x), torch's GELU, and its approximation by tanh.
VisionActivation = Literal["quick_gelu", "gelu", "tanh_gelu"]


@dataclass(frozen=True)
class VisionBlockWeights:
    """One block of a tower, D wide."""

    first_norm: nn.LayerNorm
    qkv: torch.Tensor  # [3 * D, D], rows: queries, keys, values
    qkv_bias: torch.Tensor  # [3 * D]
    output: torch.Tensor  # [D, D]
    output_bias: torch.Tensor  # [D]
    second_norm: nn.LayerNorm
    inner: torch.Tensor  # [I, D], then the activation
    inner_bias: torch.Tensor  # [I]
    outer: torch.Tensor  # [D, I]
    outer_bias: torch.Tensor  # [D]
    activation: VisionActivation = "quick_gelu"

    @classmethod
    def fused(cls, block: Any, activation: VisionActivation = "quick_gelu") -> "VisionBlockWeights":
        """The weights of a block whose parts have CLIP's names; those of queries, keys and values in the modules become
        views of the fused ones.
        """
        attention, mlp = block.self_attn, block.mlp
        joint = [attention.q_proj, attention.k_proj, attention.v_proj]
        return cls(
            first_norm=block.layer_norm1,
            qkv=fused_rows(joint),
            qkv_bias=fused_rows(joint, "bias"),
            output=attention.out_proj.weight.detach(),
            output_bias=attention.out_proj.bias.detach(),
            second_norm=block.layer_norm2,
            inner=mlp.fc1.weight.detach(),
            inner_bias=mlp.fc1.bias.detach(),
            outer=mlp.fc2.weight.detach(),
            outer_bias=mlp.fc2.bias.detach(),
            activation=activation,
        )


@dataclass(frozen=True)
class ConnectorWeights:
    """Pooling by attention and the gated projection; C is the width of all feature blocks together."""

    grid_side: int  # patches along a side of a crop
    window: int  # patches along a side of a window that becomes one feature
    num_heads: int
    pads: torch.Tensor  # [2, C], for patches that are all or partly padding
    query: torch.Tensor  # [D, C]
    query_bias: torch.Tensor  # [D]
    key_value: torch.Tensor  # [2 * D, C], rows: keys, values
    key_value_bias: torch.Tensor  # [2 * D]
    output: torch.Tensor  # [D, D]
    output_bias: torch.Tensor  # [D]
    gate_up: torch.Tensor  # [2 * J, D], rows: gate, up
    down: torch.Tensor  # [H, J]


@dataclass(frozen=True)
class VisionWeights:
    """The tower's blocks that run, in order, with embeddings, norms and connector."""

    patch_weight: torch.Tensor  # [D, 3 * S * S padded with zero columns], S the side of a patch
    class_embedding: torch.Tensor  # [D]
    positions: torch.Tensor  # [P + 1, D]
    before: nn.LayerNorm
    blocks: tuple[VisionBlockWeights, ...]
    feature_blocks: tuple[int, ...]  # whose states are laid side by side
    num_heads: int
    patch_side: int
    pad_value: float  # of every pixel of a crop that is padding
    connector: ConnectorWeights

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.patch_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.patch_weight.dtype


@dataclass(frozen=True)
class VisionModules:
    """The same as modules where they need not be fused, with the fused weights of the blocks that run."""

    embeddings: nn.Module  # [K, 3, S, S] -> [K, P + 1, D]
    pre_layernorm: nn.LayerNorm
    blocks: tuple[VisionBlockWeights, ...]
    feature_blocks: tuple[int, ...]  # whose states are laid side by side
    num_heads: int
    pad_value: float  # of every pixel of a crop that is padding
    connector: Any  # [K, P, C] and masks [K, P] -> [K, F, H]; `project` and `project_attended` are its last parts

    @property
    def weight(self) -> torch.Tensor:
        """One of the weights, all of which are on one device in one dtype."""
        return self.blocks[0].qkv
