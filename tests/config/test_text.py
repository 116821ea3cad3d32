from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.config.text import TextConfig, published_form, validated
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination


def test_the_published_attributes_of_any_object_are_read_and_others_are_recorded() -> None:
    config = SimpleNamespace(
        fp_precision="float16",
        quantization_config={"quantization": True, "load_in_4bit": True, "load_in_8bit": False},
        batching_options={"batch_size___fixed_batching": 4, "adaptive_batching": None},
        decoder_config={
            "decoding_mode": "top_k",
            "decoder_temperature": 0.7,
            "decoder_top_k": 50,
            "decoder_top_p": None,
        },
        latency_simulation={"simulate": True, "delay_min": 0.05, "delay_max": 0.1, "simulate_burst": False},
        gpu_list=[0, 1],
        _private=3,
    )
    found = validated(config)
    assert found.fp_precision == "float16" and found.quantization_config.load_in_4bit
    assert found.batch_size == 4
    assert found.decoder_config.model_dump() == {
        "decoding_mode": "top_k",
        "decoder_temperature": 0.7,
        "decoder_top_k": 50,
        "decoder_top_p": None,
    }
    assert (found.latency_simulation.delay_min, found.latency_simulation.delay_max) == (0.05, 0.1)
    assert found.further == {"gpu_list": [0, 1]}


def test_attributes_of_a_class_and_properties_count_too() -> None:
    class Config:
        fp_precision = "float16"

        @property
        def max_output_tokens(self) -> int:
            return 7

    found = validated(Config())
    assert (found.fp_precision, found.max_output_tokens) == ("float16", 7)
    with pytest.raises(ConfigurationError, match="an object with attributes such as model_name"):
        validated(SimpleNamespace(colour="red"))


def test_the_published_form_may_be_changed_between_two_steps() -> None:
    config = published_form(max_output_tokens=5)
    assert validated(config) == validated({"max_output_tokens": 5})
    config.latency_simulation["simulate"] = True
    config.latency_simulation["delay_max"] = 0.5
    assert validated(config).latency_simulation.simulate and validated(config).latency_simulation.delay_max == 0.5
    assert validated(validated(config)) is not None


def test_adaptive_batches_have_no_fixed_size() -> None:
    assert validated({"batching_options": {"adaptive_batching": True}}).batch_size is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"precision": "float16"},
            r"^precision: there is no such key \(did you mean fp_precision\?\); known are .*_timeout_s$",
        ),
        (
            {"decoder_config": {"mode": 1}},
            "^decoder_config.mode: there is no such key.*; known are decoding_mode, decoder",
        ),
        ({"fp_precision": "fp16"}, r"^fp_precision: Input should be 'auto', .*\(given: 'fp16'\)$"),
        ({"max_output_tokens": "5"}, r"^max_output_tokens: .*valid integer; write 5 without quotes \(given: '5'\)"),
        ({"random_seed": True}, "^random_seed: .*valid integer"),
        ({"random_seed": 2**32}, "^random_seed 4294967296 is not possible; give at most 4294967295$"),
        ({"latency_simulation": {"delay_min": float("inf")}}, "^latency_simulation.delay_min inf .* finite number$"),
        ({"batching_options": {"batch_size___fixed_batching": 0}}, "batch_size___fixed_batching 0 .* at least 1$"),
        ({"num_input_prompts": 0, "max_input_tokens": 0}, "^num_input_prompts 0 .*; 1 more like it$"),
        ({"model_name": " "}, "^model_name is empty"),
        ({"custom_metrics": ["rate"]}, "names 'rate'; write package.module:function"),
        ({"custom_metrics": ["a-b:c"]}, "names 'a-b:c'"),
        ({"task_type": "../up"}, "task_type '../up' is part of file names"),
        ({"country_iso_code": "de"}, "^country_iso_code"),
        (7, "^a text experiment was expected .* found int$"),
    ],
)
def test_what_is_not_allowed_is_named_in_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        validated(given)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, ImpossibleCombination)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization_config": {"quantization": True}}, "exactly one of load_in_4bit and load_in_8bit"),
        (
            {"quantization_config": {"quantization": True, "load_in_4bit": True, "load_in_8bit": True}},
            "exactly one of load_in_4bit and load_in_8bit",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, "need quantization_config.quantization: true"),
        (
            {"quantization_config": {"quantization": True, "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}},
            "bnb_4bit_quant_type fp4 needs load_in_4bit",
        ),
        (
            {"fp_precision": "float8", "quantization_config": {"quantization": True, "load_in_8bit": True}},
            "float8 quantises the weights itself",
        ),
        ({"decoder_config": {"decoding_mode": "top_k"}}, "decoding_mode top_k needs decoder_top_k"),
        ({"decoder_config": {"decoding_mode": "top_p"}}, "decoding_mode top_p needs decoder_top_p"),
        ({"decoder_config": {"decoding_mode": "temperature"}}, "needs decoder_temperature"),
        (
            {"decoder_config": {"decoding_mode": "top_k", "decoder_top_k": 5, "decoder_temperature": 0}},
            "leaves top_k nothing to draw",
        ),
        ({"latency_simulation": {"delay_min": 2.0, "delay_max": 1.0}}, "delay_min 2.0 is more than delay_max 1.0"),
        ({"latency_simulation": {"simulate_burst": True}}, "simulate_burst needs simulate"),
        ({"prompts": {"path": "a.txt", "dataset_name": "b"}}, "choose one"),
        ({"prompts": {"path": "a.txt", "revision": "main"}}, "belong to prompts.dataset_name"),
        ({"energy": "required", "track_energy": False}, "track_energy: false contradict each other"),
    ],
)
def test_values_that_contradict_each_other_are_distinguished_from_wrong_ones(given: object, message: str) -> None:
    with pytest.raises(ImpossibleCombination, match=message):
        validated(given)


def test_values_without_effect_do_not_make_another_experiment() -> None:
    def effective(**values: object) -> TextConfig:
        return validated(values).effective()

    plain = effective()
    assert effective(decoder_config={"decoding_mode": "greedy", "decoder_top_k": 50}) == plain
    assert effective(batching_options={"adaptive_max_tokens": 7}) == plain
    assert effective(latency_simulation={"delay_max": 3.0}) == plain
    assert effective(batching_options={"batch_size___fixed_batching": 7}) != plain
    assert effective(random_seed=7) == plain
    assert effective(random_seed=7, latency_simulation={"simulate": True, "delay_max": 1.0}) != effective(
        random_seed=8, latency_simulation={"simulate": True, "delay_max": 1.0}
    )
    in_4bit = {"quantization": True, "load_in_4bit": True}
    assert effective(quantization_config=in_4bit) == effective(
        quantization_config={**in_4bit, "bnb_4bit_quant_type": "nf4"}
    )
    adaptive = {"adaptive_batching": True}
    assert effective(batching_options=adaptive) == effective(
        batching_options={**adaptive, "batch_size___fixed_batching": 7}
    )
    drawn = {"decoding_mode": "top_k", "decoder_top_k": 5}
    assert effective(decoder_config=drawn) == effective(decoder_config={**drawn, "decoder_top_p": 0.5})
    assert effective(decoder_config=drawn) != effective(decoder_config={**drawn, "decoder_temperature": 0.5})


@pytest.mark.parametrize(
    ("given", "requested"),
    [
        ({}, "optional"),
        ({"energy": "required"}, "required"),
        ({"energy": "optional"}, "optional"),
        ({"energy": False}, "off"),  # a bare `off` in YAML
        ({"track_energy": False}, "off"),
        ({"track_energy": False, "energy": "optional"}, "off"),
    ],
)
def test_energy_is_wanted_unless_either_key_says_no(given: dict[str, Any], requested: str) -> None:
    assert validated(given).energy_mode == requested


def test_energy_that_is_off_by_its_older_name_stays_so_in_the_published_form() -> None:
    config = published_form(track_energy=False)
    assert (config.energy, validated(config).energy_mode) == ("off", "off")
    assert (
        validated({"track_energy": False}).effective()
        == validated({"energy": "off", "track_energy": False}).effective()
    )


def test_energy_has_three_values() -> None:
    with pytest.raises(ConfigurationError, match="energy: .*required"):
        validated({"energy": "sometimes"})


def test_a_number_that_yaml_reads_as_text_is_named_with_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match=r"; write 0\.1 without quotes \(given: '1e-1'\)"):
        validated({"decoder_config": {"decoding_mode": "temperature", "decoder_temperature": "1e-1"}})
