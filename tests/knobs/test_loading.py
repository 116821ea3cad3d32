"""The knobs that are turned by loading the model once more: names, order, what they need, and their proof."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.knobs.loading import (
    ATTENTION,
    ENGINE,
    LOADING_KNOBS,
    NUMBER_FORMAT,
    QUANTIZED,
    LoadingKnob,
    config_of_loading,
    loading_name,
    loading_of,
)
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct

HERE = KnobLimits(4, None, None)
SERVED = KnobLimits(None, None, None, variants=("a",))
BOTH = Setting.of(top_k=2, number_format="bfloat16", attention="flash_attention_2", quantized="own")


def request(limits: KnobLimits, **flags: Any) -> KnobRequest:
    every = dict.fromkeys(knob.flag for knob in LOADING_KNOBS if isinstance(knob, LoadingKnob))
    return KnobRequest(SimpleNamespace(**{**every, **flags}), limits, "m", None, False)


def test_a_key_names_what_differs_from_the_run_and_is_read_back() -> None:
    assert BOTH.key == "topk2_format-bfloat16_attn-flash-attention-2"
    assert Setting.named(BOTH.key) == BOTH
    assert Setting.named("topk2_quant-8bit_run-eager").levels == {"top_k": 2, "quantized": "8bit", "engine": "eager"}
    with pytest.raises(ConfigurationError, match="not a key"):
        Setting.named("topk2_format-float31")


def test_a_loading_is_what_the_model_has_otherwise_than_the_run() -> None:
    assert loading_of(Setting.of(top_k=2)) == () and config_of_loading(()) == {}
    assert loading_name(()) == "as it is" and loading_name(loading_of(BOTH)) == "bfloat16 flash_attention_2"
    assert config_of_loading(loading_of(BOTH)) == {
        "precision": "bfloat16",
        "attn_implementation": "flash_attention_2",
    }


@pytest.mark.parametrize(
    ("knob", "values"), [(NUMBER_FORMAT, ("own", "float16")), (QUANTIZED, ("4bit",)), (ATTENTION, ("eager", "own"))]
)
def test_values_are_of_a_model_here_and_no_server_takes_them(knob: LoadingKnob, values: tuple[str, ...]) -> None:
    assert knob.requested(request(HERE, **{knob.flag: values})).values == values
    assert knob.requested(request(HERE)).values == ("own",) and knob.requested(request(SERVED)).values == ("own",)
    with pytest.raises(ConfigurationError, match=f"--{knob.flag} .* cannot be set in m: the server of --endpoint"):
        knob.requested(request(SERVED, **{knob.flag: tuple(each for each in values if each != "own")}))


def test_what_the_runs_own_flags_load_is_not_loaded_twice() -> None:
    asked = replace(
        request(HERE, precision_list=("float32", "bfloat16", "own"), quantization_list=("none", "8bit")),
        loaded_with={"number_format": "float32", "quantized": "none", "engine": "auto"},
    )
    assert NUMBER_FORMAT.requested(asked).values == ("own", "bfloat16")
    assert QUANTIZED.requested(asked).values == ("own", "8bit") and ENGINE.requested(asked).values == ("own",)
    # What becomes of a value that is none of its own is said.
    assert NUMBER_FORMAT.requested(asked).impossible == (
        "--precision_list float32 is how the model as it is, own, is loaded, and is measured once",
    )
    assert ENGINE.requested(asked).impossible == ()


def test_fewer_bits_and_faster_ways_come_first_and_the_runs_own_last() -> None:
    assert sorted(("own", "float32", "float16", "bfloat16"), key=NUMBER_FORMAT.order) == [
        "float16", "bfloat16", "float32", "own",
    ]  # fmt: skip
    assert sorted(("eager", "own", "kernels"), key=ENGINE.order) == ["kernels", "eager", "own"]


def test_a_copy_that_is_what_the_model_is_already_did_not_act() -> None:
    described = {"dtype": "float32", "execution_stages": {"decode": "modules"}, "quantisation": None}
    eight = {"method": "bitsandbytes", "settings": {"load_in_8bit": True}}

    def proven(knob: LoadingKnob, value: str, **otherwise: Any) -> object:
        model = SimpleNamespace(describe=lambda: described, described_at=lambda setting: {**described, **otherwise})
        return knob.prove(None, Setting({knob.name: value}), model)

    assert proven(NUMBER_FORMAT, "bfloat16", dtype="bfloat16") is None
    assert proven(QUANTIZED, "8bit", quantisation=eight) is None
    assert proven(ENGINE, "kernels", execution_stages={"decode": "cpu step"}) is None
    # At rest nothing has to differ.
    assert proven(NUMBER_FORMAT, "own") is None
    for knob, value in ((NUMBER_FORMAT, "float32"), (QUANTIZED, "none"), (ENGINE, "eager")):
        with pytest.raises(KnobDidNotAct, match="as in the model as it is; leave the value out"):
            proven(knob, value)
