"""The knobs by name, and knobs that are registered."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field

from experiment_core_utils.config.parts import knob_config
from experiment_core_utils.knobs.registry import (
    all_knobs,
    knob_named,
    load_knob_module,
    register_knob,
    unregister_knob,
)
from experiment_core_utils.knobs.top_k import TopK
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.flag_fields import Part

OWN = tuple(knob.name for knob in all_knobs())


class ShadeFlags(Part):
    shade_list: tuple[int, ...] | None = Field(default=None, description="shades")


class Shade(TopK):
    name, title, plural, flags = "shade", "shade", "shades", ShadeFlags
    published = ()


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    for knob in all_knobs():
        if knob.name not in OWN:
            unregister_knob(knob.name)


def test_a_knob_that_is_not_there_is_answered_with_the_nearest() -> None:
    assert knob_named("top_k").title == "top-k"
    with pytest.raises(ConfigurationError, match=r"there is no knob topk \(did you mean top_k\?\); known are vision, "):
        knob_named("topk")


def test_a_registered_knob_comes_last_and_brings_its_flags() -> None:
    register_knob(Shade())
    assert [knob.name for knob in all_knobs()] == [*OWN, "shade"]
    assert knob_config()(shade_list=(1, 2)).shade_list == (1, 2)
    unregister_knob("shade")
    assert "shade_list" not in knob_config().model_fields


def test_names_and_flags_are_taken_once() -> None:
    register_knob(Shade())
    register_knob(Shade())  # as a module is loaded again
    other = type("Other", (TopK,), {"name": "shade", "title": "other", "published": (), "flags": ShadeFlags})
    with pytest.raises(ConfigurationError, match="there is a knob shade already; give this one another name"):
        register_knob(other())
    with pytest.raises(
        ConfigurationError, match="knob tint: there is a flag --shade_list already; give it another name"
    ):
        register_knob(type("Tint", (Shade,), {"name": "tint", "title": "tint"})())


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"name": "accuracy"}, "knob accuracy: results have a column or key of that name; give it another one"),
        ({"name": "T_total_mean_ms"}, "knob T_total_mean_ms: results have a column or key of that name"),
        ({"name": "Energy_J"}, "knob Energy_J: results have a column or key of that name"),
        ({"name": "sweep"}, "knob sweep: results have a column or key of that name"),
        ({"name": "slope_ms_per_token_ci95"}, "results have a column or key of that name"),
        ({"name": "per_sample_results"}, "results have a column or key of that name"),
        ({"name": "../up"}, r"a knob is called '../up'; use letters, digits and _, a letter first, 50 at most"),
        ({"name": "two words"}, "a knob is called 'two words'"),
        ({"name": "a" * 51}, "50 at most"),
        ({"name": "red\x1b[31m"}, r"Odd.name is red\\x1b\[31m; give a text of one line"),
        ({"name": None}, "Odd.name is None; give a text of one line"),
        ({"title": "a\nb"}, r"Odd.title is a\\nb; give a text of one line"),
        ({"title": "tokens"}, "knob odd: the title 'tokens' is another column's; give it another one"),
        ({"title": "top-k"}, "knob odd: another one has the title 'top-k'; give it another one"),
        ({"published": ("accuracy",)}, "knob odd: `published` names fields of results, accuracy, which are those of "),
    ],
)
def test_a_name_that_results_have_or_that_cannot_be_written_is_refused(
    attributes: dict[str, object], reason: str
) -> None:
    flags = type("OddFlags", (Part,), {})
    given = {"name": "odd", "title": "odd", "plural": "odds", "published": (), "flags": flags} | attributes
    with pytest.raises(ConfigurationError, match=reason):
        register_knob(type("Odd", (TopK,), given)())
    assert tuple(knob.name for knob in all_knobs()) == OWN


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="register_knob got <class .*Shade'>; give an object of a class that"):
        register_knob(Shade)


def test_a_file_is_run_once_until_it_changes(tmp_path: Path) -> None:
    file, log = tmp_path / "mine.py", tmp_path / "log"
    source = (REPOSITORY / "knob_profiler" / "head_fraction.py").read_text() + f"open({str(log)!r}, 'a').write('x')\n"
    try:
        for content in ("", "", "# changed\n", "# changed\n"):
            file.write_text(source + content)
            load_knob_module(file)
        assert log.read_text() == "xx"
    finally:
        unregister_knob("head_fraction")


def test_a_file_that_ends_the_program_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(ConfigurationError, match=r"ends.py cannot be run \(SystemExit: 0\); correct it"):
        load_knob_module(tmp_path / "ends.py")


def test_a_file_without_a_knob_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1")
    with pytest.raises(ConfigurationError, match="none.py registers no knob; call register_knob with one in it"):
        load_knob_module(tmp_path / "none.py")
