"""GGUF files as models: what is read of them, and what is said of those that cannot be read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from experiment_core_utils.b_model_loader import find_model, load_model_tokenizer
from experiment_core_utils.config.parts import ModelConfig, knob_config, only_model_in
from experiment_core_utils.knobs.active_blocks import block_choice_of
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.models.common import gguf_files
from experiment_core_utils.models.common.checkpoint_files import model_digest, weights_digest
from experiment_core_utils.models.common.gguf_files import check_gguf, quantised_file
from experiment_core_utils.models.hf.source import TransformersCheckpoint
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from tests.models.tiny_gguf import BLOCKS, HEADS, MLP, WIDTH, write_tiny_gguf

CPU = torch.device("cpu")


def own_choice(file: Path) -> BlockChoice:
    return block_choice_of(KnobRequest(knob_config()(), KnobLimits(2, None, None), "model", file, random_weights=False))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_tiny_gguf(file)


@pytest.fixture
def file(written: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> Path:
    """A copy, alone in its folder."""
    return Path(shutil.copy(written[0], tmp_path / "model.gguf"))


def test_weights_config_tokenizer_and_chat_template_come_from_the_file(file: Path, written: tuple) -> None:
    source = find_model(str(file))
    assert source.limits.num_total_blocks == BLOCKS and source.config.num_attention_heads == HEADS
    assert isinstance(source, TransformersCheckpoint) and source.hf.requests.chat_template is not None
    assert source.hf.requests.tokenizer("hehe", add_special_tokens=False)["input_ids"] == [5 + 256] * 2
    staged = source.load(ModelConfig(model_path=str(file)), CPU)
    state = staged.model.state_dict()
    assert {each.dtype for each in state.values()} == {torch.float32}
    embedding = torch.from_numpy(written[1]["token_embd"])
    torch.testing.assert_close(state["model.embed_tokens.weight"], embedding, rtol=0, atol=0)
    # Q8_0 rounds to 127 steps of the largest number in each block of 32: off by half a step, kept in float16.
    down = torch.from_numpy(written[1]["blk.1.ffn_down"])
    step = down.reshape(WIDTH, MLP // 32, 32).abs().amax(-1).repeat_interleave(32, -1) / 127
    assert ((state["model.layers.1.mlp.down_proj.weight"] - down).abs() <= 0.58 * step).all()
    assert not torch.equal(state["model.layers.1.mlp.down_proj.weight"], down)
    assert staged.describe()["quantised_file"] == {"format": "gguf", "type": "Q8_0"}
    assert staged.describe()["dtype"] == "float32"


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1])
def test_types_that_only_the_package_gguf_reads_are_read(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    weights = write_tiny_gguf(tmp_path / "model.gguf", kind=kind)
    place = str(tmp_path / "model.gguf")
    staged = find_model(place).load(ModelConfig(model_path=place), CPU)
    for block, name in ((0, "ffn_up"), (1, "ffn_down")):
        own = quants.dequantize(quants.quantize(weights[f"blk.{block}.{name}"], kind), kind)
        read = staged.model.state_dict()[f"model.layers.{block}.mlp.{name.replace('ffn_', '')}_proj.weight"]
        torch.testing.assert_close(read, torch.from_numpy(own), rtol=0, atol=0)


def test_a_type_that_nothing_reads_is_not_called_a_torn_file(file: Path) -> None:
    content = file.read_bytes()
    # In the table of tensors: the name, 2 dimensions, the type.
    named = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert content[named : named + 4] == (8).to_bytes(4, "little")
    file.write_bytes(content[:named] + (222).to_bytes(4, "little") + content[named + 4 :])
    with pytest.raises(ConfigurationError, match=r"weights of a type .*ggml type 222.*give the model in another"):
        find_model(str(file))


def test_random_weights_are_not_those_of_the_file(file: Path) -> None:
    config = ModelConfig(model_path=str(file), random_weights=True, precision="bfloat16")
    described = find_model(str(file)).load(config, CPU).describe()
    assert described["quantised_file"] is None and described["dtype"] == "bfloat16"


def test_text_runs_load_it_too(file: Path) -> None:
    model, tokenizer = load_model_tokenizer({"model_name": str(file.parent), "fp_precision": "bfloat16"})
    assert model.dtype == torch.bfloat16 and tokenizer.padding_side == "left"
    assert model.quantised_file == {"format": "gguf", "type": "Q8_0"} and model.name_or_path == str(file)
    # A tokenizer that is changed is no other run's.
    tokenizer.chat_template = None
    assert load_model_tokenizer({"model_name": str(file)})[1].chat_template is not None


def test_its_weights_are_not_quantised_again(file: Path) -> None:
    config = ModelConfig(model_path=str(file), quantization="8bit")
    with pytest.raises(ImpossibleCombination, match=r"is a GGUF file \(Q8_0\).*not quantised again"):
        find_model(str(file)).load(config, CPU)
    with pytest.raises(ImpossibleCombination, match="not quantised again"):
        load_model_tokenizer(
            {"model_name": str(file), "quantization_config": {"quantization": True, "load_in_8bit": True}}
        )


def test_a_folder_of_one_file_is_that_model(file: Path, tmp_path: Path) -> None:
    assert only_model_in(str(tmp_path)) == str(file)
    (tmp_path / "config.json").write_text("{}")  # a copy beside it is not another model
    assert only_model_in(str(tmp_path)) == str(file)
    other = shutil.copy(file, tmp_path / "Model-Q4.GGUF")
    with pytest.raises(ConfigurationError, match=f"contains 2 models; give one of {other}, {file}"):
        only_model_in(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert only_model_in(str(tmp_path)) == str(tmp_path)


def test_the_digest_is_of_the_file_alone(file: Path, tmp_path: Path) -> None:
    digests = model_digest(file), weights_digest(file)
    (tmp_path / "other.gguf").write_bytes(b"other")
    assert (model_digest(file), weights_digest(file)) == digests
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_digest(file) != digests[0] and weights_digest(file) != digests[1]


def test_scores_of_blocks_lie_beside_the_file(file: Path, tmp_path: Path) -> None:
    assert not own_choice(file).is_made
    (tmp_path / "block_importance.json").write_text('{"0": 1.0, "1": 0.5}')
    assert own_choice(file).is_made


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (-1, "is torn: it has"),
        (600, "is torn within its header, after 600 bytes"),
        (24, "is torn within its header, after 24 bytes"),
        (3, "is torn: it has 3 bytes and no header"),
        (0, "is torn: it has 0 bytes and no header"),
    ],
)
def test_a_torn_file_is_named(file: Path, kept: int, says: str) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigurationError, match=f"{says}.*copy or download it again"):
        find_model(str(file))


def test_what_is_not_gguf_is_named(tmp_path: Path) -> None:
    for content, says in (
        (b"PK\x03\x04" + bytes(100), "a.gguf is not GGUF: it begins with 'PK.*; give a GGUF file, a folder with"),
        (b"<html>", "a.gguf is not GGUF: it begins with '<html>'; give a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS, not the model; run: git lfs pull"),
        (b"GGUF\1\0\0\0" + bytes(99), "is GGUF of version 1, and versions 2 and 3 are read; convert the model again"),
        (b"GGUF\3\0\0\0" + bytes(99), "the header of .*a.gguf cannot be read as GGUF: .*; copy or download it again"),
    ):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(ConfigurationError, match=says):
            find_model(str(tmp_path / "a.gguf"))
    with pytest.raises(ConfigurationError, match=r"no.gguf: .*give a GGUF file"):
        find_model(str(tmp_path / "no.gguf"))


@pytest.mark.parametrize(
    ("architecture", "blocks", "says"),
    [
        ("clip", 2, "is a clip, which transformers does not read as GGUF; .*llama.*qwen2"),
        ("llama", 10**6, "block_count 1000000 is not possible; give 1 to 1000"),
        ("llama", 0, "block_count 0 is not possible"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path, architecture: str, blocks: int, says: str) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", architecture, blocks)
    with pytest.raises(ConfigurationError, match=says):
        check_gguf(tmp_path / "a.gguf", 1000)


def test_a_missing_package_is_named_with_its_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
    with pytest.raises(ConfigurationError, match="run: pip install -U gguf"):
        find_model(str(file))


def test_a_folder_has_no_quantised_file(tmp_path: Path) -> None:
    assert quantised_file(tmp_path) is None
