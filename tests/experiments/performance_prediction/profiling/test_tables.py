"""The two tables of a combination: their headers, a run that is killed between them, and rows that do not belong."""

from pathlib import Path

import pytest

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import ResultsError
from experiments.performance_prediction.profiling.records import IDENTITY
from experiments.performance_prediction.profiling.tables import (
    LAYER_COLUMNS,
    ResultTables,
    complete_row,
    unmeasured_row,
)

WHO: dict[str, Cell] = {**dict.fromkeys(IDENTITY, "x"), "model": "vgg16", "algorithm": "fft tiling", "batch_size": 1}


def overall(size: int) -> dict[str, Cell]:
    return complete_row(unmeasured_row(size, "refused", "why"), WHO)


def layers(size: int) -> list[dict[str, Cell]]:
    return [{**dict.fromkeys(LAYER_COLUMNS), "layer": f"l{place}", "input_size": size} for place in range(2)]


def test_the_published_paths_and_headers(tmp_path: Path) -> None:
    tables = ResultTables(tmp_path / "2_quick", "l40s", WHO)
    tables.append(overall(64), layers(64))
    folder = tmp_path / "2_quick" / "vgg16_fft_tiling_l40s"
    header = (folder / "vgg16_fft_tiling_overall.csv").read_text().splitlines()[0]
    assert header == (
        "model,algorithm,input_size,mean,std,min,max,power_mean_w,energy_per_inference_j,median,p95,ci95_low,"
        "ci95_high,images_per_s,peak_memory_bytes,peak_memory_reason,layers_sum_ms,uncovered_ms,uncovered_share,"
        "layer_pass_mean_ms,num_layers,layers_fell_back,fell_back_time_share,fell_back_flops_share,conv_flops,"
        "numerical_error_max,energy_bound_j,energy_window_s,energy_source,energy_basis,energy_reason,energy_remark,"
        "num_warmup,warmup_is_stable,launch_bound,status,reason,device_name,precision,dtype,batch_size,backend,on_unsupported,seed,"
        "warmup_asked,measure,torch,cudnn,cuda,driver,power_limit_w,cpu_threads,commit,gpu,sizes_asked,timestamp"
    )
    header = (folder / "vgg16_fft_tiling_layers.csv").read_text().splitlines()[0]
    assert header == (
        "layer,in_channels,out_channels,kernel_size,mean_ms,percentage,input_size,batch_size,input_height,input_width,"
        "output_height,output_width,stride,padding,dilation,groups,algorithm_asked,algorithm_run,engine,fell_back,"
        "refusal,kernel_names,workspace_bytes,flops,bytes,flops_per_s,share_of_peak,arithmetic_intensity,median_ms,"
        "std_ms,min_ms,percentage_of_inference,numerical_error,numerical_error_reason,energy_j,energy_method,launch_bound,model,"
        "device_name,precision"
    )


def test_layers_of_a_size_without_its_row_are_dropped_by_the_next_run(tmp_path: Path) -> None:
    tables = ResultTables(tmp_path, "cpu", WHO)
    tables.append(overall(64), layers(64))
    before = tables.overall_path.read_bytes()
    tables.append(overall(96), layers(96))
    # As if the run had been killed between the two files.
    tables.overall_path.write_bytes(before)
    assert tables.done_sizes() == {64}
    tables.append(overall(96), layers(96))
    assert tables.done_sizes() == {64, 96}
    lines = tables.layers_path.read_text().splitlines()
    assert len(lines) == 1 + 2 + 2


def test_a_size_that_another_process_has_written_is_not_written_twice(tmp_path: Path) -> None:
    for _ in range(2):
        ResultTables(tmp_path, "cpu", WHO).append(overall(64), layers(64))
    tables = ResultTables(tmp_path, "cpu", WHO)
    assert len(tables.overall_path.read_text().splitlines()) == 2
    assert len(tables.layers_path.read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["device_name", "precision", "batch_size", "on_unsupported", "cudnn"])
def test_rows_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    ResultTables(tmp_path, "cpu", WHO).append(overall(64), layers(64))
    others = ResultTables(tmp_path, "cpu", {**WHO, name: "y"})
    with pytest.raises(ResultsError, match=f"contains rows of {name} .*, not 'y'; choose another --output-dir"):
        others.done_sizes()


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    tables = ResultTables(tmp_path, "cpu", WHO)
    tables.folder.mkdir(parents=True)
    tables.overall_path.write_text("model,algorithm,input_size\nvgg16,fft tiling,64\n")
    with pytest.raises(ResultsError, match="other columns"):
        tables.done_sizes()
