"""Values, labels, published fields and the proof of active blocks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, RunningBlocks, blocks_of, num_blocks_of
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest, RequestedValues
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct

LIMITS = KnobLimits(8, None, None)


def requested(folder: Path, *flags: str, limits: KnobLimits = LIMITS) -> RequestedValues[RunningBlocks]:
    return ACTIVE_BLOCKS.requested(KnobRequest(parse_config([*flags]).knobs, limits, "m", folder, random_weights=False))


def counts(found: RequestedValues[RunningBlocks]) -> list[int]:
    return [value.count for value in found.values]


def test_the_default_is_all_and_three_quarters_too_where_scores_choose(tmp_path: Path) -> None:
    assert counts(requested(tmp_path)) == [8]
    assert counts(requested(tmp_path, "--importance_scores_file", "none")) == [6, 8]
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({str(block): block for block in range(8)}))
    found = requested(tmp_path, "--importance_scores_file", str(scores))
    # Of 8 blocks 6 run: block 0 and the five of the highest scores.
    assert [value.indices for value in found.values] == [(0, 3, 4, 5, 6, 7), tuple(range(8))]


def test_numbers_that_the_model_lacks_are_left_out_and_refused_alone(tmp_path: Path) -> None:
    found = requested(tmp_path, "--num_active_blocks_list", "3", "9")
    assert (counts(found), len(found.impossible), found.is_given) == ([3], 1, True)
    with pytest.raises(ConfigurationError, match="9"):
        requested(tmp_path, "--num_active_blocks_list", "9")


def test_a_model_that_cannot_turn_it_runs_all(tmp_path: Path) -> None:
    fixed = KnobLimits(8, None, None, unsupported={"num_active_blocks": "its cache is fixed"})
    all_blocks = RunningBlocks.of(range(8))
    assert requested(tmp_path, limits=fixed) == RequestedValues((all_blocks,))
    words = "--num_active_blocks_list 6 cannot be set in m: its cache is fixed"
    assert requested(tmp_path, "--num_active_blocks_list", "6", "8", limits=fixed) == RequestedValues(
        (all_blocks,), (words,)
    )
    with pytest.raises(ConfigurationError, match=words):
        requested(tmp_path, "--num_active_blocks_list", "6", limits=fixed)


def test_a_name_says_how_many_run_and_not_which() -> None:
    setting = Setting.of(num_active_blocks=RunningBlocks.of((0, 2, 5)))
    assert (setting.key, num_blocks_of(setting), blocks_of(setting)) == ("blocks3", 3, (0, 2, 5))
    named = Setting.named("blocks3")
    assert num_blocks_of(named) == 3 and named.levels == {"num_active_blocks": 3}
    with pytest.raises(ValueError, match="3 blocks were read from a name"):
        blocks_of(named)
    with pytest.raises(ConfigurationError, match="'3' is not a number of blocks; give a whole number"):
        ACTIVE_BLOCKS.of_level("3")


def test_its_published_field_is_read_back() -> None:
    fields = ACTIVE_BLOCKS.published_fields(RunningBlocks.of((0, 2, 5)))
    assert fields == {"num_active_blocks": 3}
    assert ACTIVE_BLOCKS.read(SimpleNamespace(**fields)) == RunningBlocks(3)


@pytest.mark.parametrize(
    ("total", "grid"), [(16, (12, 13, 14, 15, 16)), (28, (21, 23, 24, 26, 28)), (4, (3, 4)), (2, (2,))]
)
def test_the_full_grid_is_at_most_five_numbers_from_three_quarters(total: int, grid: tuple[int, ...]) -> None:
    assert ACTIVE_BLOCKS.full_grid(KnobLimits(total, None, None)) == {"num_active_blocks_list": grid}


@pytest.mark.parametrize(
    ("prefill", "decode", "layers", "words"),
    [
        ((0, 1, 2), (0, 2, 5), 3, r"blocks3: blocks \(0, 1, 2\) ran instead of \(0, 2, 5\)"),
        ((0, 2, 5), (0, 1, 2), 3, r"blocks3: blocks \(0, 2, 5\) ran instead"),
        ((0, 2, 5), (0, 2, 5), 8, "blocks3: the cache contains 8 layers"),
    ],
)
def test_these_blocks_must_have_run(prefill: tuple[int, ...], decode: tuple[int, ...], layers: int, words: str) -> None:
    setting = Setting.of(num_active_blocks=RunningBlocks.of((0, 2, 5)))
    right = SimpleNamespace(blocks_run=(0, 2, 5), blocks_run_decode=(0, 2, 5), cache_layers=3)
    assert ACTIVE_BLOCKS.prove(right, setting, None) is None
    wrong = SimpleNamespace(blocks_run=prefill, blocks_run_decode=decode, cache_layers=layers)
    with pytest.raises(KnobDidNotAct, match=words):
        ACTIVE_BLOCKS.prove(wrong, setting, None)
