"""A grid of text experiments: a YAML file in which a list of values means several experiments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.primitives.errors import ConfigurationError, first_line
from experiment_core_utils.primitives.files import read_regular_file
from experiment_core_utils.primitives.grids import made_of

# One launch has one of each.
OF_THE_LAUNCH = ("device", "mixed_precision", "num_processes", "num_threads", "worker_timeout", "task_type")
_LISTS = ("custom_metrics", "stop")
MOST_BYTES = 100_000
MOST_DEPTH = 50
MOST_COMBINATIONS = 10_000
Key = tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One point of a grid."""

    varied: Mapping[str, Any]  #: by dotted key, the values of the keys that have several
    config: TextConfig | None  #: None where the values are not possible together
    reason: str | None  #: why they are not


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; raises ConfigurationError for everything else, a key given twice included."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigurationError(f"{path} has {size} bytes, and at most {MOST_BYTES} are read; give less")
        return parse_yaml(read_regular_file(path).decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {first_line(error)}") from error


def parse_yaml(text: str, name: str) -> Mapping[str, Any]:
    """The mapping that a YAML text contains; `name` is for messages."""
    content = _parsed(text, name)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{name} contains {type(content).__name__}; write `key: value` lines")
    return content


def with_overrides(content: Mapping[str, Any], overrides: Sequence[str]) -> Mapping[str, Any]:
    """`content` with `key=value` or `group.key=value` put in force, values in YAML; raises ConfigurationError."""
    result = _copied(content)
    keys = [override.partition("=")[0] for override in overrides]
    if twice := [key for at, key in enumerate(keys) if key in keys[:at]]:
        raise ConfigurationError(f"{twice[0]} is given twice; give it once, several values as [1, 2]")
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key:
            raise ConfigurationError(
                f"{override!r} is not an override; write key=value, such as decoder_config.decoding_mode=greedy"
            )
        *groups, last = key.split(".")
        place = result
        for group in groups:
            if place.get(group) is None:
                place[group] = {}
            place = place[group]
            if not isinstance(place, dict):
                raise ConfigurationError(f"{override!r}: {group} is a value, not a group of keys")
        place[last] = _parsed(value, override)
    return result


def combinations(content: Mapping[str, Any]) -> list[Combination]:
    """Every combination of the lists in `content`, the last key varying fastest, equal values of a list once.

    Raises:
        ConfigurationError: an unknown key, a value that is not allowed by itself, a list for a key that one launch
            has only one of, or not a single combination that is possible.
    """
    if "further" in content:
        raise ConfigurationError(
            "further: there is no such key; a file contains the keys of docs/reference/command_line.md only"
        )
    axes = dict(_axes(content, TextConfig))
    for key, values in axes.items():
        if not values:
            raise ConfigurationError(f"{'.'.join(key)} has an empty list; give one value or more")
        if key[0] in OF_THE_LAUNCH:
            raise ConfigurationError(f"{key[0]} has several values; one launch has one, run a second one for the other")
    total = math.prod(len(values) for values in axes.values())
    if total > MOST_COMBINATIONS:
        raise ConfigurationError(
            f"the lists make {total} combinations, and at most {MOST_COMBINATIONS} are measured in one run; give "
            "shorter lists"
        )
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    several = [key for key in axes if len(reduce(getitem, key, content)) > 1]
    return [
        Combination({".".join(key): point[key] for key in several}, *made)
        for point, made in zip(points, made_of(points, lambda point: validated(_at(content, point))), strict=True)
    ]


def _at(content: Mapping[str, Any], point: Mapping[Key, Any]) -> Mapping[str, Any]:
    """The content with one value for each list."""
    values = _copied(content)
    for key, value in point.items():
        reduce(getitem, key[:-1], values)[key[-1]] = value
    return values


def _axes(content: Mapping[str, Any], model: type[BaseModel], above: Key = ()) -> Iterator[tuple[Key, list[Any]]]:
    """Keys that contain a list where a single value belongs, in the order of the text."""
    for name, value in content.items():
        field = model.model_fields.get(name)
        group = field.annotation if field is not None else None
        if isinstance(value, Mapping) and isinstance(group, type) and issubclass(group, BaseModel):
            yield from _axes(value, group, (*above, name))
        elif isinstance(value, list) and name not in _LISTS:
            yield (*above, name), _without_repeats(value)


def _without_repeats(values: Sequence[Any]) -> list[Any]:
    """Values without repeats, compared by value and type: true and 1 differ."""
    if all(isinstance(value, str | int | float | None) for value in values):
        return [value for _, value in dict.fromkeys((type(value), value) for value in values)]
    typed = [(type(value), value) for value in values]
    return [value for at, (_, value) in enumerate(typed) if typed[at] not in typed[:at]]


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in content.items()}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would keep the last one, and aliases."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node and all below it; refuses an alias, and what is nested too deep for a file that is meant."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise ConfigurationError(f"line {line}: the alias *{event.anchor} is not read; write its value out")
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise ConfigurationError(f"it is nested more than {MOST_DEPTH} deep; write plain `key: value` lines")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # `<<: {…}` takes in another mapping; its keys may be given again.
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        twice = [key for at, key in enumerate(keys) if key in keys[:at]]
        if twice:
            raise ConfigurationError(f"line {node.start_mark.line + 1}: {twice[0]} is given twice; keep one")
        return super().construct_mapping(node, deep)


def _parsed(text: str, name: str) -> Any:
    try:
        return _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigurationError(f"{name}{where} is not YAML: {problem}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}, {error}") from None
