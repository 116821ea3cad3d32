"""The knob of kept image tokens: numbers, rules, names, flags and what a run says of it, worked by hand."""

from pathlib import Path

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.facts.variables import knob_flags
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.interface import CannotBeSeen, KnobLimits, KnobRequest
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP, KeptTokens
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.records.requests import KnobProof, RequestShape

LIMITS = KnobLimits(2, None, None)


def at(fraction: float) -> Setting:
    return Setting.of(
        vision=own_target(), visual_token_keep=KeptTokens(fraction), num_active_blocks=RunningBlocks.of((0, 1))
    )


def request(*flags: str, limits: KnobLimits = LIMITS, seed: int = 42) -> KnobRequest:
    return KnobRequest(parse_config([*flags]).knobs, limits, "model", Path(), random_weights=True, seed=seed)


@pytest.mark.parametrize(
    ("fraction", "features", "kept"),
    [(1.0, 7, 7), (0.5, 9, 5), (0.25, 9, 2), (0.25, 10, 3), (0.01, 9, 1), (0.5, 1, 1), (0.5, 0, 0)],
)
def test_the_number_kept_is_rounded_half_up_and_never_none(fraction: float, features: int, kept: int) -> None:
    assert KeptTokens(fraction).count(features) == kept


def test_a_fraction_is_named_behind_vision_and_read_back() -> None:
    assert at(0.5).key == "own_keep0.5_blocks2"
    assert Setting.named("own_keep0.5_blocks2") == at(0.5).replaced(num_active_blocks=RunningBlocks(2))
    assert at(1.0).key == "own_blocks2" and at(1.0).level("visual_token_keep") == 1.0
    for fraction in (0.5, 0.125, 1 / 3, 1e-05):
        assert VISUAL_TOKEN_KEEP.parsed(VISUAL_TOKEN_KEEP.label(KeptTokens(fraction))) == KeptTokens(fraction)
    for label in ("keep", "keep0.50", "keepall", "keep0.0", "keep1.5", "keepnan", "0.5"):
        assert VISUAL_TOKEN_KEEP.parsed(label) is None
    with pytest.raises(ConfigurationError, match="is no fraction of image tokens"):
        VISUAL_TOKEN_KEEP.of_level(1.5)
    assert at(0.25).order < at(0.5).order < at(1.0).order


def test_flags_give_the_values_with_the_runs_rule_and_seed() -> None:
    assert VISUAL_TOKEN_KEEP.requested(request()).values == (KeptTokens(1.0),)
    given = request("--visual_token_keep_list", "1", "0.5", "--visual_token_keep_rule", "random", seed=7)
    values = VISUAL_TOKEN_KEEP.requested(given).values
    assert [(each.fraction, each.rule, each.seed) for each in values] == [(1.0, "random", 7), (0.5, "random", 7)]
    with pytest.raises(ConfigurationError, match="visual_token_keep_list"):
        request("--visual_token_keep_list", "0")


def test_fractions_can_be_added_to_a_run_and_another_rule_is_another_run() -> None:
    half = ("--visual_token_keep_list", "1", "0.5")
    given = ((), half, (*half, "--visual_token_keep_rule", "norm"))
    assert [VISUAL_TOKEN_KEEP.fingerprint(request(*flags)) for flags in given] == [(), (), ("norm",)]
    config = parse_config([*half, "--visual_token_keep_rule", "norm"])
    assert knob_flags(config.knobs) == {"visual_token_keep_rule": "norm"} and knob_flags(parse_config([]).knobs) == {}


@pytest.mark.parametrize("fractions", [(), ("--visual_token_keep_list", "1")])
def test_a_rule_without_a_token_to_drop_is_refused(fractions: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="--visual_token_keep_rule norm chooses nothing where all image tok"):
        request(*fractions, "--visual_token_keep_rule", "norm")


def test_the_seed_is_in_the_fingerprint_of_drawn_tokens() -> None:
    half = ("--visual_token_keep_list", "1", "0.5")
    drawn = request(*half, "--visual_token_keep_rule", "random", seed=9)
    assert VISUAL_TOKEN_KEEP.fingerprint(drawn) == ("random", 9)


def test_a_model_that_cannot_drop_any_refuses_in_words() -> None:
    limits = KnobLimits(2, None, None, unsupported={"visual_token_keep": "it has no image tokens"})
    assert VISUAL_TOKEN_KEEP.requested(request(limits=limits)).values == (KeptTokens(1.0),)
    with pytest.raises(
        ConfigurationError, match=r"--visual_token_keep_list 0.5 cannot be set in model: it has no image"
    ):
        VISUAL_TOKEN_KEEP.requested(request("--visual_token_keep_list", "0.5", limits=limits))


def test_sizes_are_those_of_the_shorter_prompt() -> None:
    shape = RequestShape(None, None, vision_tokens=9, image_marker_tokens=2, text_tokens=5, preprocess_s=0.0)
    assert (at(0.5).shape(shape).vision_tokens, at(0.5).shape(shape).prompt_tokens) == (5, 12)
    assert at(1.0).shape(shape) is shape


def test_the_prefill_must_have_computed_so_many_tokens() -> None:
    def proved(fraction: float, prefill_tokens: int | None) -> CannotBeSeen | None:
        proof = KnobProof((), (), None, 0, prefill_tokens=prefill_tokens, prompt_tokens=16, vision_tokens=9)
        return VISUAL_TOKEN_KEEP.prove(proof, at(fraction), None)

    assert proved(0.5, 12) is None and proved(1.0, 16) is None and proved(1.0, None) is None
    assert proved(0.5, None) == CannotBeSeen("the tokens of its prefill were not counted")
    with pytest.raises(KnobDidNotAct, match="computed 16 tokens instead of 16 without 4 of its 9 image tokens"):
        proved(0.5, 16)
