"""The layout of the original training code, made by hand from native weights, converted and loaded again."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.models.common.checkpoint_files import find_tensors
from experiment_core_utils.models.molmoe.checkpoint.original import convert_original_checkpoint
from experiment_core_utils.models.molmoe.checkpoint.published import load_published_checkpoint
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from tests.models.molmoe.golden_model import golden_model, load_goldens
from tests.models.molmoe.published_folder import write_published_tokenizer
from tests.models.molmoe.test_goldens import CASES, request_for
from tests.same_floats import assert_same_floats

EXPERTS, INNER = 16, 32


@torch.no_grad()
def logits_of(model: MolmoeForConditionalGeneration) -> torch.Tensor:
    return model(**request_for(CASES["small"], load_goldens()), logits_to_keep=1).logits


@cache
def original_tensors() -> dict[str, torch.Tensor]:
    """The golden model's weights by the original names: the inverse of the conversion, written out."""
    native = golden_model().state_dict()
    tensors = {
        "transformer.wte.embedding": native["model.language_model.embed_tokens.weight"][:50304],
        "transformer.wte.new_embedding": native["model.language_model.embed_tokens.weight"][50304:],
        "transformer.ln_f.weight": native["model.language_model.norm.weight"],
        "transformer.ff_out.weight": native["lm_head.weight"],
    }
    for block in range(3):
        new, old = f"transformer.blocks.{block}.", f"model.language_model.layers.{block}."
        attention = old + "self_attn."
        tensors[new + "att_proj.weight"] = torch.cat([native[f"{attention}{letter}_proj.weight"] for letter in "qkv"])
        tensors[new + "attn_out.weight"] = native[attention + "o_proj.weight"]
        tensors[new + "q_norm.weight"] = native[attention + "q_norm.weight"]
        tensors[new + "k_norm.weight"] = native[attention + "k_norm.weight"]
        tensors[new + "attn_norm.weight"] = native[old + "input_layernorm.weight"]
        tensors[new + "ff_norm.weight"] = native[old + "post_attention_layernorm.weight"]
        tensors[new + "ffn.router.layer.weight"] = native[old + "mlp.gate.weight"]
        gate_up, down = native[old + "mlp.experts.gate_up_proj"], native[old + "mlp.experts.down_proj"]
        tensors[new + "ffn.experts.mlp.w1"] = torch.cat([gate_up[expert, :INNER] for expert in range(EXPERTS)])
        tensors[new + "ffn.experts.mlp.v1"] = torch.cat([gate_up[expert, INNER:] for expert in range(EXPERTS)])
        tensors[new + "ffn.experts.mlp.w2"] = torch.cat([down[expert].T for expert in range(EXPERTS)])
    return tensors | original_vision_tensors(native)


def original_vision_tensors(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tower, vit = "model.vision_tower.", "vision_backbone.image_vit."
    patches = native[tower + "embeddings.patch_embedding.weight"]
    tensors = {
        vit + "class_embedding": native[tower + "embeddings.class_embedding"],
        vit + "positional_embedding": native[tower + "embeddings.position_embedding.weight"],
        vit + "patch_embedding.weight": patches.permute(0, 2, 3, 1).reshape(len(patches), 588),
        "vision_backbone.pad_embed": native["model.connector.pad_embed"],
    }
    pairs = [(vit + "pre_ln", tower + "pre_layernorm")]
    for block in range(5):
        new, old = f"{vit}transformer.resblocks.{block}.", f"{tower}layers.{block}."
        pairs += [
            (new + "attention.wq", old + "self_attn.q_proj"),
            (new + "attention.wk", old + "self_attn.k_proj"),
            (new + "attention.wv", old + "self_attn.v_proj"),
            (new + "attention.wo", old + "self_attn.out_proj"),
            (new + "attention_norm", old + "layer_norm1"),
            (new + "ffn_norm", old + "layer_norm2"),
            (new + "feed_forward.w1", old + "mlp.fc1"),
            (new + "feed_forward.w2", old + "mlp.fc2"),
        ]
    pairs += [
        (f"vision_backbone.image_pooling_2d.{new}", f"model.connector.{old}")
        for new, old in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "out_proj"))
    ]
    tensors |= {f"{new}.{kind}": native[f"{old}.{kind}"] for new, old in pairs for kind in ("weight", "bias")}
    for new, old in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        tensors[f"vision_backbone.image_projector.{new}.weight"] = native[f"model.connector.{old}.weight"]
    return tensors


def write_config(folder: Path, without: str | None = None, **changes: object) -> None:
    model = load_goldens().spec["config"] | changes
    own = {name: value for name, value in model.items() if name not in ("model_type", "architectures", without)}
    (folder / "config.yaml").write_text(yaml.safe_dump({"run_name": "multitask", "model": own}))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_config(folder)
    torch.save({name: tensor.clone() for name, tensor in original_tensors().items()}, folder / "model.pt")
    write_published_tokenizer(folder)
    return folder


@pytest.fixture
def original(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "original"))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_converted_model_gives_the_same_logits(original: Path, tmp_path: Path) -> None:
    done = convert_original_checkpoint(original, tmp_path / "made", shard_bytes=5_000_000)
    # Both tables and the head are larger than a shard, or stand alone; the rest is split at 5 MB.
    assert done.num_files == len(list((tmp_path / "made").glob("*.safetensors"))) > 2
    assert done.weights_bytes == sum(tensor.numel() * 4 for tensor in original_tensors().values())
    source = find_model(str(tmp_path / "made"))
    assert source.is_published_layout
    assert_same_floats(logits_of(load_published_checkpoint(source.folder, torch.float32)), logits_of(golden_model()))
    assert load_processor(source).tokenizer.convert_tokens_to_ids("<im_col>") == 50283
    assert left_in(tmp_path) == ["made", "original"]


def test_the_script_converts_to_another_precision(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (original / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (original / "tokenizer_config.json").rename(tmp_path / "tokenizer_config.json")
    command = [sys.executable, "scripts/convert_checkpoint.py", "--input", str(original), "--dtype", "bfloat16"]
    command += ["--output", str(tmp_path / "made"), "--tokenizer", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=os.environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote ") and done.stdout.endswith(f"to {tmp_path / 'made'}\n")
    assert {stored.dtype for stored in find_tensors(tmp_path / "made").values()} == {"BF16"}
    # The same once more, in this process.
    monkeypatch.setattr(sys, "argv", command[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPOSITORY / command[1]), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'made'} exists; give a folder that does not\n"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in original_tensors().items()}
    change(tensors)
    torch.save(tensors, folder / "model.pt")


W1 = "transformer.blocks.1.ffn.experts.mlp.w1"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change_weights(folder, lambda tensors: tensors.pop(W1)), f"1 missing: {W1}$"),
        (lambda folder: change_weights(folder, lambda found: found.update(extra=torch.ones(1))), "1 unexpected: extra"),
        (lambda folder: change_weights(folder, lambda tensors: tensors.update({W1: torch.ones(480, 64)})),
         rf"of another shape: {W1} \[480, 64\] instead of \[512, 64\]"),
        (lambda folder: torch.save({"model": {}}, folder / "model.pt"), "no state dict of tensors"),
        (lambda folder: (folder / "model.pt").write_bytes(b"half"), "cannot be read as a state dict"),
        (lambda folder: torch.save(Path("code"), folder / "model.pt"), "cannot be read as a state dict"),
        (lambda folder: (folder / "model.pt").unlink(), "contains no model.pt"),
        (lambda folder: (folder / "config.yaml").unlink(), "contains no config.yaml"),
        (lambda folder: (folder / "config.yaml").write_text("a: ["), "is not YAML"),
        (lambda folder: (folder / "config.yaml").write_text("model: 3"), "contains no model config"),
        (lambda folder: write_config(folder, without="moe_num_experts"), "lacks the key 'moe_num_experts'"),
        (lambda folder: write_config(folder, block_type="sequential"), "not a MolmoE config"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json in .* --tokenizer"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_converted_leaves_nothing(
    original: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(original)
    with pytest.raises(ConfigurationError, match=message) as caught:
        convert_original_checkpoint(original, tmp_path / "made")
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path) == ["original"]


def test_a_precision_that_does_not_hold_the_values_leaves_no_half_written_folder(
    original: Path, tmp_path: Path
) -> None:
    change_weights(original, lambda tensors: tensors["transformer.ln_f.weight"].fill_(70000.0))
    with pytest.raises(
        ConfigurationError, match=r"transformer.ln_f.weight has values that torch.float16 does not contain"
    ):
        convert_original_checkpoint(original, tmp_path / "made", "float16", shard_bytes=5_000_000)
    assert left_in(tmp_path) == ["original"]


def test_a_precision_that_is_not_known_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the dtype float8 is not known; give one of float32, bfloat16, float"):
        convert_original_checkpoint(original, tmp_path / "made", "float8")


def test_the_profiler_says_that_an_original_folder_has_to_be_converted(original: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"original training code; convert it with scripts/convert_checkpoint.py"
    ):
        find_model(str(original))
