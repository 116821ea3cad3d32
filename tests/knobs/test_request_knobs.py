"""Knobs that a request to a server carries, and the servers side by side."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.knobs.answer_limit import ANSWER_LIMIT, answer_limit_at
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.knobs.picture_side import PICTURE_SIDE
from experiment_core_utils.knobs.reasoning_effort import REASONING_EFFORT
from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.variant import VARIANT
from experiment_core_utils.primitives.errors import ConfigurationError

ONE = KnobLimits(None, None, None, variants=("a",))
TWO = KnobLimits(None, None, None, variants=("q8_0".replace("_", "-"), "a.b"))
HERE = KnobLimits(4, None, None)
KNOBS = (PICTURE_SIDE, ANSWER_LIMIT, REASONING_EFFORT)


def request(limits: KnobLimits, **flags: Any) -> KnobRequest:
    every = dict.fromkeys(("picture_side_list", "answer_limit_list", "reasoning_effort_list"))
    return KnobRequest(SimpleNamespace(variant_paths={}, **{**every, **flags}), limits, "m", Path("m"), False)


@pytest.mark.parametrize(("knob", "values"), [(PICTURE_SIDE, (336, 672)), (REASONING_EFFORT, ("low", "high"))])
def test_given_values_are_those_of_a_server_alone(knob: ServerKnob, values: tuple[Any, ...]) -> None:
    assert knob.requested(request(ONE, **{knob.flag: values})).values == values
    assert knob.requested(request(ONE)).values == (knob.neutral,)
    assert knob.requested(request(HERE)).values == (knob.neutral,)
    with pytest.raises(ConfigurationError, match=f"--{knob.flag} {values[0]} cannot be set in m: only a request"):
        knob.requested(request(HERE, **{knob.flag: values}))


def test_a_limit_of_answers_is_of_every_model() -> None:
    for limits in (ONE, HERE):
        assert ANSWER_LIMIT.requested(request(limits, answer_limit_list=(8, 2))).values == (8, 2)
        assert ANSWER_LIMIT.requested(request(limits)).values == ("task",)


def test_names_are_read_back_and_rest_has_none() -> None:
    setting = Setting.of(picture_side=336, answer_limit=16, reasoning_effort="high", variant="q8-0")
    assert setting.key == "side336_answer16_efforthigh_variant-q8-0"
    assert Setting.named(setting.key) == setting
    assert Setting.of(**{knob.name: knob.neutral for knob in KNOBS}).key == ""
    assert [knob.parsed(f"{knob.prefix}{knob.at_rest}") for knob in KNOBS] == [knob.neutral for knob in KNOBS]
    assert PICTURE_SIDE.parsed("side07") is None and VARIANT.parsed("variant--x") is None


def test_cheaper_values_come_first_and_rest_last() -> None:
    assert sorted(("whole", 672, 336), key=PICTURE_SIDE.order) == [336, 672, "whole"]
    assert sorted(("own", "deep", "high", "low"), key=REASONING_EFFORT.order) == ["low", "high", "deep", "own"]


def test_the_limit_of_a_setting_is_never_above_that_of_all() -> None:
    levels: tuple[Any, ...] = (3, 9, ANSWER_LIMIT.at_rest)
    assert [answer_limit_at(Setting.of(answer_limit=each), 6) for each in levels] == [3, 6, 6]
    assert answer_limit_at(Setting.of(top_k=2), 6) == 6


def test_several_servers_are_values_and_one_is_none() -> None:
    assert VARIANT.requested(request(TWO)).values == ("q8-0", "a.b")
    assert VARIANT.requested(request(ONE)).values == VARIANT.requested(request(HERE)).values == ()
    assert reference_setting(TWO).levels == {"vision": "own", "variant": "q8-0"}
    assert reference_setting(ONE).levels == {"vision": "own"}
    with pytest.raises(ConfigurationError, match="is not a value of variant"):
        VARIANT.of_level("a b")
