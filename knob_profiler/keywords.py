"""The arguments of `profile` as flags of the command, and the command's errors in the words of the caller."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from experiment_core_utils.config.profiling import parts_of_flags
from experiment_core_utils.primitives.errors import ConfigurationError, ProfilerError

# Short names of flags.
FLAG_OF = {
    "model": "model_path",
    "task": "dataset_name",
    "tiers": "tier_list",
    "vision_tokens": "vision_tokens_list",
    "vision_fractions": "vision_fraction_list",
    "top_k": "top_k_list",
    "active_blocks": "num_active_blocks_list",
    "samples": "num_samples",
}
NAME_OF = {flag: name for name, flag in FLAG_OF.items()}
MOST_NAMES = 3


def flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by flag, of arguments by either name; a single value where a list is meant is a list of it.

    Raises:
        ConfigurationError: an argument that does not exist, or one that is given by both its names.
    """
    fields = {name: field for part in parts_of_flags().values() for name, field in part.model_fields.items()}
    found: dict[str, Any] = {}
    for name, value in given.items():
        # Beside a server's address, the model is one of the server's.
        is_served = name == "model" and given.get("endpoint") is not None
        flag = name if is_served else FLAG_OF.get(name, name)
        if flag not in fields:
            raise ConfigurationError(
                f"{name}: there is no such argument{_nearest(name, fields)}; every flag of knobprof profile is one, "
                "see knobprof profile --help"
            )
        if flag in found:
            raise ConfigurationError(f"{flag}: given twice, also by its short name {NAME_OF[flag]}; give one of them")
        value = value.tolist() if hasattr(value, "tolist") else value
        if _is_list(fields[flag].annotation) and value is not None:
            value = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        found[flag] = value
    return found


@contextmanager
def in_words_of(given: Iterable[str]) -> Iterator[None]:
    """Context in which errors name the arguments as they were given, `top_k` instead of `--top_k_list`."""
    typed = set(given)
    try:
        yield
    except ProfilerError as error:
        known = {name for part in parts_of_flags().values() for name in part.model_fields}

        def argument(flag: re.Match[str]) -> str:
            name = flag[1]
            if name not in known:
                return flag[0]
            return name if name in typed else NAME_OF.get(name, name)

        error.args = tuple(re.sub(r"--(\w+)", argument, each) if isinstance(each, str) else each for each in error.args)
        raise


def _is_list(annotation: Any) -> bool:
    """Whether a field takes a tuple; that may be one of several types."""
    return get_origin(annotation) is tuple or any(map(_is_list, get_args(annotation)))


def _nearest(name: str, flags: Iterable[str]) -> str:
    """The arguments whose names are nearest, by their short names."""
    near = get_close_matches(name, [*FLAG_OF, *flags], n=2 * MOST_NAMES)
    names = list(dict.fromkeys(NAME_OF.get(each, each) for each in near))[:MOST_NAMES]
    return f" (did you mean {' or '.join(names)}?)" if names else ""
