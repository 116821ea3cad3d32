"""Whole runs of tiny checkpoints of transformers: a mixture that sees, a dense model that sees, a text model."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.saved_results.terminal import caveat_lines
from experiments.core_exp.acc_lat_profiling import main
from tests.documents.test_docs import first_cells
from tests.engines.cpu_compiler import needs_compiler
from tests.given_flags import over
from tests.models.tiny_checkpoints import bounded_pictures, write_checkpoint
from tests.scripted.simulated_energy import device_in_real_time, instruments_of

Results = Mapping[str, Mapping[str, Any]]
Written = Callable[[str], Path]
SHARED = "its last 3 blocks use the keys and values of other blocks"
NO_EXTRAS = ["--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
"--num_threads", "1",
             "--max_new_tokens", "4"]  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return cache(lambda family: write_checkpoint(family, tmp_path_factory.mktemp(family)))


def flags_for(folder: Path, output_dir: Path, *more: str) -> list[str]:
    return ["--model_path", str(folder), "--output_dir", str(output_dir), "--num_samples", "2", *NO_EXTRAS, *more]


def config_for(folder: Path, output_dir: Path, *more: str) -> ProfilingConfig:
    return parse_config(flags_for(folder, output_dir, "--num_runs_per_sample", "1", *more))


def by_key(report: RunReport) -> Results:
    assert not report.failed and report.exit_code == 0
    return {
        f"{result.tier or result.vision_tokens_target} {result.top_k} {result.num_active_blocks}": result.content()
        for result in report.results
    }


def assert_whole(result: Mapping[str, Any], experts: Sequence[int | None]) -> None:
    """What must hold in every result: what ran is what was requested, and the stages are all of the time."""
    blocks, realised, model = result["active_block_indices"], result["realised"], result["provenance"]["model"]
    # Engines run a decoder of the known form where their kernels can be compiled; else modules do, in which a decode
    # step on a CPU takes the kernels of the prefill.
    by_engines = model["execution"] == "cpu"
    kernels = None if by_engines or all(each is None for each in experts) else "grouped_mm"
    errors = {name: realised[name] for name in ("engine_error", "modules_error")}
    assert all((error is not None) == by_engines for error in errors.values())
    assert realised == {
        "compile_s": None,
        "experts_per_token": experts,
        "blocks_run": blocks,
        "blocks_run_decode": blocks,
        "cache_layers": len(blocks),
        "execution": model["execution"],
        "execution_reason": model["execution_reason"],
        **dict.fromkeys(("experts_implementation", "experts_implementation_decode"), kernels),
        "execution_stages": model["execution_stages"],
        **errors,
    }
    stages = {"vision": "modules", "decode": "cpu step" if by_engines else "modules"}
    assert model["execution_stages"].items() >= stages.items()
    is_profiled = model["execution_reason"] == "only the model's modules follow --use_profiler"
    assert is_profiled or "there are no CUDA graphs on the CPU" in model["execution_reason"]
    for sample in result["per_sample_results"]:
        for run in sample["runs"]:
            assert (run["T_vision_total"] is None) == (sample["actual_vision_tokens"] == 0)
            parts = (run["T_vision_total"] or 0.0) + run["T_LLM_prefill"] + (run["T_LLM_decode"] or 0.0)
            assert parts == pytest.approx(run["T_total"])
            assert len(run["T_inter_token"] or []) == sample["output_tokens"] - 1
        total = sample["actual_vision_tokens"] + sample["image_marker_tokens"] + sample["input_text_tokens"]
        assert sample["prompt_tokens"] == total


@pytest.fixture(scope="module")
def mixture(folder_of: Written, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfilingConfig, Results]:
    flags = ["--vision_tokens_list", "288", "576", "--top_k_list", "1", "3", "--num_active_blocks_list", "2", "3"]
    model = shutil.copytree(folder_of("qwen3_vl_moe"), tmp_path_factory.mktemp("model") / "bounded")
    bounded_pictures(model, 256, 40960)
    config = config_for(model, tmp_path_factory.mktemp("mixture"), *flags).replaced(no_reference=False)
    return config, by_key(run_profiling(config))


def test_a_mixture_turns_all_three_knobs(mixture: tuple[ProfilingConfig, Results]) -> None:
    *grid, reference = (results := mixture[1])
    assert grid == [f"{n} {k} {b}" for n in (288, 576) for k in (1, 3) for b in (2, 3)]
    assert reference == "None 2 3"
    assert_whole(results[reference], [2, 2, 2])
    # At most 640 tokens of 8 x 8 pixels, the checkpoint's own bound.
    for sample in results[reference]["per_sample_results"]:
        height, width = sample["actual_image_size"]
        assert sample["actual_vision_tokens"] == height * width // (8 * 8) == sample["theoretical_vision_tokens"]
        assert 0.9 * 640 < sample["actual_vision_tokens"] <= 640
    results = {key: results[key] for key in grid}
    for result in results.values():
        # The first of the blocks keeps its 2 experts.
        assert_whole(result, [2] + [result["top_k"]] * (result["num_active_blocks"] - 1))
        # At most the target, and as near as a grid of whole tokens comes.
        for sample in result["per_sample_results"]:
            most = result["vision_tokens_target"]
            assert 0.85 * most < sample["actual_vision_tokens"] <= most
            height, width = sample["actual_image_size"]
            assert sample["actual_vision_tokens"] == height * width // (8 * 8)
            assert (sample["image_marker_tokens"], sample["actual_num_crops"]) == (2, None)
    flops = {key: result["aggregate_stats"]["prefill_flops_mean"] for key, result in results.items()}
    assert flops["288 1 2"] < flops["288 1 3"] < flops["288 3 3"] < flops["576 3 3"]
    memory = {key: result["memory"]["counted_memory_bytes"] for key, result in results.items()}
    assert memory["288 1 2"] < memory["288 1 3"] < memory["288 3 3"] < memory["576 3 3"]
    model = results["288 1 2"]["provenance"]["model"]
    assert (model["model_type"], model["knobs_refused"]) == ("qwen3_vl_moe", {})
    assert model["timed_inside"] == ("generate" if model["execution"] == "eager" else "stages")


def test_what_is_reported_of_the_model_is_documented(mixture: tuple[ProfilingConfig, Results]) -> None:
    model = next(iter(mixture[1].values()))["provenance"]["model"]
    of_all = {each.split(".")[1] for each in first_cells("Provenance") if each.startswith("model.")}
    own = first_cells("Models of transformers")
    assert set(model) == of_all | own and model["runs_unused_vision_blocks"] is None


def test_a_second_call_measures_nothing_and_more_values_only_themselves(
    mixture: tuple[ProfilingConfig, Results],
) -> None:
    config, results = mixture
    written = {path: path.stat().st_mtime_ns for path in config.machine.output_dir.glob("*blocks*.json")}
    again = run_profiling(config)
    assert again.experiment_id is None and by_key(again) == results
    assert {path: path.stat().st_mtime_ns for path in written} == written


@needs_compiler
def test_kernels_run_a_tower_with_heads_of_32(tmp_path: Path) -> None:
    """The pictures' tier and the kept image tokens are turned around the tower."""
    folder = write_checkpoint("llava_next", tmp_path / "model", hidden_size=64)
    flags = ["--tier_list", "low", "high", "--visual_token_keep_list", "0.5", "1"]
    report = run_profiling(config_for(folder, tmp_path / "results", *flags))
    assert not report.failed and len(report.results) == 4
    for result in (each.content() for each in report.results):
        ways = {"vision": "cpu blocks", "decode": "cpu step"}
        assert result["realised"]["execution_stages"].items() >= ways.items()
        assert result["provenance"]["model"]["execution_stages"].items() >= ways.items()
        assert all(run["T_vision_total"] > 0 for sample in result["per_sample_results"] for run in sample["runs"])
    tokens = {result.actual_vision_tokens_mean for result in report.results}
    assert len(tokens) == 4


def test_a_dense_model_moves_its_tokens_with_the_tier(
    folder_of: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_for(folder_of("llava_next"), tmp_path, "--tier_list", "low", "medium", "high", "--ids", "1", "2", "3")
    flags += ["--num_active_blocks_list", "2", "3", "--num_latency_samples", "1", "--use_profiler"]
    monkeypatch.setattr(sys, "argv", ["", *flags])
    assert main() == 0
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*_blocks*.json")]
    assert len(results) == 6
    tokens: dict[str, list[int]] = {}
    for result in results:
        assert_whole(result, [None] * result["num_active_blocks"])
        assert (result["top_k"], result["num_latency_samples"], result["num_samples"]) == (None, 1, 3)
        assert result["hardware_utilisation"]["mfu_prefill"] is None
        assert result["provenance"]["model"]["flops_reason"] is None
        assert all(sample["prefill_flops"] > 0 for sample in result["per_sample_results"])
        tokens.setdefault(result["tier"], []).append(result["actual_vision_tokens_mean"])
        low, high = result["tier_range"]["min_crops"], result["tier_range"]["max_crops"]
        for sample in result["per_sample_results"]:
            assert low <= sample["actual_num_crops"] <= high
            assert (sample["runs"] == []) == (sample["accuracy_batch_size"] is not None)
    assert {len(set(each)) for each in tokens.values()} == {1}
    assert tokens["low"][0] < tokens["medium"][0] < tokens["high"][0]
    assert len(list(tmp_path.glob("profiler_trace_config_*.json.gz"))) == 6
    table = pd.read_csv(tmp_path / "reference-vqa_settings.csv")
    assert len(table) == 6 and table["top_k"].isna().all()
    # A knob that the model lacks has no column.
    header = capsys.readouterr().out.splitlines()[0]
    assert "blocks" in header and "top-k" not in header


def test_by_default_pictures_take_fractions_of_their_own_tokens(folder_of: Written, tmp_path: Path) -> None:
    """What is counted in the prompts is at most the fraction, FLOPs are of what was counted, and files and columns name
    it.
    """
    flags = ["--num_active_blocks_list", "2"]
    report = run_profiling(config_for(folder_of("internvl"), tmp_path, *flags))
    assert not report.failed
    results = {result.vision_fraction or 1.0: result for result in report.results}
    assert sorted(results) == [0.25, 0.5, 1.0]
    assert {path.name for path in tmp_path.glob("*_imgsize*.json")} == {
        f"reference-vqa_imgsize{name}_blocks2.json" for name in ("frac-0.25", "frac-0.5", "own")
    }
    own_samples = {sample.sample_id: sample for sample in results[1.0].per_sample_results}
    for fraction, result in results.items():
        assert (result.tier, result.vision_tokens_target, result.tier_range) == (None, None, None)
        for sample in result.per_sample_results:
            tokens = own_samples[sample.sample_id].actual_vision_tokens or 0
            assert sample.target_vision_tokens == math.floor(tokens * fraction + 0.5)
            assert sample.actual_vision_tokens is not None and sample.target_vision_tokens is not None
            # The whole picture of 4 tokens, and tiles of as many beside it.
            assert 4 <= sample.actual_vision_tokens <= sample.target_vision_tokens
            assert sample.actual_vision_tokens == 4 * ((sample.actual_num_crops or 0) + 1)
            vision, own_flops = sample.vision_flops, own_samples[sample.sample_id].vision_flops
            assert vision is not None and own_flops is not None
            assert vision * tokens == own_flops * sample.actual_vision_tokens
    flops = {fraction: result.aggregate_stats["prefill_flops_mean"] or 0 for fraction, result in results.items()}
    assert flops[0.25] < flops[0.5] < flops[1.0]
    model = results[0.5].content()["provenance"]["model"]
    assert model["vision_options"] == {"fewer": "max_patches", "more": "max_patches"}
    settings, samples = (pd.read_csv(tmp_path / f"reference-vqa_{name}.csv") for name in ("settings", "samples"))
    assert sorted(settings["vision_fraction"].dropna()) == [0.25, 0.5]
    assert sorted(samples["vision_fraction"].dropna().unique()) == [0.25, 0.5]


def test_blocks_that_share_keys_are_refused_and_the_other_knobs_act(folder_of: Written, tmp_path: Path) -> None:
    flags = ["--vision_fraction_list", "0.25", "--visual_token_keep_list", "0.5", "--num_active_blocks_list", "3", "6"]
    report = run_profiling(config_for(folder_of("gemma4_e2b"), tmp_path, *flags, "--ids", "1"))
    (result,) = by_key(report).values()
    assert result["provenance"]["model"]["knobs_refused"]["active_blocks"] == SHARED
    assert result["realised"]["blocks_run"] == list(range(6))
    (sample,) = result["per_sample_results"]
    # 70 soft tokens at most, the least that its processor takes; a half of what comes of it is kept.
    assert sample["pooled_image_features"] <= 70 and min(sample["vision_flops"], sample["prefill_flops"]) > 0
    assert sample["actual_vision_tokens"] == round(sample["pooled_image_features"] / 2)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
def test_pictures_that_are_encoded_inside_the_prefill_have_a_stage_of_their_own(tmp_path: Path) -> None:
    folder = write_checkpoint("phi4_multimodal", tmp_path / "model")
    flags = ["--vision_fraction_list", "0.25", "--num_active_blocks_list", "2"]
    (result,) = by_key(run_profiling(config_for(folder, tmp_path / "results", *flags))).values()
    assert_whole(result, [None, None])
    model = result["provenance"]["model"]
    assert model["execution_reason"].endswith("its pictures are encoded inside the prefill")
    assert model["vision_options"]["fewer"] == "dynamic_hd" and model["flops_reason"] is None
    for sample in result["per_sample_results"]:
        # 16 x 16 tokens of the whole, each row with one more, and one between it and the crops.
        assert sample["actual_vision_tokens"] > 16 * 17 + 1 and sample["vision_flops"] > sample["prefill_flops"] > 0


def test_answers_in_batches_are_those_of_measured_samples(folder_of: Written, tmp_path: Path) -> None:
    flags = ["--tier_list", "low", "--num_active_blocks_list", "2", "--ids", "1", "2", "3"]
    alone, some = (
        run_profiling(config_for(folder_of("llava_next"), tmp_path / name, *flags, *more)).results[0].content()
        for name, *more in (("alone",), ("some", "--num_latency_samples", "1"))
    )
    for one, other in zip(alone["per_sample_results"], some["per_sample_results"], strict=True):
        for key in ("sample_id", "pred", "output_tokens", "prompt_tokens", "accuracy"):
            assert one[key] == other[key]


def test_blocks_that_nobody_scored_are_not_skipped_unless_requested(
    folder_of: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three quarters of 3 blocks, rounded up, are all of them, so that a fourth block is needed to see the default."""
    model = tmp_path / "model"
    shutil.copytree(folder_of("llama"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 8}))
    flags = flags_for(model, tmp_path / "results", "--num_runs_per_sample", "1")
    assert [each.work.key for each in describe_plan(parse_config(flags)).estimates] == ["own_blocks8"]
    line = "blocks: all 8 run in every setting, because nothing says which matter least; run `knobprof blocks"
    assert line in describe_plan(parse_config(flags)).text
    random = describe_plan(parse_config([*flags, "--random_weights"]))
    assert len(random.estimates) == 2 and "blocks: " not in random.text
    flags = flags_for(folder_of("llama"), tmp_path / "results", "--num_runs_per_sample", "1")
    for more, is_first in (([], False), (["--num_active_blocks_list", "2", "3"], True)):
        assert main([*flags, *more]) == 0
        shown = capsys.readouterr()
        sentence = "blocks: without scores the first ones run, and the last are often not the least important"
        assert (sentence in shown.out, sentence in shown.err) == (is_first, is_first)
        assert ("blocks: all 3 run in every setting" in shown.err) != is_first
    (saved,) = (tmp_path / "results").glob("*blocks2.json")
    result = json.loads(saved.read_text())
    assert result["active_block_indices"] == [0, 1]
    assert [each["kind"] for each in result["provenance"]["caveat_records"] if "blocks" in each["kind"]] == [
        "first_blocks"
    ]


@pytest.mark.parametrize("task", ["reference_vqa", "reference_counting"])
def test_a_text_model_runs_without_the_pictures_and_reports_it(
    folder_of: Written,
    tmp_path: Path,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["", *flags_for(folder_of("olmoe"), tmp_path, "--dataset_name", task, "--text_only")]
    )
    assert main() == 0
    files = sorted(path.name for path in tmp_path.glob("*blocks*.json"))
    # Half of the 2 experts and all.
    name = task.replace("_", "-")
    assert files == [f"{name}_imgsizeown_topk{top_k}_blocks3.json" for top_k in (1, 2)]
    for file, top_k in zip(files, (1, 2), strict=True):
        result = json.loads((tmp_path / file).read_text())
        assert_whole(result, [2, top_k, top_k])
        assert (result["tier"], result["vision_tokens_target"], result["actual_vision_tokens_mean"]) == (None, None, 0)
        assert result["provenance"]["task"]["name"] == task
        (caveat,) = [each for each in result["provenance"]["caveats"] if each.startswith("pictures: ")]
        assert result["provenance"]["model"]["knobs_refused"]["vision_tokens"].endswith("it has no vision tokens")
    assert f"{caveat} (own_topk1_blocks3; 2 of 2 settings)" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_quantised_weights_are_another_run_in_the_same_folder(folder_of: Written, tmp_path: Path) -> None:
    flags = ["--num_active_blocks_list", "2"]
    plain, quantised = (
        run_profiling(config_for(folder_of("llama"), tmp_path, *flags, *more)).results[0].content()
        for more in ((), ("--quantization", "8bit"))
    )
    assert plain["fingerprint"] != quantised["fingerprint"]
    known, variables = (quantised["provenance"][name] for name in ("model", "experimental_variables"))
    assert (variables["quantization"], known["quantisation"]["method"]) == ("8bit", "bitsandbytes")
    assert known["quantisation"]["settings"]["load_in_8bit"] is True
    assert plain["provenance"]["model"]["quantisation"] is None
    assert_whole(quantised, [None, None])


def test_a_plan_of_a_mixture_needs_no_weights(folder_of: Written, tmp_path: Path) -> None:
    flags = ["--tier_list", "low", "--top_k_list", "1", "2", "--num_active_blocks_list", "3", "--dry_run"]
    plan = describe_plan(config_for(folder_of("qwen3_vl_moe"), tmp_path / "none", *flags))
    rows = [line for line in plan.text.splitlines() if "_blocks3" in line]
    assert [row.split()[1] for row in rows] == ["tier-low_topk1_blocks3", "tier-low_topk2_blocks3"]
    assert "2 of 2 settings to measure" in plan.text and "cache of the longest prompt" in plan.text
    # A matrix product says nothing of a model whose speed was never compared with one.
    assert "no estimate: no earlier result in --output_dir" in plan.text and plan.whole_s is None
    assert not (tmp_path / "none").exists()


def test_a_family_without_formulas_has_a_plan_without_times(
    folder_of: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder_of("llama"), model)
    config = json.loads((model / "config.json").read_text())
    # Layers and sizes have the same names there.
    (model / "config.json").write_text(json.dumps({**config, "model_type": "glm", "architectures": ["GlmForCausalLM"]}))
    assert main(flags_for(model, tmp_path / "none", "--num_active_blocks_list", "2", "3", "--dry_run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "with the reference own_blocks3 among them" in lines[0]
    assert [line.split()[1:4] for line in lines[1:] if "_blocks" in line] == [
        [f"own_blocks{blocks}", lines[3].split()[2], "-"] for blocks in (2, 3)
    ]
    assert any(line.startswith("no estimate: no formula is known for 'glm'") for line in lines)


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("llava_next", ("--top_k_list", "2"), "--top_k_list 2 cannot be set in .*: the model is dense"),
        ("llava", ("--tier_list", "low"), "--tier_list and --vision_tokens_list do nothing for .*; drop them"),
        ("olmoe", ("--vision_tokens_list", "720"), "is a text model: it has no vision tokens; drop them"),
        ("olmoe", ("--top_k_list", "5"), "--top_k_list 5 is more than the 4 experts"),
        ("llama", ("--num_active_blocks_list", "4"), "4 active blocks are not possible; the model has 3"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_a_weight_is_read(
    folder_of: Written, tmp_path: Path, family: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_profiling(config_for(folder_of(family), tmp_path / "none", *flags))
    assert not (tmp_path / "none").exists()


# --- energy -------------------------------------------------------------------------------------------------------


def energy_of(folder: Path, output_dir: Path, *more: str) -> Mapping[str, Any]:
    """Beside a device of 100 W whatever runs."""
    using = instruments_of(device_in_real_time(100.0), sample_every_s=0.005)
    means = StageMeasurement(using, WindowGoal(0.5, least_s=0.05), repeats=2, idle_s=0.05)
    config = config_for(folder, output_dir, "--energy", "optional", "--num_active_blocks_list", "3", *more)
    report = run_profiling(config, means)
    assert not report.failed
    result: Mapping[str, Any] = report.results[-1].content()
    return result


def test_the_stages_of_a_model_of_transformers_have_energy(folder_of: Written, tmp_path: Path) -> None:
    energy = energy_of(folder_of("llama"), tmp_path)["energy"]
    assert set(energy["stages"]) == {"prefill", "decode", "end_to_end"}
    # Windows of their own, by the clock of a busy machine: either may come out as the longer.
    assert energy["reason"] is None and min(energy["summary"][name] for name in ("end_to_end_j", "decode_j")) > 0


def test_a_cache_that_forgets_leaves_the_energy_null_and_the_setting_whole(folder_of: Written, tmp_path: Path) -> None:
    # The weights of a Llama are those of a Mistral; its window is shorter than any prompt here.
    model = write_checkpoint("llama", tmp_path / "model")
    content = json.loads((model / "config.json").read_text())
    changed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (model / "config.json").write_text(json.dumps(content | changed))
    result = energy_of(model, tmp_path / "results", "--execution", "eager")
    energy = result["energy"]
    assert (energy["summary"], energy["stages"]) == (None, {})
    assert "the cache of this mistral cannot be taken back by 3 steps" in energy["reason"]
    assert any(each.startswith("energy: not measured: the cache") for each in result["provenance"]["caveats"])
    # Its samples are measured as they always are.
    assert all(sample["T_total"] is not None for sample in result["per_sample_results"])


def test_preferences_of_the_checkpoint_are_kept_or_a_caveat(
    folder_of: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A penalty changes the answers, measured or in batches; beams are left out, as result and screen say."""
    results = {}
    for name, values in (("plain", {}), ("penalty", {"repetition_penalty": 3.0, "num_beams": 4})):
        folder = tmp_path / name
        folder.mkdir()
        for file in folder_of("olmoe").iterdir():
            (folder / file.name).symlink_to(file)
        own = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").unlink()
        (folder / "generation_config.json").write_text(json.dumps(own | values))
        flags = ["--top_k_list", "2", "--num_active_blocks_list", "3", "--num_latency_samples", "1"]
        usual = flags_for(folder, tmp_path / f"{name} results", "--num_runs_per_sample", "1")
        config = parse_config(over(usual, [*flags, "--max_new_tokens", "8", "--precision", "float32"]))
        results[name] = next(iter(by_key(run_profiling(config)).values()))
        print("\n".join(caveat_lines(run_profiling(config).results)))
    plain, penalty = results["plain"], results["penalty"]
    assert plain["provenance"]["model"]["decoding"]["left_out"] == {}
    found = penalty["provenance"]["model"]["decoding"]
    assert (found["kept"], found["left_out"]) == ({"repetition_penalty": 3.0}, {"num_beams": 4})
    answers = [[sample["pred"] for sample in each["per_sample_results"]] for each in (plain, penalty)]
    assert all(before != after for before, after in zip(*answers, strict=True))
    kinds = [each["kind"] for each in penalty["provenance"]["caveat_records"]]
    assert "decoding_left_out" in kinds and "decoding_left_out" not in str(plain["provenance"]["caveat_records"])
    assert "decoding: the checkpoint prefers num_beams, which this run leaves out" in capsys.readouterr().out
