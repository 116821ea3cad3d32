"""A sweep over sizes: what is there is skipped, what does not fit is a row, what is not covered is reported before."""

import signal
from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.csv_tables import Cell, read_table
from experiment_core_utils.primitives.errors import Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused
from experiments.performance_prediction.profiler import UnifiedProfiler
from experiments.performance_prediction.profiling.records import device_label, identity_cells
from experiments.performance_prediction.profiling.sweep import SweepCount, check_support, sweep
from experiments.performance_prediction.profiling.tables import ResultTables
from tests.experiments.performance_prediction.small_networks import OnePlain, TwoConvolutions, profiler_of


def tables_of(profiler: UnifiedProfiler, folder: Path) -> ResultTables:
    return ResultTables(folder, "cpu", identity_cells(profiler.settings))


def rows(path: Path) -> list[dict[str, Cell]]:
    return read_table(path.read_text(), path.name)


def test_sizes_that_do_not_fit_into_memory_are_rows_and_the_sweep_continues(tmp_path: Path) -> None:
    profiler = profiler_of(OnePlain(largest=20))
    tables = tables_of(profiler, tmp_path)
    assert sweep(profiler, tables, (16, 24, 20), "cpu", StopRequest()) == SweepCount(2, 1, 0)
    found = {row["input_size"]: (row["status"], row["reason"], row["mean"]) for row in rows(tables.overall_path)}
    assert found[24] == ("out_of_memory", "CUDA out of memory", None)
    assert found[16][0] == found[20][0] == "ok"
    assert [row["input_size"] for row in rows(tables.layers_path)] == [16, 20]
    # Nothing is measured again, what did not fit neither.
    assert sweep(profiler, tables, (16, 24, 20), "cpu", StopRequest()) == SweepCount(0, 0, 3)


def test_a_request_to_stop_ends_the_sweep_between_two_sizes(tmp_path: Path) -> None:
    stop = StopRequest()

    class Impatient(OnePlain):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if images.shape[-1] == 20:
                stop.note(signal.SIGINT, None)
            return super().forward(images)

    profiler = profiler_of(Impatient())
    tables = tables_of(profiler, tmp_path)
    # The note is made by the shapes of the second size already, by which the second is begun: it is finished.
    with pytest.raises(Stopped, match="SIGINT between two input sizes"):
        sweep(profiler, tables, (16, 20, 24), "cpu", stop)
    assert tables.done_sizes() == {16, 20}
    assert sweep(profiler_of(OnePlain()), tables, (16, 20, 24), "cpu", StopRequest()) == SweepCount(1, 0, 2)


def test_a_size_beyond_an_algorithms_limit_is_a_row(tmp_path: Path) -> None:
    # fft takes planes of up to 256, padding counted.
    profiler = profiler_of(OnePlain(), algorithm="fft", measure=1)
    lines = check_support(profiler, (16, 256))
    assert lines[0] == "at 256 pixels: fft does not cover 1 of 1 convolution of small (100% of their FLOPs)"
    tables = tables_of(profiler, tmp_path)
    assert sweep(profiler, tables, (16, 256), "cpu", StopRequest()) == SweepCount(1, 1, 0)
    assert [(row["status"], row["mean"] is None) for row in rows(tables.overall_path)] == [
        ("ok", False),
        ("refused", True),
    ]


def test_a_model_that_is_not_covered_is_refused_before_anything_runs() -> None:
    model = TwoConvolutions()
    with pytest.raises(AlgorithmRefused, match="winograd takes stride 1, this is 2x2: strided"):
        check_support(profiler_of(model, algorithm="winograd"), (16, 32))
    assert model.hooks_seen == []


def test_a_fallback_is_reported_and_recorded(tmp_path: Path) -> None:
    profiler = profiler_of(TwoConvolutions(), algorithm="winograd", on_unsupported="fallback")
    assert check_support(profiler, (16,))[0].startswith("at 16 pixels: winograd does not cover 1 of 2")
    tables = tables_of(profiler, tmp_path)
    sweep(profiler, tables, (16,), "cpu", StopRequest())
    (overall,) = rows(tables.overall_path)
    assert overall["layers_fell_back"] == 1
    strided, plain = rows(tables.layers_path)
    assert (strided["algorithm_asked"], strided["algorithm_run"], strided["fell_back"]) == ("winograd", "torch", True)
    assert (plain["algorithm_run"], plain["fell_back"], plain["refusal"]) == ("winograd", False, None)
    assert overall["fell_back_time_share"] == pytest.approx(
        float(str(strided["mean_ms"])) / (float(str(strided["mean_ms"])) + float(str(plain["mean_ms"])))
    )


def test_the_label_of_the_cpu() -> None:
    assert device_label(torch.device("cpu")) == "cpu"
