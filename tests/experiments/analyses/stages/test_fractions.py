"""Shares by hand, at the length of the generation and below it; lines through known stage times."""

from dataclasses import replace

import pytest

from experiments.analyses.stages.fractions import (
    Generation,
    display_lengths,
    regimes,
    regimes_of,
    settings_fractions,
    tokens_until_decode_is_half,
)
from experiments.analyses.stages.scaling import points_of, stage_lines

LEVELS = {"vision": "low", "top_k": 2, "num_active_blocks": 4}
ONE = Generation("signs", "tier-low_topk2_blocks4", "low", LEVELS, "a", 432, 100, 10.0, 30.0, (20.0, 40.0))


def test_fractions_of_two_generations_by_hand() -> None:
    other = replace(ONE, picture="b", vision_ms=20.0, prefill_ms=20.0, inter_token_ms=(10.0, 10.0))
    regime = regimes_of([([ONE, other], None, None)])[0]
    assert regime is not None
    # 10 + 30 + 60 = 100 ms and 20 + 20 + 20 = 60 ms.
    assert regime.total_ms == 80.0
    assert [share.mean_ms for share in regime.stages.values()] == [15.0, 25.0, 40.0]
    assert [share.share for share in regime.stages.values()] == pytest.approx([30 / 160, 50 / 160, 80 / 160])
    assert (regime.dominant, regime.n, regime.num_pictures) == ("decode", 2, 2)
    # Of the two decode is the longest in the first; in the second all are equal, and the first stage counts.
    assert [share.dominates_share for share in regime.stages.values()] == [0.5, 0.0, 0.5]
    # A resample is both, or one of them twice: shares of vision 10 / 100, 30 / 160 or 20 / 60.
    assert regime.stages["vision"].share_ci95 == pytest.approx((0.1, 1 / 3))


def test_a_shorter_answer_is_the_beginning_of_a_longer_one() -> None:
    first, second = regimes_of([([ONE], 1, None)])[0], regimes_of([([ONE], 2, None)])[0]
    assert first is not None and second is not None
    assert (first.total_ms, second.total_ms) == (40.0, 60.0)
    assert (first.dominant, first.stages["decode"].mean_ms) == ("prefill", 0.0)
    assert second.stages["decode"].share == pytest.approx(20 / 60)
    assert second.stages["decode"].share_ci95 is None
    assert regimes_of([([ONE], 4, None)]) == []
    short = replace(ONE, inter_token_ms=())
    both = regimes_of([([ONE, short], 3, None)])[0]
    assert both is not None and (both.n, both.num_shorter) == (1, 1)


def test_without_a_picture_vision_takes_no_time() -> None:
    regime = regimes_of([([replace(ONE, vision_ms=None, image_features=None)], None, None)])[0]
    assert regime is not None and regime.stages["vision"].share == 0.0 and regime.total_ms == 90.0


def test_where_decode_is_half() -> None:
    # 40 ms before the first token; 20 ms after two tokens, 60 ms after three.
    assert tokens_until_decode_is_half([ONE]) == 3
    assert tokens_until_decode_is_half([replace(ONE, inter_token_ms=(20.0,))]) is None


def test_groups_and_lengths() -> None:
    other = replace(ONE, vision="high", setting="tier-high_topk2_blocks4")
    found = regimes([ONE, other, ONE], [1, 3])
    assert [(each.vision, each.output_tokens, each.n) for each in found] == [
        ("low", 1, 2), ("low", 3, 2), ("high", 1, 1), ("high", 3, 1),
    ]  # fmt: skip
    assert [each.setting for each in settings_fractions([ONE, other])] == [ONE.setting, other.setting]
    assert display_lengths([ONE]) == [1, 3]
    assert display_lengths([replace(ONE, inter_token_ms=(1.0,) * 69)]) == [1, 4, 16, 64, 70]
    assert display_lengths([]) == []


def test_decode_points_are_the_beginnings_of_a_generation() -> None:
    assert [(each.x, each.ms) for each in points_of([ONE], "decode")] == [(2.0, 20.0), (3.0, 60.0)]
    assert [(each.x, each.ms) for each in points_of([ONE], "prefill")] == [(100.0, 30.0)]
    assert [(each.x, each.ms) for each in points_of([ONE], "vision")] == [(432.0, 10.0)]


def test_the_lines_find_what_the_times_were_made_from() -> None:
    """Vision 5 ms + 0.01 ms a feature, prefill 2 ms a block + 0.02 ms a token, 3 ms a block for each further token."""
    generations = [
        Generation(
            "signs", f"blocks{blocks}", "low", {"top_k": 2, "num_active_blocks": blocks}, f"picture-{number}",
            100 * number, 50 * number, 5.0 + number, 2.0 * blocks + number, (3.0 * blocks,) * 5,
        )
        for blocks in (2, 4)
        for number in range(1, 6)
    ]  # fmt: skip
    lines = {
        (each.stage, each.levels.get("top_k"), each.levels.get("num_active_blocks")): each.fit
        for each in stage_lines(generations)
    }
    vision, prefill, decode = lines["vision", None, None], lines["prefill", None, 4], lines["decode", 2, 2]
    assert vision is not None and prefill is not None and decode is not None
    assert (vision.intercept, vision.slope) == (pytest.approx(5.0), pytest.approx(0.01))
    assert (prefill.intercept, prefill.slope) == (pytest.approx(8.0), pytest.approx(0.02))
    # Decode starts behind the first token: 6 (n - 1) ms.
    assert (decode.intercept, decode.slope) == (pytest.approx(-6.0), pytest.approx(6.0))
    assert len(lines) == 1 + 2 * (1 + 2 + 2)
