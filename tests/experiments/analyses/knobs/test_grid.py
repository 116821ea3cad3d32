"""What E2 takes from stored results and from the table of a full grid."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.finishing.setting_content import sample_result
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.replication import IN_ROUNDS, OPEN_LOOP, UNKNOWN
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.tasks.interface import Score
from experiments.analyses.knobs.analysis import analyse_knobs
from experiments.analyses.knobs.effects import is_beyond_noise
from experiments.analyses.knobs.grid import TaskGrid, grids_of, knobs_of, levels_of, load_study, mean_log_time
from experiments.analyses.knobs.objectives import LATENCY_MEAN
from experiments.analyses.knobs.records import caveats_of
from experiments.analyses.sweeps import load_sweep, load_sweeps
from tests.experiments.hand_made_grid import measured, point
from tests.experiments.hand_made_sweep import ARRIVED, FLOPS, PROVENANCE, result, setting, write
from tests.hand_made_records import SETTING, answered_sample, measured_sample, staged_run

TABLE = REPOSITORY / "docs" / "core_exp" / "pareto_table.json"


def test_a_grid_has_every_sample_at_every_setting_or_nan(tmp_path: Path) -> None:
    right = measured_sample(0, staged_run(), prediction="1.0", flops=FLOPS)
    wrong = measured_sample(2, staged_run(vision_s=1.0), prediction="0.0", image_id="picture-0")
    folder = write(
        tmp_path, result(setting("low"), [right, wrong]), result(setting("high"), [right, answered_sample(1)])
    )
    (found,) = grids_of(load_sweep(folder))
    assert [each.key for each in found.points] == ["tier-low_topk2_blocks3", "tier-high_topk2_blocks3"]
    assert found.sample_ids == (0, 1, 2) and found.pictures == ("picture-0", "picture-1", "picture-0")
    np.testing.assert_array_equal(found.scores, [[1.0, np.nan, 0.0], [1.0, 1.0, np.nan]])
    # 0.5 + 0.25 + 0.25 s; with a second of vision 1.5; an answer in a batch has no time.
    np.testing.assert_array_equal(found.total_ms, [[1000.0, np.nan, 1500.0], [1000.0, np.nan, np.nan]])
    # 1e9 + 2e9 + 2 x 1e7.
    assert found.flops[0, 0] == 3.02e9 and np.isnan(found.flops[0, 2])
    assert np.isnan(found.energy_j).all()
    np.testing.assert_allclose(found.log_times[0], np.log([1000.0, np.nan, 1500.0]))
    assert found.times == IN_ROUNDS


def test_settings_of_rounds_have_no_variance_between_them(tmp_path: Path) -> None:
    order = {"how": "rounds", "seed": 1, "position": 0, "num_settings": 2}
    rounds, blocked = (
        [result(setting(vision)) | {"setting_order": order | {"how": how}} for vision in ("low", "high")]
        for how in ("rounds", "blocked")
    )
    assert grids_of(load_sweep(write(tmp_path / "rounds", *rounds)))[0].times == IN_ROUNDS
    assert grids_of(load_sweep(write(tmp_path / "one", rounds[0], blocked[1])))[0].times == UNKNOWN
    # One was added by a later run: it shared no round with the other.
    later = rounds[1] | {"provenance": rounds[1]["provenance"] | {"experiment_ids": ["0009"]}}
    assert grids_of(load_sweep(write(tmp_path / "later", rounds[0], later)))[0].times.source == "runs"


def test_of_requests_that_arrived_at_a_rate_the_variance_is_not_known(tmp_path: Path) -> None:
    order = {"setting_order": {"how": "rounds", "seed": 1, "position": 0, "num_settings": 2}}
    folder = write(tmp_path, *(result(setting(vision)) | order | ARRIVED for vision in ("low", "high")))
    assert grids_of(load_sweep(folder))[0].times == OPEN_LOOP


def test_the_logarithm_of_a_samples_time_is_the_mean_over_its_runs() -> None:
    sample = sample_result(measured_sample(0, staged_run(0.5), staged_run(3.5)), Score(1.0), SETTING)
    assert sample.run_totals == (1000.0, 4000.0) and mean_log_time(sample) == pytest.approx(np.log(2000.0))
    assert mean_log_time(sample.with_keys(runs=[])) is None


def test_operations_of_a_request_are_those_of_its_stages() -> None:
    flops = StageFlops(vision_flops=100, prefill_flops=10, decode_flops_per_token=2.0)
    sample = sample_result(measured_sample(0, flops=flops), Score(1.0), SETTING)
    assert (sample.output_tokens, sample.request_flops) == (3, 114.0)
    alone = sample.with_keys(vision_flops=None, decode_flops_per_token=None, output_tokens=1)
    assert alone.request_flops == 10.0
    assert sample.with_keys(prefill_flops=None).request_flops is None


def test_values_of_knobs_are_in_order() -> None:
    points = [point("low", 8), point("low", 16), point("high", 4)]
    assert levels_of(points, "vision") == ("low", "high")
    assert levels_of(points, "top_k") == (4, 8, 16)


def test_settings_scored_by_two_metrics_are_refused(tmp_path: Path) -> None:
    other = result(setting("high")) | {"metric": "em"}
    with pytest.raises(ResultsError, match="scored by em and read_off"):
        grids_of(load_sweep(write(tmp_path, result(setting("low")), other)))


def test_several_folders_are_one_study_and_each_counts_once(tmp_path: Path) -> None:
    counts = PROVENANCE["task"] | {"name": "counts"}
    one = write(tmp_path / "one", result(setting()))
    two = write(tmp_path / "two", result(setting(), task=counts, fingerprint="beef"))
    found = load_study([one, two, one])
    assert [(each.task, len(each.points)) for each in found.grids] == [("counts", 1), ("signs", 1)]
    assert found.source["num_settings"] == 2 and "2 settings" in found.caption


def test_a_table_is_a_study_without_energy_and_operations() -> None:
    found = load_study([TABLE])
    (only,) = found.grids
    assert (only.task, only.scores.shape) == ("reference_vqa", (61, 100))
    assert only.points[0].value("top_k") == 1 and levels_of(only.points, "vision") == ("low", "medium", "high", "own")
    assert [(each.key, each.in_grid) for each in only.points if each.is_reference] == [("own_topk8_blocks16", False)]
    content = json.loads(TABLE.read_text())
    assert only.total_ms[0, 0] == pytest.approx(content["settings"][only.points[0].key]["milliseconds"][0])
    np.testing.assert_allclose(only.log_times, np.log(only.total_ms))
    assert np.isnan(only.flops).all() and found.source["num_samples"] == 6100


def test_tables_of_several_tasks_are_one_study(tmp_path: Path) -> None:
    content = json.loads(TABLE.read_text())
    other = tmp_path / "other.json"
    content["origin"] |= {"task": "reference_choice", "metric": "mc"}
    other.write_text(json.dumps(content))
    found = load_study([TABLE, other])
    assert [grid.task for grid in found.grids] == ["reference_vqa", "reference_choice"]
    assert found.source["tasks"] == ["reference_vqa", "reference_choice"] and "task" not in found.source
    assert (
        found.source["num_settings"] == 122
        and found.source["num_samples"] == 2 * load_study([TABLE]).source["num_samples"]
    )
    assert found.caption.endswith("reference vqa, reference choice")
    with pytest.raises(ResultsError, match="the same task"):
        load_study([TABLE, TABLE])
    content["origin"]["versions"] = {"torch": "1.0"}
    other.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match="differ in versions"):
        load_study([TABLE, other])


def test_a_table_stands_alone_and_is_one(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="give folders of runs, or tables alone"):
        load_study([TABLE, tmp_path])
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ResultsError, match="not a table of collect_table.py"):
        load_study([other])
    with pytest.raises(ResultsError):
        load_study([tmp_path / "nowhere"])


def test_the_sweep_is_one_more_knob(tmp_path: Path) -> None:
    """Settings of both are in one grid, on the same samples."""
    model = PROVENANCE["model"] | {"dtype": "float32"}
    folders = [
        write(tmp_path / "one", result(setting("low")), result(setting("high"))),
        write(tmp_path / "two", result(setting("low"), fingerprint="beef", model=model)),
    ]
    found = load_study(folders)
    (grid,) = found.grids
    assert [each.key for each in grid.points] == [
        "bfloat16 tier-low_topk2_blocks3", "bfloat16 tier-high_topk2_blocks3", "float32 tier-low_topk2_blocks3",
    ]  # fmt: skip
    assert levels_of(grid.points, "sweep") == ("bfloat16", "float32") and knobs_of(grid.points)[-1] == "sweep"
    assert grid.sample_ids == (0, 1) and np.isfinite(grid.scores).all()
    assert found.source["sweeps"]["float32"]["fingerprints"] == {"signs": "beef"}
    assert "bfloat16, eager / float32, eager" in found.caption and "3 settings" in found.caption


def _alone(folders: Sequence[Path]) -> list[TaskGrid]:
    return [load_study([folder]).grids[0] for folder in folders]


def test_a_grid_has_the_runs_of_its_samples(tmp_path: Path) -> None:
    """Runs of 1 s and 2 s, and a sample of one run."""
    samples = [measured_sample(0, staged_run(), staged_run(vision_s=1.5)), measured_sample(1)]
    (grid,) = load_study([write(tmp_path, result(setting(), samples))]).grids
    assert grid.runs_ms is not None and grid.total_ms.tolist() == [[1500.0, 1000.0]]
    np.testing.assert_array_equal(grid.runs_ms[:, 0], [[1000.0, 1000.0], [2000.0, np.nan]])


def test_one_sweep_is_no_knob(tmp_path: Path) -> None:
    assert "sweep" not in knobs_of(load_study([write(tmp_path, result(setting()))]).grids[0].points)


def test_sweeps_of_other_questions_are_refused(tmp_path: Path) -> None:
    other = result(setting(), fingerprint="beef")
    other["per_sample_results"][1]["metadata"]["question"] = "Another?"
    folders = [write(tmp_path / "one", result(setting())), write(tmp_path / "two", other)]
    with pytest.raises(ResultsError, match="sample 1 of signs is another question in .*two than in .*one; give sweeps"):
        load_study(folders)


def days(tmp_path: Path, *uids: str | None, numbers: tuple[str, str] = ("0001", "0001")) -> TaskGrid:
    """Eight settings in rounds, and the same folder again whose times are 3 % longer with a jitter of 1 % a sample."""
    draws, folders = np.random.default_rng(5), []
    order = {"how": "rounds", "seed": 1, "position": 0, "num_settings": 8}
    base = {at: np.exp(0.05 * draws.normal(size=24)) for at in range(8)}
    for name, factor, uid, number in zip(("monday", "tuesday"), (1.0, 1.03), uids, numbers, strict=True):
        made = []
        for at, (tier, top_k) in enumerate(product(("low", "high"), (1, 2, 4, 8))):
            seconds = (1 + 0.2 * at) * base[at] * factor * np.exp(0.01 * draws.normal(size=24) * (factor > 1))
            samples = [
                measured_sample(number, staged_run(vision_s=float(each)), prediction=str(float(number % 2)))
                for number, each in enumerate(seconds)
            ]
            one = result(setting(tier, top_k), samples) | {"setting_order": order}
            runs = {"experiment_ids": [number], "run_uid": uid, "run_uids": None if uid is None else [uid]}
            made.append(one | {"provenance": one["provenance"] | runs})
        folders.append(write(tmp_path / name, *made))
    (found,) = grids_of(*load_sweeps(*folders))
    return found


@pytest.mark.parametrize("numbers", [("0001", "0001"), ("0001", "0002")])
@pytest.mark.parametrize("uids", [(None, None), ("a" * 32, "b" * 32), ("a" * 32, "a" * 32)])
def test_two_days_3_percent_apart_are_not_told_apart(
    tmp_path: Path, uids: tuple[str | None, ...], numbers: tuple[str, str]
) -> None:
    made = days(tmp_path, *uids, numbers=numbers)
    is_monday = np.array([point.sweep == "monday" for point in made.points])
    found = measured(made)
    # The same setting on two days; settings of one day took turns, and differ by 9 % and more.
    settings = [each.setting for each in made.points]
    assert not any(found.told_apart()[at, settings.index(each)] for at, each in enumerate(settings))
    assert found.told_apart()[np.ix_(is_monday, is_monday)].sum() == 8 * 7
    assert found.replication.fields() == {"std": pytest.approx(0.02), "degrees": None, "source": "runs"}
    (analysis,) = analyse_knobs([made], (LATENCY_MEAN,), 300).tasks
    beyond = {term.knobs: is_beyond_noise(term) for term in analysis.effects[LATENCY_MEAN.name].terms}
    assert not beyond["sweep",] and beyond["vision",] and not beyond["vision", "sweep"]
    # The times were made to differ in their vision part, which top-k cannot touch: once for each day.
    assert [each.kind for each in caveats_of([analysis], False)] == ["runs_differ", "control_off", "control_off"]


def test_settings_of_one_run_in_two_folders_took_turns_and_older_ones_of_equal_numbers_did_not(tmp_path: Path) -> None:
    order = {"how": "rounds", "seed": 1, "position": 0, "num_settings": 2}
    for number, (uid, source) in enumerate([("a" * 32, "rounds"), (None, "runs")]):
        folders = []
        for vision in ("low", "high"):
            one = result(setting(vision)) | {"setting_order": order}
            runs = {"experiment_ids": ["0001"], "run_uids": None if uid is None else [uid]}
            folders.append(write(tmp_path / f"{number}{vision}", one | {"provenance": one["provenance"] | runs}))
        assert grids_of(load_sweep(*folders))[0].times.source == source


def test_energies_rest_on_their_passes(tmp_path: Path) -> None:
    passes = {"low": [1.0, 1.1, 1.0], "high": [2.0, 2.1, 2.1]}
    made = [
        result(setting(vision)) | {"energy": {"passes": {"j_per_request_by_pass": own}}}
        for vision, own in passes.items()
    ]
    (found,) = grids_of(load_sweep(write(tmp_path, *made)))
    # Differences of logs by pass: their variance over three.
    apart = np.log(passes["low"]) - np.log(passes["high"])
    assert found.energies.variances(0) == pytest.approx([0.0, apart.var(ddof=1) / 3])
    assert found.energies.levels == ("sample", "picture", "pass")
    older = result(setting("low"))
    assert "no known pass" in str(grids_of(load_sweep(write(tmp_path / "older", older)))[0].energies.undecided)
