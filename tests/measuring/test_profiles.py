"""Profiled runs: which samples, what is in their files, and that nothing of them reaches a statistic."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.measuring.profiles import TorchProfiles, component_ranges, profiled_run
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError, OutputRefused
from experiment_core_utils.records.stages import COMPONENTS
from tests.scripted.scripted_model import EOS, ScriptedModel

TEXT = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
PLAN = ("tier-low_topk2_blocks2", "tier-low_topk4_blocks2")


def profiles(folder: Path, **changes: Any) -> TorchProfiles:
    given = {"mode": "minimal", "every_sample": False, "is_main_process": True, **changes}
    return TorchProfiles(folder, setting_keys=PLAN, sample_ids=(7, 30, 31), **given)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def files(config_idx: int, sample_idx: int) -> set[str]:
    place = f"config_{config_idx}_sample_{sample_idx}"
    return {f"profiler_results_{place}.txt", f"profiler_trace_{place}.json.gz"}


def test_the_stages_are_ranges_of_the_profile_and_each_decode_step_is_one() -> None:
    model = ScriptedModel(script=(1, 2, 3, EOS))
    counts = {each.key: each.count for each in profiled_run(model, TEXT, 16, "minimal").key_averages()}
    assert (counts["vision"], counts["prefill"], counts["decode"]) == (1, 1, 3)
    assert model.calls == ["encode_image", "prefill None", "decode_step 1", "decode_step 2", "decode_step 3"]


@pytest.mark.parametrize("mode", ["minimal", "full"])
def test_only_a_full_profile_knows_shapes_and_stacks(mode: str, tmp_path: Path) -> None:
    profiles(tmp_path, mode=mode).take(ScriptedModel(), PLAN[0], 7, TEXT, 16)
    table = (tmp_path / "profiler_results_config_0_sample_0.txt").read_text()
    assert table.startswith(f"setting tier-low_topk2_blocks2, sample id 7, {mode} profile on cpu\n")
    assert all(stage in table for stage in ("vision", "prefill", "decode"))
    assert ("Input Shapes" in table) == (mode == "full")
    assert ("CPU Mem" in table) == (mode == "full")
    with gzip.open(tmp_path / "profiler_trace_config_0_sample_0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {"vision", "prefill", "decode"} <= {event["name"] for event in events}
    assert any(event.get("cat") == "python_function" for event in events) == (mode == "full")


def test_components_are_ranges_while_it_lasts_also_when_a_call_fails() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, torch.nn.ReLU())
    with component_ranges({"ffn": [outer], "experts": [inner]}), torch.profiler.profile() as profiler:
        outer(torch.zeros(1, 2))
        with pytest.raises(RuntimeError):
            outer(torch.zeros(1, 3))
        outer(torch.zeros(1, 2))
    assert not inner._forward_hooks and not inner._forward_pre_hooks
    events = {each.key: each.count for each in profiler.key_averages()}
    assert (events["ffn"], events["experts"]) == (3, 3)
    parts = {each.name: each for each in profiler.events() if each.name in ("ffn", "experts")}
    assert parts["ffn"].time_range.start <= parts["experts"].time_range.start
    assert parts["experts"].time_range.end <= parts["ffn"].time_range.end


def test_the_largest_total_comes_first(tmp_path: Path) -> None:
    model = ScriptedModel(prefill_s=0.05, decode_s=0.01)
    profiles(tmp_path).take(model, PLAN[0], 7, TEXT, 16)
    table = (tmp_path / "profiler_results_config_0_sample_0.txt").read_text()
    assert table.index("prefill") < table.index("decode")


def test_the_first_sample_of_each_setting_is_profiled_by_the_main_process(tmp_path: Path) -> None:
    main, other = profiles(tmp_path), profiles(tmp_path, is_main_process=False)
    for key in PLAN:
        for sample_id in (30, 31):
            main.take(ScriptedModel(), key, sample_id, TEXT, 16)
        other.take(ScriptedModel(), key, 7, TEXT, 16)
    # Sample 7 was not this process's, or could not be read: the first that came is the second of the run.
    assert names(tmp_path) == files(0, 1) | files(1, 1)


def test_every_sample_is_profiled_in_every_process_on_request(tmp_path: Path) -> None:
    for is_main, sample_id in ((True, 7), (False, 30), (True, 31)):
        profiles(tmp_path, every_sample=True, is_main_process=is_main).take(
            ScriptedModel(), PLAN[1], sample_id, TEXT, 16
        )
    assert names(tmp_path) == files(1, 0) | files(1, 1) | files(1, 2)


def test_without_a_mode_the_model_is_not_even_called(tmp_path: Path) -> None:
    model = ScriptedModel()
    profiles(tmp_path, mode=None, every_sample=True).take(model, PLAN[0], 7, TEXT, 16)
    assert not model.calls
    assert not names(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputRefused, match="file.* cannot be written .*give another name"):
        profiles(tmp_path / "file").take(ScriptedModel(), PLAN[0], 7, TEXT, 16)


def without_times(value: Any) -> Any:
    """A result without what differs between any two runs, and without the record that profiling was requested."""
    if isinstance(value, dict):
        steadiness = ("warmup", "conditions", "rounds", "precision", "compute_utilisation")
        # What a busy machine makes runs repeat.
        repeats = ("num_discarded_runs", "disturbances", "num_disturbed_samples")
        own = ("fingerprint", "digest", "memory", "provenance", "runs", *steadiness, *repeats)
        return {key: without_times(each) for key, each in value.items() if key not in own and not key.startswith("T_")}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def test_a_run_with_profiles_has_the_same_results_and_as_many_runs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = parse_config(
        ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path / "bare"), "--ids", "3", "5", "8",
         "--num_runs_per_sample", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
         "--num_threads", "1", "--max_new_tokens", "4",
         "--tier_list", "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "4", "--execution", "eager"]
    )  # fmt: skip
    bare = [each.content() for each in run_profiling(config).results]
    folder = tmp_path / "profiled"
    report = run_profiling(config.replaced(use_profiler=True, output_dir=folder))
    profiled = [each.content() for each in report.results]
    assert {name for name in names(folder) if name.startswith("profiler_")} == files(0, 0) | files(1, 0)
    with gzip.open(folder / "profiler_trace_config_0_sample_0.json.gz", "rt") as file:
        ranges = Counter(
            each["name"] for each in json.load(file)["traceEvents"] if each.get("cat") == "user_annotation"
        )
    # 4 blocks in the prefill and in each of 3 steps; 2 norms in a block and one behind all.
    assert [ranges[name] for name in COMPONENTS] == [16, 16, 16, 16, 36, 4]
    assert [without_times(result) for result in profiled] == [without_times(result) for result in bare]
    for result in profiled:
        assert [len(sample["runs"]) for sample in result["per_sample_results"]] == [2, 2, 2]
        stats = result["aggregate_stats"]
        assert (stats["T_total_n"], stats["T_total_n_typical"]) == (6, 3)
        assert result["provenance"]["experimental_variables"]["profiler"] == "minimal"
        # The published times are the means of the measured runs, without the profiled one.
        for sample in result["per_sample_results"]:
            totals = [run["T_total"] for run in sample["runs"]]
            assert sample["T_total"] == pytest.approx(sum(totals) / 2)
    assert profiled[0]["fingerprint"] != bare[0]["fingerprint"]


def test_a_mode_without_anything_to_profile_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--profiler_mode full has nothing to act on"):
        parse_config(["--profiler_mode", "full"])
    assert parse_config([]).measuring.profiler is None
    assert parse_config(["--use_profiler"]).measuring.profiler == "minimal"
    assert parse_config(["--use_profiler_on_all_samples", "--profiler_mode", "full"]).measuring.profiler == "full"
