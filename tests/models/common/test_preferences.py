"""A checkpoint's preferences: what is kept does what transformers' own `generate()` does, in every way of running."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.config.text import validated
from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.engines.greedy import generate_greedily
from experiment_core_utils.measuring.text_generator import TextGenerator
from experiment_core_utils.models.common.preferences import (
    NO_PREFERENCES,
    Preferences,
    decoding_caveats,
    preferences_in,
    preferences_of,
)
from experiment_core_utils.models.common.text_generation import generation_values
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.primitives.device import NoMarks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import TokenisedPrompts
from tests.models.tiny_checkpoints import write_checkpoint

CPU = torch.device("cpu")
NEW_TOKENS = 12
# Every kept preference on its own, and several together. Token 258 ends an answer.
CASES: Mapping[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 2.5},
    "n-grams": {"no_repeat_ngram_size": 1},
    "forbidden": {"suppress_tokens": list(range(0, 250, 2))},
    "forbidden first": {"begin_suppress_tokens": list(range(0, 200))},
    "words": {"bad_words_ids": [[token] for token in range(0, 250, 3)]},
    "bias": {"sequence_bias": [[[7], 30.0]]},
    "least": {"min_new_tokens": 9},
    "least in all": {"min_length": 16},
    "several": {"repetition_penalty": 1.3, "suppress_tokens": [1, 2, 3], "min_new_tokens": 5, "temperature": 0.5},
}
PROMPTS = ("ab", "a longer prompt", "abc abc abc ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def preferring(folder: Path, tmp_path: Path, **values: Any) -> Path:
    """The checkpoint with these values in its `generation_config.json`."""
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    own = json.loads((folder / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**own, **values}))
    return tmp_path


def loaded(folder: Path) -> TransformersModel:
    config = parse_config(["--model_path", str(folder), "--device", "cpu"])
    model = find_model(str(folder)).load(config.model, CPU)
    assert isinstance(model, TransformersModel)
    return model


def official(model: Any, ids: torch.Tensor, values: Mapping[str, Any], eos: int) -> list[int]:
    """The answer of `generate()` with these values in its config; `eos` is made likely, so that answers end early."""
    config = GenerationConfig(
        **{name: value for name, value in values.items() if name != "temperature"},
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    before, model.generation_config = model.generation_config, config
    try:
        found: list[int] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[
            0, ids.shape[1] :
        ].tolist()
    finally:
        model.generation_config = before
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_running_gives_the_answers_of_generate(name: str, folder: Path, tmp_path: Path) -> None:
    values = CASES[name]
    model = loaded(preferring(folder, tmp_path, **values))
    plain = model.model
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in map(ids_of, PROMPTS)]
    # The fourth token of the first answer ends answers from here on.
    eos = official(plain, inputs[0]["input_ids"], {}, -1)[3]
    plain.generation_config.eos_token_id = eos
    model.eos_token_ids = frozenset([eos])
    expected = [official(plain, each["input_ids"], values, eos) for each in inputs]
    without = [official(plain, each["input_ids"], {}, eos) for each in inputs]
    assert (expected == without) == (not values)
    for each, wanted in zip(inputs, expected, strict=True):
        assert list(model.generate_timed(each, NEW_TOKENS, NoMarks()).token_ids) == wanted
        assert list(generate_greedily(model, each, NEW_TOKENS, NoMarks()).token_ids) == wanted
    # Padded on the left: padding is no token of a prompt.
    assert [list(row) for row in model.answer_batch(inputs, NEW_TOKENS)] == expected
    text = TextGenerator(plain, text_values(model, eos), 7, model.ends, preferences=model.preferences)
    assert text.generate(padded(inputs), 0, NEW_TOKENS).token_ids[1][: len(expected[1])] == expected[1]


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[3 + ord(letter) % 90 for letter in text]])


def padded(inputs: list[dict[str, torch.Tensor]]) -> TokenisedPrompts:
    longest = max(each["input_ids"].shape[1] for each in inputs)
    pad = torch.nn.functional.pad
    rows = {
        name: torch.cat([pad(each[name], (longest - each[name].shape[1], 0)) for each in inputs])
        for name in ("input_ids", "attention_mask")
    }
    return TokenisedPrompts(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])


def text_values(model: TransformersModel, eos: int) -> GenerationConfig:
    config = validated({"max_output_tokens": NEW_TOKENS})
    values = generation_values(config, model.model, model.requests.tokenizer, model.preferences)
    values.eos_token_id = eos
    return values


def test_what_is_kept_and_left_out_is_told_apart() -> None:
    found = preferences_of(
        {
            "repetition_penalty": 1.05, "do_sample": True, "temperature": 0.1, "top_p": 1.0, "num_beams": 4,
            "suppress_tokens": [5, 6], "min_length": 0, "forced_eos_token_id": 9, "eos_token_id": 2,
            "transformers_version": "5", "no_repeat_ngram_size": None, "bad_words_ids": [],
        },
        None,
        "m",
    )  # fmt: skip
    assert found.kept == {"repetition_penalty": 1.05, "suppress_tokens": [5, 6]}
    assert found.left_out == {"do_sample": True, "temperature": 0.1, "num_beams": 4, "forced_eos_token_id": 9}
    assert found.lines("m")[0] == (
        "decoding: of m's generation_config.json kept repetition_penalty 1.05, suppress_tokens [5, 6]; "
        "left out do_sample True, temperature 0.1, num_beams 4, forced_eos_token_id 9"
    )
    assert [each.figures for each in decoding_caveats(found.left_out)] == [
        {"names": ["num_beams", "forced_eos_token_id"]}
    ]
    assert decoding_caveats({"temperature": 0.1, "top_k": 5}) == []
    nothing = found.nothing_kept()
    assert nothing.kept == {} and nothing.left_out.keys() == found.kept.keys() | found.left_out.keys()
    assert NO_PREFERENCES.lines("m") == [] and not Preferences({"stop_strings": ["x"]}).change_logits


def test_stop_strings_that_are_one_special_token_end_an_answer(folder: Path, tmp_path: Path) -> None:
    model = loaded(preferring(folder, tmp_path, stop_strings=["<pad>", "\n\n", "never"]))
    pad = model.requests.tokenizer.pad_token_id
    assert model.preferences.kept == {"stop_strings": ["<pad>"]}
    assert model.preferences.left_out == {"stop_strings": ["\n\n", "never"]}
    assert pad in model.eos_token_ids and len(model.eos_token_ids) == 2


def test_what_is_in_force_is_described_with_the_template(folder: Path, tmp_path: Path) -> None:
    found = loaded(preferring(folder, tmp_path, repetition_penalty=1.2, top_p=0.9)).describe()["decoding"]
    assert found["kept"] == {"repetition_penalty": 1.2} and found["left_out"] == {"top_p": 0.9}
    assert found["chat_template_sha256"] is None and len(found["eos_token_ids"]) == 1
    templated = loaded(write_checkpoint("olmoe", tmp_path / "olmoe")).describe()["decoding"]
    assert (templated["kept"], templated["left_out"]) == ({}, {})
    assert len(templated["chat_template_sha256"]) == 64


def test_with_a_preference_no_graph_chooses_the_tokens(folder: Path) -> None:
    """Graphs that replay choose the likeliest token themselves; the reason is in the record."""
    for penalty, execution in ((None, "graph"), (1.2, "eager")):
        plain = loaded(folder)
        plain.model.generation_config.repetition_penalty = penalty
        found = TransformersModel("m", plain.model, plain.requests, "graph", Reruns()).describe()
        assert found["execution"] == execution
        assert (found["execution_reason"] is None) == (penalty is None)
    assert found["execution_reason"].startswith("the checkpoint prefers repetition_penalty, applied between the logits")
    plain.model.generation_config.repetition_penalty = 1.2
    # What hinders own kernels as it does graphs is said once.
    chosen = TransformersModel("m", plain.model, plain.requests, "auto", Reruns()).describe()
    assert chosen["execution_reason"] == found["execution_reason"]


def test_raw_logits_are_the_models_own(folder: Path, tmp_path: Path) -> None:
    model = loaded(preferring(folder, tmp_path, suppress_tokens=[5, 6]))
    inputs = {"input_ids": ids_of("abc"), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with torch.inference_mode():
        own = model.model(**inputs).logits[:, -1]
        applied, _ = model.prefill(inputs, None)
        with model.raw_logits():
            raw, state = model.prefill(inputs, None)
        torch.testing.assert_close(raw, own)
        # Forbidden tokens are the least of all finite numbers, for checks that logits are finite.
        assert applied[0, [5, 6]].tolist() == [torch.finfo(torch.float32).min] * 2
        torch.testing.assert_close(applied[0, 7:], own[0, 7:])
        after = model.decode_step(torch.tensor([[7]]), state)
        assert after[0, 5] > torch.finfo(torch.float32).min and model.preferences.kept


def test_a_plan_says_what_is_kept_and_left_out(folder: Path, tmp_path: Path) -> None:
    source = find_model(str(preferring(folder, tmp_path, repetition_penalty=1.2, num_beams=3)))
    assert source.decoding_preferences().lines(source.name) == [
        f"decoding: of {tmp_path}'s generation_config.json kept repetition_penalty 1.2; left out num_beams 3",
        "warning: decoding: the checkpoint prefers num_beams, which this run leaves out; "
        "do not compare its accuracy with that of the model's card",
    ]
    source = find_model(str(folder))
    assert source.decoding_preferences().lines(source.name) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"repetition_penalty": "much"}', "generation_config.json of m has a value that cannot be used"),
        ('{"repetition_penalty": -1.0}', "generation_config.json of m has a value that cannot be used"),
        ('{"bad_words_ids": [3]}', "generation_config.json of m has a value that cannot be used"),
        ("[1]", "is not an object of names and values"),
        ("{", "cannot be read"),
    ],
)
def test_values_that_cannot_be_used_are_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=message) as error:
        preferences_in(tmp_path, None, "m")
    assert "\n" not in str(error.value)
    assert preferences_in(tmp_path / "none", None, "m") is NO_PREFERENCES
