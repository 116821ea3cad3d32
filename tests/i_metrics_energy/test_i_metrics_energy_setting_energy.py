"""Entries and caveats of energies by hand."""

from dataclasses import replace
from typing import Any

import pytest

from experiment_core_utils.finishing.setting_content import sample_energy
from experiment_core_utils.meters.correct_answers import with_correct_answers
from experiment_core_utils.meters.setting_energy import energy_of, summary_of
from experiment_core_utils.primitives.statistics import describe
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.records.energy import (
    AllocatedJoules,
    Basis,
    Closure,
    Component,
    Energy,
    EnergyFigure,
    EnergyKind,
    EnergyOrigin,
    EnergySource,
    SettingEnergy,
    StageEnergies,
)
from experiment_core_utils.records.setting_result import AccuracyPart
from experiment_core_utils.saved_results.result_caveats import energy_caveats
from tests.hand_made_records import measured_sample, staged_run


def origin(
    basis: Basis = "counter", device: str = "GPU-1", component: Component = "gpu", kind: EnergyKind = "measured"
) -> EnergyOrigin:
    source: EnergySource = "nvml_counter" if basis == "counter" else "power_integral"
    return EnergyOrigin(device, component, source, kind, basis)


def figure(joules: float | None, of: EnergyOrigin, window_s: float = 10.0) -> EnergyFigure:
    """Two windows of half of `window_s` each; at rest an act is 1 J."""
    gross = None if joules is None else describe([joules, joules])
    reason = "2 of 2 windows gave no figure: GPU is lost" if joules is None else None
    net = None if joules is None else joules - 1.0
    windows = 0 if joules is None else 2
    return EnergyFigure(of, gross, 0.5, 70.0, 1.0, net, 0.6, 0.01, 1000.0, window_s, windows, reason)


def stages_of(*origins: EnergyOrigin, whole_j: float | None = 20.0, window_s: float = 10.0) -> StageEnergies:
    """4 J of vision, 12 J of prefill and 3 J of three decode steps, the same by each origin."""
    joules = {"vision": 4.0, "prefill": 12.0, "decode": 3.0, "end_to_end": whole_j}
    closures = tuple(
        Closure(
            each, whole_j, 19.0, *((whole_j - 19.0, (whole_j - 19.0) / whole_j) if whole_j else (None, None)), 0.7, None
        )
        for each in origins
    )
    figures = {name: tuple(figure(value, each, window_s) for each in origins) for name, value in joules.items()}
    return StageEnergies(4, figures, closures, dict.fromkeys(joules, 1.01), ())


def setting(stages: StageEnergies | None, reason: str | None = None) -> SettingEnergy:
    return SettingEnergy("0001", 0, 7, stages, {}, reason)


def caveats_of(energy: SettingEnergy) -> list[str]:
    return sentences(energy_caveats(energy_of(energy)))


def test_the_summary_is_of_the_counters_where_they_measured_the_whole() -> None:
    summary = summary_of(stages_of(origin("instant_power"), origin()))
    assert summary is not None
    assert (summary.source, summary.vision_j, summary.prefill_j, summary.decode_j) == (
        "nvml_counter", 4.0, 12.0, 3.0,
    )  # fmt: skip
    # Four tokens: three steps.
    assert (summary.decode_j_per_token, summary.j_per_output_token) == (1.0, 5.0)
    assert (summary.end_to_end_idle_j, summary.end_to_end_net_j) == (1.0, 19.0)
    assert (summary.closure_residual_share, summary.source_ratio) == (0.05, 1.01)


def accuracy_of(**given: Any) -> AccuracyPart:
    usual = {"metric": "vqa_score", "metric_best": 1.0, "accuracy": 0.5, "accuracy_ci95": [0.4, 0.6]}
    return AccuracyPart.model_construct(**(usual | given))


def per_correct_answer(entry: Energy | None, **accuracy: Any) -> tuple[Any, ...]:
    found = with_correct_answers(entry, accuracy_of(**accuracy))
    assert found is not None
    ends = ("", "_ci95_low", "_ci95_high", "_reason")
    return tuple(getattr(found.summary, f"j_per_correct_answer{end}") for end in ends)


def test_a_correct_answer_costs_what_a_request_does_over_the_accuracy() -> None:
    entry = energy_of(setting(stages_of(origin("instant_power"), origin())))
    # 20 J over 0.5. Both windows are equal, so that half of the energy's interval is 1.959964 * 0.5 and its ends are
    # 20 * exp(-+ 0.0489991), 0.956358 below and 1.004387 above: 0.24 R^2 - 20 R + 400 - 0.914621 = 0 for the lower end,
    # R = (20 - 4.108286) / 0.48, and with 400 - 1.008793 for the upper one, (20 + 4.119274) / 0.48.
    joules, low, high, reason = per_correct_answer(entry)
    assert (joules, reason) == (40.0, None)
    assert (low, high) == (pytest.approx(33.10773, rel=1e-5), pytest.approx(50.24849, rel=1e-5))
    # Scored anew, it is made anew.
    again = with_correct_answers(entry, accuracy_of(accuracy=1.0, accuracy_ci95=[1, 1]))
    assert per_correct_answer(again) == (joules, low, high, None)
    assert again is not None and again.summary is not None and again.summary.j_per_correct_answer == 20.0
    assert again.summary.j_per_correct_answer_ci95_high == pytest.approx(21.004387)


def test_without_a_correct_answer_there_are_no_joules_for_one() -> None:
    entry = energy_of(setting(stages_of(origin())))
    none = (None, None, None)
    assert per_correct_answer(entry, accuracy=0.0, accuracy_ci95=[0.0, 0.2]) == (*none, "no answer is correct")
    assert per_correct_answer(entry, accuracy=None, accuracy_ci95=None) == (*none, "no answer has a score")
    assert per_correct_answer(entry, metric="cider_score", metric_best=10.0, accuracy=4.0) == (
        *none, "cider_score gives up to 10: it counts no correct answers",
    )  # fmt: skip
    joules, low, high, reason = per_correct_answer(entry, accuracy=0.1, accuracy_ci95=[0.0, 0.3])
    assert (joules, high, reason) == (200.0, None, "the accuracy may be 0: there is no upper end")
    assert low is not None and low < 20.0 / 0.3
    assert with_correct_answers(None, accuracy_of()) is None
    lost = energy_of(setting(None, "GPU is lost"))
    assert with_correct_answers(lost, accuracy_of()) == lost


def test_an_energy_of_one_window_gives_a_figure_without_an_interval() -> None:
    stages = stages_of(origin())
    whole = replace(stages.figures["end_to_end"][0], uncertainty_j=None)
    entry = energy_of(setting(replace(stages, figures={**stages.figures, "end_to_end": (whole,)})))
    assert per_correct_answer(entry) == (40.0, None, None, "the uncertainty of the energy is not known")


def test_of_several_gpus_the_sum_counts_for_the_setting() -> None:
    summary = summary_of(stages_of(origin(), origin(device="GPU-2"), origin(device="all")))
    assert summary is not None and summary.device == "all"


def test_where_one_gpu_was_lost_another_source_counts() -> None:
    stages = stages_of(origin(), origin(device="GPU-2"), origin("instant_power"))
    whole = stages.figures["end_to_end"]
    lost = (whole[0], replace(whole[1], gross_j=None), whole[2])
    summary = summary_of(replace(stages, figures={**stages.figures, "end_to_end": lost}))
    assert summary is not None and summary.basis == "instant_power"


def test_what_the_cpu_used_has_no_ratio_of_gpus() -> None:
    summary = summary_of(stages_of(origin(component="cpu", device="package-0")))
    assert summary is not None and (summary.component, summary.source_ratio) == ("cpu", None)


def test_a_whole_that_nobody_measured_has_no_summary_and_says_why() -> None:
    energy = setting(stages_of(origin(), whole_j=None))
    entry = energy_of(energy)
    assert entry is not None and entry.summary is None
    assert caveats_of(energy) == ["energy: not measured: 2 of 2 windows gave no figure: GPU is lost"]


def test_good_figures_have_no_caveat_and_none_are_no_entry() -> None:
    assert caveats_of(setting(stages_of(origin()))) == []
    assert energy_of(None) is None and energy_caveats(None) == []


@pytest.mark.parametrize(("whole_j", "fraction"), [(21.0, "+9.5%"), (17.0, "-11.8%")])
def test_stages_that_do_not_add_up_are_warned_of(whole_j: float, fraction: str) -> None:
    # 2 of 21 and -2 of 17.
    assert caveats_of(setting(stages_of(origin(), whole_j=whole_j))) == [
        f"energy: the stages and the whole request differ by {fraction}; do not add the energy of stages up"
    ]


def test_short_windows_and_estimates_are_warned_of() -> None:
    # 3 s in two windows.
    (caveat,) = caveats_of(setting(stages_of(origin(), window_s=3.0)))
    assert caveat == "energy: the windows of vision, prefill, decode, end_to_end are shorter than 2 s"
    (caveat,) = caveats_of(setting(stages_of(origin(kind="estimated"))))
    assert caveat == "energy: estimated by nvml_counter, not measured"


def test_windows_that_did_not_reach_the_goal_are_warned_of() -> None:
    stages = stages_of(origin())
    figures = dict(stages.figures)
    for name, error in {"vision": 0.031, "decode": 0.0456, "prefill": 0.02}.items():
        figures[name] = (replace(figures[name][0], window_error=error),)
    stages = replace(stages, figures=figures, error_goal=0.02)
    assert caveats_of(setting(stages)) == [
        "energy: the longest windows leave an error of up to vision 3.1%, decode 4.6%, more than the goal of 2.0%"
    ]
    entry = energy_of(setting(stages))
    assert entry is not None and entry.error_goal == 0.02
    assert entry.stages["vision"][0].window_error == 0.031


def test_a_gpu_without_a_counter_is_warned_of_where_the_cpu_was_measured() -> None:
    energy = setting(stages_of(origin(component="cpu", device="package-0")))
    with_gpu = replace(energy, missing={"energy counter of GPU-1": "Not Supported"})
    assert caveats_of(energy) == [] and caveats_of(with_gpu) == ["energy: the GPU's own energy is not in it"]


def test_a_sample_has_its_part_of_the_windows() -> None:
    energy = AllocatedJoules(5.0, 0.5, "apportioned", origin(), None)
    sample = replace(measured_sample(3, staged_run()), energy=energy)
    assert sample_energy(sample).content() == {
        "energy_bound_j": 0.5,
        "energy_method": "apportioned",
        "energy_source": "nvml_counter (counter)",
        "energy_reason": None,
    }
    assert sample.energy_j == 5.0
    lost = replace(sample, energy=AllocatedJoules(None, None, None, None, "GPU is lost"))
    assert (lost.energy_j, sample_energy(lost).energy_reason) == (None, "GPU is lost")
