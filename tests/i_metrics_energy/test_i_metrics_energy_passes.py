"""What energy passes come to, and joules per correct answer over pictures, by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from experiment_core_utils.meters.correct_answers import AnsweredRequest, with_correct_answers
from experiment_core_utils.meters.setting_energy import energy_of, passes_energy
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.records.energy import (
    ActEnergy,
    Energy,
    EnergyOrigin,
    EnergyPass,
    EnergyPassesEnd,
    IdlePower,
    PassesEnergy,
)
from experiment_core_utils.records.setting_result import AccuracyPart
from experiment_core_utils.saved_results.result_caveats import energy_caveats

COUNTER = EnergyOrigin("GPU-1", "gpu", "nvml_counter", "measured", "counter")
POWER = replace(COUNTER, source="power_integral", basis="instant_power")


def one_pass(joules: float | None, idle_w: float = 70.0, power_j: float | None = None, index: int = 0) -> EnergyPass:
    """One window of two passes over two samples of 0.5 s; `joules` are of one pass."""
    windows = tuple(
        ActEnergy(each, value, 2.0, 1.0, 2.0, 2.0, "acts", None if value else "GPU is lost", window_error=0.01)
        for each, value in ((COUNTER, joules), (POWER, power_j or joules))
    )
    idle = tuple(IdlePower(each, idle_w, 0.0, 2.0, None) for each in (COUNTER, POWER))
    return EnergyPass("0001", 0, index, 0, (3, 5), 8, windows, (), idle)


def end_of(idle_w: float = 72.0, **changes: Any) -> EnergyPassesEnd:
    idle = tuple(IdlePower(each, idle_w, 0.0, 2.0, None) for each in (COUNTER, POWER))
    return replace(EnergyPassesEnd("0001", 0, 12, "time limit", 0.02, 60.0, idle, {}, None), **changes)


def test_a_request_takes_the_window_over_its_requests() -> None:
    """Passes of 180 J and 220 J over two samples: 90 J and 110 J a request."""
    found = passes_energy([one_pass(180.0, power_j=171.0), one_pass(220.0, power_j=209.0)], end_of())
    assert (found.device, found.basis, found.sample_ids) == ("GPU-1", "counter", [3, 5])
    assert (found.j_per_request, found.num_passes, found.num_requests) == (100.0, 2, 8)
    assert (found.window_s, found.request_s) == (4.0, 0.5)
    # Student's t of one degree of freedom at 97.5 % is 12.7062; s = sqrt(200), over sqrt(2).
    assert found.j_per_request_ci95_high == pytest.approx(100.0 * math.exp(1.27062), rel=1e-5)
    assert found.j_per_request_ci95_low == pytest.approx(100.0 * math.exp(-1.27062), rel=1e-5)
    # s^2 / n = 100, and the window's bound of 2 J over two requests.
    assert found.j_per_request_uncertainty == pytest.approx(math.sqrt(101.0))
    # Idle readings of 70, 70 and 72 W.
    assert found.idle_w == pytest.approx(212 / 3) and found.idle_j_per_request == pytest.approx(106 / 3)
    assert found.net_j_per_request == pytest.approx(100.0 - 106 / 3)
    # Eight tokens in a pass of two.
    assert (found.output_tokens_per_request, found.j_per_output_token) == (4.0, 25.0)
    assert found.source_ratio == pytest.approx(0.95)
    assert (found.num_settings, found.ended_by, found.error_goal, found.limit_s) == (12, "time limit", 0.02, 60.0)
    assert [each.gross_j for each in found.figures] == [100.0, pytest.approx(95.0)]


def test_where_the_counter_was_lost_the_readings_count_and_without_any_there_is_a_reason() -> None:
    found = passes_energy([one_pass(None, power_j=200.0)] * 2, None)
    assert (found.basis, found.j_per_request, found.ended_by) == ("instant_power", 100.0, None)
    lost = energy_of(None, [one_pass(None)] * 2, end_of())
    assert lost is not None and lost.passes is not None and lost.passes.j_per_request is None
    assert sentences(energy_caveats(lost)) == ["energy: not measured: 2 of 2 windows gave no figure: GPU is lost"]


def test_passes_of_other_sources_are_left_out() -> None:
    alone = one_pass(300.0)
    alone = replace(alone, windows=alone.windows[:1], idle=alone.idle[:1])
    found = passes_energy([alone, one_pass(180.0), one_pass(220.0)], end_of())
    assert (found.j_per_request, found.num_passes) == (100.0, 2)


def test_devices_without_idle_power_are_summed_all_the_same() -> None:
    """Two packages of 180 J and 60 J over two samples: 120 J a request, and no net."""
    window = ActEnergy(replace(COUNTER, component="cpu", source="rapl"), 180.0, 2.0, 1.0, 2.0, 2.0, "acts", None)
    other = replace(window, origin=replace(window.origin, device="GPU-2"), joules=60.0)
    found = passes_energy(
        [EnergyPass("0001", 0, index, 0, (3, 5), 8, (window, other), (), ()) for index in (0, 1)], None
    )
    assert (found.device, found.j_per_request, found.j_per_request_by_pass) == ("all", 120.0, [120.0, 120.0])
    assert (found.idle_w, found.net_j_per_request) == (None, None)


def test_an_interval_wider_than_the_goal_is_warned_of() -> None:
    assert sentences(energy_caveats(energy_of(None, [one_pass(200.0)] * 2, end_of()))) == []
    assert sentences(energy_caveats(energy_of(None, [one_pass(180.0), one_pass(220.0)], end_of()))) == [
        "energy: the joules of a request are known to +-127.1% after 2 passes; the goal was +-2.0%"
    ]


def test_without_passes_and_stages_there_is_no_energy_or_the_reason() -> None:
    assert energy_of(None) is None
    failed = energy_of(None, [], end_of(ended_by=None, reason="out of memory", missing={"RAPL": "not readable"}))
    assert failed is not None and (failed.passes, failed.summary, failed.reason) == (None, None, "out of memory")
    assert failed.missing == {"RAPL": "not readable"}
    assert sentences(energy_caveats(failed)) == ["energy: not measured: out of memory"]


def accuracy_of(**given: Any) -> AccuracyPart:
    usual = {"metric": "vqa_score", "metric_best": 1.0, "accuracy": 0.5, "accuracy_ci95": [0.3, 0.7]}
    return AccuracyPart.model_construct(**(usual | given))


def answered(
    joules: Sequence[float | None], scores: Sequence[float], pictures: str = "abcd", **accuracy: Any
) -> PassesEnergy:
    """Energy with two passes that agree and no bound of ticks: what is open is how pictures differ."""
    passes = [one_pass(200.0)] * 2
    passes = [replace(each, windows=tuple(replace(one, bound_j=0.0) for one in each.windows)) for each in passes]
    energy = energy_of(None, passes, end_of())
    samples = [AnsweredRequest(*each) for each in zip(joules, scores, pictures, strict=True)]
    found = with_correct_answers(energy, accuracy_of(**accuracy), samples)
    assert found is not None and found.passes is not None
    return found.passes


def mover(half_e: float, half_a: float, correlation: float) -> tuple[float, float]:
    """Roots R of (100 - 0.5 R)^2 = e^2 + R^2 half_a^2 - 2 r R e half_a, where e is how far the interval of the energy,
    100 * exp(-/+ half_e / 100), goes to each side."""

    def root(e: float, sign: int) -> float:
        a, b, c = 0.25 - half_a**2, 50.0 - correlation * e * half_a, 100.0**2 - e**2
        return (b + sign * math.sqrt(b**2 - a * c)) / a

    return root(100 - 100 * math.exp(-half_e / 100), -1), root(100 * math.exp(half_e / 100) - 100, 1)


def test_joules_per_correct_answer_vary_with_the_pictures() -> None:
    """80, 80, 120, 120 J: variance of the mean 4/3 * 1600 / 16, Student's t of 3 degrees 3.182446."""
    half = 3.182446 * math.sqrt(4 / 3 * 1600 / 16)
    # What an answer is worth has nothing to do with its joules.
    found = answered((80.0, 80.0, 120.0, 120.0), (0.0, 1.0, 0.0, 1.0))
    assert (found.j_per_correct_answer, found.j_per_correct_answer_reason) == (200.0, None)
    low, high = mover(half, 0.2, 0.0)
    assert (found.j_per_correct_answer_ci95_low, found.j_per_correct_answer_ci95_high) == (
        pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5),
    )  # fmt: skip
    # Pictures that take more are those that are answered: more of them cost more and give more.
    found = answered((80.0, 80.0, 120.0, 120.0), (0.0, 0.0, 1.0, 1.0))
    low, high = mover(half, 0.2, 1.0)
    assert (found.j_per_correct_answer_ci95_low, found.j_per_correct_answer_ci95_high) == (
        pytest.approx(low, rel=1e-5), pytest.approx(high, rel=1e-5),
    )  # fmt: skip


def test_questions_about_one_picture_count_as_one() -> None:
    apart = answered((80.0, 80.0, 120.0, 120.0), (0.0, 1.0, 0.0, 1.0))
    two = answered((80.0, 80.0, 120.0, 120.0), (0.0, 1.0, 0.0, 1.0), "aabb")
    assert two.j_per_correct_answer_ci95_low is not None and apart.j_per_correct_answer_ci95_low is not None
    assert two.j_per_correct_answer_ci95_low < apart.j_per_correct_answer_ci95_low


def test_what_is_not_known_gives_no_interval_and_says_why() -> None:
    ends = ("", "_ci95_low", "_ci95_high", "_reason")
    for found, expected in (
        (
            answered((None, None, None, None), (0.0, 1.0, 0.0, 1.0)),
            (200.0, None, None, "the energies of requests are known for fewer than 2 pictures"),
        ),
        (
            answered((90.0, 110.0, None, None), (0.0, 0.0, 0.0, 0.0), accuracy=0.0, accuracy_ci95=[0.0, 0.5]),
            (None, None, None, "no answer is correct"),
        ),
    ):
        assert tuple(getattr(found, f"j_per_correct_answer{end}") for end in ends) == expected
    found = answered((90.0, 110.0, 90.0, 110.0), (0.0, 1.0, 0.0, 0.0), accuracy=0.25, accuracy_ci95=[0.0, 0.6])
    assert (found.j_per_correct_answer, found.j_per_correct_answer_ci95_high) == (400.0, None)
    assert found.j_per_correct_answer_reason == "the accuracy may be 0: there is no upper end"


def test_a_stored_energy_is_scored_anew() -> None:
    found = with_correct_answers(
        Energy.model_validate(Energy.model_construct(passes=answered((90.0, 110.0) * 2, (1.0, 0.0) * 2)).content()),
        accuracy_of(accuracy=1.0, accuracy_ci95=[1.0, 1.0]),
        [AnsweredRequest(each, 1.0, picture) for each, picture in zip((90.0, 110.0) * 2, "abcd", strict=True)],
    )
    assert found is not None and found.passes is not None and found.passes.j_per_correct_answer == 100.0
    # 400 = sum of squares: 3.182446 * sqrt(4 / 3 * 400 / 16).
    high = 100 * math.exp(3.182446 * math.sqrt(100 / 3) / 100)
    assert found.passes.j_per_correct_answer_ci95_high == pytest.approx(high, rel=1e-6)
