from pathlib import Path

import pytest

from experiment_core_utils.config.text_grid import combinations, parse_yaml, read_yaml, with_overrides
from experiment_core_utils.primitives.errors import ConfigurationError


def test_lists_make_every_combination_the_last_key_varying_fastest() -> None:
    found = combinations(
        parse_yaml("fp_precision: [float32, bfloat16]\nbatching_options: {batch_size___fixed_batching: [1, 4, 1]}", "f")
    )
    assert [tuple(each.varied.values()) for each in found] == [
        ("float32", 1),
        ("float32", 4),
        ("bfloat16", 1),
        ("bfloat16", 4),
    ]
    assert list(found[0].varied) == ["fp_precision", "batching_options.batch_size___fixed_batching"]
    assert [each.config.batch_size for each in found if each.config] == [1, 4, 1, 4]


def test_a_list_of_one_value_is_not_varied_and_metrics_are_a_list_by_nature() -> None:
    (only,) = combinations({"fp_precision": ["float32"], "custom_metrics": ["a.b:c", "a.b:d"]})
    assert only.varied == {} and only.config is not None
    assert only.config.fp_precision == "float32" and only.config.custom_metrics == ("a.b:c", "a.b:d")


def test_a_group_may_be_listed_as_a_whole() -> None:
    found = combinations(
        {"decoder_config": [{"decoding_mode": "greedy"}, {"decoding_mode": "top_k", "decoder_top_k": 5}]}
    )
    assert [each.config.decoder_config.decoding_mode for each in found if each.config] == ["greedy", "top_k"]


def test_impossible_combinations_stay_in_the_list_with_their_reason() -> None:
    found = combinations({"quantization_config": {"quantization": [False, True], "load_in_8bit": [False, True]}})
    assert [each.config is not None for each in found] == [True, False, False, True]
    assert found[1].reason is not None and "need quantization_config.quantization" in found[1].reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"^f.yaml, line 1: a is given twice; keep one$"),
        ("- 1", "^f.yaml contains list; write `key: value` lines"),
        ("x: [", "^f.yaml, line 1 is not YAML: expected the node content"),
        ("device: [cpu, cuda]", "^device has several values; one launch has one"),
        ("fp_precision: []", "^fp_precision has an empty list"),
        ("decoder_config: {decoding_mode: [greedy, tpo_k]}", r"^decoder_config.decoding_mode: .*given: 'tpo_k'"),
        ("decoder_config: 3", "^decoder_config: "),
        ("further: {colour: red}", "^further: there is no such key"),
        ("nothing: [1, 2]", "^nothing: there is no such key"),
        ("decoder_config: {decoding_mode: [top_k, top_p]}", "^decoding_mode top_k needs decoder_top_k"),
    ],
)
def test_what_cannot_be_a_grid_is_named_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        combinations(parse_yaml(text, "f.yaml"))
    assert "\n" not in str(caught.value)


def test_an_empty_file_has_every_default_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert len(combinations(read_yaml(tmp_path / "empty.yaml"))) == 1
    with pytest.raises(ConfigurationError, match=r"none.yaml cannot be read: .*No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_overrides_replace_what_the_file_says_also_a_list() -> None:
    content = parse_yaml("fp_precision: [float32, bfloat16]\nmixed_precision: no", "f")
    changed = with_overrides(content, ["fp_precision=float32", "decoder_config.decoding_mode=greedy", "random_seed=7"])
    (only,) = combinations(changed)
    assert only.config is not None and only.config.mixed_precision == "no"
    assert (only.config.fp_precision, only.config.random_seed) == ("float32", 7)
    assert content["fp_precision"] == ["float32", "bfloat16"]


def test_a_key_that_is_overridden_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="^random_seed is given twice; give it once"):
        with_overrides({}, ["random_seed=1", "task_type=a", "random_seed=2"])


@pytest.mark.parametrize("override", ["fp_precision", "=3", "fp_precision.x=1"])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigurationError, match="override|not a group"):
        with_overrides({"fp_precision": "float32"}, [override])


def test_an_empty_group_can_be_overridden_and_merge_keys_are_yaml() -> None:
    (only,) = combinations(with_overrides({"decoder_config": None}, ["decoder_config.decoding_mode=greedy"]))
    assert only.config is not None
    text = "batching_options: {adaptive_batching: true}\n"
    assert parse_yaml(text + "decoder_config: {<<: {decoding_mode: top_k}, decoder_top_k: 3}", "f")[
        "decoder_config"
    ] == {
        "decoding_mode": "top_k",
        "decoder_top_k": 3,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [*a]", "line 1: the alias *a is not read; write its value out"),
        ("a: &a {k: 1}\nb: {<<: *a}", "line 2: the alias *a is not read; write its value out"),
        ("a: &one 1\nb: [2, *one]", "line 2: the alias *one is not read; write its value out"),
        ("a: " + "[" * 10000, "nested more than 50 deep"),
    ],
    ids=["itself", "merged", "value", "deep"],
)
def test_aliases_and_what_is_nested_too_deep_are_refused_in_a_line(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_yaml(text, "grid.yaml")
    assert str(caught.value).startswith("grid.yaml, ") and words in str(caught.value) and len(str(caught.value)) < 200


def test_a_grid_that_nobody_can_measure_is_refused_with_its_number(tmp_path: Path) -> None:
    long = list(range(1, 200))
    with pytest.raises(ConfigurationError, match="make 7880599 combinations, and at most 10000 are measured"):
        combinations({"max_output_tokens": long, "max_input_tokens": long, "num_input_prompts": long})
    (tmp_path / "large.yaml").write_text("#" * 200_000)
    with pytest.raises(ConfigurationError, match="has 200000 bytes, and at most 100000 are read"):
        read_yaml(tmp_path / "large.yaml")
