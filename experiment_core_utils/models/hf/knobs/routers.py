"""The routers of a decoder's blocks: which blocks have experts, what they choose for a token, and the knob of top-k.

A router's choice is read from the tensors that it returns, not from its attributes: some have a `top_k` that nothing
reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges, hooks_removed
from experiment_core_utils.primitives.errors import ConfigurationError

# The names that families give to the same number.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token")


@dataclass
class Counted:
    """The blocks and experts that ran since the last `clear`."""

    #: indices of the full model's blocks, in the order in which they ran, once for every run
    blocks_run: list[int] = field(default_factory=list)
    #: by block, the experts that its router chose for a token when it last ran; a dense block and one whose choice
    #: cannot be seen have no entry
    experts_per_token: dict[int, int] = field(default_factory=dict)
    tokens: int | None = None  #: positions that the last block computed; None where its output does not show it

    def clear(self) -> None:
        """Forget the counts."""
        self.tokens = None
        self.blocks_run.clear()
        self.experts_per_token.clear()

    def block_hook(self, index: int) -> Any:
        """A forward hook of a block that counts it."""

        def hook(_module: Any, _args: Any, output: Any) -> None:
            self.blocks_run.append(index)
            hidden = output[0] if isinstance(output, tuple | list) else output
            self.tokens = int(hidden.shape[-2]) if isinstance(hidden, torch.Tensor) and hidden.dim() > 1 else None

        return hook


@dataclass(frozen=True)
class _Choice:
    """The place where a block shows its choice: an integer tensor [tokens, k] among a module's inputs or outputs."""

    module: nn.Module
    is_output: bool
    place: int


class Routers:
    """The routers of a decoder's blocks, and the `KnobAdapter` of top-k.

    Attributes:
        routed_blocks: indices of the blocks with experts.
        num_experts: that a router chooses from; None in a dense model, and where the config does not say.
        unsupported_reason: why top-k cannot be set, as far as it is known; None if it can.
        value: top-k in force; None for the model's own.
    """

    def __init__(self, blocks: Sequence[nn.Module], text_config: Any) -> None:
        self._blocks = tuple(blocks)
        self.routed_blocks = tuple(index for index, block in enumerate(blocks) if _has_experts(block))
        self._holders = {index: _holders(blocks[index]) for index in self.routed_blocks}
        self._choices: dict[int, _Choice] = {}
        self._own: dict[int, int] = {}
        self.num_experts = _first_number(text_config, _NUM_EXPERTS) if self.routed_blocks else None
        self._config_top_k = _first_number(text_config, _TOP_K)
        self._changes = AttributeChanges()
        self.unsupported_reason: str | None = None
        self.value: int | None = None

    @property
    def adjustable_blocks(self) -> tuple[int, ...]:
        """The blocks with experts after the first of them, which keeps its own number."""
        return self.routed_blocks[1:]

    @property
    def blocks_without_top_k(self) -> tuple[int, ...]:
        """The blocks with experts in which no module has its own `top_k`."""
        return tuple(index for index in self.routed_blocks if not self._holders[index])

    @property
    def default_top_k(self) -> int | None:
        """Experts for a token of the first block with experts: seen, or by its attribute, or by the config.

        None in a dense model, and where none of these says.
        """
        if not self.routed_blocks:
            return None
        first = self.routed_blocks[0]
        if first in self._own:
            return self._own[first]
        holders = self._holders[first]
        return int(vars(holders[0])["top_k"]) if holders else self._config_top_k

    def own_top_k(self, block: int) -> int | None:
        """Experts that the block was seen to choose by itself; None for a dense one, and where it was not seen."""
        return self._own.get(block)

    def validate(self, top_k: int | None) -> None:
        """Raises ConfigurationError, with the reason, for a top-k that the model cannot run at."""
        if top_k is None:
            return
        if self.unsupported_reason is not None:
            if self.routed_blocks and top_k == self.default_top_k:
                return
            own = f"or its own {self.default_top_k}" if self.routed_blocks else "for it"
            raise ConfigurationError(f"top-k {top_k} cannot be set: {self.unsupported_reason}; give none {own}")
        if self.num_experts is None or not 1 <= top_k <= self.num_experts:
            raise ConfigurationError(
                f"top-k {top_k} is not possible; give 1 to {self.num_experts}, the experts of a block"
            )

    def put(self, value: int | None) -> None:
        """See `KnobAdapter.put`; None for the model's own number."""
        self.validate(value)
        self._changes.put_back()
        self.value = None
        if value is not None and self.unsupported_reason is None:
            self._changes.put(self.changes(value))
        self.value = value

    def changes(self, top_k: int) -> list[AttributeChange]:
        """The changes that give every block with experts after the first `top_k` of them for a token."""
        return [
            AttributeChange(holder, "top_k", top_k)
            for index in self.adjustable_blocks
            for holder in self._holders[index]
        ]

    def learn(self, run: Callable[[], object], tokens: int) -> None:
        """Find where and what each block chooses, by one `run` over so many tokens at the model's own setting."""
        handles = [
            module.register_forward_hook(self._learning_hook(index, tokens), with_kwargs=True)
            for index in self.routed_blocks
            for module in _outside_attention(self._blocks[index])
        ]
        with hooks_removed(handles):
            run()

    def _learning_hook(self, index: int, tokens: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if index in self._choices:
                return
            for is_output in (True, False):
                for place, value in enumerate(_values(is_output, args, kwargs, output)):
                    if _is_index(value) and value.shape[0] == tokens:
                        self._choices[index] = _Choice(module, is_output, place)
                        self._own[index] = int(value.shape[-1])
                        return

        return hook

    @contextmanager
    def counted(self) -> Iterator[Counted]:
        """A context that counts blocks and experts by hooks on every block and router of the full model; never while
        timing.
        """
        counted = Counted()
        handles = [block.register_forward_hook(counted.block_hook(index)) for index, block in enumerate(self._blocks)]
        for index, choice in self._choices.items():
            hook = _choice_hook(counted, index, choice)
            handles.append(choice.module.register_forward_hook(hook, with_kwargs=True))
        with hooks_removed(handles):
            yield counted


def _choice_hook(counted: Counted, index: int, choice: _Choice) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        chosen = _values(choice.is_output, args, kwargs, output)[choice.place]
        counted.experts_per_token[index] = int(chosen.shape[-1])

    return hook


def _values(is_output: bool, args: Any, kwargs: Any, output: Any) -> Sequence[Any]:
    if not is_output:
        return [*args, *kwargs.values()]
    return output if isinstance(output, tuple | list) else [output]


def _is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 2


def _has_experts(block: nn.Module) -> bool:
    return any(
        "top_k" in vars(module) or name.rpartition(".")[2] == "experts" for name, module in block.named_modules()
    )


def _holders(block: nn.Module) -> list[nn.Module]:
    # Many blocks have an unused copy beside the router's: all get the same number.
    return [module for module in block.modules() if "top_k" in vars(module)]


def _outside_attention(block: nn.Module) -> list[nn.Module]:
    """Modules that may show a choice; the block itself and attention get positions, which are integers too."""
    return [module for name, module in block.named_modules() if name and "attn" not in name and "attention" not in name]


def _first_number(text_config: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(text_config, name, None)
        if isinstance(value, int):
            return value
    return None
