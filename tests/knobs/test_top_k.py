"""Values, labels, published fields and the proof of experts per token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest, RequestedValues
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct

LIMITS = KnobLimits(4, 16, 6)
DENSE = KnobLimits(4, None, None, unsupported={"top_k": "the model is dense"})


def requested(*given: str, limits: KnobLimits = LIMITS) -> RequestedValues[int]:
    flags = ("--top_k_list", *given) if given else ()
    return TOP_K.requested(KnobRequest(parse_config([*flags]).knobs, limits, "m", Path("m"), random_weights=False))


def test_the_default_is_half_of_the_experts_and_all() -> None:
    assert requested() == RequestedValues((3, 6))
    assert requested(limits=KnobLimits(4, 16, 1)) == RequestedValues((1,))


def test_more_experts_than_there_are_are_left_out_and_refused_alone() -> None:
    words = "--top_k_list 17 is more than the 16 experts of m; give 1 to 16"
    assert requested("16", "17") == RequestedValues((16,), (words,), is_given=True)
    with pytest.raises(ConfigurationError, match=words):
        requested("17")


def test_more_than_the_groups_of_a_router_allow_is_left_out() -> None:
    limits = KnobLimits(4, 16, 6, top_k_limit=(8, "a token may use 2 of 4 groups of 4 experts"))
    words = "--top_k_list 9 is not possible in m: a token may use 2 of 4 groups of 4 experts; give 1 to 8"
    assert requested("8", "9", limits=limits) == RequestedValues((8,), (words,), is_given=True)


def test_a_model_that_cannot_turn_it_keeps_its_own() -> None:
    assert requested(limits=DENSE) == RequestedValues(())
    with pytest.raises(ConfigurationError, match="--top_k_list 4 cannot be set in m: the model is dense"):
        requested("4", limits=DENSE)
    fixed = KnobLimits(4, 16, 6, unsupported={"top_k": "its router is another"})
    assert requested("6", limits=fixed) == RequestedValues((6,))
    words = ("--top_k_list 4 cannot be set in m: its router is another",)
    assert requested("4", "6", limits=fixed) == RequestedValues((6,), words)


def test_labels_and_levels_are_read_back() -> None:
    assert (TOP_K.label(8), TOP_K.parsed("topk8"), TOP_K.of_level(8)) == ("topk8", 8, 8)
    assert [TOP_K.parsed(label) for label in ("topk", "topkmany", "blocks8", "8")] == [None] * 4
    with pytest.raises(ConfigurationError, match="'8' is not a value of top_k; give a whole number above 0"):
        TOP_K.of_level("8")


@pytest.mark.parametrize("top_k", [8, None])
def test_its_published_field_is_read_back(top_k: int | None) -> None:
    fields = TOP_K.published_fields(top_k)
    assert fields == {"top_k": top_k}
    assert TOP_K.read(SimpleNamespace(**fields)) == top_k == experts_of(Setting.of(top_k=top_k))


def test_the_full_grid_is_powers_of_two_and_the_models_own() -> None:
    assert TOP_K.full_grid(LIMITS) == {"top_k_list": (1, 2, 4, 6)}


def test_the_routers_must_have_chosen_so_many_experts() -> None:
    setting = Setting.of(top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 3)))
    model: Any = SimpleNamespace(expected_experts=lambda at: [6, experts_of(at), experts_of(at)])
    assert TOP_K.prove(SimpleNamespace(experts_per_token=(6, 2, 2)), setting, model) is None
    with pytest.raises(KnobDidNotAct, match=r"topk2_blocks3: \(6, 2, 4\) experts a token instead of \(6, 2, 2\)"):
        TOP_K.prove(SimpleNamespace(experts_per_token=(6, 2, 4)), setting, model)
