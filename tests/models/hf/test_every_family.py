"""Every text family through the driver once: the reference answers as the untouched model's own `generate()`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from tests.models.depth_families import LISTED, RECURRENT, WHOLE
from tests.models.knob_families import BY_THETA_FAMILIES, TEXT_FAMILIES, UNTRIED_FAMILIES, indexed
from tests.models.other_lists import NONE_LISTED, OTHER_LISTS
from tests.models.tiny_checkpoints import UNBATCHABLE_FAMILIES, _Ids, _tokenizer
from tests.models.tiny_families import config_class

QUESTIONS = ("Why?", "What is the capital of France?")
NEW_TOKENS = 4
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, **_FACTORS}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def _of(name: str, **chosen: Any) -> Any:
    return lambda: config_class(name)(**{**_SIZES, **chosen})


FAMILIES: dict[str, Any] = {
    **LISTED,
    **RECURRENT,
    **{name: make for name, (make, _) in WHOLE.items()},
    # The logits of the others are tested beside the knob of blocks.
    **{name: OTHER_LISTS[name] for name in ("gpt2", "bloom", "dbrx", "opt")},
    **NONE_LISTED,
    **{
        name: lambda family=family: family.make((0, 1, 2, 3), family.top_k or 0)
        for name, family in {
            **TEXT_FAMILIES,
            **BY_THETA_FAMILIES,
            **UNTRIED_FAMILIES,
            "hy_v4": indexed("HYV4Config", "full", "shared", "full", "shared"),
        }.items()
    },
    **{
        name: lambda name=name: UNBATCHABLE_FAMILIES[name].config(_Ids(_tokenizer({})))
        for name in ("deepseek_v4", "doge")
    },
    # Its blocks choose other numbers of experts by themselves.
    "hunyuan_v1_moe": _of("HunYuanMoEV1Config", head_dim=8, num_experts=6, moe_topk=[3, 2, 4, 1]),
    # Prompts of 22 and 48 tokens: below and above the length before the positions are stretched.
    "phi3, longrope": _of("Phi3Config", max_position_embeddings=256, rope_parameters=_LONGROPE),
    "llama, dynamic": _of("LlamaConfig", max_position_embeddings=24, rope_parameters=_DYNAMIC),
}


def write(name: str, folder: Path) -> None:
    tokenizer = _tokenizer({})
    config = FAMILIES[name]()
    config.vocab_size = len(tokenizer)
    marks = {each: getattr(tokenizer, each) for each in ("pad_token_id", "eos_token_id", "bos_token_id")}
    for each, value in marks.items():
        setattr(config, each, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**marks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def raw_answer(folder: Path, prompt: str) -> str:
    """Of a model through which nothing but this prompt has run."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answered = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    text: str = tokenizer.decode(answered[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_is_the_model_itself(name: str, tmp_path: Path) -> None:
    folder, data, out = tmp_path / "model", tmp_path / "questions.jsonl", tmp_path / "out"
    write(name, folder)
    data.write_text("".join(json.dumps({"question": each, "answer": "x"}) + "\n" for each in QUESTIONS))
    flags = ["--model_path", str(folder), "--data_file", str(data), "--output_dir", str(out), "--device", "cpu"]
    flags += ["--ignore_eos", "--max_new_tokens", str(NEW_TOKENS), "--num_runs_per_sample", "1"]
    flags += ["--max_warmup_runs", "1", "--num_threads", "1"]
    # That its routers do not show what they choose is known only of the loaded model.
    flags += ["--top_k_list", "2"] if name == "jetmoe" else []
    run_profiling(parse_config(flags))
    results = [json.loads(path.read_text()) for path in out.glob("questions_imgsize*.json")]
    (reference,) = (each for each in results if each["is_reference"])
    assert len(results) == (1 if reference["top_k"] is None or name in ("jetmoe", "dbrx") else 2)
    assert reference["failed_samples"] == []
    found = {each["metadata"]["prompt"]: each["pred"] for each in reference["per_sample_results"]}
    assert len(found) == 2 and found == {prompt: raw_answer(folder, prompt) for prompt in found}
