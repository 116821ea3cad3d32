"""Knobs that are turned by adapters and by themselves, and what comes back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.registry import knob_named, load_knob_module, register_knob, unregister_knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.models.common.turned_knobs import CountingAdapter, RequestKnob, TurnedKnobs
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import StageFlops


class UpTo(RequestKnob):
    """Takes numbers up to a highest one."""

    def __init__(self, highest: int) -> None:
        self.highest, self.taken = highest, list[Any]()

    def put(self, value: int | None) -> None:
        if value is not None and value > self.highest:
            raise ConfigurationError(f"{value} is more than {self.highest}")
        self.taken.append(value)
        self.value = value


class Scales(CountingAdapter):
    """Multiplies costs by its value; shows the value in percent, and nothing at 1."""

    value = 1.0

    @property
    def engines_unsupported_reason(self) -> str | None:
        return None if self.value == 1 else f"{self.value} is for modules"

    def put(self, value: float) -> None:
        self.value = value

    def counted(self, setting: Setting, stages: Any, inputs: Any) -> Any:
        return None if self.value == 1 else {"percent": 100 * self.value}

    def flops(self, setting: Setting, flops_at: Any) -> StageFlops | None:
        whole = flops_at(setting)
        return None if whole is None else StageFlops(None, round(self.value * whole.prefill_flops), None)

    def step_bytes(self, setting: Setting, bytes_at: Any) -> float | None:
        whole = bytes_at(setting)
        return None if whole is None else float(self.value * whole)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.lm_head.weight)

    def read(self) -> float:
        """How many of four features the head reads."""
        return float(self.lm_head(torch.ones(4)).detach())


@pytest.fixture(autouse=True)
def own_knob() -> Iterator[None]:
    """A knob without an adapter: the fraction of the features that the head reads."""
    load_knob_module(Path("knob_profiler.head_fraction"))
    yield
    unregister_knob("head_fraction")


def made() -> tuple[TurnedKnobs, Headed]:
    model = Headed()
    return TurnedKnobs(model, {TOP_K.name: UpTo(8), EXPERT_MASS.name: Scales()}), model


def test_a_setting_stays_until_the_next_and_what_it_does_not_name_is_the_models_own() -> None:
    knobs, model = made()
    assert knobs.in_force == {"top_k": None, "expert_mass": 1.0}
    knobs.apply(Setting.of(top_k=3, expert_mass=0.5, head_fraction=0.5))
    assert knobs.in_force == {"top_k": 3, "expert_mass": 0.5, "head_fraction": 0.5}
    assert (knobs.on_modules, model.read()) == ({"head_fraction": 0.5}, 2)
    knobs.apply(Setting.of(head_fraction=0.25))
    assert (knobs.in_force, model.read()) == ({"top_k": None, "expert_mass": 1.0, "head_fraction": 0.25}, 1)
    knobs.apply(Setting.of())
    assert (knobs.on_modules, model.read()) == ({}, 4)


def test_a_context_brings_back_what_was_there_also_after_an_error_and_within_another() -> None:
    knobs, model = made()
    knobs.apply(Setting.of(top_k=3, head_fraction=0.5))
    before = {"top_k": 3, "expert_mass": 1.0, "head_fraction": 0.5}
    with knobs.apply(Setting.of(top_k=4, expert_mass=0.25)):
        assert (knobs.in_force, model.read()) == ({"top_k": 4, "expert_mass": 0.25}, 4)
        with knobs.apply(Setting.of(top_k=5, head_fraction=0.75)):
            knobs.apply(Setting.of(top_k=6))
        assert (knobs.in_force, model.read()) == ({"top_k": 4, "expert_mass": 0.25}, 4)
    assert (knobs.in_force, model.read()) == (before, 2)
    with pytest.raises(KeyError), knobs.apply(Setting.of(top_k=4)):
        raise KeyError
    assert (knobs.in_force, model.read()) == (before, 2)
    with knobs.restored_afterwards():
        knobs.apply(Setting.of(top_k=7))
        # Whatever turned it.
        knobs.adapters["top_k"].put(8)
    assert (knobs.in_force, model.read()) == (before, 2)


def test_a_setting_with_an_impossible_value_changes_nothing() -> None:
    model = Headed()
    first, second = UpTo(8), UpTo(2)
    knobs = TurnedKnobs(model, {TOP_K.name: first, ACTIVE_BLOCKS.name: second})
    knobs.apply(Setting.of(top_k=3, head_fraction=0.5))
    with pytest.raises(ConfigurationError, match="7 is more than 2"):
        # In the order of the registry, the first adapter takes its value before the second one refuses.
        knobs.apply(Setting.of(top_k=4, num_active_blocks=7))
    assert first.taken == [3, 4, 3]
    assert (knobs.in_force, model.read()) == ({"top_k": 3, "num_active_blocks": None, "head_fraction": 0.5}, 2)


def test_what_is_counted_and_costs_come_from_the_adapters_that_count() -> None:
    knobs, _ = made()
    whole = StageFlops(None, 1000, None)
    stages: Any = None
    setting = Setting.of(top_k=3)
    knobs.apply(setting)
    assert (knobs.engines_unsupported_reason, knobs.counted(setting, stages, {})) == (None, {})
    knobs.apply(setting.replaced(expert_mass=0.5))
    assert knobs.engines_unsupported_reason == "0.5 is for modules"
    assert knobs.counted(setting, stages, {}) == {"expert_mass": {"percent": 50}}
    assert knobs.flops(setting, lambda _: whole) == StageFlops(None, 500, None)
    assert knobs.step_bytes(setting, lambda _: 80.0) == 40
    assert (knobs.flops(setting, lambda _: None), knobs.step_bytes(setting, lambda _: None)) == (None, None)


def test_costs_of_a_knob_that_acts_on_modules_are_what_it_says_or_not_known() -> None:
    knobs, _ = made()
    whole = StageFlops(None, 1000, None)
    half, own = Setting.of(head_fraction=0.5), Setting.of(top_k=3)
    assert (knobs.flops(half, lambda _: whole), knobs.step_bytes(half, lambda _: 80.0)) == (whole, 80.0)
    silent = type("Silent", (type(knob_named("head_fraction")),), {"keeps_costs": False})
    silent.__qualname__ = "HeadFraction"  # in its place
    register_knob(silent())
    assert (knobs.flops(half, lambda _: whole), knobs.step_bytes(half, lambda _: 80.0)) == (None, None)
    assert (knobs.flops(own, lambda _: whole), knobs.step_bytes(own, lambda _: 80.0)) == (whole, 80.0)


def test_a_knob_of_requests_says_what_is_in_force() -> None:
    knob = RequestKnob()
    assert (knob.unsupported_reason, knob.value) == (None, None)
    knob.put(6)
    assert (knob.value, RequestKnob().value) == (6, None)


def test_a_placebo_acts_on_no_module_and_comes_back() -> None:
    knobs = TurnedKnobs(nn.Linear(2, 2), {})
    with knobs.apply(Setting({"placebo": "again"})):
        assert knobs.in_force == {"placebo": "again"} and knobs.on_modules == {}
    assert knobs.in_force == {}


def test_a_knob_that_nothing_turns_is_refused_and_a_placebo_is_none() -> None:
    knobs, model = made()
    knobs.apply(Setting.of(head_fraction=0.5, placebo="again"))
    with pytest.raises(ConfigurationError, match="picture side cannot be turned in this model: PictureSide has no"):
        knobs.apply(Setting.of(picture_side=336))
    assert (knobs.on_modules, model.read()) == ({"head_fraction": 0.5}, 2)


def test_a_limit_of_answers_is_in_force_until_the_next_setting_and_acts_on_no_module() -> None:
    knobs, _ = made()
    with knobs.apply(Setting.of(answer_limit=3)):
        assert [knobs.limited(most) for most in (2, 3, 9)] == [2, 3, 3] and knobs.on_modules == {}
    assert knobs.limited(9) == 9
