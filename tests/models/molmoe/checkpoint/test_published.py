"""A checkpoint as it is published: through the profiler's door, strictly, at the memory of one copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.molmoe.checkpoint.published import (
    load_published_checkpoint,
    native_shapes,
    published_layout,
)
from experiment_core_utils.models.molmoe.checkpoint.published_config import config_from_published
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY
from tests.models.molmoe.golden_model import golden_model, load_goldens
from tests.models.molmoe.published_folder import (
    INDEX,
    SPECIAL_IDS,
    golden_tensors,
    write_published_folder,
    write_published_tokenizer,
)
from tests.models.molmoe.test_goldens import CASES, request_for
from tests.same_floats import assert_same_floats

CPU = torch.device("cpu")
A_NORM = "model.transformer.ln_f.weight"
AN_EXPERT = "model.transformer.blocks.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published_folder(tmp_path_factory.mktemp("published"))


@pytest.fixture
def own_copy(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "copy"))


@torch.no_grad()
def logits_of(model: MolmoeForConditionalGeneration) -> torch.Tensor:
    return model(**request_for(CASES["small"], load_goldens()), logits_to_keep=1).logits


def test_a_published_folder_is_profiled_like_any_other(published: Path, tmp_path: Path) -> None:
    config = parse_config(
        ["--model_path", str(published), "--output_dir", str(tmp_path), "--num_samples", "1", "--tier_list", "low",
         "--top_k_list", "4", "--num_active_blocks_list", "2", "--num_runs_per_sample", "1", "--num_warmup_runs", "0",
         "--max_repeats", "0", "--no_reference", "--max_new_tokens", "3", "--device", "cpu",
         "--num_threads", "1"]
    )  # fmt: skip
    report = run_profiling(config)
    assert (report.exit_code, report.failed, len(report.results)) == (0, {}, 1)
    assert report.results[0].content()["provenance"]["model"]["model_class"] == "MolmoeForConditionalGeneration"


def test_the_weights_and_the_tokenizer_are_those_of_the_folder(published: Path) -> None:
    config = parse_config(["--model_path", str(published), "--precision", "float32"])
    staged = find_model(str(published)).load(config.model, CPU)
    assert isinstance(staged, MolmoeStagedModel)
    assert_same_floats(logits_of(staged.model), logits_of(golden_model()))
    tokenizer = load_processor(find_model(str(published))).tokenizer
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_IDS)) == list(SPECIAL_IDS.values())
    text = " User: How many? Assistant:"
    assert tokenizer.decode([50282, *tokenizer(text)["input_ids"], 50279], skip_special_tokens=True) == text


def test_in_bfloat16_it_is_what_the_native_layout_gives(published: Path, tmp_path: Path) -> None:
    golden_model().save_pretrained(tmp_path)
    native = MolmoeForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    loaded = load_published_checkpoint(published, torch.bfloat16)
    weights = native.state_dict()
    assert all(torch.equal(weight, weights.pop(name)) for name, weight in loaded.state_dict().items()) and not weights
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    # width 64 / 4 heads = 16 a head: 8 frequencies, 10000 ** (-i / 8)
    expected = torch.tensor([10000.0 ** (-index / 8) for index in range(8)])
    assert torch.allclose(loaded.model.language_model.rotary_emb.inv_freq, expected, rtol=1e-6)
    assert not any(buffer.is_meta for buffer in loaded.buffers())


def test_one_file_without_an_index_loads_too(tmp_path: Path) -> None:
    folder = write_published_folder(tmp_path / "one", {})
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file(golden_tensors(), folder / "model.safetensors")
    assert_same_floats(logits_of(load_published_checkpoint(folder, torch.float32)), logits_of(golden_model()))


def test_the_layout_takes_every_published_value_once_and_fills_every_native_one() -> None:
    config = config_from_published(load_goldens().spec["config"])
    shapes = native_shapes(config)
    layout = published_layout(config, shapes)
    filled = dict.fromkeys(shapes, 0)
    for published in layout.values():
        rows = [part.rows or (0, published.shape[0]) for part in published.parts]
        assert [end for _, end in rows[:-1]] == [first for first, _ in rows[1:]]
        assert (rows[0][0], rows[-1][1]) == (0, published.shape[0])
        for part in published.parts:
            filled[part.target] += torch.empty(shapes[part.target], device="meta")[part.into].numel()
    assert filled == {name: torch.Size(shape).numel() for name, shape in shapes.items()}


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [A_NORM, AN_EXPERT])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), r"1 missing: {name}$"),
        (lambda tensors, name: tensors.update({name + "_other": tensors.pop(name)}),
         r"1 missing: {name}; 1 unexpected: {name}_other$"),
        (lambda tensors, name: tensors.update({name: tensors[name][:-1]}), r"1 of another shape: {name} \[\d+.* inst"),
        (lambda tensors, name: tensors.update({name: tensors[name].to(torch.int8)}), r"{name} not stored in floating"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_as_it_should_be_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor], str], object], message: str, name: str
) -> None:
    tensors = golden_tensors()
    change(tensors, name)
    folder = write_published_folder(tmp_path / "model", tensors)
    with pytest.raises(ConfigurationError, match=message.format(name=re.escape(name))) as caught:
        load_published_checkpoint(folder, torch.float32)
    assert "\n" not in str(caught.value)


def drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def repeat_tensor(folder: Path) -> None:
    first, second = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    save_file(load_file(second) | {A_NORM: torch.ones(64)}, second)
    save_file(load_file(first) | {A_NORM: torch.ones(64)}, first)


def add_file(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")


def spoil_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": []}')


def remove_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_weights, r"has a config.json but no \*.safetensors; give a folder with weights, or --random_weights"),
        (
            drop_shard,
            r"1 of the 3 files that .*index.json names are not there: model-00002-of-00003.safetensors; the",
        ),
        (cut_shard, r"the weights in .*model-00002-of-00003.safetensors cannot be read: .*download the file again"),
        (repeat_tensor, rf"the tensor {A_NORM} lies in model-00001-of-00003.safetensors and in model-00002-of-00003"),
        (add_file, r"index.json does not name model.safetensors; remove what is not its own"),
        (spoil_index, "is not an index of safetensors"),
    ],
)
def test_a_folder_that_is_not_whole(own_copy: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(own_copy)
    config = parse_config(["--model_path", str(own_copy)])
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_model(str(own_copy)).load(config.model, CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_type": "sequential"}, "not a MolmoE config: block_type is 'sequential'.*or a dense one, such as"),
        ({"norm_after": True}, "norm_after is True"),
        ({"qkv_bias": True, "scale_logits": True}, "does not do: qkv_bias True, scale_logits True"),
        ({"d_model": "wide"}, "a value that cannot be used"),
        ({"layer_norm_eps": "1e-05"}, "a value that cannot be used"),
    ],
)
def test_another_molmo_is_refused_by_its_config(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_goldens().spec["config"] | changes))
    with pytest.raises(ConfigurationError, match=message):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "no usable tokenizer or image processor: tokenizer.json is not there"),
        ("tokenizer_config.json", None, "tokenizer_config.json is not there"),
        ("tokenizer.json", "{", r"tokenizer\.json is not JSON"),
    ],
)
def test_a_tokenizer_that_is_not_there(own_copy: Path, file: str, content: str | None, message: str) -> None:
    (own_copy / file).unlink()
    if content is not None:
        (own_copy / file).write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        load_processor(find_model(str(own_copy)))


def test_the_tokenizer_of_another_model_is_refused(own_copy: Path) -> None:
    write_published_tokenizer(own_copy)
    path = own_copy / "tokenizer.json"
    path.write_text(path.read_text().replace("50283", "50290"))
    with pytest.raises(ConfigurationError, match="is not MolmoE's: <im_col> has id 50290, not 50283"):
        load_processor(find_model(str(own_copy)))


# --- memory ---------------------------------------------------------------------------------------------------------

MEASURE_LOAD = """
import re, sys
from pathlib import Path
import torch
from experiment_core_utils.models.molmoe.checkpoint.published import load_published_checkpoint

def kibibytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
folder, small, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
load_published_checkpoint(small, dtype)  # what libraries load once
before = kibibytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
model = load_published_checkpoint(folder, dtype)
weights = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
print((kibibytes("VmHWM") - before) * 1024 / weights)
"""


@pytest.fixture(scope="module")
def some_hundred_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 blocks of 16 experts of width 512 (4 * 16 * 3 * 512 * 512 * 4 bytes = 201 MB), in float32 in 3 shards."""
    sizes = {
        "d_model": 512,
        "n_heads": 8,
        "n_layers": 4,
        "moe_num_experts": 16,
        "mlp_hidden_size": 1024,
        "embedding_size": 1024,
    }
    config = load_goldens().spec["config"] | sizes
    native = config_from_published(config)
    layout = published_layout(native, native_shapes(native))
    assert sum(torch.Size(tensor.shape).numel() for tensor in layout.values()) * 4 > 201e6
    folder = tmp_path_factory.mktemp("large")
    return write_published_folder(folder, {name: torch.ones(each.shape) for name, each in layout.items()}, **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_the_memory_of_one_copy(some_hundred_megabytes: Path, published: Path, dtype: str) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not let a process begin its peak of memory anew")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_LOAD, str(some_hundred_megabytes), str(published), dtype],
        capture_output=True, text=True, check=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    # A second copy would give 2, the stored float32 beside bfloat16 3, a whole shard of it beside bfloat16 1.67.
    assert 0.9 < float(done.stdout) < 1.15
