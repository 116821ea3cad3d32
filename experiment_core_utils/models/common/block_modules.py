"""The blocks of a decoder: their list, routers, matrices and parts.

Routers and matrices are read once while their modules stay the same: walking a block of seventy modules takes longer
than computing the operations of eighty blocks may take.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.common.describe import SCALE_SUFFIXES
from experiment_core_utils.primitives.private_apis import PARAMETERS, PARTS
from experiment_core_utils.records.stages import Component

# The biases of a block's experts lie in one tensor.
_NOT_MATRICES = (*SCALE_SUFFIXES, "_bias")


@dataclass(frozen=True)
class BlockStack:
    """A list of modules through which hidden states may run, one after another."""

    owner: Any  #: the module that has the list
    name: str  #: of the list in it, such as `layers`, `h` or `blocks`

    @property
    def blocks(self) -> nn.ModuleList:
        """The modules that are in the list now."""
        found: nn.ModuleList = getattr(self.owner, self.name)
        return found


def text_decoder(model: PreTrainedModel) -> Any:
    """The module that makes hidden states of token ids, without the head."""
    decoder = model.get_decoder()
    # Some families have a head of this name.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def block_stacks(model: PreTrainedModel) -> list[BlockStack]:
    """The lists of modules in a model's decoder that are in no other one: those as long as its config says come first,
    the one with the most weights first among them.
    """
    decoder, found, inside = text_decoder(model), list[BlockStack](), set[nn.Module]()
    for owner in decoder.modules():
        for name, part in owner.named_children():
            if owner not in inside and isinstance(part, nn.ModuleList) and len(part):
                found.append(BlockStack(owner, name))
                inside.update(part.modules())
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)

    def rank(stack: BlockStack) -> tuple[bool, int]:
        return len(stack.blocks) == count, sum(weight.numel() for weight in stack.blocks.parameters())

    return sorted(found, key=rank, reverse=True)


def block_stack(model: PreTrainedModel) -> BlockStack | None:
    """The list of the blocks of a model's decoder, by `block_stacks`; None where it has no list of modules."""
    return next(iter(block_stacks(model)), None)


@dataclass(frozen=True)
class BlockModules:
    """The modules that a block was made of when it was read; the record does not keep them alive."""

    block: "weakref.ref[nn.Module]"
    #: the module whose `top_k` says how many experts run for a token; None in a dense block
    router: "weakref.ref[nn.Module] | None"
    #: of all its products, packed weights as many as before packing; None where packed weights do not show it
    matrix_elements: int | None
    #: the module, by its name in the block, whose `forward` was put in place of its class's, so that what it computes
    #: is not known from its weights; accelerate's hooks, which then call the class's own, do not count
    patched: str | None

    @classmethod
    def of(cls, block: nn.Module) -> "BlockModules":
        """Reads the modules of a block."""
        router = next((module for module in block.modules() if "top_k" in vars(module)), None)
        return cls(
            weakref.ref(block),
            None if router is None else weakref.ref(router),
            matrix_elements(block),
            next((name or "itself" for name, module in block.named_modules() if _is_patched(module)), None),
        )

    @property
    def top_k(self) -> int | None:
        """Experts that the router chooses for a token now; None in a dense block."""
        router = None if self.router is None else self.router()
        return None if router is None else int(vars(router)["top_k"])


def _is_patched(module: nn.Module) -> bool:
    own = vars(module)
    return "forward" in own and not ("_hf_hook" in own and "_old_forward" in own)


_Modules = tuple["weakref.ref[nn.Module]", ...]


@dataclass(frozen=True)
class ModulePlaces:
    """The places of the modules and matrices of blocks when they were read; the record does not keep them alive.

    All blocks are compared in one pass: by block, a deep mixture takes longer than a figure may.
    """

    #: parents, holders: modules that have parts, and those that have matrices
    parents: _Modules
    holders: _Modules
    #: ids of the parts and of the matrices, and which of these modules have a `forward` of their own; what lives has an
    #: id of its own
    found: tuple[list[int], list[bool]]

    @classmethod
    def of(cls, blocks: Iterable[nn.Module]) -> "ModulePlaces":
        """Reads the places of the blocks' modules and matrices."""
        modules = [module for block in blocks for module in block.modules()]
        parents = [module for module in modules if vars(module)[PARTS]]
        holders = [module for module in modules if _has_matrix(module)]
        return cls(tuple(map(weakref.ref, parents)), tuple(map(weakref.ref, holders)), _positions(parents, holders))

    def are_as_read(self) -> bool:
        """Whether no module or matrix of the blocks was replaced, added, removed or patched since they were read."""
        parents = [module for reference in self.parents if (module := reference()) is not None]
        holders = [module for reference in self.holders if (module := reference()) is not None]
        return (len(parents), len(holders)) == (len(self.parents), len(self.holders)) and (
            _positions(parents, holders) == self.found
        )


def _positions(parents: Sequence[nn.Module], holders: Sequence[nn.Module]) -> tuple[list[int], list[bool]]:
    above, below = [module.__dict__ for module in parents], [module.__dict__ for module in holders]
    parts = [own[PARTS].values() for own in above]
    parts += [own[PARAMETERS].values() for own in below]
    return list(map(id, chain.from_iterable(parts))), ["forward" in own for own in above + below]


def _has_matrix(module: nn.Module) -> bool:
    return any(each is not None and each.dim() > 1 for each in vars(module)[PARAMETERS].values())


def matrix_elements(part: nn.Module) -> int | None:
    """Elements of every matrix in a part, as its products use them; None where packed weights do not show it.

    Not counted: vectors (norms, biases) and the scales of quantised weights.
    """
    found = 0
    for module in part.modules():
        elements = _own_elements(module)
        if elements is None:
            return None
        found += elements
    return found


def _own_elements(module: nn.Module) -> int | None:
    own = vars(module)
    kept = {name: each for name, each in own[PARAMETERS].items() if each is not None}
    matrices = [each for name, each in kept.items() if each.dim() > 1 and not name.endswith(_NOT_MATRICES)]
    is_linear = isinstance(own.get("in_features"), int) and isinstance(own.get("out_features"), int)
    # bitsandbytes stores its packed column in any number format.
    is_column = is_linear and any(matrix.shape[-1] == 1 != own["in_features"] for matrix in matrices)
    is_packed = is_column or any(not each.is_floating_point() for each in kept.values())
    if is_linear and (is_packed or not matrices):
        return int(own["in_features"]) * int(own["out_features"])
    return None if is_packed else sum(matrix.numel() for matrix in matrices)


# Families name the parts of a block differently; a part with none of these names is in no range of a profile, and its
# time is counted as the stage's `other`.
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


def final_norm_of(model: PreTrainedModel) -> nn.Module | None:
    """The norm behind the blocks of a model's decoder; None where none stands beside their list."""
    stack = block_stack(model)
    if stack is None:
        return None
    behind = dropwhile(lambda part: part is not stack.blocks, stack.owner.children())
    return next(filter(_is_norm, behind), None)


def _children(modules: Iterable[nn.Module], names: frozenset[str]) -> list[nn.Module]:
    return [child for module in modules for name, child in module.named_children() if name in names]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
