"""The documents against the code: every key that a real run writes, every flag, every link."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import BaseModel

from experiment_core_utils.config.profiling import build_parser, parse_config, parts_of_flags
from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.meters.correct_answers import with_correct_answers
from experiment_core_utils.meters.energy_files import ENERGY_VERSION
from experiment_core_utils.meters.setting_energy import energy_of
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.primitives.statistics import describe
from experiment_core_utils.records.columns import LAST_COLUMNS, SETTING_COLUMNS
from experiment_core_utils.records.compute import ComputeUtilisation, GenerationFlops, HardwareUtilisation, MemoryParts
from experiment_core_utils.records.energy import (
    END_TO_END,
    Closure,
    DeviceEnergy,
    EnergyFigure,
    EnergyOrigin,
    EnergyReading,
    EnergyWindow,
    IdlePower,
    SettingEnergy,
    StageEnergies,
    WindowFigure,
)
from experiment_core_utils.records.ledger import Ledger, RunPlan
from experiment_core_utils.records.sample_result import QUANTITIES, FailedSample
from experiment_core_utils.records.setting_result import (
    PROTOCOL_VERSION,
    SCHEMA_VERSION,
    AccuracyPart,
    CommonFactor,
    OpenLoop,
    Rounds,
)
from experiment_core_utils.records.text import (
    AllocatedEnergy,
    ComputeMetrics,
    EnergyMetrics,
    GpuMemory,
    InferenceMetrics,
    InstrumentEnergy,
    PooledEnergy,
)
from experiments.core_exp.multi_datasets import PUBLISHED_LIMITS
from knob_profiler.__main__ import COMMANDS

DOCS = REPOSITORY / "docs"
SCHEMA = (DOCS / "results_schema.md").read_text(encoding="utf-8")
COMMAND_LINE = (DOCS / "reference" / "command_line.md").read_text(encoding="utf-8")
# Objects whose keys are data: described in words, not row by row.
KEYS_ARE_DATA = {"versions", "source", "prompt_form", "eos_sources"}


def first_cells(section: str, text: str = SCHEMA) -> set[str]:
    """What the tables of a section name in backticks in their first column."""
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {section!r}"
    return set(re.findall(r"^\| `([^`]+)`", found[1], re.MULTILINE))


def dotted(content: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The keys of nested objects, such as `hardware` and `hardware.cpu`."""
    names = set()
    for key, value in content.items():
        names.add(prefix + key)
        if isinstance(value, dict) and key not in KEYS_ARE_DATA:
            names |= dotted(value, f"{prefix}{key}.")
    return names


@pytest.fixture(scope="module")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], pd.DataFrame, Ledger]:
    """A real result, the CSV beside it, and the ledger of the run."""
    folder = tmp_path_factory.mktemp("documented")
    config = parse_config(
        ["--model_path", str(tiny_checkpoint), "--output_dir", str(folder), "--num_samples", "4", "--tier_list", "low",
         "--top_k_list", "2", "--num_active_blocks_list", "3", "--num_runs_per_sample", "1", "--num_warmup_runs", "0",
         "--max_repeats", "0", "--no_reference", "--max_new_tokens", "4", "--num_threads", "1", "--memory_timeline"]
    )  # fmt: skip
    report = run_profiling(config)
    assert report.csv_path is not None
    (path,) = folder.glob("*blocks3.json")
    result = json.loads(path.read_text())
    return result, pd.read_csv(report.csv_path), Ledger(folder, result["fingerprint"])


def test_every_key_of_a_result_is_documented_and_no_other(run: tuple[dict[str, Any], pd.DataFrame, Ledger]) -> None:
    result = run[0]
    sample = result["per_sample_results"][0]
    assert set(result) == first_cells("Top level of a setting's file")
    # Of a budget of thinking alone, and of scored log-probabilities.
    assert {*sample, "thinking_forced", "continuations"} == first_cells("Per-sample results")
    # Of batches alone.
    assert {*sample["runs"][0], "batch_output_tokens"} == first_cells("Runs")
    assert set(sample["metadata"]) == first_cells("Metadata")
    # There where a knob was not seen, or counted, or left tokens out.
    of_knobs = {"knobs_not_seen", "counted", "prefill_tokens", "prompt_tokens", "vision_tokens"}
    assert {*result["realised"], *of_knobs} == first_cells("Realised")
    assert set(result["memory"]) == first_cells("Memory")
    assert set(result["compute_utilisation"][0]) == first_cells("Compute utilisation")
    assert set(result["memory_timeline"][0]) == first_cells("Memory timeline")
    assert all(f"`{key}`" in SCHEMA for key in result["memory_timeline"][0]["samples"][0])
    assert set(result["warmup"][0]) == first_cells("Warm-up")
    assert set(result["conditions"][0]) == first_cells("Conditions")
    assert set(result["precision"]) == first_cells("Precision")
    of_rounds = {*Rounds.model_fields, *CommonFactor.model_fields, *OpenLoop.model_fields}
    assert set(result["setting_order"]) | of_rounds == first_cells("Order and rounds")
    assert result["protocol_version"] == PROTOCOL_VERSION
    assert dotted(result["provenance"]) == first_cells("Provenance")
    assert set(FailedSample.model_fields) == first_cells("Failed samples")
    for key in (
        *result["tier_range"],
        *result["sampling"],
        *result["setting_order"],
        *result["provenance"]["versions"],
    ):
        assert f"`{key}`" in SCHEMA
    for entry in result["accuracy_by_type"].values():
        assert all(f"`{key}`" in SCHEMA for key in entry)
    assert result["schema_version"] == SCHEMA_VERSION
    assert f"`schema_version` is {SCHEMA_VERSION} " in SCHEMA


def test_every_key_of_an_energy_is_documented() -> None:
    origin = EnergyOrigin("GPU-1", "gpu", "nvml_counter", "measured", "counter")
    figure = EnergyFigure(origin, describe([1.0, 2.0]), 0.1, 70.0, 0.1, 1.4, 0.2, 0.01, 100.0, 2.0, 2, None)
    idle = IdlePower(origin, 70.0, 0.1, 5.0, None)
    closure = Closure(origin, 1.5, 1.5, 0.0, 0.0, 0.1, None)
    stages = StageEnergies(2, {END_TO_END: (figure,)}, (closure,), {END_TO_END: 1.0}, ((idle, idle),))
    accuracy = AccuracyPart.model_construct(metric="em", metric_best=1.0, accuracy=0.5, accuracy_ci95=[0.4, 0.6])
    energy = with_correct_answers(energy_of(SettingEnergy("0001", 0, 3, stages, {}, None)), accuracy)
    assert energy is not None and energy.summary is not None
    entry = energy.content()
    assert set(entry) == first_cells("Energy")
    assert set(entry["stages"][END_TO_END][0]) == first_cells("Energy figures")
    assert set(entry["summary"]) == first_cells("Energy summary")
    assert set(entry["closures"][0]) == first_cells("Energy closures")
    assert set(entry["idle"][0]) == first_cells("Energy idle")


def test_every_key_that_the_instruments_add_is_documented() -> None:
    assert all(f"`{key}`" in SCHEMA for key in (*InstrumentEnergy.__annotations__, *WindowFigure.__dataclass_fields__))


def test_every_key_of_the_energy_files_is_documented_and_no_other() -> None:
    written = {key for kind in (EnergyMetrics, PooledEnergy) for key in kind.__annotations__}
    assert first_cells("Energy of a text experiment") == written | set(EnergyWindow.__dataclass_fields__)
    records = (EnergyReading, DeviceEnergy, IdlePower, WindowFigure, EnergyOrigin)
    assert first_cells("Records of energy windows") == {key for each in records for key in each.__dataclass_fields__}
    assert "`windows`" in SCHEMA and f"`schema_version` ({ENERGY_VERSION})" in SCHEMA


def test_every_key_of_the_metrics_of_a_text_experiment_is_documented_and_no_other() -> None:
    written = {
        key
        for part in (InferenceMetrics, AllocatedEnergy, ComputeMetrics, GenerationFlops)
        for key in part.__annotations__
    }
    assert first_cells("Metrics of a text experiment") == written
    parts = (GpuMemory, MemoryParts, ComputeUtilisation)
    keys = {key for part in parts for key in part.__annotations__} | {"memory", "memory_by_process"}
    assert first_cells("Memory and load of a text experiment") == keys | {"compute_utilisation"}
    assert set(HardwareUtilisation.model_fields) == first_cells("Hardware utilisation")


def test_every_aggregate_is_documented(run: tuple[dict[str, Any], pd.DataFrame, Ledger]) -> None:
    names = {each.spread for each in QUANTITIES.values() if each.figures is not None}
    section = SCHEMA.partition("## Aggregate stats\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    assert names == {name for cell in cells for name in re.findall("`([^`]+)`", cell) if not name.startswith("_")}
    endings = sorted(set(re.findall(r"`(_[a-z0-9_]+)`", SCHEMA)), key=len, reverse=True)
    found = set()
    for key in run[0]["aggregate_stats"]:
        key = key.removesuffix("_typical")
        ending = next(ending for ending in endings if key.endswith(ending))
        assert key.removesuffix(ending) in names
        found.add(ending)
    assert found == {"_mean", "_std", "_p50", "_p95", "_p99", "_min", "_max", "_ci95_low", "_ci95_high", "_n"}


def test_every_column_of_the_csv_is_documented(run: tuple[dict[str, Any], pd.DataFrame, Ledger]) -> None:
    # A column without a value is left out.
    documented = first_cells("Settings CSV")
    assert set(run[1].columns) <= documented == {column.name for column in (*SETTING_COLUMNS, *LAST_COLUMNS)}
    folder = run[2].path.parents[1]
    samples = pd.read_csv(folder / "reference-vqa_samples.csv")
    # It stands where a fraction was requested.
    assert set(samples.columns) | {"vision_fraction"} == first_cells("Samples CSV")
    assert len(samples) == run[0]["num_samples"]


def test_every_key_of_the_ledger_is_documented(run: tuple[dict[str, Any], pd.DataFrame, Ledger]) -> None:
    content = json.loads(run[2].path.read_text())
    (entry,) = content["settings"].values()
    assert set(content) | set(entry) == first_cells("Ledger")


def test_every_key_of_a_plan_is_documented() -> None:
    assert set(RunPlan.__dataclass_fields__) == first_cells("Plan of a run")


def test_every_variable_and_dataset_of_the_runner_is_documented() -> None:
    sweeps = (DOCS / "sweeps.md").read_text(encoding="utf-8")
    source = (REPOSITORY / "experiments" / "core_exp" / "multi_datasets.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"([A-Z][A-Z_]+)"', source)) - {"CUDA_VISIBLE_DEVICES", "FAILED", "DATASET", "DIR"}
    assert read | {"PYTHON"} == first_cells("Several datasets", sweeps)
    rows = dict(re.findall(r"^\| ([a-z0-9_, ]+) \| (\d+) \|$", sweeps, re.MULTILINE))
    limits = {name: int(limit) for names, limit in rows.items() for name in names.split(", ")}
    assert limits == PUBLISHED_LIMITS


def test_every_flag_is_documented_with_its_default() -> None:
    flags = {action.option_strings[0]: action for action in build_parser()._actions if action.dest != "help"}
    parts = parts_of_flags().values()
    defaults = {f"--{name}": field.default for part in parts for name, field in part.model_fields.items()}
    rows = dict(re.findall(r"^\| `(--\w+)` \| (.*) \|$", COMMAND_LINE, re.MULTILINE))
    assert set(rows) == set(flags)
    for flag, action in flags.items():
        default = rows[flag].split(" | ")[0]
        if defaults[flag] is False:
            assert default == "off"
        elif isinstance(defaults[flag], int | float | str | Path) and flag != "--model_path":
            assert default == f"`{defaults[flag]}`"
        for choice in action.choices or ():
            assert f"`{choice}`" in rows[flag]


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a configuration with their defaults."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{above}{name}.")
        else:
            yield above + name, field.get_default(call_default_factory=True)


def test_every_key_of_a_text_experiment_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_0-9.]+)` \| ([^|]*) \|", COMMAND_LINE, re.MULTILINE))
    keys = {key: default for key, default in keys_of(TextConfig) if key != "further"}
    assert set(rows) == set(keys)
    for key, default in keys.items():
        if isinstance(default, bool) or default is None:
            expected = {"True": "true", "False": "false", "None": "null"}[str(default)]
            assert rows[key] == expected or key.endswith("quant_type")
        elif isinstance(default, int | float):
            assert float(rows[key]) == default
        elif isinstance(default, str) and key != "model_name":
            assert rows[key] == f"`{default}`"


@pytest.mark.parametrize(
    "page", sorted([*DOCS.rglob("*.md"), *REPOSITORY.glob("*.md")]), ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


#: published paths and modules that have a name of `knobprof`
SECOND_DIALECT = re.compile(
    r"python3? (experiments/|(\S*/)?(run_profile|predict|acc_lat_profiling)\.py|scripts/score_block_importance)"
    r"|-m (experiments\.(?!benchmarks\.)|experiment_core_utils\.)"
    r"|accelerate launch (?!.*--multi_gpu)\S*experiments/"
)


@pytest.mark.parametrize(
    "page",
    sorted([*DOCS.rglob("*.md"), *(REPOSITORY / "experiments").rglob("*.md"), *REPOSITORY.glob("checkpoints/*/*.md")]),
    ids=lambda page: str(page.relative_to(REPOSITORY)),
)
def test_commands_are_written_as_knobprof(page: Path) -> None:
    """Launchers need a path, benchmarks and scripts have no other name; one table has the published paths."""
    lines = page.read_text(encoding="utf-8").splitlines()
    if page == REPOSITORY / "experiments" / "README.md":
        lines = [" | ".join(line.split(" | ")[:2]) for line in lines if line.startswith("|")]
    assert [line for line in lines if SECOND_DIALECT.search(line)] == []


def test_the_benchmarks_that_pages_and_modules_name_exist() -> None:
    folder = REPOSITORY / "experiments" / "benchmarks"
    files = [
        *(path for top in ("docs", "experiments", "experiment_core_utils") for path in (REPOSITORY / top).rglob("*.*")),
        *REPOSITORY.glob("*.md"),
    ]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".md", ".py", ".sh")]
    command = re.compile(r"python -m experiments\.benchmarks\.([a-z\d_.]*[a-z\d_])")
    named = {name for text in texts for name in command.findall(text)}
    rows = (folder / "README.md").read_text(encoding="utf-8").splitlines()[5:]
    cells = [cell for row in rows if row.startswith("| ") for cell in row.split(" | ")[1:2]]
    named |= {name for cell in cells for name in re.findall(r"`([a-z\d_.]+)[ `]", cell)}
    missing = [
        name
        for name in sorted(named)
        if not (path := folder.joinpath(*name.split("."))).with_suffix(".py").is_file()
        and not (path / "__main__.py").is_file()
    ]
    assert {"kernels", "kernels.parts", "kernels.tune"} < named and missing == []


def test_the_published_paths_stand_in_the_table_of_commands() -> None:
    table = (REPOSITORY / "experiments" / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    commands = {word for row in rows for word in re.findall(r"`knobprof (\w+)", row[1])}
    assert commands == set(COMMANDS.commands)
    paths = re.findall(r"`((?:experiments|scripts)/[\w/]+\.(?:py|sh))`", table)
    assert len(paths) > 10 and [path for path in paths if not (REPOSITORY / path).is_file()] == []


def test_the_pages_have_at_most_30000_words_written_by_hand() -> None:
    """A word has a letter; tables that are made from the code are not counted."""
    pages = [*DOCS.rglob("*.md"), REPOSITORY / "README.md", *(REPOSITORY / "experiments").rglob("*.md")]
    texts = [
        re.sub(r"<!-- from \S+ -->.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for page in pages
    ]
    assert sum(bool(re.search(r"[^\W\d_]", word)) for text in texts for word in text.split()) <= 30_000
