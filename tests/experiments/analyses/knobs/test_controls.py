"""The controls of a run in rounds, by hand and by simulated rounds in the order that runs use."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.records.controls import Control, control_lines
from experiments.analyses.knobs.controls import carry_over_of
from experiments.analyses.knobs.grid import TaskGrid, grids_of
from experiments.analyses.knobs.records import TaskAnalysis, caveats_of
from experiments.analyses.sweeps import load_sweep
from tests.experiments.hand_made_sweep import result, setting
from tests.hand_made_records import measured_sample, staged_run


def rounds(
    seed: int, size: int, number: int, behind_slow: float = 0.0, first: float = 0.0, noise: float = 0.04
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Logarithms of times and places [S, R]: settings up to 2.2 times apart, samples 30 %, their interaction 5 %."""
    random = np.random.default_rng(seed)
    order = RoundOrder([str(at) for at in range(size)], seed)
    levels = random.permutation(np.linspace(0, 0.8, size))
    slow = set(np.argsort(levels)[size - size // 2 :])
    logs = levels[:, None] + random.normal(0, 0.3, number) + random.normal(0, math.hypot(noise, 0.05), (size, number))
    places = np.empty((size, number), dtype=int)
    for at in range(number):
        row = [int(key) for key in order.of_round(at, [str(each) for each in range(size)])]
        for place, which in enumerate(row):
            places[which, at] = place
            logs[which, at] += (behind_slow if row[place - 1] in slow else 0.0) if place else first
    return logs, places, [f"picture {at}" for at in range(number)]


def shares(size: int, number: int, seeds: range, kind: str, **world: float) -> tuple[float, float]:
    """The shares of runs whose interval of a control holds the truth, and is above 1."""
    truth = math.exp(world.get("behind_slow", 0.0))
    found = [
        each.ratio_ci95
        for seed in seeds
        for each in carry_over_of(*rounds(seed, size, number, **world))
        if each.kind == kind and each.ratio_ci95 is not None
    ]
    assert len(found) == len(seeds)
    return np.mean([low <= truth <= high for low, high in found]), np.mean([low > 1 for low, _ in found])


@pytest.mark.parametrize("kind", ["first", "carry_over"])
@pytest.mark.parametrize(("size", "number"), [(8, 16), (3, 24)])
def test_of_equal_places_the_intervals_hold_1(kind: str, size: int, number: int) -> None:
    # 93 %, less two standard errors of 150 runs.
    covered, _ = shares(size, number, range(150), kind)
    assert covered >= 0.93 - 0.04


def test_a_carry_over_of_5_percent_is_found() -> None:
    """Of 200 runs of 8 settings 97 % find it in 16 rounds and all in 52; of 3 settings 37 % in 16 rounds."""
    covered, found = shares(8, 16, range(60), "carry_over", behind_slow=math.log(1.05))
    assert covered >= 0.88 and found >= 0.9


def exact() -> Iterator[tuple[int, int, float]]:
    """Setting, place and time in rounds of two of 1 ms and two of 2 ms: 1.1 times as long behind these, 1.2 first."""
    for row in ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1)) * 2:
        for place, which in enumerate(row):
            factor = 1.2 if place == 0 else 1.1 if row[place - 1] > 1 else 1.0
            yield which, place, (1.0 if which < 2 else 2.0) * factor


def test_without_noise_the_effects_are_exact() -> None:
    logs, places = np.empty((4, 8)), np.empty((4, 8), dtype=int)
    for at, (which, place, time) in enumerate(exact()):
        logs[which, at // 4], places[which, at // 4] = math.log(time), place
    pictures = ["b", "a", "c", "d", "a", "e", "f", "g"]
    first, behind = carry_over_of(logs, places, pictures)
    assert (first.kind, behind.kind, behind.num_rounds) == ("first", "carry_over", 8)
    assert behind.ratio == pytest.approx(1.1) and behind.ratio_ci95 == pytest.approx((1.1, 1.1))
    # Over the mean of those behind slower and faster ones.
    assert first.ratio == pytest.approx(1.2 / math.sqrt(1.1))
    # Six pictures are the fewest.
    assert all(each.ratio_ci95 is None for each in carry_over_of(logs, places, ["a", "b"] * 4))


def test_of_two_settings_only_the_first_place_is_known() -> None:
    logs, places, pictures = rounds(3, 2, 12, first=0.1)
    (only,) = carry_over_of(logs, places, pictures)
    assert only.kind == "first"
    assert carry_over_of(logs[:1], places[:1], pictures) == []


def test_a_control_is_off_where_its_interval_is_more_than_2_percent_from_1() -> None:
    near = Control("placebo", "placebo", 1.03, (1.015, 1.04), 9)
    far, unknown = Control("first", "first", 0.96, (0.94, 0.97), 9), Control("first", "first", 2.0, None, 3)
    assert [each.is_off for each in (near, far, unknown)] == [False, True, False]
    assert [each.excess for each in (near, far, unknown)] == pytest.approx([0.015, 0.03, 0.0])
    assert control_lines([near, far, unknown]) == [
        "controls, 1 where knobs alone change times: placebo 1.030 [1.015, 1.040]; first 0.960 [0.940, 0.970] (off); "
        "first 2.000"
    ]
    assert control_lines([]) == []


def in_rounds(tmp_path: Path, vision_s: Mapping[str, Sequence[float]], *, settings: Sequence[Setting]) -> TaskGrid:
    """The grid of settings in rounds of samples 5, 3, 9 ..., whose vision times are given by the setting's key."""
    ids = (5, 3, 9, 0, 4, 12, 8)
    order = {"how": "rounds", "seed": 1, "position": 0, "num_settings": len(settings)}
    tmp_path.mkdir(exist_ok=True)
    for at, each in enumerate(settings):
        samples = [
            replace(measured_sample(sample_id, staged_run(time)), round_places=((number + at) % len(settings),))
            for number, (sample_id, time) in enumerate(zip(ids, vision_s[each.key], strict=True))
        ]
        places = {"is_reference": at == 0, "in_grid": "placebo" not in each.key}
        content = result(each, samples) | {"setting_order": order} | places
        (tmp_path / f"signs_imgsize{each.key}.json").write_text(json.dumps(content))
    (found,) = grids_of(load_sweep(tmp_path))
    return found


BASE = (0.5, 0.25, 0.75, 1.0, 0.5, 2.0, 0.125)


def test_what_a_knob_cannot_touch_and_a_placebo_are_controls_of_a_grid(tmp_path: Path) -> None:
    low, more, high = setting("low", 2), setting("low", 4), setting("high", 2)
    again = Setting({**low.values, "placebo": "again"})
    times = {each.key: BASE for each in (low, high, again)} | {more.key: [1.5 * each for each in BASE]}
    times[high.key] = [9 * each for each in BASE]
    found = in_rounds(tmp_path, times, settings=(low, more, high, again))
    # The placebo is in no front and no effect, and the reference is the reference.
    assert [point.key for point in found.points] == [low.key, more.key, high.key]
    # Nor in anything else that reads a sweep, such as a comparison of two.
    sweep = load_sweep(tmp_path)
    assert {each.key for each in sweep.settings} == {low.key, more.key, high.key}
    assert [each.key for each in sweep.placebos] == [again.key]
    by_kind = {each.kind: each for each in found.controls}
    assert set(by_kind) == {"untouched", "carry_over", "first", "placebo"}
    # The tier may change vision time, and top-k may not.
    control = by_kind["untouched"]
    assert control.what == f"vision time, which top-k cannot touch, at {more.key} over {low.key}"
    assert control.ratio == pytest.approx(1.5) and control.is_off and control.num_rounds == 7
    assert by_kind["placebo"].ratio == 1.0 and not by_kind["placebo"].is_off
    (caveat,) = [each for each in caveats_of([TaskAnalysis(found, [], {})], False) if "top-k cannot" in each.sentence]
    assert caveat.kind == "control_off" and not caveat.voids


def test_settings_that_differ_in_what_acts_on_a_stage_are_no_control(tmp_path: Path) -> None:
    low, high = setting("low"), setting("high")
    found = in_rounds(tmp_path, {low.key: BASE, high.key: BASE[::-1]}, settings=(low, high))
    assert [each.kind for each in found.controls] == ["first"]
