"""E1 of a sweep with times, and of one without."""

from pathlib import Path

import pytest

from experiments.analyses.charts.stage_charts import settings_chart
from experiments.analyses.stages.analysis import analyse_stages, stage_findings
from experiments.analyses.stages.records import tables_of
from experiments.analyses.sweeps import load_sweep, samples_frame
from tests.experiments.hand_made_sweep import FLOPS, reference, result, setting, write
from tests.hand_made_records import answered_sample, measured_sample, staged_run


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


def test_times_are_compared_with_the_reference_which_is_a_group_of_its_own(tmp_path: Path) -> None:
    # 1 s at both tiers, 0.5 + 0.25 + 0.25 - 0.2 = 0.8 s at the reference.
    own = [measured_sample(0, staged_run(vision_s=0.3), flops=FLOPS)]
    tiers = [result(setting(tier), [measured_sample(0, flops=FLOPS)]) for tier in ("low", "high")]
    sweep = load_sweep(write(tmp_path, *tiers, reference(own)))
    found = analyse_stages(sweep, samples_frame(sweep))
    assert found is not None and found.references == {"signs": "own_topk4_blocks4"}
    of = " a request (125 % of own_topk4_blocks4, the reference), vision"
    assert [line.partition(" 50%")[0] for line in stage_findings(found)[-3:-1]] == [
        f"signs, vision {tier}: 1.00 s{of}" for tier in ("low", "high")
    ]
    assert stage_findings(found)[-1].startswith("signs, vision own: 800 ms a request (100 % of own_topk4_blocks4, the")
    rows = tables_of(found)["e1_stage_shares"]
    shares = {(row["vision"], row["setting"]): row["total_share_of_reference"] for row in rows}
    assert shares["low", "tier-low_topk2_blocks3"] == pytest.approx(1.25) and shares["own", "own_topk4_blocks4"] == 1
    # Of a part of an answer nothing is said.
    assert shares["low", None] is None
    (panel,) = settings_chart(found.by_setting, found.references).panels
    assert next(iter((panel.y.ticks or {}).values())).startswith("own_topk4_blocks4, reference")


def test_the_fraction_of_the_reference_is_of_the_same_samples(tmp_path: Path) -> None:
    """A sample of 9 s that the reference lacks is in no fraction; the other takes 1 s in both, in two runs here."""
    runs = [staged_run(vision_s=each) for each in (0.25, 0.75)]
    samples = [measured_sample(4, staged_run(vision_s=8.5), has_picture=False), measured_sample(2, *runs)]
    sweep = load_sweep(write(tmp_path, result(setting(), samples), reference([measured_sample(2)])))
    found = analyse_stages(sweep, samples_frame(sweep))
    assert found is not None
    low = next(each for each in found.by_setting if each.setting == "tier-low_topk2_blocks3")
    assert low.total_ms == 5000.0 and found.share_of_reference(low) == pytest.approx(1.0)


def test_a_sweep_without_times_has_no_e1(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, result(setting(), [answered_sample(0)])))
    assert analyse_stages(sweep, samples_frame(sweep)) is None
