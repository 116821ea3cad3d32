"""Whole runs on the CPU with a tiny model: files, keys, sums, refusals, resume."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.engines.cpu import decode as decode_step
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.live_table import Publisher
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.ledger import read_plan
from experiment_core_utils.records.requests import KnobProof
from experiment_core_utils.saved_results.rescoring import rescore
from experiment_core_utils.tasks.registry import get_metric, load_task
from experiments.core_exp.acc_lat_profiling import main
from tests.given_flags import over
from tests.processes.forked_runs import Run, RunServer, of_rank

SETTING_KEYS = """
    tier tier_range selected_crops_mean selected_crops_distribution target_vision_tokens_mean actual_vision_tokens_mean
    max_crops top_k num_active_blocks num_total_blocks active_block_indices accuracy accuracy_std num_samples
    theoretical_num_crops theoretical_tiling theoretical_image_size theoretical_vision_tokens aggregate_stats
    per_sample_results
""".split()
SAMPLE_KEYS = """
    sample_id target_vision_tokens target_crops actual_vision_tokens top_k num_active_blocks input_text_tokens
    output_tokens theoretical_num_crops theoretical_tiling theoretical_image_size theoretical_vision_tokens
    actual_num_crops actual_tiling actual_image_size accuracy pred metadata T_vision_total T_LLM_prefill T_LLM_decode
    T_total T_decode_per_token
""".split()


def tiny_config(checkpoint: Path, output_dir: Path, *more: str) -> ProfilingConfig:
    return parse_config(
        over(["--model_path", str(checkpoint), "--output_dir", str(output_dir), "--num_samples", "3",
              "--num_runs_per_sample", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",

              "--num_threads", "1", "--max_new_tokens", "4"], more)
    )  # fmt: skip


def lasting_caveats(result: dict) -> list[str]:
    """Those that do not depend on what else the machine does."""
    changing = ("throttled", "runs_discarded", "foreign_load_cpu", "foreign_load_gpu")
    records = [Caveat(**each) for each in result["provenance"]["caveat_records"]]
    assert [each.sentence for each in records] == result["provenance"]["caveats"]
    return [each.sentence for each in records if each.kind not in changing]


def run_two_ranks(server: RunServer, folder: Path, *arguments: str) -> str:
    """What two processes of one machine print, in the environment that torchrun gives them."""
    logs = [folder / f"log{rank}" for rank in (0, 1)]
    ended = server.run(*(Run(arguments, str(log), of_rank(rank, 29517)) for rank, log in enumerate(logs)))
    printed = "".join(log.read_text() for log in logs)
    assert [each.code for each in ended] == [0, 0], printed
    return printed


@pytest.fixture(scope="module")
def results(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("results")
    config = tiny_config(
        tiny_checkpoint, folder, "--tier_list", "low", "medium", "--top_k_list", "2", "4",
        "--num_active_blocks_list", "3", "4", "--max_warmup_runs", "1",
    )  # fmt: skip
    report = run_profiling(config)
    assert not report.failed
    assert len(report.results) == 8
    assert report.csv_path == folder / "reference-vqa_settings.csv"
    ledger = f"ledger_{report.results[0].fingerprint}.json"
    assert sorted(path.name for path in (folder / ".parts").iterdir()) == [ledger, "lock", "plan.json"]
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_each_setting_has_its_file_with_the_published_name(results: dict[str, dict]) -> None:
    assert len(results) == 8
    for name, result in results.items():
        crops = round(result["selected_crops_mean"])
        assert name == (
            f"reference-vqa_imgsizetier-{result['tier']}_crops{crops}"
            f"_topk{result['top_k']}_blocks{result['num_active_blocks']}.json"
        )


def test_the_published_keys_are_there(results: dict[str, dict]) -> None:
    for result in results.values():
        assert set(SETTING_KEYS) <= set(result)
        for name in ("T_total_mean", "T_total_p95", "T_total_p99", "vision_tokens_mean", "vision_tokens_std",
                     "vision_tokens_diff_mean", "T_vision_total_std", "T_LLM_prefill_p50"):  # fmt: skip
            assert name in result["aggregate_stats"]
        for sample in result["per_sample_results"]:
            assert set(SAMPLE_KEYS) <= set(sample)
            assert set(sample["metadata"]) >= {"question", "answers", "image_id"}


def test_how_samples_were_chosen_and_scored_is_in_every_result(results: dict[str, dict]) -> None:
    for result in results.values():
        assert result["sampling"] == {
            "how": "random",
            "seed": 42,
            "num_asked": 3,
            "num_in_split": 2000,
            "num_left_out": 0,
        }
        assert result["sample_ids"] == [353, 1333, 1860]
        assert [sample["sample_id"] for sample in result["per_sample_results"]] == result["sample_ids"]
        assert (result["metric"], result["metric_best"]) == ("vqa_score", 1.0)
        assert (result["num_unparsed"], result["share_unparsed"], result["share_failed"]) == (0, 0.0, 0.0)
        low, high = result["accuracy_ci95"]
        assert 0.0 <= low <= result["accuracy"] <= high <= 1.0
        for sample in result["per_sample_results"]:
            assert (sample["parse_status"], len(sample["metadata"]["answers"])) == ("text", 10)
        caveat, *others = lasting_caveats(result)
        # Random answers run on to the limit.
        *of_blocks, cut = others
        assert cut.startswith("answers: ")
        # Nobody scored the blocks of a tiny model.
        assert [each.partition(" the first")[0] for each in of_blocks] == (
            [] if result["num_active_blocks"] == 4 else ["blocks: without scores"]
        )
        assert caveat.startswith("only 3 samples per setting: use --num_samples 500")


def test_stored_answers_scored_again_give_the_same_accuracy(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4", "--ids", "5", "6")
    (measured,) = (each.content() for each in run_profiling(config.replaced(num_active_blocks_list=(4,))).results)
    (again,) = rescore(tmp_path, get_metric("vqa_score"), None).after
    content = again.content()
    assert content.pop("rescored")["accuracy_before"] == measured["accuracy"]
    assert content == measured


def test_ids_and_limits_given_are_those_used(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4", "--ids", "8", "2")
    config = config.replaced(num_active_blocks_list=(4,), num_runs_per_sample=1)
    (result,) = (each.content() for each in run_profiling(config).results)
    assert result["sample_ids"] == [sample["sample_id"] for sample in result["per_sample_results"]] == [2, 8]
    assert result["sampling"] == {"how": "ids", "seed": None, "num_asked": 2, "num_in_split": 2000, "num_left_out": 0}
    assert result["provenance"]["experimental_variables"]["max_new_tokens"] == 4
    recipe = ProfilingConfig.of(config=tmp_path / "recipe.yaml")
    assert recipe.flags == config.flags | {"dataset_name": "reference_vqa"}
    (own_limit,) = (each.content() for each in run_profiling(config.replaced(max_new_tokens=None)).results)
    assert own_limit["provenance"]["experimental_variables"]["max_new_tokens"] == 16
    assert own_limit["provenance"]["task"]["max_new_tokens"] == 16
    assert own_limit["fingerprint"] != result["fingerprint"]
    (cut,) = lasting_caveats(result)
    assert cut.startswith("answers: 2 of 2 were cut at the limit of 4 tokens; raise the limit")


def test_the_stages_add_up_in_every_run(results: dict[str, dict]) -> None:
    for result in results.values():
        for sample in result["per_sample_results"]:
            assert len(sample["runs"]) == 2
            for run in [sample, *sample["runs"]]:
                parts = run["T_vision_total"] + run["T_LLM_prefill"] + (run["T_LLM_decode"] or 0.0)
                assert parts == pytest.approx(run["T_total"], rel=5e-3)
            if sample["output_tokens"] >= 2:
                assert sample["T_LLM_decode"] > 0
                steps = sample["output_tokens"] - 1
                assert sample["T_decode_per_token"] == pytest.approx(sample["T_LLM_decode"] / steps)
                assert all(len(run["T_inter_token"]) == steps for run in sample["runs"])
            else:
                assert sample["T_LLM_decode"] is None


def test_every_setting_saw_the_same_samples_and_did_what_was_requested(results: dict[str, dict]) -> None:
    ids = {tuple(sample["sample_id"] for sample in result["per_sample_results"]) for result in results.values()}
    assert len(ids) == 1
    for result in results.values():
        blocks = result["active_block_indices"]
        assert result["realised"]["blocks_run"] == result["realised"]["blocks_run_decode"] == blocks
        assert result["realised"]["experts_per_token"] == [4] + [result["top_k"]] * (len(blocks) - 1)
        assert result["realised"]["cache_layers"] == len(blocks)


def test_tokens_are_counted_as_the_picture_calls_for(results: dict[str, dict]) -> None:
    for result in results.values():
        for sample in result["per_sample_results"]:
            rows, cols = sample["actual_tiling"]
            assert sample["actual_tiling"] == sample["theoretical_tiling"]
            assert sample["actual_image_size"] == [rows * 224 + 112, cols * 224 + 112]
            low, high = result["tier_range"]["min_crops"], result["tier_range"]["max_crops"]
            assert low <= rows * cols == sample["actual_num_crops"] <= high
            assert sample["actual_vision_tokens"] == 144 + (8 * rows + 4) * (8 * cols + 4)
            assert sample["theoretical_vision_tokens"] == (rows * cols + 1) * 144
            assert sample["image_marker_tokens"] == 12 + 8 * rows + 4 + 4
            total = sample["actual_vision_tokens"] + sample["image_marker_tokens"] + sample["input_text_tokens"]
            assert sample["prompt_tokens"] == total


def test_flops_fall_with_every_knob(results: dict[str, dict]) -> None:
    by_knobs = {(r["tier"], r["top_k"], r["num_active_blocks"]): r["aggregate_stats"] for r in results.values()}
    for tier in ("low", "medium"):
        assert by_knobs[tier, 2, 4]["prefill_flops_mean"] < by_knobs[tier, 4, 4]["prefill_flops_mean"]
        assert by_knobs[tier, 4, 3]["prefill_flops_mean"] < by_knobs[tier, 4, 4]["prefill_flops_mean"]
    assert by_knobs["low", 4, 4]["vision_flops_mean"] < by_knobs["medium", 4, 4]["vision_flops_mean"]


def test_a_second_call_measures_nothing_again_and_a_lost_file_only_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "2", "4")
    first = run_profiling(config.replaced(num_active_blocks_list=(4,)))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*topk*.json")}
    assert len(written) == 2
    lost = next(path for path in written if "topk2" in path.name)
    lost.unlink()
    again = run_profiling(config.replaced(num_active_blocks_list=(4,)))
    assert [result.top_k for result in again.results] == [result.top_k for result in first.results]
    # Both were measured by one run; the lost one then alone, by another.
    (uid,), (own,) = (
        {result.provenance.run_uid for result in report.results if result.top_k == 2} for report in (first, again)
    )
    assert uid != own and [result.provenance.run_uids for result in first.results] == [[uid]] * 2
    assert [result.provenance.run_uids for result in again.results] == [[own], [uid]]
    assert read_plan(tmp_path).run_uid == own
    for path, modified in written.items():
        assert (path.stat().st_mtime_ns == modified) == (path != lost)


def test_the_model_as_it_is_is_measured_beside_the_grid(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """MolmoE's official rule, all experts and blocks; a later run that requests it finds it measured."""
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "2")
    config = config.replaced(num_active_blocks_list=(3,), num_runs_per_sample=1, no_reference=False)
    low, own = run_profiling(config).results
    assert sorted(path.name for path in tmp_path.glob("*topk*.json")) == [
        "reference-vqa_imgsizeown_topk4_blocks4.json", "reference-vqa_imgsizetier-low_crops2_topk2_blocks3.json"
    ]  # fmt: skip
    assert [(each.is_reference, each.in_grid) for each in (low, own)] == [(False, True), (True, False)]
    assert (own.tier, own.tier_range, own.max_crops, own.vision_tokens_target) == (None, None, None, None)
    assert (own.top_k, own.active_block_indices, low.sample_ids) == (4, [0, 1, 2, 3], own.sample_ids)
    task, processor = load_task("reference_vqa"), MolmoeProcessor.from_pretrained(tiny_checkpoint)
    for sample in own.per_sample_results:
        given = task[sample.sample_id]
        rows, cols = processor.image_processor.tiling_for(given.image.height, given.image.width)
        assert (sample.actual_tiling, sample.actual_num_crops) == ([rows, cols], rows * cols)
        assert sample.theoretical_tiling == sample.actual_tiling
        assert sample.prompt_tokens == processor(task.prompt(given), given.image)["input_ids"].shape[1]
        assert sample.vision_flops == (rows * cols + 1) * low.per_sample_results[0].vision_flops / (
            low.per_sample_results[0].actual_num_crops + 1
        )
    table = pd.read_csv(tmp_path / "reference-vqa_settings.csv")
    assert table.columns.tolist().index("in_grid") == table.columns.tolist().index("is_reference") + 1
    assert table.columns[-3:].tolist() == ["T_total_share_of_reference", "experiment_id", "file"]
    assert table["T_total_share_of_reference"].iloc[1] == 1
    assert table[["setting", "is_reference", "in_grid"]].to_numpy().tolist() == [
        ["tier-low_topk2_blocks3", False, True], ["own_topk4_blocks4", True, False]
    ]  # fmt: skip
    wider = config.replaced(tier_list=("own",), top_k_list=(4,), num_active_blocks_list=(4,))
    (again,) = run_profiling(wider).results
    assert again == own.with_keys(in_grid=True, digest=again.digest) != own
    # A setting that was requested once stays so.
    assert run_profiling(config).results == (low, again)


def test_a_run_of_fewer_settings_keeps_the_rows_of_the_others(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4", "2")
    config = config.replaced(num_active_blocks_list=(4,), num_samples=1, num_runs_per_sample=1)
    run_profiling(config)
    narrowed = run_profiling(config.replaced(top_k_list=(4,)))
    assert [each.top_k for each in narrowed.results] == [4]
    settings, samples = (pd.read_csv(tmp_path / f"reference-vqa_{kind}.csv") for kind in ("settings", "samples"))
    assert settings["top_k"].tolist() == [4, 2]
    assert sorted(samples["top_k"]) == [2, 4]
    # A broken file of a setting that is not asked for does not stop a run.
    broken = next(tmp_path.glob("*topk2*.json"))
    content = broken.read_text()
    broken.write_text(content.replace('"accuracy":', '"precision_":', 1))
    run_profiling(config.replaced(top_k_list=(4,)))
    assert pd.read_csv(tmp_path / "reference-vqa_settings.csv")["top_k"].tolist() == [4]
    # Other samples are another run, whose table has its own rows alone.
    broken.write_text(content)
    run_profiling(config.replaced(top_k_list=(4,), seed=1))
    assert pd.read_csv(tmp_path / "reference-vqa_settings.csv")["top_k"].tolist() == [4]


def test_a_run_is_not_gone_on_with_by_another_engine(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun with a compiler, resumed without one: what is finished is recognised, nothing is added to it."""
    flags = ["--tier_list", "low", "--top_k_list", "4", "--execution", "graph"]
    config = tiny_config(tiny_checkpoint, tmp_path, *flags).replaced(num_active_blocks_list=(4,))
    (first,) = (each.content() for each in run_profiling(config).results)
    assert first["provenance"]["model"]["execution_stages"]["decode"] == "cpu step"
    assert first["realised"]["execution"] == "cpu"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    decode_step._decode.cache_clear()
    assert run_profiling(config).experiment_id is None
    with pytest.raises(ConfigurationError, match=r"other engines \(.*decode cpu step\) than .* decode reference\)"):
        run_profiling(config.replaced(num_active_blocks_list=(3, 4)))
    assert len(list(tmp_path.glob("*topk*.json"))) == 1
    elsewhere = config.replaced(output_dir=tmp_path / "other")
    assert run_profiling(elsewhere).results[0].content()["provenance"]["model"]["execution"] == "reference"
    decode_step._decode.cache_clear()


def test_other_samples_are_another_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4")
    config = config.replaced(num_active_blocks_list=(4,))
    first = run_profiling(config).results[0].content()
    other = run_profiling(config.replaced(seed=1)).results[0].content()
    assert first["fingerprint"] != other["fingerprint"]
    assert [s["sample_id"] for s in first["per_sample_results"]] != [
        s["sample_id"] for s in other["per_sample_results"]
    ]


def test_another_run_in_the_same_folder_does_not_pass_for_this_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4")
    config = config.replaced(num_active_blocks_list=(4,))
    first, other, again = (run_profiling(config.replaced(seed=seed)) for seed in (42, 1, 42))
    assert again.results[0].fingerprint == first.results[0].fingerprint != other.results[0].fingerprint
    assert again.experiment_id is not None
    done = run_profiling(config)
    assert done.experiment_id is None
    assert done.results == again.results


def test_results_that_other_flags_made_are_named_before_they_are_replaced(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "4")
    config = config.replaced(num_active_blocks_list=(4,), num_samples=1, num_runs_per_sample=1)
    run_profiling(config)
    assert "warning" not in capsys.readouterr().err
    # Retries change no figure: the result counts.
    run_profiling(config.replaced(max_config_retries=1))
    assert "warning" not in capsys.readouterr().err
    more = config.replaced(num_active_blocks_list=(3, 4), num_runs_per_sample=2, precision="bfloat16")
    expected = (
        f"warning: 1 of the 2 settings to measure have results in {tmp_path} that were measured otherwise and will be "
        "replaced (--num_runs_per_sample 2, there 1, --precision bfloat16, there auto); give another --output_dir to "
        "keep them"
    )
    assert expected in describe_plan(more.replaced(dry_run=True)).text.splitlines()
    run_profiling(more)
    assert capsys.readouterr().err.splitlines().count(expected) == 1
    assert run_profiling(more).experiment_id is None
    assert "warning" not in capsys.readouterr().err


def test_values_that_the_strategy_leaves_out_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--tier_list", "low", "--top_k_list", "1", "2", "3", "4", "5")
    report = run_profiling(config.replaced(num_active_blocks_list=(4,), num_samples=1, num_runs_per_sample=1))
    assert [result.top_k for result in report.results] == [1, 2, 4, 5]
    assert report.left_out == ("left out by the sampling strategy: top-k 3 (--sampling_strategy full measures all)",)


def test_a_prompt_beyond_the_context_fails_its_setting(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tiny_checkpoint, tmp_path, "--vision_tokens_list", "8640", "--top_k_list", "4")
    config = config.replaced(num_active_blocks_list=(4,), num_samples=1, config_retry_delay=0.0, max_config_retries=1)
    report = run_profiling(config)
    (failure,) = report.failed.values()
    fault = "is longer than the model's context of 4096"
    assert fault in failure.reason
    # It is known before the model is loaded, as in the plan.
    (key,) = report.failed
    before, _, _ = capsys.readouterr().err.partition("loading ")
    (line,) = [each for each in before.splitlines() if fault in each]
    assert line.startswith(f"warning: {key}: ") and line in describe_plan(config).text.splitlines()


def test_token_targets_name_their_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny_checkpoint, tmp_path, "--vision_tokens_list", "720", "--top_k_list", "4", "--num_active_blocks_list", "4"
    )
    (result,) = (each.content() for each in run_profiling(config).results)
    assert [path.name for path in tmp_path.glob("*blocks*.json")] == [
        "reference-vqa_imgsizetokens720_topk4_blocks4.json"
    ]
    assert result["selected_crops_distribution"] == {"4": 3}
    assert {sample["target_vision_tokens"] for sample in result["per_sample_results"]} == {720}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top_k_list", "9"], "9 is more than the 8 experts"),
        (["--num_active_blocks_list", "5"], "5 active blocks are not possible; the model has 4"),
        (["--dataset_name", "imagenet"], "unknown task 'imagenet'"),
        (["--split", "test"], "no split 'test'"),
        (["--ids", "1", "9999"], "sample ids 9999 are outside the split; it has 0 to 1999"),
    ],
)
def test_what_the_model_or_task_does_not_have_is_refused_before_loading(
    tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text((tiny_checkpoint / "config.json").read_text())  # a folder without weights
    with pytest.raises(ConfigurationError, match=message):
        run_profiling(tiny_config(tmp_path, tmp_path / "results", *arguments))
    assert not (tmp_path / "results").exists()


def test_importance_scores_with_a_missing_block_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    scores.write_text('{"1": 0.5, "2": 0.25}')
    with pytest.raises(ConfigurationError, match=r"leave out blocks \[3\]"):
        run_profiling(tiny_config(tiny_checkpoint, tmp_path, "--importance_scores_file", str(scores)))


def test_importance_scores_choose_the_blocks(tiny_checkpoint: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    scores.write_text('{"0": 0.0, "1": 0.1, "2": 0.5, "3": 0.9}')
    config = tiny_config(
        tiny_checkpoint, tmp_path, "--importance_scores_file", str(scores), "--tier_list", "low", "--top_k_list", "2",
        "--num_active_blocks_list", "3",
    )  # fmt: skip
    (result,) = (each.content() for each in run_profiling(config).results)
    assert result["active_block_indices"] == result["realised"]["blocks_run"] == [0, 2, 3]


def test_scores_in_the_models_folder_choose_the_blocks_unless_a_flag_says_otherwise(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    own = model / "block_importance.json"
    own.write_text('{"0": 0.0, "1": 0.1, "2": 0.5, "3": 0.9}')
    sets = tmp_path / "sets.json"
    sets.write_text('{"3": [0, 1, 3]}')
    flags = ["--tier_list", "low", "--top_k_list", "2", "--num_active_blocks_list", "3", "--num_runs_per_sample", "1"]

    def chosen(*more: str) -> tuple[list[int], str | None, str | None, str]:
        report = run_profiling(tiny_config(model, tmp_path / "results", *flags, *more))
        result = report.results[0].content()
        variables = result["provenance"]["experimental_variables"]
        assert result["realised"]["blocks_run"] == result["active_block_indices"]
        files = variables["importance_scores_file"], variables["block_sets_file"]
        return result["active_block_indices"], *files, result["fingerprint"]

    by_own, by_none = chosen(), chosen("--importance_scores_file", "none")
    by_sets = chosen("--block_sets_file", str(sets))
    assert by_own[:3] == ([0, 2, 3], str(own), None)
    assert by_none[:3] == ([0, 1, 2], None, None)
    assert by_sets[:3] == ([0, 1, 3], None, str(sets))
    assert len({by_own[3], by_none[3], by_sets[3]}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks_run": (0, 1)}, "blocks"),
        ({"blocks_run_decode": (0, 1)}, "blocks"),
        ({"experts_per_token": (4, 4, 4)}, "experts"),
        ({"cache_layers": 4}, "cache contains 4 layers"),
    ],
)
def test_a_knob_that_did_not_act_is_an_error(change: dict, message: str) -> None:
    setting = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1, 3)))
    proof = KnobProof(experts_per_token=(4, 2, 2), blocks_run=(0, 1, 3), blocks_run_decode=(0, 1, 3), cache_layers=3)
    model = SimpleNamespace(expected_experts=lambda _: (4, 2, 2))
    check_proof(proof, setting, model)
    with pytest.raises(KnobDidNotAct, match=message):
        check_proof(replace(proof, **change), setting, model)


def test_two_ranks_give_the_same_answers_as_one(tiny_checkpoint: Path, run_server: RunServer, tmp_path: Path) -> None:
    flags = [
        "--model_path", str(tiny_checkpoint), "--tier_list", "low", "--top_k_list", "4",
        "--num_active_blocks_list", "4",
        "--num_samples", "5", "--num_runs_per_sample", "1", "--max_new_tokens", "3", "--num_threads", "1",
        "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
    ]  # fmt: skip
    run_profiling(parse_config([*flags, "--output_dir", str(tmp_path / "one")]))
    two = run_two_ranks(run_server, tmp_path, *flags, "--num_processes", "2", "--output_dir", str(tmp_path / "two"))
    (single,), (double,) = (
        [json.loads(path.read_text()) for path in (tmp_path / name).glob("*blocks4.json")] for name in ("one", "two")
    )
    assert double["provenance"]["num_processes"] == 2
    # One run of two processes; both runs are the first of their folder.
    uids = [each["provenance"]["run_uid"] for each in (single, double)]
    assert [each["provenance"]["run_uids"] for each in (single, double)] == [[uid] for uid in uids]
    assert len(set(uids)) == 2 and read_plan(tmp_path / "two").run_uid == uids[1]
    shared, cut = lasting_caveats(double)
    assert shared == "2 processes share the CPU cores: times are not those of one process alone"
    assert cut.startswith("answers: 4 of 5 were cut at the limit of 3 tokens")
    for key in ("accuracy", "accuracy_std", "accuracy_ci95", "accuracy_by_type", "metric_details", "sample_ids"):
        assert double[key] == single[key]
    for key in ("sample_id", "pred", "accuracy", "parse_status", "metadata", "prompt_tokens", "output_tokens"):
        assert [s[key] for s in double["per_sample_results"]] == [s[key] for s in single["per_sample_results"]]
    assert two.count("table of settings") == 1
    table = pd.read_csv(tmp_path / "two" / "reference-vqa_settings.csv")
    assert table.loc[0, "num_samples"] == 5


def test_fewer_processes_than_requested_is_an_error(
    tiny_checkpoint: Path, run_server: RunServer, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    flags = ["--model_path", str(tiny_checkpoint), "--num_processes", "2", "--output_dir", str(tmp_path / "r")]
    assert run_server.run(Run(flags, str(log)))[0].code == 1
    assert log.read_text().strip().splitlines()[-1].startswith("error: 2 processes were requested and 1 launched")
    assert not list((tmp_path).glob("r/*"))


def test_a_folder_without_a_model_is_one_line_and_exit_code_2(run_server: RunServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ["--model_path", str(tmp_path), "--output_dir", str(tmp_path / "r")]
    assert run_server.run(Run(flags, str(log)))[0].code == 2
    output = log.read_text().strip()
    assert output.startswith("error: ") and len(output.splitlines()) == 1
    assert not list((tmp_path).glob("r/*"))


@pytest.mark.parametrize("content", ["{}", "no json", '{"model_type": "llama"}'])
def test_a_folder_with_another_config_is_one_line_and_exit_code_2(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["", "--model_path", str(tmp_path), "--output_dir", str(tmp_path / "r")])
    assert main() == 2
    output = capsys.readouterr().err.strip()
    assert output.startswith("error: ") and len(output.splitlines()) == 1
    assert not list((tmp_path).glob("r/*"))


def test_a_folder_that_cannot_be_written_to_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--output_dir .* cannot be written to"):
        run_profiling(tiny_config(tiny_checkpoint, tmp_path / "file" / "results"))


def test_weights_that_do_not_fit_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"do not fit its config: \d+ missing keys"):
        run_profiling(tiny_config(tmp_path, tmp_path / "results", "--num_active_blocks_list", "5"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        run_profiling(tiny_config(tmp_path, tmp_path / "results", "--num_active_blocks_list", "5"))


@pytest.mark.parametrize(("execution", "untimed"), [("eager", "batches"), ("graph", "as timed")])
def test_samples_that_need_no_latency_get_the_same_answers(
    execution: str, untimed: str, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By modules in batches of 3 and 7; by engines alone, as those that are timed."""
    flags = (
        "--tier_list", "low", "--top_k_list", "2", "--num_active_blocks_list", "4", "--num_samples", "7",
        "--num_runs_per_sample", "1", "--execution", execution,
    )  # fmt: skip
    alone, some, none = (
        run_profiling(tiny_config(tiny_checkpoint, tmp_path / name, *flags, *more)).results[0].content()
        for name, *more in (
            ("alone",),
            ("some", "--num_latency_samples", "2", "--accuracy_batch_size", "3"),
            ("none", "--num_latency_samples", "0"),
        )
    )
    assert [result["num_latency_samples"] for result in (alone, some, none)] == [7, 2, 0]
    assert len({result["fingerprint"] for result in (alone, some, none)}) == 3
    fields = ("pred", "accuracy", "output_tokens", "output_ended", "prefill_flops", "decode_flops_per_token")
    in_batches = untimed == "batches"
    for batched, sizes in ((some, [2, 2, 3, 3, 3] if in_batches else [1] * 5), (none, [7 if in_batches else 1] * 7)):
        assert batched["provenance"]["model"]["execution_untimed"] == untimed
        # The proofs' errors are of other prompts.
        realised = [
            {key: value for key, value in each["realised"].items() if not key.endswith("_error")}
            for each in (batched, alone)
        ]
        assert realised[0] == realised[1]
        assert (batched["accuracy"], batched["share_truncated"]) == (alone["accuracy"], alone["share_truncated"])
        for one, other in zip(alone["per_sample_results"], batched["per_sample_results"], strict=True):
            assert {key: one[key] for key in ("sample_id", *fields)} == {
                key: other[key] for key in ("sample_id", *fields)
            }
            assert (other["T_total"] is None) == (other["runs"] == []) == (other["accuracy_batch_size"] is not None)
        found = [each["accuracy_batch_size"] for each in batched["per_sample_results"] if not each["runs"]]
        assert sorted(found) == sizes
    assert alone["provenance"]["model"]["execution_untimed"] is None
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("answers: ")]
    # Of 2 timed requests and 5 others, and of 7 others alone.
    shares = [] if in_batches else ["5 of its 7 requests, or about 71%", "7 of its 7 requests, or about 100%"]
    assert len(said) == len(shares) and all(share in line for share, line in zip(shares, said, strict=True))
    assert some["aggregate_stats"]["T_total_n"] == 2
    assert not [name for name in none["aggregate_stats"] if name.startswith("T_") and "T_preprocess" not in name]


def test_what_has_run_is_saved_every_five_seconds_in_at_most_a_hundredth_of_the_time() -> None:
    now, saved = [100.0], list[float]()

    def save() -> None:
        saved.append(now[0])
        now[0] += 0.25

    publish = Publisher(save, lambda: now[0])
    for _ in range(100):
        publish()
        now[0] += 1
    # After 5 s, and then after a hundred times the quarter of a second that it took.
    assert saved == [105.0, 130.25, 155.5, 180.75]
