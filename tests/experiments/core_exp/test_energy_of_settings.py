"""`--energy` from the flag to the files, beside a device of 100 W whatever runs: joules are 100 times seconds."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.d_energy_tracking import meters_of
from experiment_core_utils.finishing.pooling import merge_parts, part_of
from experiment_core_utils.meters.codecarbon import codecarbon_library
from experiment_core_utils.meters.correct_answers import with_correct_answers
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.requested_energy import energy_plan_lines, with_estimate
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.plan import plan_for, requested_run
from experiment_core_utils.planning.run import ProfilingRun
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.energy import Energy
from experiment_core_utils.records.journal import read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.setting_result import AccuracyPart
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import settings_table
from experiments.core_exp.closing_lines import closing_lines
from tests.given_flags import over
from tests.processes.one_process import run_alone
from tests.scripted.scripted_codecarbon import scripted_library
from tests.scripted.simulated_energy import device_in_real_time, instruments_of
from tests.scripted.simulated_meters import SimulatedDevice

WATTS = 100.0
NOTHING = Instruments(HostClock(), (), (), missing={"GPU energy": "torch sees no GPU"})


def config_for(checkpoint: Path, folder: Path, *more: str) -> ProfilingConfig:
    return parse_config(
        over(["--model_path", str(checkpoint), "--output_dir", str(folder), "--num_samples", "2", "--tier_list", "low",
              "--top_k_list", "2", "--num_active_blocks_list", "3", "--num_runs_per_sample", "3",
              "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
              "--num_threads", "1",
              "--max_new_tokens", "3"], more)
    )  # fmt: skip


def means(device: SimulatedDevice | None = None) -> StageMeasurement:
    """Short windows: how exact they are is tested with a scripted clock."""
    using = instruments_of(device or device_in_real_time(WATTS), sample_every_s=0.005)
    return StageMeasurement(using, WindowGoal(0.5, least_s=0.05), repeats=2, idle_s=0.05)


def result_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*blocks3.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("energy")
    run_profiling(config_for(tiny_checkpoint, folder, "--energy", "required"), means())
    return folder


def test_each_stage_has_its_energy_by_two_sources(folder: Path) -> None:
    energy = result_in(folder)["energy"]
    assert set(energy["stages"]) == {"vision", "prefill", "decode", "end_to_end"}
    for figures in energy["stages"].values():
        counter, power = figures
        assert (counter["basis"], power["basis"], counter["source"]) == ("counter", "instant_power", "simulated")
        assert power["gross_j"] == pytest.approx(WATTS * power["act_s"], rel=1e-6)
        assert counter["num_windows"] == 2 and counter["uncertainty_j"] is not None
        assert power["idle_w"] == pytest.approx(WATTS)
        assert power["net_j"] == pytest.approx(power["gross_j"] - power["idle_j"])
    assert energy["sample_id"] in result_in(folder)["sample_ids"]
    # Of two requests each is as far from their mean as the other.
    assert energy["flops_over_mean"] == pytest.approx(1.0, abs=0.5)
    assert energy["reason"] is None and [each["basis"] for each in energy["closures"]] == ["counter", "instant_power"]
    summary = energy["summary"]
    assert summary["end_to_end_j"] == energy["stages"]["end_to_end"][0]["gross_j"]
    assert summary["j_per_output_token"] == summary["end_to_end_j"] / energy["output_tokens"]
    assert summary["decode_j_per_token"] == summary["decode_j"] / (energy["output_tokens"] - 1)


def test_a_correct_answer_costs_the_request_over_the_accuracy(folder: Path) -> None:
    result, frame = result_in(folder), pd.read_csv(folder / "reference-vqa_settings.csv")
    summary = result["energy"]["summary"]
    if result["accuracy"]:
        assert summary["j_per_correct_answer"] == pytest.approx(summary["end_to_end_j"] / result["accuracy"])
        assert frame["energy_j_per_correct_answer"][0] == pytest.approx(summary["j_per_correct_answer"], rel=1e-5)
    else:
        assert (summary["j_per_correct_answer"], summary["j_per_correct_answer_reason"]) == (
            None,
            "no answer is correct",
        )
        assert "energy_j_per_correct_answer" not in frame  # a column without a value is left out
    # The same answers by a metric that calls each of them right, from the stored file.
    everything = AccuracyPart.model_construct(metric="m", metric_best=1.0, accuracy=1.0, accuracy_ci95=[0.5, 1.0])
    again = with_correct_answers(Energy.model_validate(result["energy"]), everything)
    assert again is not None and again.summary is not None
    assert again.summary.j_per_correct_answer == summary["end_to_end_j"]


def test_each_sample_has_its_part_of_the_passes(folder: Path) -> None:
    result = result_in(folder)
    passes = result["energy"]["passes"]
    assert (passes["num_passes"], passes["num_settings"], passes["sample_ids"]) == (2, 1, result["sample_ids"])
    assert passes["num_requests"] >= 4 and passes["ended_by"] in ("error goal", "number of passes")
    counter, power = passes["figures"]
    assert (counter["basis"], power["basis"]) == ("counter", "instant_power")
    assert power["gross_j"] == pytest.approx(WATTS * power["act_s"], rel=1e-6)
    for sample in result["per_sample_results"]:
        assert (sample["energy_method"], sample["energy_source"]) == ("apportioned", "simulated (counter)")
    # The energy that E2 compares and that of the setting are the same.
    mean = sum(sample["energy_j"] for sample in result["per_sample_results"]) / 2
    assert result["aggregate_stats"]["energy_j_mean"] == pytest.approx(mean)
    assert passes["j_per_request"] == pytest.approx(mean, rel=1e-9)
    frame = pd.read_csv(folder / "reference-vqa_settings.csv")
    assert frame["energy_passes_j_per_request"][0] == pytest.approx(mean, rel=1e-5)
    assert frame["energy_sample_j_mean"][0] == frame["energy_passes_j_per_request"][0]


def test_energy_of_a_request_is_among_the_first_columns(folder: Path) -> None:
    frame = pd.read_csv(folder / "reference-vqa_settings.csv")
    summary = result_in(folder)["energy"]["summary"]
    of_energy = [column for column in frame.columns if column.startswith("energy_")]
    # What people read first stands in front; six digits are kept.
    assert of_energy[:4] == [
        "energy_passes_j_per_request", "energy_end_to_end_j", "energy_j_per_output_token", "energy_vision_j",
    ]  # fmt: skip
    assert list(frame.columns).index("energy_end_to_end_j") < list(frame.columns).index("selected_crops_mean")
    for name in ("vision", "prefill", "decode", "end_to_end"):
        assert frame[f"energy_{name}_j"][0] == pytest.approx(summary[f"{name}_j"], rel=1e-5)
    assert (frame["energy_source"][0], frame["energy_kind"][0]) == ("simulated", "measured")


def test_short_windows_are_warned_of(folder: Path) -> None:
    caveats = result_in(folder)["provenance"]["caveats"]
    assert any(each.startswith("energy: the windows of ") and "shorter than 2 s" in each for each in caveats)


def test_off_reads_nothing_and_leaves_nulls(tiny_checkpoint: Path, tmp_path: Path) -> None:
    device = device_in_real_time(WATTS)
    how = means(device)
    readings = device.num_readings
    report = run_profiling(config_for(tiny_checkpoint, tmp_path, "--energy", "off"), how)
    assert device.num_readings == readings
    result = report.results[0].content()
    assert result["energy"] is None and result["per_sample_results"][0]["energy_j"] is None
    assert not any(name.startswith("energy_") for name in result["aggregate_stats"])


def test_by_default_a_counter_is_read_in_a_fifth_of_the_runs_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Two settings at 100 W whatever runs: the run's wall clock is five sixths of it and more without energy."""
    more = "--num_samples", "12", "--num_runs_per_sample", "7", "--top_k_list", "1", "2"
    config = config_for(tiny_checkpoint, tmp_path, *more)
    began_s = time.perf_counter()
    report = run_profiling(config, means(device_in_real_time(WATTS, tick_s=0.002)))
    took_s = time.perf_counter() - began_s
    energies = [result.energy for result in report.results if result.energy is not None]
    assert len(energies) == 2
    for result, energy in zip(report.results, energies, strict=True):
        passes = energy.passes
        assert passes is not None and (passes.basis, passes.num_settings) == ("counter", 2)
        assert passes.j_per_request == pytest.approx(WATTS * (passes.request_s or 0.0), rel=0.1)
        assert passes.j_per_request_ci95_low is not None and passes.num_passes in (2, 4)
        assert (passes.idle_w, passes.error_goal, energy.summary, energy.stages) == (None, None, None, {})
        assert result.provenance.experimental_variables.energy == "auto"
        assert not [each for each in result.provenance.caveats if each.startswith("energy")]
    assert sum(energy.passes.window_s or 0.0 for energy in energies if energy.passes is not None) < took_s / 6
    (table, *lines) = closing_lines(report)
    assert " J" in table.splitlines()[0] and table.count(" +-") == 2
    assert any("+-: half of the 95 % interval over passes" in line for line in lines)


def test_by_default_a_machine_without_a_counter_has_no_joules_and_no_word_of_it(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    powers = replace(instruments_of(device_in_real_time(WATTS)), counters=())
    for name, using in (("nothing", NOTHING), ("powers", powers)):
        config = config_for(tiny_checkpoint, tmp_path / name)
        report = run_profiling(config, StageMeasurement(using, WindowGoal()))
        (result,) = report.results
        assert result.energy is None
        assert not [each for each in result.provenance.caveats if each.startswith("energy")]
        assert energy_plan_lines("auto", "cpu", 0, using) == []


def test_required_energy_that_nothing_measures_stops_before_the_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for path in tiny_checkpoint.iterdir():
        (tmp_path / "checkpoint" / path.name).write_bytes(path.read_bytes())
    (weights,) = (tmp_path / "checkpoint").glob("*.safetensors")
    # Loading it would be an error of its own.
    weights.write_bytes(b"torn")
    config = config_for(tmp_path / "checkpoint", tmp_path / "results", "--energy", "required")
    with pytest.raises(MeterUnavailable, match="--energy required: nothing on this machine.*use --energy optional"):
        run_profiling(config, StageMeasurement(NOTHING, WindowGoal()))
    assert not (tmp_path / "results").exists()
    # In a folder that is there already it is refused as well, once there is something to measure.
    (tmp_path / "results").mkdir()
    with pytest.raises(MeterUnavailable, match="--energy required"):
        run_profiling(config, StageMeasurement(NOTHING, WindowGoal()))


def test_optional_energy_is_none_with_the_reason_in_every_place(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(tiny_checkpoint, tmp_path, "--energy", "optional")
    (result,) = (each.content() for each in run_profiling(config, StageMeasurement(NOTHING, WindowGoal())).results)
    energy = result["energy"]
    assert (energy["summary"], energy["stages"]) == (None, {})
    assert "nothing on this machine measures energy" in energy["reason"]
    assert energy["missing"] == {"GPU energy": "torch sees no GPU"}
    for sample in result["per_sample_results"]:
        assert sample["energy_j"] is None and "torch sees no GPU" in sample["energy_reason"]
    assert any(each.startswith("energy: not measured: nothing") for each in result["provenance"]["caveats"])


def test_optional_energy_that_nothing_measures_is_codecarbons_estimate_and_marked_so_everywhere(
    tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Where the CPU's counters can be read, codecarbon reads them: its figures are used all the same.
    using = with_estimate(NOTHING, replace(codecarbon_library(), reads_rapl=lambda: False))
    assert "energy is estimated by codecarbon" in caplog.text
    how = StageMeasurement(using, WindowGoal(0.5, least_s=0.2), repeats=2, idle_s=0.2)
    report = run_profiling(config_for(tiny_checkpoint, tmp_path, "--energy", "optional"), how)
    (result,) = (each.content() for each in report.results)
    energy = result["energy"]
    assert set(energy["stages"]) == {"vision", "prefill", "decode", "end_to_end"}
    for cpu, ram in energy["stages"].values():
        assert (cpu["component"], ram["component"]) == ("cpu", "ram")
        for figure in (cpu, ram):
            assert (figure["source"], figure["kind"], figure["basis"]) == (
                "codecarbon_estimate", "estimated", "load_model",
            )  # fmt: skip
            assert figure["gross_j"] > 0 and figure["uncertainty_j"] is None
    summary = energy["summary"]
    assert (summary["component"], summary["kind"]) == ("cpu", "estimated")
    assert summary["end_to_end_j"] == energy["stages"]["end_to_end"][0]["gross_j"]
    assert energy["missing"] == {"GPU energy": "torch sees no GPU"}
    # Of a single run of milliseconds there is no estimate, and no 0.
    for sample in result["per_sample_results"]:
        assert sample["energy_j"] is None and "too coarse for one run" in sample["energy_reason"]
    assert "energy: estimated by codecarbon_estimate, not measured" in result["provenance"]["caveats"]
    frame = pd.read_csv(tmp_path / "reference-vqa_settings.csv")
    assert (frame["energy_source"][0], frame["energy_kind"][0]) == ("codecarbon_estimate", "estimated")
    (table, *lines) = closing_lines(report)
    passes = energy["passes"]
    assert (passes["kind"], passes["num_passes"], passes["j_per_request_uncertainty"]) == ("estimated", 2, None)
    assert " J" in table.splitlines()[0] and f"~{passes['j_per_request']:.3g}" in table
    assert any(line.startswith("energy: estimated by codecarbon_estimate, not measured") for line in lines)
    page = settings_table(analyse([tmp_path]))
    at = [column.label for column in page.columns].index("J a token")
    assert page.rows[0][at].text == f"{passes['j_per_output_token']:.3f} (estimated)"


def test_where_codecarbon_does_not_start_nothing_estimates_and_missing_says_why() -> None:
    using = with_estimate(NOTHING, scripted_library(fail_at="probe"))
    assert using.estimate is None and "does not track here" in using.missing["codecarbon's estimate"]
    measuring = instruments_of(device_in_real_time(WATTS))
    assert with_estimate(measuring, scripted_library(fail_at="probe")) is measuring


def test_an_estimate_is_not_enough_where_energy_is_required() -> None:
    using = with_estimate(Instruments(HostClock(), (), ()), scripted_library())
    assert using.estimate is not None
    with pytest.raises(MeterUnavailable, match="--energy required: nothing on this machine measures energy"):
        meters_of("required", "cpu", 0, 42, StageMeasurement(using, WindowGoal()))


def test_an_unknown_energy_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--energy"):
        parse_config(["--energy", "yes"])


def new_run(config: ProfilingConfig, experiment_id: str) -> ProfilingRun:
    ledger = Ledger(config.machine.output_dir, "f00d")
    return run_alone(requested_run(config), ledger, experiment_id, energy=means())


def test_a_settings_energy_is_measured_once_however_often_it_is_taken_up(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """As a search does, which measures more samples in every round, and a run that goes on after a kill."""
    config = config_for(tiny_checkpoint, tmp_path, "--energy", "required")
    for experiment_id in ("0001", "0002"):
        run = new_run(config, experiment_id)
        (setting,) = plan_for(config, find_model(config.model.model_path))
        ids = run.context.own_ids
        with run.bench.requests, Progress(1, 2, shown=False) as progress:
            for share in (ids[:1], ids):
                run.measurer.measure({setting: share}, progress)
    (path,) = (tmp_path / ".parts").glob("*.rank0.jsonl")
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert [kinds.count(each) for each in ("energy_pass", "energy_end", "energy", "sample")] == [2, 1, 1, 2]
    # Behind the samples of the first share, before its end.
    first = kinds.index("energy_pass")
    assert kinds[first - 1] in ("sample", "conditions")
    assert kinds[first : first + 5] == ["energy_pass", "energy_pass", "energy_end", "energy", "end"]
    content = read_journal(path)
    assert content is not None and content.energy is not None and content.energy.experiment_id == "0001"
    parts = [part_of(content, 0, 1, "0002")]
    assert merge_parts(parts, ids).energy == content.energy


def test_a_plan_says_where_requested_energy_cannot_be_measured() -> None:
    assert energy_plan_lines("off", "cpu", 0, NOTHING) == []
    reason = "nothing on this machine measures energy (GPU energy: torch sees no GPU)"
    assert energy_plan_lines("required", "cpu", 0, NOTHING) == [
        f"warning: --energy required: {reason}; the run would be refused"
    ]
    assert energy_plan_lines("optional", "cpu", 0, NOTHING) == [
        f"warning: --energy optional: {reason}; energy is estimated by codecarbon from the CPU's load and nominal power"
    ]
    assert energy_plan_lines("required", "cpu", 0, instruments_of(device_in_real_time(WATTS))) == []
