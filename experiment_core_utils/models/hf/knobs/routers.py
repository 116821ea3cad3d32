"""The routers of a decoder's blocks: which blocks have experts, what they choose for a token, and the knob of top-k.

A router's choice is read from the tensors that it returns, not from its attributes: some have a `top_k` that nothing
reads.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges, hooks_removed
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.primitives.private_apis import computes_experts

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
    #: the most positions that a block computed, as some blocks need the last one alone; None where no output shows it
    tokens: int | None = None
    #: by block, the most experts of a token with a weight other than 0; those whose weights cannot be seen are left out
    weighted_experts: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the counts."""
        self.tokens = None
        self.blocks_run.clear()
        self.experts_per_token.clear()
        self.weighted_experts.clear()

    def block_hook(self, index: int, token_axis: int | None) -> Any:
        """A forward hook of a block that counts it.

        Args:
            token_axis: of its hidden states, along which positions lie; None where it is not known.
        """

        def hook(_module: Any, _args: Any, output: Any) -> None:
            self.blocks_run.append(index)
            if token_axis is not None:
                self.tokens = max(self.tokens or 0, _shape_of(output)[token_axis])

        return hook


@dataclass(frozen=True)
class _TopKHolder:
    """A module that says how many experts a token gets: by its own `top_k`, or by a field of the config that it has."""

    module: nn.Module
    config_field: str | None = None  #: None for its own `top_k`

    @property
    def top_k(self) -> int:
        own = vars(self.module)
        return int(own["top_k"] if self.config_field is None else getattr(own["config"], self.config_field))

    def change(self, top_k: int) -> AttributeChange:
        """The change that makes it another number; a config, which other blocks have too, is replaced by a copy."""
        if self.config_field is None:
            return AttributeChange(self.module, "top_k", top_k)
        config = copy.copy(vars(self.module)["config"])
        setattr(config, self.config_field, top_k)
        return AttributeChange(self.module, "config", config)


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
        # By block. Some have states of several streams, before or behind the positions.
        self._token_axes: dict[int, int] = {}
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
        """The blocks with experts in which no module says how many a token gets."""
        return tuple(index for index in self.routed_blocks if not self._holders[index])

    @property
    def first_top_k(self) -> int | None:
        """Experts for a token of the first block with experts; None in a dense model, and where nothing says it."""
        return self._own_or_said(self.routed_blocks[0]) if self.routed_blocks else None

    @property
    def default_top_k(self) -> int | None:
        """The value of the model as it is: the most experts for a token of the blocks that the knob turns, else of the
        first block with experts. None in a dense model, and where nothing says it.
        """
        own = [number for number in map(self._own_or_said, self.adjustable_blocks) if number is not None]
        return max(own, default=self.first_top_k)

    @property
    def own_by_block(self) -> dict[int, int] | None:
        """Experts for a token of each block with experts, where these differ; None where they do not."""
        own = {block: self._own_or_said(block) for block in self.routed_blocks}
        known = {block: number for block, number in own.items() if number is not None}
        return known if len(set(known.values())) > 1 else None

    def own_top_k(self, block: int) -> int | None:
        """Experts that the block was seen to choose by itself; None for a dense one, and where it was not seen."""
        return self._own.get(block)

    def _own_or_said(self, block: int) -> int | None:
        """Experts for a token of a block with experts: seen, or by its attribute, or by the config."""
        if block in self._own:
            return self._own[block]
        holders = self._holders[block]
        return holders[0].top_k if holders else self._config_top_k

    def top_k_at(self, block: int, top_k: int) -> int:
        """Experts for a token of a block that the knob turns: where blocks differ by themselves, none gets more than
        its own.
        """
        own = None if self.own_by_block is None else self._own_or_said(block)
        return top_k if own is None else min(top_k, own)

    @property
    def limit(self) -> tuple[int, str] | None:
        """The largest top-k, and why it is not the number of experts; None where it is."""
        limits = [_group_limit(each.module) for index in self.adjustable_blocks for each in self._holders[index]]
        if self.own_by_block is not None and self.default_top_k is not None:
            numbers = ", ".join(map(str, self.own_by_block.values()))
            reason = f"its blocks choose {numbers} experts by themselves, and a top-k only lowers these"
            limits.append((self.default_top_k, reason))
        return min((limit for limit in limits if limit is not None), default=None)

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
        if self.limit is not None and top_k > self.limit[0]:
            raise ConfigurationError(f"top-k {top_k} is not possible: {self.limit[1]}; give 1 to {self.limit[0]}")

    def put(self, value: int | None) -> None:
        """None stands for the model's own number."""
        self.validate(value)
        self._changes.put_back()
        self.value = None
        if value not in (None, self.default_top_k) and self.unsupported_reason is None:
            self._changes.put(self.changes(value))
        self.value = value

    def changes(self, top_k: int) -> list[AttributeChange]:
        """The changes that give every block with experts after the first `top_k` of them for a token, or `top_k_at`."""
        return [
            holder.change(self.top_k_at(index, top_k))
            for index in self.adjustable_blocks
            for holder in self._holders[index]
        ]

    def learn(self, run: Callable[[], object], tokens: int) -> None:
        """Find where and what each block chooses, and along which axis its tokens lie, by one `run` over so many tokens
        at the model's own setting.
        """
        handles = [
            block.register_forward_hook(self._axis_hook(index, tokens)) for index, block in enumerate(self._blocks)
        ]
        handles += [
            module.register_forward_hook(self._learning_hook(index, tokens), with_kwargs=True)
            for index in self.routed_blocks
            for module in _outside_attention(self._blocks[index])
        ]
        with hooks_removed(handles):
            run()

    def _axis_hook(self, index: int, tokens: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            axes = [axis for axis, size in enumerate(_shape_of(output)) if size == tokens]
            if len(axes) == 1:
                self._token_axes[index] = axes[0]

        return hook

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
        handles = [
            block.register_forward_hook(counted.block_hook(index, self._token_axes.get(index)))
            for index, block in enumerate(self._blocks)
        ]
        for index, choice in self._choices.items():
            hook = _choice_hook(counted, index, choice)
            handles.append(choice.module.register_forward_hook(hook, with_kwargs=True))
        with hooks_removed(handles):
            yield counted


def _choice_hook(counted: Counted, index: int, choice: _Choice) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        chosen = _values(choice.is_output, args, kwargs, output)[choice.place]
        counted.experts_per_token[index] = int(chosen.shape[-1])
        beside = [*_values(True, args, kwargs, output), *_values(False, args, kwargs, output)]
        weights = next((value for value in beside if _is_weight(value, chosen)), None)
        if weights is not None and not weights.is_meta:
            counted.weighted_experts[index] = int((weights != 0).sum(dim=-1).max())

    return hook


def refuse_without_effect(top_k: int, counted: Counted, scores: Sequence[torch.Tensor]) -> None:
    """Raises KnobDidNotAct where some of the experts that a top-k above the model's own adds cannot count.

    Args:
        counted: at that top-k.
        scores: that routers chose from, each [T, E]; an expert that a router excludes has 0 or the lowest number.
    """
    for block, number in counted.weighted_experts.items():
        if number < counted.experts_per_token[block]:
            raise KnobDidNotAct(
                f"top-k {top_k}: the router of block {block} gives at most {number} of the experts of a token a weight "
                f"other than 0; give at most {number}"
            )
    for each in scores:
        lowest = torch.finfo(each.dtype).min
        choosable = int(((each != 0) & (each > lowest)).sum(dim=-1).max())
        if choosable < top_k:
            raise KnobDidNotAct(
                f"top-k {top_k}: a router excludes all but {choosable} experts of a token; give at most {choosable}"
            )


def _group_limit(router: nn.Module) -> tuple[int, str] | None:
    """The most experts that a router limited to groups can choose, and why; None for another router.

    Every family of transformers that has such groups names them as DeepSeek does.
    """
    of_router = vars(router)
    groups, num_groups = of_router.get("topk_group"), of_router.get("num_group", of_router.get("n_group"))
    experts = of_router.get("num_experts", of_router.get("n_routed_experts"))
    is_limited = of_router.get("topk_method") != "greedy"
    if not (isinstance(groups, int) and isinstance(num_groups, int) and isinstance(experts, int)):
        return None
    if not is_limited or groups >= num_groups:
        return None
    each = experts // num_groups
    return groups * each, f"a token may use {groups} of {num_groups} groups of {each} experts"


def _values(is_output: bool, args: Any, kwargs: Any, output: Any) -> Sequence[Any]:
    if not is_output:
        return [*args, *kwargs.values()]
    return output if isinstance(output, tuple | list) else [output]


def _shape_of(output: Any) -> tuple[int, ...]:
    """The shape of a block's hidden states; () where it gives none."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    return tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else ()


def _is_weight(value: Any, chosen: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == chosen.shape


def _is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 2


def _has_experts(block: nn.Module) -> bool:
    return any(
        "top_k" in vars(module) or name.rpartition(".")[2] == "experts" for name, module in block.named_modules()
    )


def _holders(block: nn.Module) -> list[_TopKHolder]:
    # Many blocks have an unused copy beside the router's: all get the same number.
    own = [_TopKHolder(module) for module in block.modules() if "top_k" in vars(module)]
    return own or [
        _TopKHolder(module, name)
        for module in _outside_attention(block)
        # How experts are computed is switched in the config that all blocks have.
        if isinstance(config := vars(module).get("config"), PreTrainedConfig) and not computes_experts(module)
        for name in _TOP_K
        if _number_of(config, name) is not None
    ]


def _outside_attention(block: nn.Module) -> list[nn.Module]:
    """Modules that may show a choice; the block itself and attention get positions, which are integers too."""
    return [module for name, module in block.named_modules() if name and "attn" not in name and "attention" not in name]


def _first_number(text_config: Any, names: Sequence[str]) -> int | None:
    numbers = (_number_of(text_config, name) for name in names)
    return next((number for number in numbers if number is not None), None)


def _number_of(config: Any, name: str) -> int | None:
    """A whole number of a config; None where it has none of this name, or one for each block."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # not lost: a config with other values for other blocks has none for all
        return None
    return value if isinstance(value, int) else None
