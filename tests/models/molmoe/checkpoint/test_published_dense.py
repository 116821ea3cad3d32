"""Dense Molmo models as they are published: beside plain torch, and their decoders beside those of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Olmo2Config, Olmo2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from experiment_core_utils.b_model_loader import find_model, load_model_tokenizer
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.molmoe.checkpoint.published import (
    load_published_checkpoint,
    native_shapes,
    published_layout,
)
from experiment_core_utils.models.molmoe.checkpoint.published_config import config_from_published
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.molmoe.dense_folder import CONFIGS, SPECIAL_IDS, dense_shapes, dense_tensors, write_dense_folder
from tests.models.molmoe.executions import eager_and_graph
from tests.models.molmoe.plain_dense import plain_logits
from tests.models.molmoe.published_folder import write_published_tokenizer
from tests.models.molmoe.test_goldens import as_patches
from tests.same_floats import assert_same_floats

KINDS = list(CONFIGS)
PROMPT = " User: which colour is the circle? Assistant:"
IDS = torch.tensor([[9, 30, 77, 511, 12, 12, 100, 64, 3, 250, 8]])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense_folder(tmp_path_factory.mktemp("dense") / kind, kind)


def picture() -> np.ndarray:
    """400 x 700 pixels, so that the canvas has padding: tiling (1, 3) with 4 crops."""
    return np.random.RandomState(3).randint(0, 256, (400, 700, 3)).astype(np.uint8)


@torch.no_grad()
def test_a_request_with_a_picture_gives_the_logits_of_plain_torch(kind: str, folder: Path) -> None:
    processor = load_processor(find_model(str(folder)))
    inputs = processor(PROMPT, picture())
    ids, special = inputs["input_ids"][0], SPECIAL_IDS[kind]
    assert ids[:2].tolist() == [special["<|endoftext|>"], special["<im_start>"]]
    assert int((ids == special["<im_patch>"]).sum()) == int((inputs["image_input_idx"] >= 0).sum())
    assert bool(((inputs["image_masks"] >= 0) & (inputs["image_masks"] < 1)).any())
    found = load_published_checkpoint(folder, torch.float32)(**inputs).logits[0]
    given = as_patches(inputs["pixel_values"][0]), inputs["image_masks"][0], inputs["image_input_idx"][0]
    expected = plain_logits(CONFIGS[kind], dense_tensors(CONFIGS[kind]), ids, given)
    assert found.std() > 0.3
    assert_same_floats(found, expected)


def official(kind: str) -> Qwen2ForCausalLM | Olmo2ForCausalLM:
    """The decoder as transformers' own model, its tensors put there by hand; rows of the head that the published one
    has not are zero.
    """
    config, tensors = CONFIGS[kind], dense_tensors(CONFIGS[kind])
    text = {name.removeprefix("model.transformer."): tensor for name, tensor in tensors.items()}
    table = torch.cat([text["wte.embedding"], text["wte.new_embedding"]])
    sizes = {
        "hidden_size": 128, "intermediate_size": config["intermediate_size"] // 2, "num_hidden_layers": 3,
        "num_attention_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": len(table),
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
    }  # fmt: skip
    model: Any = (
        Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2))
        if kind == "7B-D"
        else Olmo2ForCausalLM(Olmo2Config(**sizes, eos_token_id=0, pad_token_id=1))
    )
    first, second = (
        ("input_layernorm", "post_attention_layernorm")
        if kind == "7B-D"
        else ("post_attention_layernorm", "post_feedforward_layernorm")
    )
    head = torch.cat([text["ff_out.weight"], torch.zeros_like(text["wte.new_embedding"])])
    state = {"model.embed_tokens.weight": table, "model.norm.weight": text["ln_f.weight"], "lm_head.weight": head}
    for block in range(3):
        at, to, inner = f"blocks.{block}.", f"model.layers.{block}.", config["intermediate_size"] // 2
        kv = (len(text[at + "att_proj.weight"]) - 128) // 2
        for kind_of in ("weight", "bias") if config["qkv_bias"] else ("weight",):
            parts = text[f"{at}att_proj.{kind_of}"].split([128, kv, kv])
            state |= {f"{to}self_attn.{c}_proj.{kind_of}": part for c, part in zip("qkv", parts, strict=True)}
        if config["attention_layer_norm"]:
            state |= {f"{to}self_attn.{c}_norm.weight": text[f"{at}{c}_norm.weight"] for c in "qk"}
        state |= {
            f"{to}self_attn.o_proj.weight": text[at + "attn_out.weight"],
            f"{to}mlp.up_proj.weight": text[at + "ff_proj.weight"][:inner],
            f"{to}mlp.gate_proj.weight": text[at + "ff_proj.weight"][inner:],
            f"{to}mlp.down_proj.weight": text[at + "ff_out.weight"],
            f"{to}{first}.weight": text[at + "attn_norm.weight"],
            f"{to}{second}.weight": text[at + "ff_norm.weight"],
        }
    model.load_state_dict(state)
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def test_the_decoder_is_the_official_one_of_transformers(kind: str, folder: Path) -> None:
    model, theirs = load_published_checkpoint(folder, torch.float32), official(kind)
    rows = CONFIGS[kind]["embedding_size"]
    assert_same_floats(model(IDS).logits, theirs(IDS).logits[..., :rows])
    added = list(range(rows, rows + 128))
    greedy = GenerationConfig(do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=0, pad_token_id=1)
    expected = theirs.generate(IDS, generation_config=greedy, suppress_tokens=added)
    found = model.generate(IDS, generation_config=greedy)
    assert len(set(expected[0, IDS.shape[1] :].tolist())) > 4
    assert torch.equal(found, expected)


@torch.no_grad()
def test_the_language_model_alone_reads_no_tensor_of_pictures(kind: str, folder: Path) -> None:
    model, tokenizer = load_model_tokenizer({"model_name": str(folder), "device": "cpu", "fp_precision": "float32"})
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (0, "left")
    assert not any("vision" in name for name, _ in model.named_parameters())
    assert_same_floats(model(IDS).logits, load_published_checkpoint(folder, torch.float32)(IDS).logits)


@torch.no_grad()
def test_engines_and_skipped_blocks_give_what_the_blocks_left_give(kind: str, folder: Path) -> None:
    """Blocks 0 and 2 of the three, in plain torch under the names of a model of two."""
    kept = {"blocks.0.": "blocks.0.", "blocks.2.": "blocks.1."}
    tensors = {}
    for name, tensor in dense_tensors(CONFIGS[kind]).items():
        old = next((old for old in kept if f"transformer.{old}" in name), None)
        tensors[name if old is None else name.replace(old, kept[old])] = tensor
    expected = plain_logits(CONFIGS[kind] | {"num_hidden_layers": 2}, tensors, IDS[0])[-1]
    for execution, model in eager_and_graph(folder).items():
        model.model.set_knobs(None, (0, 2))
        logits, _ = model.prefill({"input_ids": IDS}, None)
        assert_same_floats(logits[0], expected)
        ways = set(model.describe()["execution_stages"].values())
        assert ways == ({"modules"} if execution == "eager" else {"cpu blocks", "cpu step"})


def test_a_run_turns_its_knobs_and_has_none_of_experts(kind: str, folder: Path, tmp_path: Path) -> None:
    flags = ["--model_path", str(folder), "--output_dir", str(tmp_path), "--num_samples", "1", "--tier_list", "low",
             "--visual_token_keep_list", "0.5", "--num_active_blocks_list", "2", "--num_runs_per_sample", "1",
             "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference", "--max_new_tokens", "3",
             "--device", "cpu", "--num_threads", "1"]  # fmt: skip
    report = run_profiling(parse_config(flags))
    assert (report.exit_code, report.failed, len(report.results)) == (0, {}, 1)
    content = report.results[0].content()
    assert (content["top_k"], content["num_active_blocks"]) == (None, 2)
    assert content["provenance"]["model"]["num_experts"] is None
    for knob in (["--top_k_list", "1"], ["--expert_mass_list", "0.5"]):
        with pytest.raises(ConfigurationError, match="the model is dense"):
            run_profiling(parse_config([*flags, *knob]))


# --- sizes and refusals ---------------------------------------------------------------------------------------------


def test_the_published_7b_d_has_the_size_of_its_index(tmp_path: Path) -> None:
    """`total_size` in its model.safetensors.index.json is 32,084,101,120 bytes of float32."""
    write_published_tokenizer(tmp_path)
    changes = {
        "hidden_size": 3584, "intermediate_size": 37888, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "embedding_size": 152064, "vocab_size": 152064,
    }  # fmt: skip
    published = {key: value for key, value in CONFIGS["7B-D"].items() if not key.startswith("vi")} | changes
    config = config_from_published(published, tmp_path)
    layout = published_layout(config, native_shapes(config))
    assert 4 * sum(torch.Size(each.shape).numel() for each in layout.values()) == 32_084_101_120


def test_the_layout_has_the_published_names_and_shapes(kind: str, folder: Path) -> None:
    config = config_from_published(json.loads((folder / "config.json").read_text()), folder)
    layout = published_layout(config, native_shapes(config))
    assert {name: tuple(each.shape) for name, each in layout.items()} == dense_shapes(CONFIGS[kind])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_after": True}, "blocks of no native decoder: attention_layer_norm False, norm_after True, qkv_bias T"),
        ({"layer_norm_type": "default", "clip_qkv": 8.0}, "does not do: clip_qkv 8.0, layer_norm_type 'default'"),
        ({"hidden_size": "wide"}, "a value that cannot be used"),
    ],
)
def test_another_dense_molmo_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_model(str(write_dense_folder(tmp_path / "other", "7B-D", **changes)))
    assert "\n" not in str(caught.value)


def test_a_config_without_a_key_and_a_tokenizer_without_a_token_are_named(tmp_path: Path) -> None:
    folder = write_dense_folder(tmp_path / "model", "7B-O")
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    for file in (tokenizer, folder / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("<im_col>", "<other>"))
    with pytest.raises(ConfigurationError, match="is not a Molmo's: it lacks <im_col>"):
        find_model(str(folder))
    tokenizer.write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "rope_theta"}))
    with pytest.raises(ConfigurationError, match="lacks the key 'rope_theta'"):
        find_model(str(folder))
