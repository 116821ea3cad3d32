"""Finding a checkpoint before any weight is read, and loading it in the precision and implementation asked for."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import choose_dtype, find_model, load_staged_model
from experiment_core_utils.models.molmoe.staged import MolmoeStagedModel
from experiment_core_utils.primitives.config import Precision, ProfilingConfig, parse_config
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobSetting, tier_target
from tests.models.molmoe.golden_model import load_goldens

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_checkpoint: Path, tmp_path: Path) -> ProfilingConfig:
    return parse_config(["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path)])


@pytest.fixture
def without_weights(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def loaded(config: ProfilingConfig) -> MolmoeStagedModel:
    model = load_staged_model(config, find_model(config.model_path), CPU)
    assert isinstance(model, MolmoeStagedModel)
    return model


def test_a_native_folder_tells_the_limits_of_the_knobs(tiny_checkpoint: Path) -> None:
    source = find_model(str(tiny_checkpoint))
    assert (source.num_total_blocks, source.num_experts, source.default_top_k) == (4, 8, 4)
    assert (source.folder, source.is_published_layout, source.revision) == (tiny_checkpoint, False, None)


def test_the_published_layout_is_recognised(tmp_path: Path) -> None:
    published = load_goldens().spec["config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    source = find_model(str(tmp_path))
    assert source.is_published_layout
    assert source.num_total_blocks == published["n_layers"]
    assert (source.num_experts, source.default_top_k) == (published["moe_num_experts"], published["moe_top_k"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "there is no model folder ./nowhere; give a folder"),
        ("/nowhere/at/all", "there is no model folder"),
        ("nowhere", "there is no model folder nowhere"),
        ("someone/something", "someone/something is no folder, and the hub did not give it"),
    ],
)
def test_a_model_that_is_not_there(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_model(path, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no config.json"),
        ("{", "is not JSON"),
        ("[1]", "no JSON object"),
        ("{}", "a model of type None; supported are 'molmoe'"),
        ('{"model_type": "llama"}', "a model of type 'llama'"),
        ('{"model_type": "molmo", "block_type": "llama"}', "not a MolmoE config: block_type is 'llama'"),
    ],
)
def test_a_folder_without_a_supported_model(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        find_model(str(tmp_path))


def test_a_folder_without_weights_is_refused_with_the_way_out(config: ProfilingConfig, without_weights: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors; .*or --random_weights"):
        loaded(replace(config, model_path=str(without_weights)))


def test_random_weights_need_no_file_and_are_the_same_each_time(config: ProfilingConfig, without_weights: Path) -> None:
    random = replace(config, model_path=str(without_weights), random_weights=True, precision="bfloat16")
    first, second = loaded(random).model.state_dict(), loaded(random).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_turning_knobs_does_not_change_the_source(config: ProfilingConfig) -> None:
    source = find_model(config.model_path)
    model = load_staged_model(replace(config, random_weights=True), source, CPU)
    model.apply(KnobSetting(tier_target("low"), 1, (0, 1)))
    assert source.num_total_blocks == 4


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_precision_asked_for_is_what_runs(config: ProfilingConfig, precision: Precision) -> None:
    described = loaded(replace(config, precision=precision)).describe()
    assert described["dtype"] == precision
    assert described["num_total_blocks"] == 4


def test_auto_is_float32_on_the_cpu_and_bfloat16_on_a_gpu() -> None:
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("auto", torch.device("cuda", 0)) == torch.bfloat16
    assert choose_dtype("float16", CPU) == torch.float16


def test_implementations_asked_for_are_what_runs(config: ProfilingConfig) -> None:
    described = loaded(replace(config, attn_implementation="eager", experts_implementation="eager")).describe()
    assert (described["attn_implementation"], described["experts_implementation"]) == ("eager", "eager")


@pytest.mark.parametrize("what", ["attn_implementation", "experts_implementation"])
def test_an_unknown_implementation_is_refused(config: ProfilingConfig, what: str) -> None:
    with pytest.raises(ConfigurationError, match="implementation asked for is not available"):
        loaded(replace(config, **{what: "abacus"}))  # type: ignore[arg-type]
