"""What is validated before weights are read, what is loaded, and what is refused in one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.models.common.quantisation import fp8_unsupported_reason
from experiment_core_utils.models.molmoe.language_model import MolmoeForCausalLM
from experiment_core_utils.models.text_model import load_language_model, load_tokenizer, validate_loadable
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, REPOSITORY
from tests.models.molmoe.golden_model import golden_model
from tests.models.molmoe.published_folder import write_published_folder
from tests.same_floats import assert_same_floats
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama, tiny_olmoe

CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def requested(folder: Path | str, **values: Any) -> TextConfig:
    return validated({"model_name": str(folder), "device": "cpu", **values})


def loaded(config: TextConfig) -> PreTrainedModel:
    return load_language_model(validate_loadable(config))


def change_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value != "gone"}))


def refused(config: TextConfig, message: str, load: bool = False) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        loaded(config) if load else validate_loadable(config)
    assert "\n" not in str(caught.value)


def test_a_folder_is_found_without_reading_weights(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"not read")
    source = validate_loadable(requested(copied))
    assert (source.name, source.folder, source.revision) == (str(copied), copied, None)
    assert (source.config.model_type, source.quant_method) == ("llama", None)


@pytest.mark.parametrize(("build", "name"), [(tiny_llama, "LlamaForCausalLM"), (tiny_olmoe, "OlmoeForCausalLM")])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16", "float16"])
def test_every_precision_loads_and_generates(build: Any, name: str, precision: str, tmp_path: Path) -> None:
    original = build()
    model = loaded(requested(save_checkpoint(original, tmp_path), fp_precision=precision))
    wanted = {"auto": torch.float32}.get(precision) or getattr(torch, precision)
    assert type(model).__name__ == name and not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    ids = torch.tensor([[5, 9, 30]])
    known = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4)
    assert known.shape == (1, 7)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits.float(), original(ids).logits, rtol=0.1, atol=0.5)


def test_the_embedded_model_loads_as_a_language_model() -> None:
    model = loaded(validated({"device": "cpu"}))
    assert isinstance(model, MolmoeForCausalLM)
    assert model.dtype == torch.float32
    assert sum(each.numel() for each in model.parameters()) < sum(
        int(torch.tensor(tensor.shape).prod())
        for file in EMBEDDED_MODEL.glob("*.safetensors")
        for tensor in load_file(file).values()
    )


def test_the_published_layout_loads_without_running_code_of_the_hub(tmp_path: Path) -> None:
    published = write_published_folder(tmp_path)
    model, tokenizer = load_model_tokenizer({"model_name": str(published), "device": "cpu", "fp_precision": "float32"})
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (50279, "left")
    ids = torch.tensor([[5, 9, 30]])
    with torch.inference_mode():
        assert_same_floats(model(ids).logits, golden_model()(ids).logits)


def test_the_requested_attention_is_in_force(llama: Path) -> None:
    for name in ("eager", "sdpa"):
        assert loaded(requested(llama, attn_implementation=name)).config._attn_implementation == name


# --- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds one commit of someone/tiny, as "main" and as the tag "v1"."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return repository


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_hub_id_is_loaded_and_its_commit_known(hub: Path, revision: str | None) -> None:
    config = requested("someone/tiny", revision=revision)
    source = validate_loadable(config)
    assert source.revision == COMMIT
    assert load_language_model(source).name_or_path.endswith(COMMIT)


def test_what_the_hub_does_not_give(hub: Path) -> None:
    refused(
        requested("someone/tiny", revision="v2"),
        "someone/tiny is not a folder, and the hub did not give it at revision v2",
    )
    refused(requested("someone/else"), "someone/else is not a folder, and the hub did not give it")
    refused(requested("./nowhere"), "there is no model folder ./nowhere; give a folder")


def test_a_revision_of_a_folder_is_an_impossible_combination(llama: Path) -> None:
    with pytest.raises(ImpossibleCombination, match="revision v1 is for models of the hub"):
        validate_loadable(requested(llama, revision="v1"))


# --- what is refused before weights are read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gone"}, "the config in .* cannot be used: "),
        ({"model_type": "abacus"}, "the config in .* cannot be used: .*abacus"),
        ({"hidden_size": "wide"}, "the config in .* cannot be used: "),
        ({"model_type": "clip_vision_model", "architectures": ["X"]}, "cannot be built as a causal language model"),
        ({"model_type": "molmo", "block_type": "llama"}, "asks for what the native model does not do: head_dim 16"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            "runs only with trust_remote_code: true",
        ),
    ],
)
def test_a_config_that_is_no_language_model(copied: Path, changes: dict[str, Any], message: str) -> None:
    change_json(copied / "config.json", **changes)
    refused(requested(copied), message)


def test_a_folder_without_parts_of_a_checkpoint(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    refused(requested(copied), r"has a config.json but no \*.safetensors; give a folder")
    (copied / "config.json").unlink()
    refused(requested(copied), "there is no config.json in it")


def test_a_tokenizer_that_cannot_be_used(copied: Path) -> None:
    change_json(copied / "tokenizer_config.json", eos_token="gone")
    refused(requested(copied), "has no end-of-sequence token")
    (copied / "tokenizer.json").unlink()
    refused(requested(copied), "has no usable tokenizer")


def test_pickled_weights_are_loaded_only_where_they_are_allowed(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    refused(requested(copied), "allow_pickled_weights: true loads its pytorch_model")
    model = loaded(requested(copied, allow_pickled_weights=True))
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)


def test_other_safetensors_beside_pickled_weights_do_not_let_them_in(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").rename(copied / "other.safetensors")
    refused(requested(copied), "the weights in .* cannot be loaded: ", load=True)


def test_code_of_a_checkpoint_runs_only_where_it_is_allowed(copied: Path, tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    (copied / "own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    change_json(copied / "config.json", model_type="own_llama", auto_map=auto_map)
    refused(requested(copied), "runs only with trust_remote_code: true")
    assert not trace.exists()
    assert type(loaded(requested(copied, trust_remote_code=True))).__name__ == "Own"
    assert trace.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device_map": "auto"}, "device_map auto shards a model over GPUs, and this process has none"),
        ({"fp_precision": "float8"}, "float8 needs a GPU of compute capability 8.9"),
        ({"attn_implementation": "abacus"}, "with attn_implementation abacus"),
        ({"attn_implementation": "flash_attention_2"}, "with attn_implementation flash_attention_2"),
        ({"attn_implementation": "someone/fast"}, "is code from the hub; it runs with trust_remote_code: true"),
    ],
)
def test_what_this_machine_cannot_do(llama: Path, values: dict[str, Any], message: str) -> None:
    refused(requested(llama, **values), message)


def test_no_kernel_is_fetched_for_an_attention(llama: Path, tmp_path: Path) -> None:
    """With the package `kernels` transformers would do so; a stand-in for it says what it was requested."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(
        "class Any:\n"
        "    def __init__(self, *_, **__): pass\n"
        "def get_kernel(name, *_, **__):\n"
        "    print('fetched', name)\n"
        "    raise FileNotFoundError(name)\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return (lambda *_, **__: lambda cls: cls) if name.startswith('use_') else Any\n"
    )
    (tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info").mkdir()
    (tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    )
    program = (
        "from transformers import AutoModelForCausalLM, GptOssConfig\n"
        "from experiment_core_utils.config.text import validated\n"
        "from experiment_core_utils.models.text_model import validate_loadable\n"
        "from experiment_core_utils.models.common.checkpoint_files import refuse_hub_code\n"
        "from experiment_core_utils.primitives.private_apis import compatible_attentions\n"
        "from experiment_core_utils.primitives.errors import ConfigurationError\n"
        "def load(name):\n"
        f"    validate_loadable(validated(dict(model_name={str(llama)!r}, device='cpu', attn_implementation=name)))\n"
        "def load_other(name):\n"
        "    refuse_hub_code(name, 'it', compatible_attentions(AutoModelForCausalLM, GptOssConfig()))\n"
        "names = ['flash_attention_2', 'flash_attention_3', 'flash_attention_4', 'paged|flash_attention_2',\n"
        "         'kernels-community/flash-attn2', 'paged|kernels-community/flash-attn2']\n"
        "for how, name in [*((load, name) for name in names), (load_other, names[0]), (load, 'eager')]:\n"
        "    try:\n"
        "        how(name)\n"
        "    except ConfigurationError as error:\n"
        "        print(error)\n"
    )
    found = os.pathsep.join([str(tmp_path), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": found, "USE_HUB_KERNELS": "NO"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    output = ended.stdout.splitlines()
    assert "fetched" not in ended.stdout and len(output) == 7
    assert all("needs the package flash-attn and a GPU; transformers would fetch" in line for line in output[:4])
    assert all("code from the hub" in line for line in output[4:6])
    assert "it: in place of flash_attention_2 this model takes a kernel" in output[6]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(llama: Path) -> None:
    refused(validated({"model_name": str(llama), "device": "cuda"}), "torch sees no GPU")


# --- weights that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop", "1 missing keys, for example model.layers.1.mlp.up_proj.weight"),
        ("add", "1 unexpected keys, for example model.layers.9.mlp.up_proj.weight"),
        ("reshape", "1 mismatched keys, for example .*model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config(copied: Path, change: str, message: str) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "drop":
        del tensors[name]
    elif change == "add":
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:, :16].contiguous()
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    refused(requested(copied), message, load=True)


def test_torn_weights(copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(requested(copied), "the weights in .* cannot be loaded: ", load=True)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_llama(tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = loaded(requested(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_tokenizer_pads_left_with_the_end_of_sequence(llama: Path) -> None:
    tokenizer = load_tokenizer(validate_loadable(requested(llama)))
    padded = tokenizer(["a", "a longer prompt"], padding=True, return_tensors="pt")
    assert tokenizer.pad_token == tokenizer.eos_token
    assert padded["input_ids"][0, 0] == tokenizer.eos_token_id
    assert padded["attention_mask"][0, 0] == 0 and padded["attention_mask"][0, -1] == 1


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("device_map", [None, "auto"])
def test_a_gpu_gets_the_model_in_bfloat16(llama: Path, device_map: str | None) -> None:
    model = loaded(validated({"model_name": str(llama), "device_map": device_map}))
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cuda")
    ids = torch.tensor([[5, 9, 30]], device=model.device)
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_float8_on_a_gpu_is_loaded_or_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_llama(hidden_size=256, intermediate_size=512), tmp_path)
    config = validated({"model_name": str(folder), "fp_precision": "float8"})
    problem = fp8_unsupported_reason(torch.device("cuda", 0))
    if problem is not None:
        refused(config, re.escape(problem))
    else:
        assert loaded(config).model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
