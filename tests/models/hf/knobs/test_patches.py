"""An interrupt between any two lines of a change loses no original."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from torch import nn

from experiment_core_utils.models.hf.knobs import controller, patches
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.patches import (
    AttributeChange,
    AttributeChanges,
    fields_in_force,
    hooks_removed,
    replaced_method,
)
from tests.models.knob_families import ALL_BLOCKS, TEXT_FAMILIES

TRACED = {patches.__file__, controller.__file__}


def interrupted_at(point: int, run: Callable[[], None]) -> bool:
    """Run until the given traced line, at which a KeyboardInterrupt is raised once; False where there is no such
    line.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            lines += 1
            if lines == point + 1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(before)
    return lines > point


def every_interrupt(run: Callable[[], None], check: Callable[[int], None]) -> int:
    """Interrupt `run` at each of its lines in turn and check after each; how many there are."""
    point = 0
    while interrupted_at(point, run):
        check(point)
        point += 1
    return point


def test_restore_is_right_wherever_a_setting_is_interrupted() -> None:
    """One setting after another, so that changes are undone and made; `restore` is called after the interrupt only."""
    model = TEXT_FAMILIES["gpt_oss"].built()
    knobs = DecoderKnobs(model)
    layers, config = model.model.layers, model.config.to_dict()

    def settings() -> None:
        knobs.apply(1, (0, 2, 3))
        with knobs.applied(2, (1, 3)):
            pass

    def full_again(point: int) -> None:
        knobs.restore()
        assert model.model.layers is layers and len(layers) == 4, point
        assert model.config.to_dict() == config, point
        assert [block.self_attn.layer_idx for block in layers] == [0, 1, 2, 3], point
        assert [block.mlp.router.top_k for block in layers] == [3, 3, 3, 3], point
        assert knobs.in_force == (None, ALL_BLOCKS), point

    assert every_interrupt(settings, full_again) > 200


class Holder:
    """An object with one attribute of its own, and one of its class."""

    shared = "class"

    def __init__(self) -> None:
        self.own = 1


def test_contexts_undo_their_changes_wherever_they_are_interrupted() -> None:
    holder, linear = Holder(), nn.Linear(1, 1)
    replaced = nn.Linear(1, 1)
    replaced.__dict__["forward"] = "before"

    def run() -> None:
        with fields_in_force(holder, {"own": 2, "shared": "instance"}), replaced_method(linear, "forward", abs):
            pass
        handle = linear.register_forward_hook(print)
        with hooks_removed([handle]), replaced_method(replaced, "forward", abs):
            pass

    def unchanged(point: int) -> None:
        assert (holder.own, holder.shared) == (1, "class"), point
        assert "forward" not in vars(linear) and vars(replaced)["forward"] == "before", point

    assert every_interrupt(run, unchanged) > 40


def test_a_change_that_fails_undoes_those_before_it() -> None:
    holder, changes = Holder(), AttributeChanges()
    with pytest.raises(AttributeError):
        changes.put([AttributeChange(holder, "own", 5), AttributeChange(holder, "missing", 6)])
    assert holder.own == 1
    holder.own = 7
    changes.put_back()
    assert holder.own == 7  # nothing is left to undo
