"""E1 of a sweep with times, and of one without."""

from pathlib import Path

import pytest

from experiments.analyses.stages.analysis import analyse_stages
from experiments.analyses.sweeps import load_sweep, samples_frame
from tests.experiments.hand_made_sweep import FLOPS, result, setting, write
from tests.hand_made_records import answered_sample, measured_sample


def test_a_sweep_becomes_all_that_e1_shows(tmp_path: Path) -> None:
    sweep = load_sweep(
        write(tmp_path, *(result(setting(tier), [measured_sample(0, flops=FLOPS)]) for tier in ("low", "high")))
    )
    found = analyse_stages(sweep, samples_frame(sweep))
    assert found is not None and len(found.generations) == 2
    # Vision 0.5 s of 1 s in each setting.
    assert [each.stages["vision"].share for each in found.by_setting] == pytest.approx([0.5, 0.5])
    assert {each.stage for each in found.points} == set(found.flops_lines) == {"vision", "prefill", "decode"}
    assert not found.profiles and "no profiles" in (found.profiles_reason or "")


def test_a_sweep_without_times_has_no_e1(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, result(setting(), [answered_sample(0)])))
    assert analyse_stages(sweep, samples_frame(sweep)) is None
