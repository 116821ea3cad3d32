"""The knobs that there are, in the order in which keys name them, and the door for others."""

from pathlib import Path
from typing import Any

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import read_given, run_python_file
from experiment_core_utils.primitives.texts import did_you_mean

_KNOBS: dict[str, Knob[Any]] = {
    knob.name: knob for knob in (VISION_TOKENS, VISUAL_TOKEN_KEEP, TOP_K, EXPERT_MASS, ACTIVE_BLOCKS)
}
# Content of the files that `load_knob_module` ran, by path.
_LOADED: dict[Path, bytes] = {}


def all_knobs() -> tuple[Knob[Any], ...]:
    """Every knob, in the order in which keys name them."""
    return tuple(_KNOBS.values())


def knob_named(name: str) -> Knob[Any]:
    """The knob of a name; raises ConfigurationError where there is none."""
    if name not in _KNOBS:
        raise ConfigurationError(f"there is no knob {name}{did_you_mean(name, _KNOBS)}; known are {', '.join(_KNOBS)}")
    return _KNOBS[name]


def register_knob(knob: Knob[Any]) -> None:
    """Add a knob behind those that there are; one of the same class and name is replaced, as a module is loaded again.

    Raises:
        ConfigurationError: another knob has its name or one of its flags.
    """
    before = _KNOBS.get(knob.name)
    if before is not None and type(before).__qualname__ != type(knob).__qualname__:
        raise ConfigurationError(f"there is a knob {knob.name} already; give this one another name")
    taken = {flag for other in all_knobs() if other is not before for flag in other.flags.model_fields}
    twice = sorted(taken & knob.flags.model_fields.keys())
    if twice:
        raise ConfigurationError(f"knob {knob.name}: there is a flag --{twice[0]} already; give it another name")
    _KNOBS[knob.name] = knob


def unregister_knob(name: str) -> None:
    """Take a knob away that `register_knob` added."""
    del _KNOBS[name]
    _LOADED.clear()


def load_knob_module(path: Path) -> None:
    """Run a Python file that registers knobs, once as long as it does not change.

    Raises:
        ConfigurationError: it cannot be run, or registers what `register_knob` refuses.
    """
    content, place = read_given(path, "--knob_module"), path.resolve()
    if _LOADED.get(place) != content:
        before = dict(_KNOBS)
        run_python_file(path, "--knob_module")
        if before == _KNOBS:
            raise ConfigurationError(f"--knob_module {path} registers no knob; call register_knob with one in it")
        _LOADED[place] = content
