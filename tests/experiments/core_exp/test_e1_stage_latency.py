"""E1 from a run's folder to its files: published names and keys, numbers by hand, figures that are not empty."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from experiment_core_utils.records.caveats import Caveat
from experiments.analyses.stages.operations import stage_points
from experiments.analyses.sweeps import load_sweep, samples_frame
from experiments.core_exp.e1_stage_latency import main
from tests.experiments.hand_made_sweep import FLOPS, result, setting, write
from tests.hand_made_records import VisionGeometry, answered_sample, measured_sample, staged_run

JSON_FILES = ("e1_stage_latency_breakdown", "e1_flops_vs_latency", "e1_attention_ffn_breakdown")
FIGURES = ("e1_stage_shares", "e1_stages_over_tokens", "e1_scaling", "e1_flops_vs_latency")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings of 4 and 3 blocks; pictures of 432 and 864 features."""
    large = VisionGeometry(5, (1, 5), (336, 1232), 864)
    samples = [
        measured_sample(0, staged_run(), flops=FLOPS),
        measured_sample(1, staged_run(vision_s=1.0), flops=FLOPS, geometry=large),
        measured_sample(2, staged_run(vision_s=0.75), flops=FLOPS, geometry=large),
    ]
    run = tmp_path_factory.mktemp("e1") / "run"
    return write(run, *(result(setting(tier, 2, n), samples) for tier in ("low", "high") for n in (3, 4)))


@pytest.fixture(scope="module")
def printed(folder: Path) -> list[str]:
    """The lines that the analysis of the folder printed."""
    with redirect_stdout(StringIO()) as out:
        assert main([str(folder), "--verbose"]) == 0
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def output(folder: Path, printed: list[str]) -> Path:
    return folder / "analysis"


def test_of_an_invalid_run_that_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disturbed = [Caveat.of("foreign_load_cpu", cpu_fraction=0.9).model_dump()]
    run = write(tmp_path / "run", result(setting(), caveat_records=disturbed), result(setting(blocks=4)))
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("INVALID: background load: other processes used 90% of the CPUs")


def test_published_files_and_keys(output: Path, printed: list[str]) -> None:
    # Of 4 settings of 2 tiers: vision 2.25, prefill 0.75, decode 0.75 s.
    assert printed[:4] == [
        "The stage that takes longest is vision in all of the 4 settings.",
        "Decode takes at least half of the time: never (low, high).",
        "signs, vision low: 1.25 s a request, vision 60%, prefill 20%, decode 20%",
        "signs, vision high: 1.25 s a request, vision 60%, prefill 20%, decode 20%",
    ]
    assert {str(path) for path in output.iterdir()} == set(printed[4:])
    breakdown, flops, parts = (json.loads((output / f"{name}.json").read_text()) for name in JSON_FILES)
    assert {"regimes", "settings", "prefill_vs_input_tokens", "decode_vs_output_tokens"} <= set(breakdown)
    assert breakdown["source"]["device"] == "Scripted GPU" and breakdown["source"]["num_samples"] == 12
    # Vision 0.5 + 1 + 0.75, prefill 3 x 0.25, decode 3 x 0.25 s.
    own = breakdown["settings"][0]["stages"]
    assert own["vision"]["share"] == pytest.approx(2.25 / 3.75) and own["decode"]["mean_ms"] == 250.0
    assert [each["stage"] for each in breakdown["dominant_stage"] if each["settings"]] == ["vision"]
    # All prompts are equally long, so that there is no line, and the file says why.
    assert all(
        each["intercept_ms"] is None and "same x" in each["reason"] for each in breakdown["prefill_vs_input_tokens"]
    )
    line = breakdown["decode_vs_output_tokens"][0]
    assert (line["slope_ms_per_token"], line["intercept_ms"]) == (pytest.approx(125.0), pytest.approx(-125.0))
    assert parts["profiles"] is None and "--use_profiler" in parts["reason"]
    # 10^9 operations in 0.5, 1 and 0.75 s: 3 x 10^9 / 2.25 s of 10^12.
    (vision, *_) = [each for each in flops["points"] if each["stage"] == "vision"]
    assert vision["mfu"] == pytest.approx(3e9 / 2.25 / 1e12) and flops["mfu_reason"] is None


def test_tables_are_tidy(output: Path) -> None:
    shares = pd.read_csv(output / "e1_stage_shares.csv")
    assert list(shares.filter(like="_share").columns[:1]) == ["vision_share"]
    assert shares[["vision_share", "prefill_share", "decode_share"]].sum(axis=1).to_numpy() == pytest.approx(1.0)
    lines = pd.read_csv(output / "e1_line_fits.csv")
    assert set(lines["stage"]) == {"vision", "prefill", "decode"} and "slope_ms_per_unit_ci95_low" in lines.columns


def test_figures_show_something_and_are_small(output: Path) -> None:
    for name in FIGURES:
        with Image.open(output / f"{name}.png") as picture:
            colours = picture.convert("RGB").getcolors(1 << 24)
        assert colours is not None and len(colours) > 20
        svg = (output / f"{name}.svg").read_text()
        assert "Scripted GPU" in svg and "n = 12 generations" in svg
        assert len(svg) < 200_000


def test_equal_data_give_equal_figures(folder: Path, output: Path, tmp_path: Path) -> None:
    assert main([str(folder), "--output_dir", str(tmp_path / "again")]) == 0
    names = {path.name for path in output.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    for name in names:
        assert (output / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_mfu_needs_a_known_peak(folder: Path) -> None:
    points = stage_points(samples_frame(load_sweep(folder)), None)
    assert points and all(each.mfu is None for each in points)


def test_a_sweep_without_operations_or_pictures_still_has_its_fractions(tmp_path: Path) -> None:
    samples = [measured_sample(number, has_picture=False) for number in range(3)]
    folder = write(tmp_path, result(setting(), samples))
    assert main([str(folder)]) == 0
    flops = json.loads((folder / "analysis" / "e1_flops_vs_latency.json").read_text())
    assert flops["points"] == [] and "not known" in flops["reason"]
    assert not (folder / "analysis" / "e1_flops_vs_latency.png").exists()


@pytest.mark.parametrize("what", ["nowhere", "empty", "batched"])
def test_errors_are_one_line(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / what
    if what != "nowhere":
        folder.mkdir()
    if what == "batched":
        write(folder, result(setting(), [answered_sample(0), answered_sample(1)]))
    assert main([str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(folder) in error


def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "RESULTS_DIR" in capsys.readouterr().err
