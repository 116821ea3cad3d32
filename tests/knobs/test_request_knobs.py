"""Knobs that a request to a server carries, and the servers side by side."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.knobs.answer_limit import ANSWER_LIMIT, answer_limit_at
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.knobs.picture_side import PICTURE_SIDE
from experiment_core_utils.knobs.reasoning_effort import REASONING_EFFORT
from experiment_core_utils.knobs.registry import all_knobs, knob_named, unregister_knob
from experiment_core_utils.knobs.request_knobs import ServerKnob, merged, requested_fields
from experiment_core_utils.knobs.setting import Setting, check_label, reference_setting
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


@pytest.fixture
def own_fields() -> Iterator[None]:
    """No field of a request that a test names stays a knob."""
    yield
    for knob in all_knobs():
        if knob.name.startswith("request."):
            unregister_knob(knob.name)


def test_values_are_json_where_they_can_be_read_as_json_and_divided_at_its_commas() -> None:
    given = ['top_k=40,1e-1,"7"', 'a.b=true,null,{"x": "1,2"},[3, 4],no', "c=,two words,NaN", 'd=own,"own","x,y"']
    assert requested_fields(given) == {
        "request.top_k": (40, 0.1, '"7"'),
        "request.a.b": ("true", "null", '{"x":"1,2"}', "[3,4]", "no"),
        "request.c": ("", "two words", "NaN"),
        "request.d": ("own", '"own"', "x,y"),
    }


@pytest.mark.usefixtures("own_fields")
def test_a_field_of_a_path_is_nested_and_rest_is_left_out() -> None:
    knob = knob_named("request.extra_body.top_k")
    assert knob.request_fields(5) == {"extra_body": {"top_k": 5}}
    texts = ("true", "null", '"7"', "[3,4]", "no", '"own"', "own")
    found = [knob.request_fields(each).get("extra_body", {}).get("top_k", "left out") for each in texts]
    assert found == [True, None, "7", [3, 4], "no", "own", "left out"]
    other = knob_named("request.extra_body.min_p").request_fields(0.5)
    assert merged(knob.request_fields(5), other, {"x": 1}) == {"extra_body": {"top_k": 5, "min_p": 0.5}, "x": 1}


@pytest.mark.usefixtures("own_fields")
def test_labels_of_fields_are_parts_of_file_names_and_different_where_fields_or_values_are() -> None:
    names = ("top_k", "top-k", "top.k", "top__k", "a.json_x", "T.rank0")
    values = (1, 2.5, -1, "true", "", "a_b", "a-b", "a--b", ".json", "ü_1", '"own"', "own")
    labels = set()
    for name in names:
        knob = knob_named(f"request.{name}")
        for value in values:
            check_label(knob, value)
            labels.add(knob.label(value))
    assert len(labels) == len(names) * len(values)
    setting = Setting({"request.top_k": 40, "request.a.on": "true", "variant": "q8"})
    assert setting.key == "variant-q8_req-a.on--true_req-top-k--40"


@pytest.mark.usefixtures("own_fields")
def test_names_and_results_of_fields_are_read_where_no_flag_has_named_them() -> None:
    name = "request.min_p"
    assert name not in {knob.name for knob in all_knobs()}
    assert Setting.named("req-min-p--0.5").levels == {name: 0.5}
    unregister_knob(name)
    assert knob_named(name).read(SimpleNamespace(knobs={name: 0.5})) == 0.5
    with pytest.raises(ConfigurationError, match="there is no knob request.a b"):
        knob_named("request.a b")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["top_k"], "--request_knob top_k is not possible; give NAME=V1,V2, such as"),
        (["a..b=1"], r"--request_knob a\.\.b=1 is not possible"),
        (["messages=1"], "--request_knob messages cannot be set: the run sets it in every request, or drop it"),
        (["extra_body.top_k=1"], "--request_knob extra_body.top_k cannot be set: it is of OpenAI's Python client"),
        (["max_tokens=1,2"], "--request_knob max_tokens cannot be set: the run sets it; give --answer_limit_list"),
        (["stream_options.x=1"], "--request_knob stream_options.x cannot be set: the run sets it"),
        (["reasoning_effort=low"], "give --reasoning_effort_list, or drop it"),
        (["a.b=1", "a=2"], "--request_knob a and a.b are one field, or one is in the other; drop one"),
        (["a=2", "a.b=1"], "--request_knob a.b and a are one field"),
        (["a=2", "a=1"], "--request_knob a and a are one field"),
        (["a=1,1.0"], "--request_knob a=1,1.0 has one value twice; drop one"),
        (["a=1e999"], "--request_knob: 1e999 is no number that a float can be"),
        ([f"a={'x' * 100}"], r"--request_knob a is too long for the name of a file \(107 letters, at most 100\)"),
    ],
)
def test_a_field_that_cannot_be_a_knob_is_refused(given: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        requested_fields(given)
    # `ab` and `a` are two fields.
    assert list(requested_fields(["a=1", "ab=1", "a_b.c=1"])) == ["request.a", "request.ab", "request.a_b.c"]


@pytest.mark.usefixtures("own_fields")
def test_fields_are_of_a_server_alone_and_ordered_numbers_first() -> None:
    knob = knob_named("request.top_k")
    flags = ("top_k=40,own,text,5", "min_p=1")
    assert knob.requested(request(ONE, request_knob=flags)).values == (40, "own", "text", 5)
    assert sorted((40, "own", "text", 5, 0.5), key=knob.order) == [0.5, 5, 40, "text", "own"]
    assert knob.requested(request(HERE, request_knob=None)).values == ("own",)
    with pytest.raises(ConfigurationError, match="--request_knob top_k cannot be set in m: only a request to a server"):
        knob.requested(request(HERE, request_knob=flags))
