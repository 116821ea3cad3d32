"""The data dictionary is what the code says: the committed page, rows by hand, and what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.columns import LAST_COLUMNS, SAMPLE_COLUMNS, SETTING_COLUMNS
from experiment_core_utils.records.journal import LINE_KINDS
from tests.documents.schema_docs import (
    PAGES,
    documented,
    main,
    record_rows,
    table_of,
)
from tests.l_results_csv_cleaning.test_l_results_csv_cleaning import HEADER

SHOWN = (
    "KnobProof FailedSample HardwareUtilisation RunPlan SettingResult WarmUpRuns Conditions Precision Memory "
    "ProcessLoad MemoryTimeline Energy StageFigure EnergySummary EnergyClosure EnergyIdle SampleResult RunTimes "
    "Provenance Caveat InferenceMetrics AllocatedEnergy ComputeMetrics GenerationFlops GpuMemory MemoryParts "
    "ComputeUtilisation EnergyFigures InstrumentEnergy EnergyMetrics PooledEnergy EnergyWindow EnergyReading "
    "DeviceEnergy IdlePower WindowFigure EnergyOrigin"
).split()


@dataclass(frozen=True)
class Explained:
    """A record."""

    length_m: float  #: of the table, in metres
    #: across the table,
    #: in metres
    width_m: float
    colour: str | None = None  #: as seen; None in the dark


@dataclass(frozen=True)
class Silent:
    """A record."""

    length_m: float  #: of the table
    colour: str | None  #: as seen


@dataclass(frozen=True)
class Bare:
    """A record."""

    length_m: float
    width_m: float  #: across the table


def test_the_committed_page_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(
        f"<!-- from {name} -->" in text
        for name in (*SHOWN, "flags", "text_config", "journal", "settings_csv", "samples_csv")
    )


def test_rows_of_a_record_by_hand() -> None:
    assert record_rows(Explained) == [
        ("length_m", "of the table, in metres", "always there"),
        ("width_m", "across the table, in metres", "always there"),
        ("colour", "as seen", "in the dark"),
    ]


def test_a_record_must_explain_itself() -> None:
    with pytest.raises(ResultsError, match=r"Silent.colour: its type and its meaning differ"):
        record_rows(Silent)
    with pytest.raises(ResultsError, match=r"Bare.length_m is not explained"):
        record_rows(Bare)


def test_columns_of_the_settings_are_those_of_the_file() -> None:
    names, in_file = [column.name for column in (*SETTING_COLUMNS, *LAST_COLUMNS)], HEADER.split(",")
    assert [name for name in names if name in in_file] == in_file
    assert len(set(names)) == len(names)
    # Of results made by hand these have no value.
    absent = [
        "model_name", "precision", "device", "execution", "counted_memory_bytes",
        "counted_weights_bytes", "counted_kv_cache_bytes", "counted_activation_bytes", "peak_memory_bytes",
        "process_rss_bytes", "thinking_tokens_mean", "T_thinking_mean_ms", "fixed_length_tokens",
        "T_fixed_length_mean_ms", "share_empty", "share_one_token", "share_outlier_runs", "mbu_decode",
        "request_rate", "achieved_rate", "most_under_way",
        "T_total_share_of_reference", "experiment_id",
    ]  # fmt: skip
    assert [name for name in names if name in absent] == absent and not set(absent) & set(in_file)


def test_columns_of_the_samples_say_where_they_are_from() -> None:
    rows = table_of("samples_csv").splitlines()[2:]
    assert len(rows) == len(SAMPLE_COLUMNS)
    assert "| `image_id` | text | `metadata.image_id` |" in rows
    assert "| `tier` | text | the top level |" in rows


def test_flags_have_their_default_and_their_choices() -> None:
    rows = table_of("flags").splitlines()
    assert "| `--num_samples` | `1000` | number of samples, drawn without replacement |" in rows
    assert (
        "| `--device` | `auto` | auto: a GPU where there is one, else the CPU; one of `auto`, `cpu`, `cuda` |" in rows
    )
    assert any(row.startswith("| `--tier_list` |") and "among low medium high and own" in row for row in rows)
    assert "| `--ids` | none | ids of the samples of the split to measure, in place of a draw |" in rows


def test_keys_of_a_text_experiment_have_their_default_and_their_words() -> None:
    rows = table_of("text_config").splitlines()
    assert "| `mixed_precision` | `no` | accelerate's autocast; one of `no`, `fp16`, `bf16` |" in rows
    assert "| `prompts.split` | `train` | split of the dataset |" in rows
    assert "| `custom_metrics` | [] | functions of your own, `package.module:function` |" in rows


def test_lines_of_a_journal_have_their_keys() -> None:
    rows = table_of("journal").splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(LINE_KINDS)
    (row,) = [row for row in rows if row.startswith("| `load` |")]
    assert row.endswith("samples of a setting | `experiment_id`, `rank`, `trace`, `has_timeline` |")


def test_writing_makes_tables_anew_and_leaves_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    page = tmp_path / "page.md"
    page.write_text("By hand.\n\n<!-- from FailedSample -->\nold\n<!-- end -->\n\nMore.\n")
    assert main(["--check"], [page]) == 1
    assert capsys.readouterr().err == "error: page.md does not match the code; run with --write\n"
    assert main(["--write"], [page]) == 0 and main(["--check"], [page]) == 0
    text = page.read_text()
    assert text.startswith("By hand.\n\n<!-- from FailedSample -->\n\n| key |") and text.endswith(
        "<!-- end -->\n\nMore.\n"
    )
    assert "old" not in text
    with pytest.raises(ResultsError, match="asks for a table from 'Nobody'"):
        documented("<!-- from Nobody -->\n<!-- end -->")
