"""The requested settings of a run, from flags and a model's limits, without a model."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks, blocks_of
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.models.molmoe.source import MolmoeCheckpoint
from experiment_core_utils.planning.plan import left_out_by, plan_for, reference_beside, requested_values
from experiment_core_utils.primitives.errors import ConfigurationError

MIXTURE = KnobLimits(num_total_blocks=6, num_experts=8, default_top_k=5)
DENSE = KnobLimits(
    num_total_blocks=6, num_experts=None, default_top_k=None, unsupported={"top_k": "the model is dense"}
)
FIXED_PICTURE = KnobLimits(6, 8, 5, unsupported={"vision": "its pictures are 576 tokens"})
IGNORES_TOP_K = KnobLimits(6, 8, 2, unsupported={"top_k": "it ignores top-k"})
PIXELS = KnobLimits(6, 8, 5, token_unit=TokenUnit(None))
TILES = KnobLimits(6, 8, 5, token_unit=TokenUnit(576))
ONLY_MORE = KnobLimits(
    6, None, None, unsupported={"top_k": "the model is dense"}, fraction_reasons=("it has one crop", None)
)
SHARES_KEYS = KnobLimits(
    6, None, None, unsupported={"top_k": "the model is dense", "num_active_blocks": "its blocks share keys"}
)


def source_of(limits: KnobLimits, folder: Path) -> MolmoeCheckpoint:
    return MolmoeCheckpoint("some/model", limits, None, folder, LlamaConfig(), False)


def keys(limits: KnobLimits, folder: Path, *flags: str) -> list[str]:
    return [setting.key for setting in plan_for(parse_config([*flags]), source_of(limits, folder))]


def test_by_default_every_knob_has_its_values(tmp_path: Path) -> None:
    """Half of 5 experts is 2; three quarters of 6 blocks are 4.5, so 5, where it is known which, or does not matter."""
    for fewer, flags in (((), ()), ((5,), ("--random_weights",)), ((5,), ("--importance_scores_file", "none"))):
        assert keys(MIXTURE, tmp_path, *flags) == [
            f"{vision}_topk{top_k}_blocks{blocks}"
            for vision in ("frac-0.25", "frac-0.5", "own")
            for top_k in (2, 5)
            for blocks in (*fewer, 6)
        ]
    (tmp_path / "block_importance.json").write_text('{"1": 1, "2": 2, "3": 9, "4": 3, "5": 8}')
    assert keys(DENSE, tmp_path, "--tier_list", "low") == ["tier-low_blocks5", "tier-low_blocks6"]
    (tmp_path / "block_importance.json").unlink()
    requested = requested_values(parse_config([]), source_of(KnobLimits(1, 4, 1), tmp_path))
    values = {name: of_knob.values for name, of_knob in requested.items()}
    assert (values["top_k"], values["num_active_blocks"]) == ((1,), (RunningBlocks.of((0,)),))


@pytest.mark.parametrize(
    ("limits", "flags", "expected"),
    [
        (DENSE, ("--tier_list", "low"), ["tier-low_blocks6"]),
        (FIXED_PICTURE, ("--num_active_blocks_list", "6"), ["own_topk2_blocks6", "own_topk5_blocks6"]),
        (FIXED_PICTURE, ("--tier_list", "low", "own", "--top_k_list", "5"), ["own_topk5_blocks6"]),
        # Its own number may be given where no other can be.
        (IGNORES_TOP_K, ("--tier_list", "low", "--top_k_list", "2", "--num_active_blocks_list", "6"),
         ["tier-low_topk2_blocks6"]),
        (SHARES_KEYS, ("--tier_list", "low", "--num_active_blocks_list", "6"), ["tier-low_blocks6"]),
        (SHARES_KEYS, ("--vision_tokens_list", "720"), ["tokens720_blocks6"]),
        (ONLY_MORE, ("--num_active_blocks_list", "6"), ["own_blocks6"]),
        (ONLY_MORE, ("--vision_fraction_list", "2", "1", "0.5", "1.25", "--num_active_blocks_list", "6"),
         ["frac-2_blocks6", "own_blocks6", "frac-1.25_blocks6"]),
        (FIXED_PICTURE, ("--vision_fraction_list", "1", "0.5", "--top_k_list", "5"), ["own_topk5_blocks6"]),
    ],
)  # fmt: skip
def test_a_knob_that_cannot_be_turned_stays_at_the_models_own(
    limits: KnobLimits, flags: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    assert keys(limits, tmp_path, *flags) == expected


@pytest.mark.parametrize(
    ("limits", "flags", "message"),
    [
        (DENSE, ("--top_k_list", "2"), "--top_k_list 2 cannot be set in some/model: the model is dense"),
        (IGNORES_TOP_K, ("--top_k_list", "4", "3"), "--top_k_list 4 cannot be set in some/model: it ignores top-k"),
        (MIXTURE, ("--top_k_list", "9", "32"), "--top_k_list 9 is more than the 8 experts of some/model; give 1 to 8"),
        (FIXED_PICTURE, ("--tier_list", "low"),
         "--tier_list and --vision_tokens_list do nothing for some/model: its pictures are 576 tokens; drop them"),
        (FIXED_PICTURE, ("--vision_fraction_list", "0.5"), "--vision_fraction_list, .* do nothing for some/model"),
        (ONLY_MORE, ("--vision_fraction_list", "0.5"), "0.5 of the model's own vision tokens: it has one crop"),
        (FIXED_PICTURE, ("--vision_tokens_list", "720"), "do nothing for some/model"),
        (MIXTURE, ("--vision_tokens_list", "100", "99999"), "100 vision tokens are too few.* take 288"),
        (PIXELS, ("--vision_tokens_list", "0"), "0 vision tokens are too few: a picture takes at least 1"),
        (TILES, ("--vision_tokens_list", "288"), "288 .* the overview crop and one more crop take 1152"),
        (SHARES_KEYS, ("--num_active_blocks_list", "5"), "--num_active_blocks_list 5 cannot be set .* share keys"),
        (MIXTURE, ("--num_active_blocks_list", "7"), "7 active blocks are not possible; the model has 6"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do_is_refused(
    limits: KnobLimits, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        plan_for(parse_config([*flags]), source_of(limits, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "flags", "beside"),
    [
        (MIXTURE, (), None),
        (MIXTURE, ("--vision_fraction_list", "0.5", "2"), "own_topk5_blocks6"),
        (MIXTURE, ("--tier_list", "high", "--sampling_strategy", "lhs", "--num_configs", "1"), "own_topk5_blocks6"),
        (MIXTURE, ("--tier_list", "own", "low"), None),
        (MIXTURE, ("--tier_list", "own", "--top_k_list", "2"), "own_topk5_blocks6"),
        (MIXTURE, ("--no_reference",), None),
        (PIXELS, ("--vision_tokens_list", "256"), "own_topk5_blocks6"),
        # Without a vision knob all experts and blocks are the model as it is, which the grid mostly has.
        (FIXED_PICTURE, (), None),
        (FIXED_PICTURE, ("--num_active_blocks_list", "3", "4"), "own_topk5_blocks6"),
    ],
)
def test_the_model_as_it_is_is_measured_beside_a_grid_without_it(
    limits: KnobLimits, flags: tuple[str, ...], beside: str | None, tmp_path: Path
) -> None:
    config, source = parse_config([*flags]), source_of(limits, tmp_path)
    found = reference_beside(config, source, plan_for(config, source))
    assert (None if found is None else found.key) == beside
    assert found is None or (vision_of(found).crops, blocks_of(found)) == (None, (0, 1, 2, 3, 4, 5))


def test_the_models_own_number_of_crops_stands_after_the_tiers(tmp_path: Path) -> None:
    one = ("--top_k_list", "5", "--tier_list", "own", "low", "medium", "high")
    assert [key[:8] for key in keys(MIXTURE, tmp_path, *one)] == ["own_topk", "tier-low", "tier-med", "tier-hig"]
    # Of four values in order the second is the middle one.
    assert [key[:8] for key in keys(MIXTURE, tmp_path, *one, "--sampling_strategy", "stratified")] == [
        "tier-low", "tier-med", "own_topk"
    ]  # fmt: skip


def test_what_a_strategy_leaves_out_is_named(tmp_path: Path) -> None:
    config = parse_config(["--top_k_list", "1", "2", "3", "--tier_list", "low", "--sampling_strategy", "boundary"])
    source = source_of(MIXTURE, tmp_path)
    assert left_out_by(config, source, plan_for(config, source)) == ()
    lhs = parse_config(["--top_k_list", "1", "2", "3", "--sampling_strategy", "lhs", "--num_configs", "2"])
    (vision, top_k) = left_out_by(lhs, source, plan_for(lhs, source))
    by_strategy = "left out by the sampling strategy: "
    assert vision.startswith(f"{by_strategy}vision targets ") and top_k.startswith(f"{by_strategy}top-k ")


def test_values_that_the_model_cannot_have_are_left_out_and_named(tmp_path: Path) -> None:
    (sets := tmp_path / "sets.json").write_text('{"2": [0, 3], "4": [0, 1, 3, 5]}')
    flags = (
        "--vision_tokens_list", "100", "1008", "99999", "--top_k_list", "32", "4", "16", "8",
        "--num_active_blocks_list", "8", "3", "4", "6", "--block_sets_file", str(sets),
    )  # fmt: skip
    expected = [f"tokens1008_topk{top_k}_blocks{blocks}" for top_k in (4, 8) for blocks in (4, 6)]
    assert keys(MIXTURE, tmp_path, *flags) == expected
    config, source = parse_config([*flags]), source_of(MIXTURE, tmp_path)
    assert left_out_by(config, source, plan_for(config, source)) == (
        "left out: 100 vision tokens are too few: the overview crop and one more crop take 288; give at least that",
        "left out: 99999 vision tokens are too many: they take 693 crops; give at most 73872",
        "left out: --top_k_list 32 is more than the 8 experts of some/model; give 1 to 8",
        "left out: --top_k_list 16 is more than the 8 experts of some/model; give 1 to 8",
        "left out: 8 active blocks are not possible; the model has 6, give 1 to 6",
        "left out: --block_sets_file has no set of 3 blocks; it has sets of 2, 4",
    )
    # A knob that cannot be turned keeps the model's own value, if that is among those given.
    others = ("--tier_list", "low", "--top_k_list", "4", "2", "--num_active_blocks_list", "6")
    assert keys(IGNORES_TOP_K, tmp_path, *others) == ["tier-low_topk2_blocks6"]
    config, source = parse_config([*others]), source_of(IGNORES_TOP_K, tmp_path)
    assert left_out_by(config, source, plan_for(config, source)) == (
        "left out: --top_k_list 4 cannot be set in some/model: it ignores top-k",
    )


def test_a_file_of_scores_in_the_models_folder_chooses_the_blocks(tmp_path: Path) -> None:
    (tmp_path / "block_importance.json").write_text('{"1": 1, "2": 2, "3": 9, "4": 3, "5": 8}')
    config = parse_config(["--tier_list", "low", "--top_k_list", "5", "--num_active_blocks_list", "3"])
    (setting,) = plan_for(config, source_of(MIXTURE, tmp_path))
    assert blocks_of(setting) == (0, 3, 5)
