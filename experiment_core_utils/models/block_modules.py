"""In: a model, or a block of its decoder; out: the list of blocks; router and elements of the matrices of a block, read
once while its modules stay.

A block of seventy modules takes longer to walk than a figure of operations may take over eighty blocks.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.architecture import SCALE_SUFFIXES

# The biases of a block's experts lie in one tensor.
_NOT_MATRICES = (*SCALE_SUFFIXES, "_bias")
# A module, the name of a dict of its parts, and their ids: what lives has an id of its own.
_Place = tuple["weakref.ref[nn.Module]", str, tuple[int, ...]]


def block_stack(model: PreTrainedModel) -> Any:
    """The module that holds the blocks of a model's decoder as `layers`; None where there is no such list."""
    decoder = model.get_decoder()
    for stack in (decoder, getattr(decoder, "model", None)):
        if isinstance(getattr(stack, "layers", None), nn.ModuleList):
            return stack
    return None


@dataclass(frozen=True)
class BlockModules:
    """What a block was made of when it was read; it does not keep its modules alive.

    Attributes:
        router: the module whose `top_k` says how many experts run for a token; None in a dense block.
        matrix_elements: of all its products, packed weights as many as before packing; None where packed weights do
            not tell.
    """

    block: "weakref.ref[nn.Module]"
    router: "weakref.ref[nn.Module] | None"
    matrix_elements: int | None
    places: tuple[_Place, ...]

    @classmethod
    def of(cls, block: nn.Module) -> "BlockModules":
        """Read it."""
        modules = list(block.modules())
        router = next((module for module in modules if "top_k" in vars(module)), None)
        return cls(
            weakref.ref(block),
            None if router is None else weakref.ref(router),
            matrix_elements(block),
            tuple(place for module in modules for place in _places(module)),
        )

    def is_of(self, block: nn.Module) -> bool:
        """Whether this is the block that was read, and nothing in it was replaced, added or removed since."""
        if self.block() is not block:
            return False
        for reference, names, ids in self.places:
            module = reference()
            if module is None or tuple(map(id, module.__dict__[names].values())) != ids:
                return False
        return True

    @property
    def top_k(self) -> int | None:
        """Experts that the router chooses for a token now; None in a dense block."""
        router = None if self.router is None else self.router()
        return None if router is None else int(vars(router)["top_k"])


def _places(module: nn.Module) -> Iterator[_Place]:
    """Where matrices hang, and where the modules do that have them."""
    own = vars(module)
    if own["_modules"]:
        yield weakref.ref(module), "_modules", tuple(map(id, own["_modules"].values()))
    if any(parameter is not None and parameter.dim() > 1 for parameter in own["_parameters"].values()):
        yield weakref.ref(module), "_parameters", tuple(map(id, own["_parameters"].values()))


def matrix_elements(part: nn.Module) -> int | None:
    """Elements of every matrix in it, as its products use them; None where packed weights do not tell.

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
    kept = {name: each for name, each in own["_parameters"].items() if each is not None}
    matrices = [each for name, each in kept.items() if each.dim() > 1 and not name.endswith(_NOT_MATRICES)]
    is_linear = isinstance(own.get("in_features"), int) and isinstance(own.get("out_features"), int)
    # bitsandbytes stores its packed column in any number format.
    is_column = is_linear and any(matrix.shape[-1] == 1 != own["in_features"] for matrix in matrices)
    is_packed = is_column or any(not each.is_floating_point() for each in kept.values())
    if is_linear and (is_packed or not matrices):
        return int(own["in_features"]) * int(own["out_features"])
    return None if is_packed else sum(matrix.numel() for matrix in matrices)
