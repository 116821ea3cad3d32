"""Grids of text experiments from YAML values to files, on a tiny model; every step has tests of its own."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.config.text_grid import combinations
from experiment_core_utils.j_results_saving import save_aggregated_results_json
from experiment_core_utils.l_results_csv_cleaning import read_results_csv
from experiment_core_utils.meters.codecarbon import CodecarbonLibrary
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.tracked_window import EnergySources
from experiment_core_utils.models.costs.architecture import Architecture, architecture_of
from experiment_core_utils.models.text_model import validate_loadable
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    DeviceLost,
    EnergyRefused,
    MeterUnavailable,
    ProfilerError,
    ResultsNotSaved,
    ResultsRefused,
)
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiment_core_utils.saved_results.terminal import text_table
from experiment_core_utils.tasks.prompts import read_prompts
from experiment_core_utils.text_pipeline import run_text_experiments
from experiment_core_utils.text_run.grid_run import TextReport
from experiment_core_utils.text_run.plan import fingerprint_parts, launched, plan_of
from tests.processes.deadline import ends_within
from tests.scripted.scripted_codecarbon import WINDOW, scripted_library
from tests.scripted.simulated_energy import device_in_real_time, instruments_of
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

PROMPTS = ("How many red circles are there?", "=1+1", "What is left of the blue square?", "a", "Is it raining?")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def values(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return {
        "model_name": str(checkpoint),
        "prompts": {"path": str(path)},
        "max_output_tokens": 6,
        "device": "cpu",
        "num_threads": 1,
        "track_energy": False,
        "num_warmup_batches": 0,
    }


def measured(values: dict[str, Any], folder: Path, output: list[str] | None = None) -> TextReport:
    return run_text_experiments(combinations(values), folder, (output if output is not None else []).append)


# A field of a saved experiment, what stands in it (a class: the field is gone), words of the message.
BROKEN: list[tuple[str, Any, str]] = [
    ("digest", 7, "digest is 7"),
    ("digest", None, "digest is None"),
    ("experiment_id", KeyError, "lacks 'experiment_id'"),
    ("experiment_id", "../../x", "experiment_id is '../../x', and it is part of file names"),
    ("varied", [], "varied is []"),
    ("inference_metrics", KeyError, "lacks 'inference_metrics'"),
    ("inference_metrics", None, "inference_metrics is None"),
    ("inference_metrics.num_prompts", "5", "inference_metrics.num_prompts is '5'"),
    ("inference_metrics.total_output_tokens", -1, "inference_metrics.total_output_tokens is -1"),
    ("inference_metrics.tokens_per_second", "x", "inference_metrics.tokens_per_second is 'x'"),
    ("inference_metrics.tokens_per_second", float("nan"), "inference_metrics.tokens_per_second is nan"),
    ("inference_metrics.queries_per_second", 10**400, "inference_metrics.queries_per_second is 1000"),
    ("inference_metrics.padding_share", KeyError, "lacks 'padding_share' in "),
    ("inference_metrics.ttft_s", [], "inference_metrics.ttft_s is []"),
    ("inference_metrics.ttft_s.mean", None, "inference_metrics.ttft_s.mean is None"),
    ("global_energy_results", [], "global_energy_results is []"),
    ("global_energy_results.total_energy_kwh", "x", "global_energy_results.total_energy_kwh is 'x'"),
    ("custom_failures", None, "custom_failures is None"),
    ("custom_failures", [{}], "lacks 'name' in "),
]


def test_what_was_saved_and_edited_is_named_by_file_and_field(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    grid = combinations({**values, "save_outputs": True})
    (name,) = run_text_experiments(grid, folder, [].append).results
    path = folder / "text_generation_results.json"
    whole = path.read_text()

    def unsupported_reason() -> str:
        with ends_within(60), pytest.raises(ProfilerError) as caught:
            plan_of(grid, folder, launched(grid, folder))
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
        return str(caught.value)

    for place, value, words in BROKEN:
        content = json.loads(whole)
        *above, last = place.split(".")
        part = content[name]
        for key in above:
            part = part[key]
        if value is KeyError:
            del part[last]
        else:
            part[last] = value
        path.write_text(json.dumps(content))
        output = unsupported_reason()
        assert output.startswith(str(path)) and words in output, (place, value, output)
    path.write_text(json.dumps({name: []}))
    assert "which is not an experiment" in unsupported_reason()
    path.write_text("[" * 100_000)
    assert "nested more than 200 deep" in unsupported_reason()
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be written (Is a directory)" in unsupported_reason()
    path.rmdir()
    os.mkfifo(path)
    assert "only a regular file is written over" in unsupported_reason()
    path.unlink()
    path.write_text(whole)
    assert plan_of(grid, folder, launched(grid, folder)).saved
    experiment_id = name.removeprefix("experiment_")
    texts = folder / "raw_results" / experiment_id / f"{experiment_id}_8_text_output.json"
    texts.unlink()
    texts.mkdir()
    assert f"{texts} is not a result, but a folder" in unsupported_reason()


def ids_of(report: TextReport) -> list[str]:
    """Run ids count on from whatever ran on this checkout before."""
    return [result["experiment_id"] for result in report.results.values()]


def plain_answers(folder: Path, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """Greedy, one prompt at a time, by transformers alone; up to end-of-sequence."""
    model = tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        row = out[0, ids.shape[1] :].tolist()
        eos = model.generation_config.eos_token_id
        answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return answers


def test_a_grid_leaves_every_file_under_its_published_name(
    values: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    report = measured(
        {**values, "batching_options": {"batch_size___fixed_batching": [1, 3]}, "save_outputs": True}, folder
    )
    assert (report.num_measured, report.exit_code, dict(report.failed)) == (2, 0, {})
    names = [
        "1_experiment_setup", "2_experiment_variables", "3_model_architecture", "4_inference_metrics",
        "5_compute_metrics", "6_local_energy_results_process_0", "7_global_energy_results", "8_text_output",
        "8_token_output",
    ]  # fmt: skip
    for experiment_id in ids_of(report):
        raw = folder / "raw_results" / experiment_id
        assert sorted(path.name for path in raw.iterdir()) == [f"{experiment_id}_{name}.json" for name in names]
        outputs = json.loads((raw / f"{experiment_id}_8_token_output.json").read_text())["output_token_ids"]
        in_order = sorted(PROMPTS, key=lambda prompt: len(AutoTokenizer.from_pretrained(checkpoint)(prompt).input_ids))
        assert outputs == plain_answers(checkpoint, in_order, tokens=6)
        texts = json.loads((raw / f"{experiment_id}_8_text_output.json").read_text())["outputs"]
        assert [each["prompt"] for each in texts] == in_order
        # Places in the file, not in this order.
        assert [PROMPTS[each["prompt_index"]] for each in texts] == in_order
    saved = json.loads((folder / "text_generation_results.json").read_text())
    assert list(saved) == list(report.results) == [f"experiment_{each}" for each in ids_of(report)]
    first, second = saved.values()
    tokens = sum(map(len, plain_answers(checkpoint, PROMPTS, tokens=6)))
    for each in (first, second):
        metrics = each["inference_metrics"]
        assert (metrics["num_prompts"], metrics["total_output_tokens"]) == (5, tokens)
        assert metrics["tokens_per_second"] == pytest.approx(tokens / metrics["total_time_s"])
        assert each["global_energy_results"]["total_energy_kwh"] is None
        assert each["experiment_variables"]["model_name"] == str(checkpoint)
    assert [each["inference_metrics"]["num_batches"] for each in (first, second)] == [5, 2]
    assert first["varied"] == {"batching_options.batch_size___fixed_batching": 1}
    table = text_table([first, second])
    assert "batch_size___fixed_batching" in table and ids_of(report)[1] in table and "GPU J" not in table
    read = {**second, "global_energy_results": second["global_energy_results"] | {"gpu_power_integral_j": 12.5}}
    head, *rows = text_table([first, read]).splitlines()
    assert head.split()[-2:] == ["GPU", "J"] and [row.split()[-1] for row in rows] == ["–", "12.50"]


def test_the_csv_has_a_row_for_each_and_gives_back_what_was_measured(values: dict[str, Any], tmp_path: Path) -> None:
    report = measured({**values, "cycle_id": [1, 2]}, tmp_path / "results")
    assert report.csv_path == tmp_path / "results" / "text_generation_results.csv"
    rows = read_results_csv(report.csv_path)
    frame = pd.read_csv(report.csv_path)
    assert len(rows) == len(frame) == 2
    for row, number, result in zip(rows, frame["inference_metrics.total_time_s"], report.results.values(), strict=True):
        assert row["inference_metrics.total_time_s"] == number == result["inference_metrics"]["total_time_s"]
        assert row["experiment_id"] == result["experiment_id"]
        assert row["inference_metrics.ttft_s.mean"] == result["inference_metrics"]["ttft_s"]["mean"]


def test_a_stopped_grid_resumes_with_what_is_missing(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    (first,) = ids_of(measured({**values, "cycle_id": [1]}, folder))
    output: list[str] = []
    report = measured({**values, "cycle_id": [1, 2]}, folder, output)
    assert report.num_measured == 1 and ids_of(report)[0] == first and len(report.results) == 2
    assert output[0] == f"1/2 cycle_id=1: done before, as experiment_{first}"
    # What a killed run was writing, in the folders of experiments that it began.
    raw = folder / "raw_results" / "0002"
    begun = [folder / ".table.csv.tmp", raw / ".0002_1_setup.json.tmp", raw / "process_1" / ".energy.json.tmp"]
    for path in begun:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    again = measured({**values, "cycle_id": [2, 1]}, folder)
    assert again.num_measured == 0 and set(again.results) == set(report.results)
    assert not any(path.exists() for path in begun)


def test_other_prompts_or_weights_are_another_experiment(
    values: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    measured(values, folder)
    Path(values["prompts"]["path"]).write_text("\n".join((*PROMPTS, "one more")))
    assert measured(values, folder).num_measured == 1
    (weights,) = checkpoint.glob("*.safetensors")
    content = weights.read_bytes()
    # The same content at another time is the same model.
    weights.write_bytes(content)
    assert measured(values, folder).num_measured == 0
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert measured(values, folder).num_measured == 1
    assert measured(values, folder).num_measured == 0


def test_what_cannot_be_done_here_is_left_out_with_its_reason(values: dict[str, Any], tmp_path: Path) -> None:
    output: list[str] = []
    report = measured(
        {**values, "fp_precision": ["float32", "float8"], "decoder_config": {"decoder_top_k": [5, 6]}},
        tmp_path / "results",
        output,
    )
    assert report.num_measured == 1 and report.exit_code == 0
    left_out = report.plan.left_out
    assert left_out["2/4 fp_precision=float32 decoder_top_k=6"] == (
        "the same experiment as 1/4 fp_precision=float32 decoder_top_k=5"
    )
    assert [title for title, reason in left_out.items() if "float8 needs a GPU" in reason] == [
        "3/4 fp_precision=float8 decoder_top_k=5",
        "4/4 fp_precision=float8 decoder_top_k=6",
    ]


def test_a_grid_of_which_nothing_is_possible_is_an_error(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="float8 needs a GPU"):
        measured({**values, "fp_precision": "float8"}, tmp_path / "results")
    with pytest.raises(ConfigurationError, match="6 prompts of .* are requested, and 5 of 5 are that short"):
        measured({**values, "num_input_prompts": 6}, tmp_path / "results")
    assert not (tmp_path / "results" / "text_generation_results.json").exists()


def test_a_combination_that_fails_does_not_stop_the_others(
    values: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    broken = tiny_llama()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    save_checkpoint(broken, tmp_path / "broken")
    drawn = {"decoding_mode": "top_k", "decoder_top_k": 5}
    models = [str(tmp_path / "broken"), str(checkpoint)]
    report = measured({**values, "model_name": models, "decoder_config": drawn}, tmp_path / "results")
    assert report.num_measured == 1 and report.exit_code == 1
    ((title, failure),) = report.failed.items()
    assert title.startswith("1/2 model_name=") and failure.startswith("ConfigurationError: the weights in")
    assert "contains NaN or infinity" in failure


def test_an_error_of_a_library_fails_its_combination_and_its_traceback_is_saved(
    values: dict[str, Any], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LlamaForCausalLM.generate

    def odd(self: Any, **given: Any) -> Any:
        if given["generation_config"].max_new_tokens == 3:
            raise KeyError("odd")
        return whole(self, **given)

    monkeypatch.setattr(LlamaForCausalLM, "generate", odd)
    # Drawn tokens come from `generate()`.
    drawn = {"decoder_config": {"decoding_mode": "top_k", "decoder_top_k": 1}}
    report = measured({**values, **drawn, "max_output_tokens": [3, 4]}, tmp_path / "results")
    assert (report.num_measured, report.exit_code) == (1, 1)
    ((title, failure),) = report.failed.items()
    assert title.startswith("1/2")
    found = re.fullmatch(
        r"GenerationFailed: generate\(\) failed: KeyError: 'odd' \(traceback: (tracebacks/KeyError-\w+\.txt)\)", failure
    )
    assert found is not None and ", in odd\n" in (tmp_path / "results" / found[1]).read_text()

    def broken(self: Any, **given: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(LlamaForCausalLM, "generate", broken)
    with pytest.raises(DeviceLost):
        measured({**values, "max_output_tokens": [3, 5]}, tmp_path / "results")


@pytest.mark.parametrize("gone", ["results", "lock"])
def test_what_is_removed_under_a_run_ends_it_before_anything_is_saved(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    whole, folder = LlamaForCausalLM.generate, tmp_path / "results"
    lock = folder / PARTS_FOLDER / "lock"

    def removed_meanwhile(self: Any, **given: Any) -> Any:
        if lock.exists():
            shutil.rmtree(folder) if gone == "results" else lock.unlink()
        return whole(self, **given)

    monkeypatch.setattr(LlamaForCausalLM, "generate", removed_meanwhile)
    with pytest.raises(ResultsNotSaved, match="lock was removed or moved while this run writes it; "):
        measured(values, folder)
    assert not list(folder.glob("*.json"))


def test_what_prompts_and_model_do_not_allow_is_found_before_loading(values: dict[str, Any], tmp_path: Path) -> None:
    report = measured(
        {**values, "max_output_tokens": [6, 4000], "max_input_tokens": [1, 64], "num_input_prompts": 2},
        tmp_path / "results",
    )
    assert report.num_measured == 1 and report.exit_code == 0
    reasons = {title.partition(" ")[0]: reason for title, reason in report.plan.left_out.items()}
    assert (
        reasons["1/4"]
        == reasons["3/4"]
        == (
            "2 prompts of at most 1 tokens are requested, and 1 of 5 are that short; lower num_input_prompts or raise "
            "max_input_tokens"
        )
    )
    assert "with max_output_tokens 4000 is longer than the model's context of 256" in reasons["4/4"]


def test_a_tokenizer_of_another_model_is_found_before_loading(values: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tiny_llama(vocab_size=40), tmp_path / "small")
    with pytest.raises(ConfigurationError, match=r"its tokenizer gives token \d+, and the model knows 40"):
        measured({**values, "model_name": str(tmp_path / "small")}, tmp_path / "results")


def test_repetitions_are_experiments_of_their_own(values: dict[str, Any], tmp_path: Path) -> None:
    assert measured({**values, "cycle_id": [1, 2]}, tmp_path / "results").num_measured == 2


def test_texts_that_were_not_saved_are_generated_again(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert measured(values, folder).num_measured == 1
    assert measured({**values, "save_outputs": True}, folder).num_measured == 1
    assert measured({**values, "save_outputs": True}, folder).num_measured == 0
    assert measured(values, folder).num_measured == 0


def test_the_csv_is_made_whole_where_nothing_is_due(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    csv_path = measured(values, folder).csv_path
    assert csv_path is not None
    content = csv_path.read_text()
    csv_path.unlink()
    assert measured(values, folder).num_measured == 0
    assert csv_path.read_text() == content


def test_what_a_notebook_saved_stays_and_does_no_harm(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    save_aggregated_results_json({"experiment_9000": {"note": 1}}, "text_generation", results_dir=folder)
    report = measured(values, folder)
    assert report.num_measured == 1 and "experiment_9000" not in report.results
    assert report.csv_path is not None and len(read_results_csv(report.csv_path)) == 2


def test_simulated_waiting_in_the_energy_is_a_caveat(values: dict[str, Any], tmp_path: Path) -> None:
    waiting = {"simulate": True, "delay_min": 0.01, "delay_max": 0.01}
    report = measured(
        {
            **values,
            "track_energy": True,
            "energy": "optional",
            "country_iso_code": "FRA",
            "latency_simulation": waiting,
        },
        tmp_path / "results",
    )
    (result,) = report.results.values()
    assert "the energy of the whole run contains 0.01 s of simulated waiting" in result["caveats"]
    (record,) = (each for each in result["caveat_records"] if each["kind"] == "simulated_waiting")
    assert (record["severity"], record["advice"]) == ("note", None)


def test_another_number_of_processes_is_another_experiment(values: dict[str, Any]) -> None:
    config = validated(values)
    source, prompts = validate_loadable(config), read_prompts(config.prompts)
    one, two = (SimpleNamespace(num_processes=number, device=torch.device("cpu")) for number in (1, 2))
    digests = {fingerprint_parts(config, source, prompts, each, ("model",)) for each in (one, two)}  # type: ignore[arg-type]
    assert len(digests) == 2


def test_an_applied_chat_template_is_another_experiment_and_none_is_the_former_one(values: dict[str, Any]) -> None:
    config = validated(values)
    off = validated({**values, "prompts": {**values["prompts"], "chat_template": "off"}})
    source, prompts = validate_loadable(config), read_prompts(config.prompts)
    here: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))

    def parts(of: TextConfig, use: str) -> tuple[object, ...]:
        return fingerprint_parts(of, source, prompts, here, ("model",), {"chat_template": use})

    former = parts(config, "none")
    # The keys of the chat template are in no part of it.
    assert former == fingerprint_parts(config, source, prompts, here, ("model",))
    assert not {"chat_template", "system_prompt"} & set(json.loads(str(former[0]))["prompts"])
    assert parts(off, "off") == former != parts(config, "applied")


def test_the_chat_template_and_the_first_prompt_are_recorded(values: dict[str, Any], tmp_path: Path) -> None:
    model = shutil.copytree(values["model_name"], tmp_path / "model")
    (model / "chat_template.jinja").write_text("Q: {{ messages[0]['content'] }} A:")
    prompts = {**values["prompts"], "chat_template": ["auto", "off"]}
    grid = {**values, "model_name": str(model), "save_outputs": True, "prompts": prompts}
    report = measured(grid, tmp_path / "results")
    applied, off = (result["prompts"] for result in report.results.values())
    assert (applied["chat_template"], applied["final_prompt"]["text"]) == ("applied", "Q: a A:")
    assert (off["chat_template"], off["final_prompt"]["text"]) == ("off", "a")
    texts = [json.loads(path.read_text()) for path in (tmp_path / "results").glob("raw_results/*/*text_output.json")]
    assert [sorted(each["prompt"] for each in found["outputs"]) for found in texts] == [sorted(PROMPTS)] * 2


def test_a_model_that_was_moved_is_the_same_model(values: dict[str, Any], tmp_path: Path) -> None:
    measured(values, tmp_path / "results")
    moved = shutil.copytree(values["model_name"], tmp_path / "elsewhere")
    grid = combinations({**values, "model_name": str(moved)})
    plan = plan_of(grid, tmp_path / "results", launched(grid, tmp_path / "results"))
    assert len(plan.saved) == 1 and not plan.due
    with (moved / "config.json").open("a") as file:
        file.write(" ")
    plan = plan_of(grid, tmp_path / "results", launched(grid, tmp_path / "results"))
    assert len(plan.due) == 1 and not plan.saved


def test_the_first_short_prompts_are_taken_before_they_are_sorted(values: dict[str, Any], tmp_path: Path) -> None:
    chosen = {**values, "num_input_prompts": 2, "save_outputs": True, "sort_prompts": [True, False]}
    measured(chosen, tmp_path / "results")
    orders = [
        [each["prompt"] for each in json.loads(path.read_text())["outputs"]]
        for path in sorted((tmp_path / "results").rglob("*text_output.json"))
    ]
    assert orders == [["=1+1", PROMPTS[0]], [PROMPTS[0], "=1+1"]]


def test_a_metric_of_ones_own_adds_columns_and_a_broken_one_costs_nothing(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_metrics.py").write_text(
        "def lengths(results, metrics):\n"
        "    longest = max(query['output_tokens'] for query in results['queries'])\n"
        "    return {'longest': longest, 'rate': metrics['tokens_per_second']}\n"
        "def broken(results, metrics):\n"
        "    return {'share': 1 / 0}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ["my_own_metrics:lengths", "my_own_metrics:broken"]
    report = measured({**values, "custom_metrics": names}, tmp_path / "results")
    (result,) = report.results.values()
    assert result["custom"]["lengths"]["longest"] <= 6
    assert result["custom"]["lengths"]["rate"] == result["inference_metrics"]["tokens_per_second"]
    (failure,) = result["custom_failures"]
    assert (failure["name"], failure["error"]) == ("my_own_metrics:broken", "ZeroDivisionError")
    assert report.csv_path is not None
    assert read_results_csv(report.csv_path)[0]["custom.lengths.longest"] == result["custom"]["lengths"]["longest"]


def test_energy_is_tracked_around_the_generation_alone(values: dict[str, Any], tmp_path: Path) -> None:
    report = measured({**values, "track_energy": True, "country_iso_code": "FRA"}, tmp_path / "results")
    (result,) = report.results.values()
    energy = result["global_energy_results"]
    assert energy["total_energy_kwh"] > 0 and energy["num_tracking_processes"] == 1
    assert energy["duration_seconds"] >= result["inference_metrics"]["total_time_s"]
    (experiment_id,) = ids_of(report)
    assert (tmp_path / "results" / "raw_results" / experiment_id / f"emissions_{experiment_id}.csv").exists()


def test_operations_memory_and_load_are_those_of_the_generation(values: dict[str, Any], tmp_path: Path) -> None:
    report = measured({**values, "memory_timeline": True}, tmp_path / "results")
    (result,) = report.results.values()
    compute, metrics = result["compute_metrics"], result["inference_metrics"]
    architecture = architecture_of(tiny_llama().config)
    assert isinstance(architecture, Architecture)
    prompts = sum(architecture.prefill_flops(tokens) for tokens in prompt_lengths(values))
    assert (compute["flops_method"], compute["flops_counted_on"]) == ("formula", "config")
    assert compute["prefill_flops"] == prompts < compute["flops"]
    assert compute["generation_flops"] == prompts + compute["decode_flops"] > prompts
    per_token = compute["generation_flops"] / metrics["total_output_tokens"]
    assert compute["generation_flops_per_output_token"] == per_token
    assert compute["memory"]["kv_cache_bytes"] > 0 and compute["memory"]["activation_bytes"] is None
    assert compute["memory_by_process"] == [compute["memory"]]
    load = compute["compute_utilisation"]
    assert load["num_samples"] >= 1 and load["gpu_utilization_percent"] == []
    assert compute["hardware_utilisation"]["mfu_prefill"] is None
    (experiment_id,) = ids_of(report)
    folder = tmp_path / "results" / "raw_results" / experiment_id
    timeline = json.loads((folder / f"{experiment_id}_5_memory_timeline.json").read_text())
    assert len(timeline["samples"]) == load["num_samples"]
    last = timeline["samples"][-1]
    assert last["seconds"] >= metrics["total_time_s"] and last["allocated_bytes"] is None
    assert max(each["process_rss_bytes"] for each in timeline["samples"]) == load["cpu_memory_usage_bytes_max"]


def prompt_lengths(values: dict[str, Any]) -> list[int]:
    """True tokens of each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(values["model_name"])
    return [len(tokenizer(prompt).input_ids) for prompt in PROMPTS]


def test_batches_and_queries_have_their_energy_and_the_run_two_sources(values: dict[str, Any], tmp_path: Path) -> None:
    """Beside a device that draws 100 W whatever runs, energies are 100 times seconds."""
    grid = combinations({**values, "track_energy": True, "country_iso_code": "FRA"})
    sources = EnergySources(scripted_library(), instruments_of(device_in_real_time(), sample_every_s=0.005), 0.05)
    report = run_text_experiments(grid, tmp_path / "results", lambda line: None, sources)
    (result,) = report.results.values()
    (experiment_id,) = ids_of(report)
    raw = tmp_path / "results" / "raw_results" / experiment_id
    local = json.loads((raw / f"{experiment_id}_6_local_energy_results_process_0.json").read_text())
    found = json.loads((raw / f"{experiment_id}_7_apportioned_energy.json").read_text())
    for batch in found["batches"]:
        # The device is synchronised and the marks are read within the window.
        assert 100 * batch["inference_time_s"] <= batch["energy_j"] <= 100 * batch["inference_time_s"] + 5.0
        assert batch["energy_method"] == "apportioned" and batch["energy_source"] == "simulated"
    # Batches are of the prompts by length, each by its place in the file.
    lengths = prompt_lengths(values)
    assert [each["input_tokens"] for each in found["queries"]] == sorted(lengths) != lengths
    assert [lengths[each["prompt_index"]] for each in found["queries"]] == sorted(lengths)
    own = [index for batch in found["batches"] for index in batch["prompt_indices"]]
    assert own == [each["prompt_index"] for each in found["queries"]]
    total = sum(batch["energy_j"] for batch in found["batches"])
    assert sum(query["energy_j"] for query in found["queries"]) == pytest.approx(total)
    metrics = result["inference_metrics"]
    assert metrics["energy_per_batch_j"]["n"] == metrics["num_batches"]
    assert metrics["energy_per_query_j"]["n"] == len(PROMPTS)
    assert metrics["energy_per_output_token_j"] == pytest.approx(total / metrics["total_output_tokens"])
    assert local["gpu_energy_kwh"] == 3e-3 and local["gpu_counter_j"] > 0
    assert local["gpu_source_ratio"] == local["gpu_power_integral_j"] / local["gpu_counter_j"]
    assert local["gpu_idle_j"] is not None
    assert result["global_energy_results"]["gpu_counter_j"] == local["gpu_counter_j"]


def no_codecarbon() -> CodecarbonLibrary:
    return scripted_library(fail_at="probe")


def test_energy_that_nothing_measures_stops_before_the_model_is_loaded(values: dict[str, Any], tmp_path: Path) -> None:
    requested = {**values, "track_energy": True, "energy": "required"}
    with pytest.raises(MeterUnavailable, match="energy: required: codecarbon .*use energy: optional"):
        run_text_experiments(
            combinations(requested), tmp_path / "results", lambda line: None, EnergySources(no_codecarbon())
        )
    assert not (tmp_path / "results" / "raw_results").exists()


@pytest.mark.parametrize("script", [{"fail_at": "probe"}, {"silent_at": "start window 2"}])
def test_required_energy_needs_one_source_of_the_two(
    script: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    """codecarbon does not start, or measures nothing; the device draws 100 W throughout."""
    instruments = instruments_of(device_in_real_time(), sample_every_s=0.005)
    sources = EnergySources(scripted_library(**script), instruments, 0.05)
    grid = combinations({**values, "track_energy": True, "energy": "required"})
    (result,) = run_text_experiments(grid, tmp_path / "results", lambda line: None, sources).results.values()
    energy = result["global_energy_results"]
    # 100 W while the batch ran, and in what the host took around it.
    assert 80 * energy["duration_seconds"] < energy["gpu_counter_j"] < 100 * (energy["duration_seconds"] + 1)
    assert energy["total_energy_kwh"] is None
    assert "process 0: codecarbon lacks 1 of 1 window: codecarbon" in energy["reason"]


def test_what_is_only_estimated_is_refused_where_energy_is_required_and_a_caveat_where_it_is_optional(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = Instruments(HostClock(), (), (), missing={"GPU energy": "no GPU here"})
    on_cpu = {**WINDOW, "gpu_energy": 0.0, "gpu_count": 0}
    sources = EnergySources(scripted_library(window=on_cpu), nothing, gpus=())
    requested = {**values, "track_energy": True}
    with pytest.raises(EnergyRefused, match="codecarbon only estimates here.*no GPU here.*use energy: opt") as caught:
        run_text_experiments(
            combinations({**requested, "energy": "required"}), tmp_path / "results", lambda line: None, sources
        )
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert not (tmp_path / "results" / "raw_results").exists()
    report = run_text_experiments(combinations(requested), tmp_path / "results", lambda line: None, sources)
    (result,) = report.results.values()
    assert "energy: estimated by codecarbon_estimate, not measured" in result["caveats"]
    assert "no GPU here" in caplog.text and "energy is estimated by codecarbon" in caplog.text
    # Counters that codecarbon reads itself are measured.
    counted = EnergySources(scripted_library(window=on_cpu, rapl=True), nothing, gpus=())
    grid = combinations({**requested, "energy": "required"})
    (result,) = run_text_experiments(grid, tmp_path / "counted", lambda line: None, counted).results.values()
    assert not [each for each in result["caveats"] if each.startswith("energy")]


def test_required_energy_whose_meter_is_lost_on_the_way_is_not_replaced_by_an_estimate(
    values: dict[str, Any], tmp_path: Path
) -> None:
    device = device_in_real_time()
    sources = EnergySources(
        scripted_library(window={**WINDOW, "gpu_energy": 0.0, "gpu_count": 0}),
        instruments_of(device, sample_every_s=0.005),
        0.0,
        (),
    )
    device.vanishes_at_s = 0.0
    grid = combinations({**values, "track_energy": True, "energy": "required"})
    with pytest.raises(MeterUnavailable, match="no meter of the machine gave a reading, and codecarbon only estimates"):
        run_text_experiments(grid, tmp_path / "results", lambda line: None, sources)


def test_optional_energy_is_none_with_the_reason_in_every_place(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    grid = combinations({**values, "track_energy": True, "energy": "optional"})
    nothing = Instruments(HostClock(), (), (), missing={"GPU energy": "torch sees no GPU"})
    report = run_text_experiments(grid, folder, lambda line: None, EnergySources(no_codecarbon(), nothing))
    (result,) = report.results.values()
    energy, metrics = result["global_energy_results"], result["inference_metrics"]
    assert (energy["total_energy_kwh"], energy["gpu_counter_j"]) == (None, None)
    assert "energy was not tracked: codecarbon does not track here" in energy["reason"]
    assert metrics["energy_per_batch_j"] is None and "torch sees no GPU" in metrics["energy_reason"]
    (sentence,) = (each for each in result["caveats"] if each.startswith("energy"))
    assert sentence.startswith("energy: not measured: ") and "codecarbon does not track here" in sentence


@pytest.mark.parametrize(
    ("script", "output"),
    [({"silent_at": "start window 2"}, "measured nothing"), ({"fail_at": "start window 2"}, "does not track here")],
)
def test_a_tracker_that_fails_on_the_way_costs_the_energy_alone_where_it_is_optional(
    script: dict[str, Any], output: str, values: dict[str, Any], tmp_path: Path
) -> None:
    grid = combinations({**values, "track_energy": True, "energy": "optional"})
    nothing = Instruments(HostClock(), (), ())
    sources = EnergySources(scripted_library(**script), nothing)
    (result,) = run_text_experiments(grid, tmp_path / "results", lambda line: None, sources).results.values()
    assert f"codecarbon {output}" in result["global_energy_results"]["reason"]
    assert result["inference_metrics"]["num_prompts"] == 5


def test_energy_off_is_the_same_as_not_tracking(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    measured(values, folder)
    again = measured({**values, "track_energy": True, "energy": "off"}, folder)
    assert again.num_measured == 0


def test_one_run_at_a_time_works_in_a_folder(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with only_run_in(folder / PARTS_FOLDER), pytest.raises(ResultsRefused, match="another process") as caught:
        measured(values, folder)
    assert caught.value.exit_code == 2 and not (folder / "text_generation_results.json").exists()
    assert measured(values, folder).num_measured == 1
