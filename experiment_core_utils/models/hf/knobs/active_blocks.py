"""The changes by which a transformers decoder runs with some of its blocks only (layer skipping).

The reference is a model built with the active blocks and the same weights. To match it, the decoder gets a shorter list
of blocks, each block gets a new number, by which it finds its layer of the cache, and the text config gets a shorter
form of every list with an entry for each block, and of the fields in which blocks differ, because masks and caches are
made from these. Such lists are known by their names, or by what the decoder reads of them while it runs (`list_reads`).
A decoder for which this is not known to be enough is refused with the reason.
"""

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.models.common.block_modules import BlockStack, text_decoder
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.costs.decoder import refuse_impossible_blocks
from experiment_core_utils.models.hf.knobs.list_reads import entries_of, reads_of
from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import FIELDS_BY_BLOCK, fields_of_blocks

# Lists with an entry for each block that are known by how their names end; others are found by how they are read.
# `mtp_` lists are about other blocks.
_PER_BLOCK_ENDINGS = ("_types", "_type", "_pattern", "_freq", "_layers", "_per_layer")
_KNOWN_PER_BLOCK = ("no_rope_layers",)
_OTHER_BLOCKS = "mtp_"
# Lists that name blocks by their indices.
_KNOWN_INDEX_LISTS = ("moe_layers", "mlp_only_layers", "rope_scaling_layers")
_INDEX_MARKS = ("layers", "blocks", "idx", "indices", "indexes")
# Other names for a block's number, which no rule here renumbers.
_PER_LAYER_NUMBERS = ("layer_id", "layer_number", "layer_index", "block_idx", "block_id")
# Kinds of blocks that keep a state of one size instead of keys and values of every token.
_NOT_ATTENTION = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
# In a list about blocks: this one takes over what another computes, such as the token indices of an indexer.
_TAKEN_OVER = "shared"
# What knobs and modes set in a block.
_NO_CONSTANTS = ("layer_idx", "top_k", "training")
# What a config's own properties raise where they do not apply to it.
_PROPERTY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip


class ActiveBlocks:
    """The blocks of a model's decoder, and the `KnobAdapter` of those that are active.

    Args:
        stack: the list of the blocks; None where there is none: the whole decoder then counts as one block.

    Attributes:
        every: the blocks of the full model, in order.
        unsupported_reason: why none of them can be skipped; None if they can, as far as is known without running
            them.
        value: the blocks in force.
    """

    def __init__(self, model: PreTrainedModel, stack: BlockStack | None) -> None:
        self._list = stack
        self._stack: nn.Module = text_decoder(model) if stack is None else stack.owner
        self.every: tuple[nn.Module, ...] = (self._stack,) if stack is None else tuple(stack.blocks)
        self._configs = [] if stack is None else _text_configs(model, self._stack, len(self.every))
        self._numbered = [[module for module in block.modules() if _number(module) is not None] for block in self.every]
        #: names of lists with an entry for each block, found by their reads
        self._read_by_block: frozenset[str] = frozenset()
        self._kinds: Sequence[str] | None = None
        if self._configs:
            self._kinds = getattr(self._configs[0], "layer_types", None)
        self._changes = AttributeChanges()
        self.value = self._all = RunningBlocks.of(range(len(self.every)))
        self.unsupported_reason = self._refuse(model)

    def put(self, value: RunningBlocks | None) -> None:
        """None stands for all blocks."""
        blocks = value or self._all
        self.validate(blocks.indices)
        # Lists by block are known by their length, which is that of the full model only.
        self._changes.put_back()
        self.value = self._all
        self._changes.put(self.changes(blocks.indices))
        self.value = blocks

    def learn(self, run: Callable[[], object]) -> None:
        """Find the lists about blocks that no name tells, by one `run` of the whole decoder over a prompt."""
        total = len(self.every)
        if self.unsupported_reason is not None or total == 1:
            run()
            return
        unknown = {
            f"{place}.{name}": (config, name)
            for place, config in enumerate(self._configs)
            for name, value in _lists(config)
            if not _has_rule(name, value, total) and (len(value) == total or _are_indices(value, total))
        }
        inside = {
            f"{place}.{name}.{key}": (value, key)
            for place, config in enumerate(self._configs)
            for name, value in vars(config).items()
            if isinstance(value, dict)
            for key, entry in value.items()
            if isinstance(entry, list | tuple) and len(entry) == total
        }
        with reads_of(unknown, self.every) as seen, entries_of(inside, self.every) as seen_inside:
            run()
        by_block = [key.partition(".")[2] for key, reads in seen_inside.items() if reads.is_by_block]
        if by_block:
            self.unsupported_reason = f"its config has {by_block[0]} with an entry for each block inside an object"
        for key, reads in seen.items():
            config, name = unknown[key]
            if reads.is_by_block and len(getattr(config, name)) == total:
                self._read_by_block |= {name}
            elif reads.names_blocks:
                self.unsupported_reason = f"its config names blocks by their indices in {name}"
            elif reads.entries and len(getattr(config, name)) == total:
                self.unsupported_reason = (
                    f"its config has {name} with as many entries as blocks, and how its decoder reads them does not "
                    "tell whether they are about blocks"
                )

    def validate(self, active_blocks: Sequence[int]) -> None:
        """Raises ConfigurationError where these cannot be the active blocks."""
        total = len(self.every)
        refuse_impossible_blocks(active_blocks, total)
        if len(active_blocks) == total:
            return
        if self.unsupported_reason is not None:
            raise ConfigurationError(
                f"blocks of this model cannot be skipped: {self.unsupported_reason}; give all {total}"
            )
        if not self.has_attention(active_blocks):
            attending = [index for index in range(total) if self._attends(index)]
            raise ConfigurationError(
                f"active blocks {list(active_blocks)} leave no attention; keep at least one of {attending}"
            )

    def has_attention(self, active_blocks: Sequence[int]) -> bool:
        """Whether an active block has attention, or the model has none."""
        return any(map(self._attends, active_blocks)) or not any(map(self._attends, range(len(self.every))))

    def _attends(self, index: int) -> bool:
        return self._kinds is None or self._kinds[index] not in _NOT_ATTENTION

    def changes(self, active_blocks: Sequence[int]) -> list[AttributeChange]:
        """The changes that make the full model the one with these blocks; nothing where all of them are active."""
        if self._list is None or len(active_blocks) == len(self.every):
            return []
        changes = [
            AttributeChange(module, "layer_idx", position)
            for position, index in enumerate(active_blocks)
            for module in self._numbered[index]
        ]
        for config in self._configs:
            changes += _config_changes(config, active_blocks, len(self.every), self._read_by_block)
        changes += _own_lists(self._stack, active_blocks, len(self.every))
        kept = nn.ModuleList(self.every[index] for index in active_blocks)
        return [*changes, AttributeChange(self._stack, self._list.name, kept)]

    def _refuse(self, model: PreTrainedModel) -> str | None:
        total = len(self.every)
        if getattr(model.config, "is_encoder_decoder", False):
            return "its decoder attends to an encoder"
        if self._list is None:
            return "its decoder has no list of modules through which a prompt runs once, one after another"
        if not self._configs:
            counted = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
            return f"it has {total} blocks, and its text config counts {counted or 'no'} layers"
        beside = [
            name
            for name, module in self._stack.named_children()
            if name != self._list.name and isinstance(module, nn.ModuleList | nn.ParameterList)
            if len(module) == total > 1
        ]
        if beside:
            return f"its decoder has a second list with an entry for each block ({', '.join(beside)})"
        tensors = [*self._stack.named_parameters(recurse=False), *self._stack.named_buffers(recurse=False)]
        by_length = [name for name, tensor in tensors if tensor.dim() and tensor.shape[0] == total > 1]
        if by_length:
            return f"its decoder has a tensor with as many rows as blocks ({', '.join(by_length)})"
        reasons = [_refuse_config(config, total) for config in self._configs]
        reasons.append(self._refuse_numbers())
        return next((reason for reason in reasons if reason is not None), None) or self._refuse_constants()

    def _refuse_numbers(self) -> str | None:
        for index, block in enumerate(self.every):
            for module in block.modules():
                own = vars(module)
                unusual = [name for name in _PER_LAYER_NUMBERS if name in own]
                if unusual:
                    return f"its blocks keep their number as {unusual[0]}"
                if own.get("is_kv_shared_layer"):
                    return f"block {index} uses the keys and values of another block"
        misnumbered = [
            index for index, modules in enumerate(self._numbered) if any(_number(module) != index for module in modules)
        ]
        return f"the numbers in blocks {misnumbered} are not their places" if misnumbered else None

    def _refuse_constants(self) -> str | None:
        """Build the decoder without block 0 anew, without storage: its blocks must have the constants of the active
        ones.

        Parts of a decoder that its config alone does not build are not checked.
        """
        config = vars(self._stack).get("config")
        if self._list is None or len(self.every) == 1 or not any(config is each for each in self._configs):
            return None
        # A list without a rule may be read by block while blocks are made; where it is not, they come out as before.
        same_length = {name for name, value in _lists(config) if len(value) == len(self.every)}
        reasons = [self._other_constants(config, names) for names in ((), same_length)]
        return None if None in reasons else reasons[0]

    def _other_constants(self, config: Any, by_block: Collection[str]) -> str | None:
        """See `_refuse_constants`; `by_block` are taken for lists about blocks."""
        total = len(self.every)
        active, trial = range(1, total), copy.deepcopy(config)
        try:
            for change in _config_changes(trial, active, total, by_block):
                setattr(trial, change.name, change.value)
            with torch.device("meta"):
                built = type(self._stack)(trial)
        except HF_CODE_ERRORS:  # More than its config is needed for it.
            return None
        for change in _own_lists(self._stack, active, total):
            if vars(built).get(change.name) != change.value:
                return f"its decoder derives {change.name} from the places of the blocks"
        assert self._list is not None
        others = getattr(built, self._list.name)
        if len(others) != len(active):
            return "its config counts other layers than its decoder's blocks"
        for index, new in zip(active, others, strict=True):
            other = _other_constant(self.every[index], new)
            if other is not None:
                return f"its blocks have a constant that depends on their number or index ({other})"
        return None


def _other_constant(block: nn.Module, new: nn.Module) -> str | None:
    """The first number, switch or word that differs between two blocks of the same class."""
    modules = dict(block.named_modules())
    for name, module in new.named_modules():
        mine = modules.get(name)
        # A block of another make, such as a dense one, says so in a switch.
        if mine is None or _makes(mine) != _makes(module):
            continue
        for attribute, value in vars(module).items():
            is_constant = isinstance(value, int | float | str) and attribute not in _NO_CONSTANTS
            if is_constant and vars(mine).get(attribute, value) != value:
                return attribute
    return None


def _makes(module: nn.Module) -> list[type]:
    return [type(module), *map(type, module.children())]


def _number(module: nn.Module) -> int | None:
    number = vars(module).get("layer_idx")
    return number if isinstance(number, int) else None


def _text_configs(model: PreTrainedModel, stack: nn.Module, total: int) -> list[Any]:
    """Every config object that masks, caches and blocks read; a model may contain copies of one."""
    holders = [model.config.get_text_config(decoder=True), *(vars(module).get("config") for module in stack.modules())]
    configs = {id(config): config for config in holders if getattr(config, "num_hidden_layers", None) == total}
    return list(configs.values())


def _config_changes(
    config: Any, active_blocks: Sequence[int], total: int, read_by_block: Collection[str] = ()
) -> list[AttributeChange]:
    changes = [AttributeChange(config, "num_hidden_layers", len(active_blocks))]
    for name, value in _lists(config):
        if name in _KNOWN_INDEX_LISTS:
            kept = [position for position, index in enumerate(active_blocks) if index in value]
        elif _is_per_block(name, value, total) or (name in read_by_block and len(value) == total):
            kept = [value[index] for index in active_blocks]
        else:
            continue
        changes.append(AttributeChange(config, name, type(value)(kept)))
    if getattr(config, "is_heterogeneous", False):
        changes.append(AttributeChange(config, FIELDS_BY_BLOCK, fields_of_blocks(config, active_blocks)))
    return changes


def _own_lists(stack: nn.Module, active_blocks: Sequence[int], total: int) -> list[AttributeChange]:
    """Lists by block that a decoder keeps beside its config."""
    return [
        AttributeChange(stack, name, type(value)(value[index] for index in active_blocks))
        for name, value in vars(stack).items()
        if isinstance(value, list | tuple) and len(value) == total
    ]


def _lists(config: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(config).items() if isinstance(value, list | tuple) and value]


def _is_per_block(name: str, value: Sequence[Any], total: int) -> bool:
    return len(value) == total and name.endswith(_PER_BLOCK_ENDINGS) and not name.startswith(_OTHER_BLOCKS)


def _has_rule(name: str, value: Sequence[Any], total: int) -> bool:
    """Whether it is known by its name what a list is about."""
    return name in _KNOWN_INDEX_LISTS or name.startswith(_OTHER_BLOCKS) or _is_per_block(name, value, total)


def _refuse_config(config: Any, total: int) -> str | None:
    """The reason why a config does not allow layer skipping, None where it does; which fields exist depends on the
    family.
    """
    if getattr(config, "num_kv_shared_layers", 0):
        return f"its last {config.num_kv_shared_layers} blocks use the keys and values of other blocks"
    if any(mode is not None for mode in getattr(config, "kv_sharing_modes", None) or ()):
        return "some of its blocks use the keys and values of other blocks"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "each of its blocks has its own embedding, sliced from one table"
    for name, value in _lists(config):
        if len(value) == total and _TAKEN_OVER in value and not name.startswith(_OTHER_BLOCKS):
            return f"some of its blocks take over what another block computes ({name})"
        if _names_blocks(name, value, total):
            return f"its config names blocks by their indices in {name}"
    return _refuse_derived(config, total)


def _names_blocks(name: str, value: Sequence[Any], total: int) -> bool:
    """Whether a list that no rule is known for looks like indices of blocks."""
    if name in (*_KNOWN_INDEX_LISTS, *_KNOWN_PER_BLOCK) or name.startswith(_OTHER_BLOCKS):
        return False
    ascending = all(earlier < later for earlier, later in itertools.pairwise(value))
    return name.endswith(_INDEX_MARKS) and _are_indices(value, total) and ascending


def _are_indices(value: Sequence[Any], total: int) -> bool:
    return all(type(entry) is int and 0 <= entry < total for entry in value)


def _refuse_derived(config: Any, total: int) -> str | None:
    """Try the changes without block 0 on a copy: what the config derives must follow."""
    if total == 1:
        return None
    active, trial = range(1, total), copy.copy(config)
    before = _derived_lists(config, total)
    try:
        for change in _config_changes(trial, active, total):
            setattr(trial, change.name, change.value)
    except _PROPERTY_ERRORS as error:
        return f"its config cannot be changed ({type(error).__name__}: {error})"
    if trial.num_hidden_layers != total - 1:
        return "its config derives the number of blocks"
    for name, value in before.items():
        if list(getattr(trial, name)) != [value[index] for index in active]:
            return f"its config derives {name} from the places of the blocks"
    return None


def _derived_lists(config: Any, total: int) -> dict[str, list[Any]]:
    found = {}
    kinds = itertools.takewhile(lambda kind: kind is not PreTrainedConfig, type(config).__mro__)
    names = {name for kind in kinds for name, member in vars(kind).items() if isinstance(member, property)}
    for name in sorted(names):
        try:
            value = getattr(config, name)
        except _PROPERTY_ERRORS:
            continue
        if isinstance(value, list | tuple) and len(value) == total:
            found[name] = list(value)
    return found
