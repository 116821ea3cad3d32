import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import create_model

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.registry import register_knob, unregister_knob
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.knobs.top_k import TopK
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, REPOSITORY
from experiment_core_utils.primitives.flag_fields import Part


def test_the_published_defaults() -> None:
    config = parse_config([])
    assert config.model.model_path == str(EMBEDDED_MODEL)
    assert config.machine.output_dir == Path("results/core_exp")
    # A fraction of 1 is the model as it is.
    assert [target.value for target in config.knobs.vision_targets] == ["0.25 of own", "0.5 of own", "own"]
    assert (config.task.num_samples, config.measuring.num_runs_per_sample, config.task.seed) == (1000, 3, 42)
    assert (config.task.max_new_tokens, config.task.prompt_template, config.task.dataset_revision) == (None, None, None)
    assert (config.task.sample_by, config.task.ids) == ("random", None)
    assert (config.measuring.setting_order, config.measuring.num_warmup_runs, config.measuring.max_warmup_runs) == (
        "shuffled",
        2,
        6,
    )
    assert parse_config(["--num_warmup_runs", "11"]).measuring.max_warmup_runs == 11
    assert config.measuring.until_precision is None
    # The task is known with the model: reference_vqa for one with vision.
    assert (config.task.dataset_name, config.task.split, config.knobs.sampling_strategy) == (None, None, "balanced")


@pytest.mark.parametrize(("most", "least"), [(0, 0), (1, 1), (2, 2), (3, 2), (9, 2)])
def test_a_limit_of_the_warm_up_lowers_its_usual_length(most: int, least: int) -> None:
    measuring = parse_config(["--max_warmup_runs", str(most)]).measuring
    assert (measuring.num_warmup_runs, measuring.max_warmup_runs) == (least, most)


def test_ids_are_kept_once_and_ascending() -> None:
    assert parse_config(["--ids", "17", "3", "17"]).task.ids == (3, 17)


def test_tokens_take_the_place_of_tiers() -> None:
    knobs = parse_config(["--vision_tokens_list", "432", "1008", "432", "100"]).knobs
    targets, left_out = knobs.targets_and_left_out(KnobLimits(4, 4, 2))
    assert [(target.label, target.crops) for target in targets] == [
        ("tokens432", CropRange(2, 2)), ("tokens1008", CropRange(6, 6))
    ]  # fmt: skip
    assert len(left_out) == 1 and left_out[0].startswith("100 vision tokens are too few")
    # A model that takes pictures in their own shape.
    targets, left_out = knobs.targets_and_left_out(KnobLimits(4, 4, 2, token_unit=TokenUnit(None)))
    assert [target.tokens for target in targets] == [432, 1008, 100] and left_out == ()


def test_the_models_own_is_a_tier_beside_the_published_ones() -> None:
    tiers = parse_config(["--tier_list", "own", "low"]).knobs.tiers
    assert [(target.value, target.tier) for target in tiers] == [("own", None), ("low", "low")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier_list", "low", "giant"], "'giant'.*own, low, medium, high"),
        (["--tier_list", "onw"], "'onw'.*own"),
        (["--sampling_strategy", "magic"], "'magic' .*'full', 'balanced', 'stratified', 'boundary', 'lhs'"),
        (["--num_configs", "5"], "--num_configs 5 is for --sampling_strategy lhs, not for balanced"),
        (["--sampling_strategy", "lhs", "--num_configs", "0"], "--num_configs 0.*at least 1"),
        (["--num_samples", "0"], "--num_samples 0.*at least 1"),
        (["--num_warmup_runs", "8", "--max_warmup_runs", "7"], "--max_warmup_runs 7 is less than.*give at least 8"),
        (["--num_warmup_runs", "2", "--max_warmup_runs", "1"], "--max_warmup_runs 1 is less than --num_warmup_runs 2"),
        (["--max_warmup_runs", "-1"], "--max_warmup_runs -1 is less than --num_warmup_runs 0; give at least 0"),
        (["--seed", "4294967296"], "--seed 4294967296 is not possible; give at most 4294967295"),
        (["--worker_timeout", "inf"], "--worker_timeout inf is not possible; give a finite number"),
        (["--use_profiler", "--num_latency_samples", "0"], "--num_latency_samples 0 leaves none"),
        (["--setting_order", "random"], "invalid choice: 'random'"),
        (["--order", "blocked"], "unrecognized arguments: --order blocked"),
        (["--until_precision", "2"], "--until_precision 2 is not possible; give less than 1, such as 0.02"),
        (["--until_precision", "0"], "--until_precision 0 is not possible; give more than 0, such as 0.02"),
        (["--until_precision", "nan"], "--until_precision nan is not possible"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0.*at least 1"),
        (["--sample_by", "size"], "invalid choice: 'size'"),
        (["--ids", "3", "--sample_by", "question_type"], "--ids leaves nothing to draw"),
        (["--ids"], "expected at least one argument"),
        (["--top_k_list", "4", "0"], "--top_k_list 0"),
        (["--importance_scores_file", "nowhere.json"], "nowhere.json: No such file.*give a JSON object"),
        (["--config_retry_delay", "-1"], "--config_retry_delay"),
        (["--num_latency_samples", "-1"], "--num_latency_samples -1.*at least 0"),
        (["--accuracy_batch_size", "0"], "--accuracy_batch_size 0.*at least 1"),
        (["--request_cache_gb", "-0.5"], "--request_cache_gb -0.5.*at least 0"),
        (["--config_retry_delay", "nan"], "--config_retry_delay nan is not possible"),
        (["--num_threads", "100000"], "more than the [0-9]+ cores"),
        (
            ["--use_magic"],
            "unrecognized arguments: --use_magic; a flag of a knob of your own needs --knob_module, too; see --help",
        ),
        (["--tier_list", "low", "--vision_tokens_list", "432"], "not allowed with"),
    ],
)
def test_bad_requests_are_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse_config(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["not json", "[]", "{}", '{"one": 1}', '{"1": "high"}', '{"1": NaN}', '{"1": true}']
)
def test_a_file_without_scores_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "scores.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="scores.json"):
        parse_config(["--importance_scores_file", str(file)])


def test_a_block_named_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text('{"3": 0.1, "03": 0.9}')
    with pytest.raises(ConfigurationError, match="names block 3 twice"):
        parse_config(["--importance_scores_file", str(file)])


def test_scores_are_read_by_block(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text(json.dumps({"0": 1, "1": 0.25}))
    choice = parse_config(["--importance_scores_file", str(file)]).knobs.block_choice
    assert choice == BlockChoice(scores={0: 1.0, 1: 0.25}, file=file)


def test_neither_scores_nor_sets_means_the_models_own_scores(tmp_path: Path) -> None:
    scores, sets = tmp_path / "scores.json", tmp_path / "sets.json"
    scores.write_text('{"1": 0.5}')
    sets.write_text('{"2": [0, 3]}')
    assert parse_config([]).knobs.block_choice is None
    by_scores = parse_config(["--importance_scores_file", str(scores)]).knobs
    assert by_scores.block_choice == BlockChoice(scores={1: 0.5}, file=scores)
    assert parse_config(["--importance_scores_file", "none"]).knobs.block_choice == BlockChoice()
    by_sets = parse_config(["--block_sets_file", str(sets)]).knobs
    assert by_sets.block_choice == BlockChoice(sets={2: (0, 3)}, file=sets)
    with pytest.raises(ConfigurationError, match="not allowed with"):
        parse_config(["--block_sets_file", str(sets), "--importance_scores_file", "none"])


def test_the_python_call_is_checked_as_the_command_line() -> None:
    flags = ["--num_samples", "4", "--ids", "5", "3", "--top_k_list", "2", "4", "2", "--output_dir", "here"]
    config = ProfilingConfig.of(num_samples=4, ids=[5, 3], top_k_list=[2, 4, 2], output_dir="here", split=None)
    assert config == parse_config(flags)
    assert config.replaced(num_samples=9, top_k_list=None) == ProfilingConfig.of(
        num_samples=9, ids=(3, 5), output_dir=Path("here")
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "^--num_samples 0 is not possible; give at least 1$"),
        ({"top_k_list": (0,)}, "^--top_k_list 0 is not possible; give at least 1$"),
        ({"top_k_list": (0, -1)}, "^--top_k_list 0 is not possible; give at least 1; 1 more like it$"),
        ({"num_sample": 3}, "^num_sample: there is no such key .did you mean num_samples.*; known are model_path"),
        ({"output_dir": ""}, "^--output_dir: a path is missing; write . for the current folder"),
        ({"num_samples": "5"}, "^--num_samples: .*valid integer; write 5 without quotes"),
        ({"device": "tpu"}, "^--device: .*'cpu' or 'cuda' .given: 'tpu'"),
        ({"tier_list": ["low"], "vision_tokens_list": [432]}, "^--tier_list and --vision_tokens_list are both given"),
    ],
)
def test_a_wrong_python_call_is_one_clear_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        ProfilingConfig.of(**values)
    assert "\n" not in str(caught.value)


def test_help_and_a_wrong_flag_need_no_torch() -> None:
    driver = REPOSITORY / "experiments" / "core_exp" / "acc_lat_profiling.py"
    code = (
        "import sys, runpy\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'transformers', 'numpy'): raise AssertionError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "sys.argv = ['acc_lat_profiling.py', *sys.argv[2:]]\n"
        f"runpy.run_path({str(driver)!r}, run_name='__main__')\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, "--", "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "--num_active_blocks_list" in shown.stdout
    wrong = subprocess.run(
        [sys.executable, "-c", code, "--", "--tier_list", "giant"], capture_output=True, text=True, timeout=60
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: unknown tier 'giant'")


@pytest.mark.parametrize("flag", ["num_samples", "num_configs"])
def test_a_knob_cannot_have_the_flag_of_another_part(flag: str) -> None:
    flags = create_model("OwnFlags", __base__=Part, **{flag: (int | None, None)})  # type: ignore[call-overload]
    register_knob(type("Own", (TopK,), {"name": "own_knob", "title": "own knob", "published": (), "flags": flags})())
    try:
        with pytest.raises(ConfigurationError, match=f"knob own_knob: there is a flag --{flag} already; give it"):
            parse_config([])
    finally:
        unregister_knob("own_knob")


def test_a_recipe_is_read_as_its_flags_and_flags_beside_it_replace_its_own(tmp_path: Path) -> None:
    flags = "--top_k_list 2 8 --ids 4 3 --until_precision 0.02 --output_dir kept --no_reference".split()
    config = parse_config(["--system_prompt", "Gr\u00fc\u00dfe", *flags])
    assert config.flags == {
        "ids": (3, 4),
        "system_prompt": "Gr\u00fc\u00dfe",
        "top_k_list": (2, 8),
        "no_reference": True,
        "until_precision": 0.02,
        "output_dir": Path("kept"),
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config.recipe)
    assert parse_config(["--config", str(recipe)]) == ProfilingConfig.of(config=recipe) == config
    other = parse_config(["--config", str(recipe), "--ids", "7", "--seed", "1"])
    assert (other.task.ids, other.task.seed, other.knobs.top_k_list) == ((7,), 1, (2, 8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("top_k: 3\n", "top_k: there is no such key.*top_k_list"),
        ("seed: 1\nseed: 2\n", "seed"),
        ("- seed\n", "recipe.yaml contains list; write `key: value` lines"),
        ("seed: many\n", "--seed"),
        (None, "recipe.yaml cannot be read"),
    ],
)
def test_a_recipe_that_is_none_is_one_clear_line(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse_config(["--config", str(tmp_path / "recipe.yaml")])
    assert "\n" not in str(caught.value)
