"""The parts of a transformers decoder under the names that profiles use.

Families name the parts of a block differently; a part with none of the names below is in no range of a profile, and its
time is counted as the stage's `other`.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from experiment_core_utils.models.interface import Component

_ATTENTION = frozenset({"self_attn", "attn", "attention", "self_attention", "linear_attn"})
_FFN = frozenset({"mlp", "block_sparse_moe", "feed_forward", "ffn", "moe"})
_ROUTERS = frozenset({"gate", "router"})
_EXPERTS = frozenset({"experts"})


def decoder_components(
    blocks: Sequence[nn.Module], final_norm: nn.Module | None, head: nn.Module | None
) -> dict[Component, list[nn.Module]]:
    """Parts of the active blocks, the norm after them and the product with the vocabulary; empty ones left out.

    `routing` and `experts` are inside `ffn`.
    """
    ffn = _children(blocks, _FFN)
    norms = [child for block in blocks for child in block.children() if _is_norm(child)]
    # The gate of a dense gated MLP is a plain layer and chooses nothing: only one beside experts is a router.
    routed = [part for part in ffn if _children([part], _EXPERTS)]
    found: dict[Component, list[nn.Module]] = {
        "attention": _children(blocks, _ATTENTION),
        "ffn": ffn,
        "routing": _children(routed, _ROUTERS),
        "experts": _children(routed, _EXPERTS),
        "norm": [*norms, *([final_norm] if final_norm is not None else [])],
        "head": [head] if head is not None else [],
    }
    return {name: modules for name, modules in found.items() if modules}


def _children(modules: Iterable[nn.Module], names: frozenset[str]) -> list[nn.Module]:
    return [child for module in modules for name, child in module.named_children() if name in names]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
