"""Plans before a run: no weights read, nothing written, what is done counted as done."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange, fraction_target
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan
from experiment_core_utils.primitives.device import matmul_flops_per_second
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.registry import load_task
from experiments.core_exp.acc_lat_profiling import main
from tests.given_flags import over
from tests.models.tiny_checkpoints import write_checkpoint


def flags(checkpoint: Path, output_dir: Path, *more: str) -> list[str]:
    usual = ["--model_path", str(checkpoint), "--output_dir", str(output_dir), "--num_samples", "3",
            "--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_repeats", "0",
            "--num_threads", "1", "--max_new_tokens", "4",
            "--tier_list", "low", "medium", "high", "--top_k_list", "1", "2", "3", "4"]  # fmt: skip
    return over(usual, more)


def flags_without_tiers(checkpoint: Path, output_dir: Path) -> list[str]:
    of_all = flags(checkpoint, output_dir, "--dry_run", "--ids", "5", "--top_k_list", "4")
    at = of_all.index("--tier_list")
    return of_all[:at] + of_all[at + 4 :]


def config_of(checkpoint: Path, output_dir: Path, *more: str) -> ProfilingConfig:
    return parse_config(flags(checkpoint, output_dir, "--dry_run", *more))


@pytest.mark.parametrize(
    ("strategy", "settings"),
    # 3 tiers x 4 top-k x 3 block counts. boundary: 8 corners, and on 4 edges a knob the values between its ends.
    [("full", 36), ("balanced", 36), ("stratified", 27), ("boundary", 8 + 4 * (1 + 2 + 1)), ("lhs", 27)],
)
def test_every_strategy_is_planned_without_weights_and_without_a_trace(
    tiny_checkpoint: Path, tmp_path: Path, strategy: str, settings: int
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    blocks = ("--num_active_blocks_list", "2", "3", "4", "--sampling_strategy", strategy)
    plan = describe_plan(config_of(model, tmp_path / "out", *blocks))
    # The reference setting stands after the grid.
    assert [each.work.key for each in plan.estimates].index("own_topk4_blocks4") == settings
    assert plan.text.startswith(f"plan: {settings} settings by {strategy} and the reference own_topk4_blocks4, ")
    assert f"whole: {settings + 1} of {settings + 1} settings to measure" in plan.text
    assert plan.whole_s == pytest.approx(sum(each.setting_s for each in plan.estimates))
    assert {each.time_source for each in plan.estimates} == {"matmul"}
    assert not (tmp_path / "out").exists()


def test_more_tiles_experts_and_blocks_cost_more(tiny_checkpoint: Path, tmp_path: Path) -> None:
    blocks = ("--num_active_blocks_list", "2", "4")
    found = {each.work.key: each for each in describe_plan(config_of(tiny_checkpoint, tmp_path, *blocks)).estimates}
    base = found["tier-low_topk2_blocks2"]
    for key in ("tier-medium_topk2_blocks2", "tier-low_topk4_blocks2", "tier-low_topk2_blocks4"):
        assert found[key].run_s > base.run_s
    assert found["tier-high_topk2_blocks2"].memory_bytes > base.memory_bytes


def test_settings_that_are_done_are_not_counted_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    grid = ("--num_active_blocks_list", "4", "--no_reference")
    two = flags(tiny_checkpoint, tmp_path, *grid)
    two[two.index("low") : two.index("--top_k_list")] = ["low", "medium"]
    measured = run_profiling(parse_config([*two, "--sampling_strategy", "full"])).results
    assert len(measured) == 8
    plan = describe_plan(config_of(tiny_checkpoint, tmp_path, *grid))
    # Tier high is new, and is estimated from what the eight reached.
    assert [each.work.is_done for each in plan.estimates] == [True] * 8 + [False] * 4
    assert [each.time_source for each in plan.estimates] == ["measured"] * 8 + ["scaled"] * 4
    assert plan.estimates[0].run_s == pytest.approx(measured[0].aggregate_stats["T_total_mean"] / 1e3)
    assert plan.whole_s == pytest.approx(sum(each.setting_s for each in plan.estimates[8:]))
    assert "whole: 4 of 12 settings to measure" in plan.text
    # Another number of samples is another run: nothing is done, but the times are known.
    other = describe_plan(config_of(tiny_checkpoint, tmp_path, *grid, "--num_samples", "2"))
    assert [each.work.is_done for each in other.estimates] == [False] * 12
    assert [each.time_source for each in other.estimates] == ["measured"] * 8 + ["scaled"] * 4


def test_tokens_are_those_of_the_prompts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    more = ("--num_active_blocks_list", "4", "--ids", "5")
    estimates = describe_plan(config_of(tiny_checkpoint, tmp_path, *more)).estimates
    (setting,) = {each.work.prompt_tokens for each in estimates if each.work.key.startswith("tier-low")}
    (own,) = {each.work.prompt_tokens for each in estimates if each.work.key.startswith("own")}
    task = load_task("reference_vqa")
    processor = MolmoeProcessor.from_pretrained(tiny_checkpoint)
    config = config_of(tiny_checkpoint, tmp_path)
    inputs = processor(task.prompt(task[5]), task[5].image, crops=config.knobs.tiers[0].crops)
    assert setting == inputs["input_ids"].shape[1]
    assert own == processor(task.prompt(task[5]), task[5].image)["input_ids"].shape[1] > setting


def test_a_plan_compares_the_prompts_with_those_of_the_model_as_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    task, processor = load_task("reference_vqa"), MolmoeProcessor.from_pretrained(tiny_checkpoint)

    def tokens(crops: CropRange | None) -> int:
        length: int = processor(task.prompt(task[5]), task[5].image, crops=crops)["input_ids"].shape[1]
        return length

    def line(*more: str) -> str:
        plan = describe_plan(config_of(tiny_checkpoint, tmp_path, "--top_k_list", "4", "--ids", "5", *more))
        return "\n".join(each for each in plan.text.splitlines() if each.startswith("vision: "))

    own_tokens, names = tokens(None), ("low", "high")
    of_own = ", ".join(f"tier-{name} {100 * tokens(TIERS[name]) / own_tokens:.0f} %" for name in names)
    blocks = ("--num_active_blocks_list", "2", "4")
    assert tokens(TIERS["low"]) < own_tokens < tokens(TIERS["high"])
    # Two settings of tier high, of 2 and of 4 blocks; the reference is beside them.
    assert line("--tier_list", *names, *blocks) == (
        f"vision: prompts have {own_tokens} tokens in the model as it is, of these {of_own}, own 100 %; 2 of 5 "
        "settings take more (pictures are enlarged by tier-high)"
    )
    flags = flags_without_tiers(tiny_checkpoint, tmp_path)
    half = fraction_target(0.5)
    (half_tokens,) = [
        each.work.prompt_tokens
        for each in describe_plan(parse_config([*flags, "--vision_fraction_list", "0.5", *blocks[:2]])).estimates
        if each.work.key.startswith(half.label)
    ]
    assert half_tokens == tokens(half.crops) < own_tokens
    assert line("--tier_list", "own", *blocks) == ""


def test_the_driver_prints_the_plan(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["x", *flags(tiny_checkpoint, tmp_path, "--dry_run")])
    assert main() == 0
    output = capsys.readouterr().out
    assert output.startswith("plan: 12 settings by balanced")
    assert "no weights were loaded" in output
    assert "time, matmul: a rough lower bound" in output


def test_a_matrix_product_has_a_speed() -> None:
    # Between a pocket calculator and the fastest machine there is.
    assert 1e6 < matmul_flops_per_second(torch.device("cpu"), torch.float32) < 1e18


def test_the_plan_says_what_its_samples_can_show(tiny_checkpoint: Path, tmp_path: Path) -> None:
    lines = describe_plan(config_of(tiny_checkpoint, tmp_path, "--detect", "0.02")).text.splitlines()
    assert re.match(
        r"differences that two of \d+ settings show \(95 % over all pairs, 80 % power\): accuracy none", lines[-2]
    )
    assert re.match(r"to show 0.02 with 80 % power: accuracy \d+ samples \(0% with", lines[-1])


def test_detect_is_of_a_plan(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give --dry_run too"):
        parse_config(flags(tiny_checkpoint, tmp_path, "--detect", "0.02"))


def copies_of(folder: Path, *more: str) -> ProfilingConfig:
    model = write_checkpoint("llama", folder / "llama")
    usual = ["--model_path", str(model), "--output_dir", str(folder / "out"), "--num_samples", "3", "--dry_run"]
    return parse_config([*usual, "--device", "cpu", "--energy", "off", "--num_threads", "1", *more])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("--quantization_list", "own", "fp8"), "the requested quantisation cannot be done here: float8 needs a GPU"),
        (("--execution_list", "own", "inductor"), "--execution inductor cannot run .*: it needs a GPU"),
        (("--attention_list", "own", "wind"), '.* cannot be built with attn_implementation wind: Specified .*"wind"'),
    ],
)
def test_a_copy_that_cannot_be_loaded_is_refused_by_its_flag_before_any_is(
    tmp_path: Path, values: tuple[str, ...], reason: str
) -> None:
    flag, _, value = values
    with pytest.raises(ConfigurationError, match=f"^{flag} {value} cannot be loaded here, leave it out: {reason}"):
        describe_plan(copies_of(tmp_path, *values))


def test_each_copy_has_the_memory_of_its_own_number_format(tmp_path: Path) -> None:
    found = {
        each.work.key: each.work.memory_bytes
        for each in describe_plan(copies_of(tmp_path, "--precision_list", "bfloat16", "own")).estimates
    }
    whole, half = found["own_blocks3"], found["own_blocks3_format-bfloat16"]
    assert whole is not None and half is not None
    # 32,928 parameters and the longest prompt's cache, at 4 bytes each and at 2.
    assert (whole, whole > 4 * 32928) == (2 * half, True)


def test_servers_that_a_run_would_start_are_named_in_their_order(tmp_path: Path) -> None:
    served = ["--endpoint", "http://localhost:9/v1", "--model", "m", "--serve", "start {q} --to {n}"]
    others = ["--num_samples", "2", "--energy", "off", "--dry_run", "--output_dir", str(tmp_path / "out")]
    given = [*served, "--set", "q=,-x 8", "n=b c", *others]
    lines = describe_plan(parse_config(given)).text.split("\n")
    at = next(place for place, line in enumerate(lines) if line.startswith("servers: "))
    order = "q-empty_n-b-c q-x-8_n-b-c q-x-8_n-b-c q-empty_n-b-c"
    assert lines[at].startswith(f"servers: 2, one at a time and each twice ({order})")
    assert lines[at + 1 : at + 3] == ["  q-empty_n-b-c: start --to b c", "  q-x-8_n-b-c: start -x 8 --to b c"]
    assert not (tmp_path / "out").exists()
