"""Labels, values and the proof of dynamic experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS, mass_of
from experiment_core_utils.knobs.interface import CannotBeSeen, KnobLimits, KnobRequest, RequestedValues
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct


def at(mass: float | None) -> Setting:
    blocks = RunningBlocks.of((0, 1))
    return Setting.of(vision=tier_target("low"), top_k=4, expert_mass=mass, num_active_blocks=blocks)


@pytest.mark.parametrize("mass", [0.7, 0.5, 1e-6, 0.123456789])
def test_a_mass_is_a_part_of_the_key_and_read_back(mass: float) -> None:
    setting = at(mass)
    assert setting.key == f"tier-low_topk4_mass{mass}_blocks2"
    assert Setting.named(setting.key) == setting.replaced(num_active_blocks=RunningBlocks(2))
    assert setting.levels["expert_mass"] == mass == mass_of(setting)


def test_all_experts_are_in_no_name_and_come_last() -> None:
    assert at(1.0) == at(None) and at(1.0).key == "tier-low_topk4_blocks2"
    assert mass_of(at(None)) == 1.0
    assert sorted([at(1.0), at(0.5), at(0.7)], key=lambda each: each.order) == [at(0.5), at(0.7), at(1.0)]


@pytest.mark.parametrize("label", ["mass", "mass0", "mass1.5", "mass-0.5", "massnan", "mass0.70", "topk4", "0.7"])
def test_other_labels_are_no_mass(label: str) -> None:
    assert EXPERT_MASS.parsed(label) is None


@pytest.mark.parametrize("level", ["0.5", 0, 1.2])
def test_other_levels_are_refused(level: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a value of expert_mass; give a number above 0, at most 1"):
        EXPERT_MASS.of_level(level)


def requested(*given: str, limits: KnobLimits | None = None) -> RequestedValues[float]:
    flags = ["--expert_mass_list", *given] if given else []
    config = parse_config(["--model_path", ".", *flags])
    return EXPERT_MASS.requested(KnobRequest(config.knobs, limits or KnobLimits(4, 8, 3), "m", Path("m"), False))


def test_it_is_not_varied_by_default() -> None:
    assert requested() == RequestedValues((1.0,))
    assert requested("1.0", "0.7", "1") == RequestedValues((1.0, 0.7), is_given=True)


@pytest.mark.parametrize("value", ["0", "1.1", "nan", "many"])
def test_a_value_that_is_no_fraction_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--expert_mass_list"):
        requested(value)


def test_a_model_that_cannot_have_it_refuses_it() -> None:
    dense = KnobLimits(4, None, None, unsupported={"top_k": "the model is dense"})
    assert requested(limits=dense) == RequestedValues(())
    with pytest.raises(ConfigurationError, match=r"--expert_mass_list 0.7 cannot be set in m: the model is dense"):
        requested("0.7", limits=dense)
    other = KnobLimits(4, 8, 3, unsupported={"expert_mass": "its routers are others"})
    assert requested("1.0", "0.7", limits=other).impossible == (
        "--expert_mass_list 0.7 cannot be set in m: its routers are others",
    )


def proof(**chosen: Any) -> Any:
    """Of tokens with 1 to 3 experts, at a mass of 0.7."""
    figures = {
        "mean_experts_per_token": 2.1,
        "mean_computed_experts": 2.1,
        "fewest_experts": 1,
        "most_experts": 3,
        "least_mass": 0.71,
        "most_mass_without_last": 0.69,
    }
    counted = {name: {"prefill": value, "decode": value} for name, value in figures.items()}
    for name, value in chosen.items():
        counted[name]["decode"] = value
    return SimpleNamespace(counted={"expert_mass": counted})


def test_a_proof_is_that_every_token_has_the_mass_and_no_expert_more() -> None:
    assert EXPERT_MASS.prove(proof(), at(0.7), None) is None
    assert EXPERT_MASS.prove(proof(least_mass=None, most_mass_without_last=None), at(0.7), None) is None
    for chosen, message in (
        ({"fewest_experts": 0}, "in the decode a token uses 0 to 3 experts instead of 1 to 4"),
        ({"most_experts": 5}, "in the decode a token uses 1 to 5 experts instead of 1 to 4"),
        ({"least_mass": 0.65}, "the experts of a token have 0.650000 of the probability, not 0.7"),
        ({"most_mass_without_last": 0.75}, "a token's experts have 0.750000 of the probability without the last"),
    ):
        with pytest.raises(KnobDidNotAct, match=f"tier-low_topk4_mass0.7_blocks2: .*{message}"):
            EXPERT_MASS.prove(proof(**chosen), at(0.7), None)


def test_without_a_block_that_is_turned_nothing_is_seen() -> None:
    nothing = SimpleNamespace(counted={"expert_mass": {}})
    assert EXPERT_MASS.prove(nothing, at(0.7), None) == CannotBeSeen("no block with experts after the first one runs")
    assert EXPERT_MASS.prove(nothing, at(1.0), None) is None
