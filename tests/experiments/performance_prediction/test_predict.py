"""predict.py on profiles of an H200 that are kept as test data, and its error lines."""

import csv
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.patches import Rectangle
from PIL import Image

from experiment_core_utils.primitives.csv_tables import csv_of_rows, read_table_file
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import REPOSITORY, write_text_atomically
from experiments.analyses.charts.chart import Bars
from experiments.analyses.charts.matplotlib_charts import figure_of, new_figure, save_figure
from experiments.performance_prediction.predict import build_parser, main
from experiments.performance_prediction.prediction.figures import COLOURS, PART_COLOURS, breakdown_chart, figure_folders
from experiments.performance_prediction.prediction.measurements import Measurements, read_measurements
from experiments.performance_prediction.prediction.predictor_file import load_fitted
from experiments.performance_prediction.profiling.tables import LAYER_COLUMNS, OVERALL_COLUMNS

PROFILES = REPOSITORY / "tests" / "data" / "convolution_profiles"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """The file, what fit printed, and the pictures' folder."""
    folder = tmp_path_factory.mktemp("fitted")
    printed = StringIO()
    with redirect_stdout(printed):
        code = main(["fit", str(PROFILES), "--output", str(folder / "m.json"), "--figures", str(folder / "pictures")])
    assert code == 0
    return folder / "m.json", printed.getvalue(), folder / "pictures"


def test_the_tables_are_read_as_they_were_measured() -> None:
    measured = read_measurements([PROFILES])
    # Five combinations, seven sizes.
    assert (measured.devices, len(measured.inferences), len(measured.energies)) == (("NVIDIA H200",), 35, 0)
    first = next(
        each for each in measured.inferences if (each.model, each.requested) == ("alexnet", "winograd nonfused")
    )
    assert [layer.fell_back for layer in first.layers] == [True, False, False, False, False]
    assert first.layers[0].runs == "implicit precomp gemm" and first.layers[0].shape.kernel == (11, 11)


def test_launch_bound_inferences_are_in_the_fit_unless_they_are_left_out(tmp_path: Path) -> None:
    """Tables of today, in which the timer has marked one size of one combination, or all."""
    for path in PROFILES.rglob("*.csv"):
        rows = read_table_file(path)
        columns = OVERALL_COLUMNS if path.name.endswith("_overall.csv") else LAYER_COLUMNS
        is_marked = path.name.startswith("alexnet_winograd_nonfused")
        for row in rows:
            row["launch_bound"] = is_marked and row["input_size"] == 272
        write_text_atomically(csv_of_rows(rows, columns), tmp_path / path.relative_to(PROFILES))
    measured = read_measurements([tmp_path])
    (marked,) = (each for each in measured.inferences if each.is_launch_bound)
    assert (marked.model, marked.requested, marked.input_size) == ("alexnet", "winograd nonfused", 272)
    kept = measured.not_launch_bound.inferences
    assert len(kept) == len(measured.inferences) - 1 and marked not in kept
    with pytest.raises(ResultsError, match="each of 1 inference is launch-bound; fit without --without-launch-bound"):
        _ = Measurements((marked,), ()).not_launch_bound


def test_what_was_printed_is_what_was_left_out(fitted: tuple[Path, str, Path]) -> None:
    printed = fitted[1]
    assert "sizes between left out: 272, 416; 10 inferences" in printed
    assert "model left out: alexnet" in printed and "no energy: energy was measured of 0 inferences" in printed
    assert re.search(r"sizes between left out · network, device", printed)
    content = json.loads(fitted[0].read_text())
    rows = {
        (row["fold_kind"], row["level"], row["method"]): row
        for row in content["devices"]["NVIDIA H200"]["scores"]
        if (row["fold"], row["algorithm"]) == ("all", "all")
    }
    # Measured, at sizes that the fit had not seen.
    assert rows["sizes between", "network, device", "this model"]["mape"] < 0.1
    assert rows["sizes between", "network, device", "roofline"]["mape"] > 0.5


def test_pictures_are_drawn(fitted: tuple[Path, str, Path]) -> None:
    names = {"time_against_size", "layer_breakdown", "predicted_against_measured"}
    assert {path.stem for path in fitted[2].glob("*.png")} == names


def test_each_of_several_devices_has_a_folder_for_its_pictures() -> None:
    assert figure_folders(["NVIDIA H200"], Path("p")) == {"NVIDIA H200": Path("p")}
    assert figure_folders(["NVIDIA H200", "A/B (80 GB)"], Path("p")) == {
        "NVIDIA H200": Path("p/NVIDIA_H200"), "A/B (80 GB)": Path("p/A_B_80_GB_"),
    }  # fmt: skip


def test_a_file_that_was_read_predicts_as_the_fit_did(fitted: tuple[Path, str, Path]) -> None:
    one, two = (load_fitted(fitted[0], device).predictor for device in (None, "NVIDIA H200"))
    assert one.predict("vgg16", "guess", 300) == two.predict("vgg16", "guess", 300)
    measured = next(each for each in read_measurements([PROFILES]).inferences if each.model == "vgg16")
    found = one.predict("vgg16", measured.requested, measured.input_size)
    assert found.device_s == pytest.approx(measured.device_s, rel=0.05)


def test_a_prediction_has_its_error_beside_it(
    fitted: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "vgg16", "--from", str(fitted[0]), "--input-size", "300", "600", "--layers"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"300  winograd nonfused +\d+\.\d+ ± \d+\.\d%", printed)
    assert "size 600 is outside the measured 224 to 512 pixels" in printed
    assert "no energy: energy was measured of 0 inferences" in printed
    assert "best mix at 300: " in printed and "features.28" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "vgg17", "--input-size", "300"], "no model 'vgg17'; there are: vgg16, densenet121"),
        (["predict", "vgg16", "--input-size", "9"], "--input-size of vgg16 9 is not possible; give at least 32"),
        (["predict", "vgg16", "--input-size", "300", "--algorithm", "fast"], "no convolution algorithm 'fast'; there"),
        (
            ["predict", "vgg16", "--input-size", "300", "--algorithm", "fft"],
            "fft was not fitted for NVIDIA H200; there",
        ),
        (["predict", "vgg16", "--input-size", "300", "--device", "V100"], "no fit for device 'V100' in "),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(
    fitted: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*arguments, "--from", str(fitted[0])]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_files_that_are_none_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path), "--output", str(tmp_path / "m.json")]) == 1
    assert "contains no *_overall.csv" in capsys.readouterr().err
    (tmp_path / "m.json").write_text('{"schema": "another"}')
    assert main(["predict", "vgg16", "--input-size", "300", "--from", str(tmp_path / "m.json")]) == 1
    assert "is not of schema convolution-latency/2" in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["", ', "devices": {}', ', "devices": [1]', ', "devices": {"gpu": []}'])
def test_a_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: str) -> None:
    (tmp_path / "m.json").write_text('{"schema": "convolution-latency/2"' + devices + "}")
    assert main(["predict", "vgg16", "--input-size", "300", "--from", str(tmp_path / "m.json")]) == 1
    assert re.fullmatch(r"error: \S+m\.json is damaged \(.+\); fit again\n", capsys.readouterr().err)


ABOVE_0, FROM_1 = "a number above 0, at most 1000000000000", "a whole number from 1 to 1000000000000"
PAIR = "a pair of whole numbers such as 3x3"
# Of which table, in which column, what stands in its second row, and what is allowed there.
ODD_CELLS = [
    *(("overall", name, odd, ABOVE_0)
      for name in ("mean", "layer_pass_mean_ms") for odd in ("-1", "0", "nan", "-inf", "1e400", "", "fast", "True")),
    *(("layers", "mean_ms", odd, ABOVE_0) for odd in ("-0.5", "0.0", "NaN", "", "x")),
    *(("layers", "in_channels", odd, FROM_1) for odd in ("0", "-3", "2.5", "nan", "")),
    ("overall", "input_size", "224.5", FROM_1),
    ("overall", "batch_size", "0", FROM_1),
    *(("layers", "kernel_size", odd, PAIR) for odd in ("3", "-1x3", "axb", "3x" + 99 * "9")),
    ("layers", "algorithm_run", "magic", "one of direct, gemm, "),
    ("overall", "algorithm", "", "one of direct, gemm, "),
]  # fmt: skip


def test_a_cell_that_cannot_be_is_named_by_file_row_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit_with(kind: str, change: Callable[[list[list[str]]], object]) -> str:
        for table in (PROFILES / "alexnet_guess_h200").glob("*.csv"):
            rows = list(csv.reader(table.read_text().splitlines()))
            if table.name.endswith(f"_{kind}.csv"):
                change(rows)
            with (tmp_path / table.name).open("w", newline="") as file:
                csv.writer(file).writerows(rows)
        assert main(["fit", str(tmp_path), "--output", str(tmp_path / "m.json")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    for kind, column, odd, allowed in ODD_CELLS:
        error = fit_with(kind, lambda rows: rows[2].__setitem__(rows[0].index(column), odd))  # noqa: B023
        found = re.fullmatch(
            rf"error: \S+_{kind}\.csv, row 3: {column} is (.+), and it should be {allowed}.*; (.+)\n", error
        )
        assert found is not None, error
        assert found[2] == "correct it, leave the table out, or profile again"
    torn = fit_with("layers", lambda rows: rows[2].pop())
    assert re.fullmatch(r"error: \S+_layers\.csv, row 3 has \d+ cells, .* it is torn; correct it, .*\n", torn)
    small = fit_with("layers", lambda rows: rows[2].__setitem__(rows[0].index("kernel_size"), "999x9"))
    assert re.match(r"error: \S+_layers\.csv, row 3 is of no convolution: an input of ", small)
    other = fit_with("overall", lambda rows: rows[2].__setitem__(rows[0].index("input_size"), "999"))
    assert re.match(r"error: \S+_overall\.csv, row 3 is of size 999, of which the table of layers", other)


def test_thin_layers_have_the_colour_of_their_kernel() -> None:
    """All of vgg16's kernels are 3x3: no pixel of its bars is lightened to another colour by edges of thin layers."""
    measured = read_measurements([PROFILES / "vgg16_guess_h200", PROFILES / "vgg16_winograd_nonfused_h200"])
    figure = figure_of(breakdown_chart(measured), "caption")
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_width() > 0]
    layers = [bar for bar in bars if bar.get_facecolor() == to_rgba(PART_COLOURS["3x3"])]
    assert len(layers) == 2 * 13
    for bar in layers:
        wide = bar.get_window_extent().width >= 6
        assert (bar.get_linewidth() > 0, bar.get_antialiased() is not False) == (wide, wide)
    assert {bar.get_linewidth() > 0 for bar in layers} == {True, False}


def test_layers_of_a_bar_begin_where_the_one_before_ends_and_the_rest_fills_the_whole() -> None:
    measured = read_measurements([PROFILES / "alexnet_winograd_nonfused_h200"])
    (panel,) = breakdown_chart(measured).panels
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    inference = min(measured.inferences, key=lambda each: each.input_size)
    ends = sorted(
        (start, start + length) for bar in bars for start, length in zip(bar.starts, bar.lengths, strict=True)
    )
    np.testing.assert_allclose([start for start, _ in ends[1:]], [end for _, end in ends[:-1]])
    assert len(ends) == 6 and ends[-1][1] == pytest.approx(1e3 * inference.device_s)
    # Its first layer has an 11x11 kernel, which this algorithm does not run.
    lengths = {bar.name: len(bar.lengths) for bar in bars}
    assert lengths == {"3x3": 3, "larger kernels": 1, "fell back to guess": 1, "other operations": 1}


def test_a_rare_colour_stays_in_a_picture_of_many(tmp_path: Path) -> None:
    """One point of each algorithm on a field of 10,000 tones."""
    figure = new_figure(6.0, 3.0, "caption")
    axes = figure.subplots()
    ramp = np.linspace(0.0, 1.0, 100)
    axes.imshow(np.stack([*np.meshgrid(ramp, ramp), np.full((100, 100), 0.2)], axis=-1), extent=(0, 9, 1, 9))
    for place, colour in enumerate(COLOURS.values()):
        axes.scatter(place, 0.5, s=18, color=colour, linewidths=0)
    pixels = np.asarray(Image.open(save_figure(figure, tmp_path, "points")[0]).convert("RGB")).reshape(-1, 3)
    for name, colour in COLOURS.items():
        assert np.abs(pixels - 255 * np.array(to_rgb(colour))).max(axis=1).min() < 25, name


def test_two_precisions_are_not_fitted_together(tmp_path: Path) -> None:
    for name, precision in (("a", "fma"), ("b", "tf32")):
        folder = tmp_path / name
        folder.mkdir()
        for table in (PROFILES / "alexnet_guess_h200").glob("*.csv"):
            (folder / table.name).write_text(table.read_text().replace(",fma,", f",{precision},"))
    with pytest.raises(ResultsError, match="precisions fma, tf32; fit one at a time"):
        read_measurements([tmp_path])


def test_the_flags_parse() -> None:
    arguments = build_parser().parse_args(["predict", "vgg16", "--input-size", "224", "--algorithm", "all"])
    assert (arguments.algorithm, arguments.batch_size, arguments.layers) == (["all"], 1, False)
