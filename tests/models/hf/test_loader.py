"""Checkpoints of transformers: what their knobs allow before any weight is read, and the model as it was requested."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, MllamaConfig, Phi4MultimodalConfig

from experiment_core_utils.b_model_loader import find_model, find_requested_checkpoint
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.token_units import TokenUnit
from experiment_core_utils.models.common.describe import stored_bytes
from experiment_core_utils.models.common.quantisation import RequestedQuantisation, transformers_config
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.loader import HFSource, find_hf_model, skeleton_of
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.dry_run import describe_plan, untried_sentences
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from tests.models.tiny_checkpoints import write_checkpoint
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

CPU = torch.device("cpu")
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return cache(lambda family: write_checkpoint(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of widths that bitsandbytes' 4-bit blocks of 64 weights fit into."""
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("wide"))


def requested(folder: Path, *flags: str) -> ProfilingConfig:
    return parse_config(["--model_path", str(folder), "--device", "cpu", *flags])


def loaded(folder: Path, *flags: str) -> TransformersModel:
    model = find_model(str(folder)).load(requested(folder, *flags).model, CPU)
    assert isinstance(model, TransformersModel)
    return model


def source_of(folder: Path) -> HFSource:
    found = find_model(str(folder)).hf
    assert found is not None
    return found


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["olmoe", "qwen3_vl_moe", "glm4v_moe", "aria"])
def test_a_mixture_tells_all_its_limits_without_a_weight(folder_of: Written, tmp_path: Path, family: str) -> None:
    shutil.copytree(folder_of(family), tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    limits = find_model(str(tmp_path)).limits
    assert (limits.num_total_blocks, limits.num_experts, limits.default_top_k) == (3, 4, 2)
    assert not limits.unsupported.keys() & {"top_k", "num_active_blocks"}
    assert ("vision" not in limits.unsupported) == (family != "olmoe")


def test_a_dense_model_and_one_with_a_fixed_picture_say_why(folder_of: Written) -> None:
    # 24 pixels in patches of 8 are 9 features of a tile.
    reasons = dict.fromkeys(("top_k", "expert_mass"), "the model is dense")
    reasons["thinking_budget"] = "its tokenizer and its chat template have no marks of thinking"
    dense = KnobLimits(3, None, None, reasons, token_unit=TokenUnit(9))
    found = find_model(str(folder_of("llava_next"))).limits
    assert replace(found, fraction_reasons=(None, None)) == dense
    assert found.fraction_reasons[0] is None and "adds vision tokens to a picture" in str(found.fraction_reasons[1])
    fixed = find_model(str(folder_of("llava"))).limits
    assert "vision" in fixed.unsupported
    # The whole picture is scaled to 24 x 24 pixels.
    assert re.fullmatch(
        r"neither an option of the CLIPImageProcessorPil of \S+ nor the size of the picture moves the number of vision "
        r"tokens \(9 for 640 x 480 pixels and 9 for 300 x 1100 pixels by itself\)",
        fixed.unsupported["vision"],
    )
    text = find_model(str(folder_of("llama"))).limits
    assert text.unsupported["vision"].endswith("is a text model: it has no vision tokens")


def test_a_skeleton_has_the_parameters_and_no_storage(folder_of: Written) -> None:
    skeleton = skeleton_of(source_of(folder_of("olmoe")))
    model = loaded(folder_of("olmoe")).model
    assert {name: each.shape for name, each in skeleton.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    assert {each.device.type for each in skeleton.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "bart"}, "a bart, is an encoder-decoder: .*; give a decoder-only model"),
        ({"model_type": "florence2"}, "a florence2, is an encoder-decoder"),
        ({"model_type": "vit"}, "is a vit, which transformers has neither"),
        ({"model_type": "nobody_knows"}, "the config in .* cannot be used"),
    ],
)
def test_another_kind_of_model_is_refused_at_the_door(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=message) as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_causal_model_with_a_vision_part_takes_pictures(tmp_path: Path) -> None:
    """transformers has it among its causal models, and not among those of pictures and text."""
    source = HFSource("phi", tmp_path, Phi4MultimodalConfig(), None)
    assert source.takes_pictures and source.auto_class is AutoModelForCausalLM
    assert not HFSource("llama", tmp_path, LlamaConfig(), None).takes_pictures


def test_limits_that_need_values_are_left_to_the_loaded_model(folder_of: Written, tmp_path: Path) -> None:
    """JetMoe's routers cannot run without values, and do not show what they choose."""
    source = find_model(str(folder_of("jetmoe")))
    assert source.limits.untried_reason is not None
    assert source.limits.default_top_k == 2 and "top_k" not in source.limits.unsupported
    assert loaded(folder_of("jetmoe")).knobs.top_k_unsupported_reason is not None
    flags = ["--top_k_list", "1", "--num_active_blocks_list", "2", "--num_samples", "2", "--output_dir", str(tmp_path)]
    config = requested(folder_of("jetmoe"), *flags, "--num_warmup_runs", "0")
    assert "knobs: whether they can be set shows once the model is loaded" in "\n".join(untried_sentences(source))
    with pytest.raises(ConfigurationError, match="topk1.* shows to be impossible now .*: its routers do not show"):
        run_profiling(config)


def test_what_fails_only_as_loaded_is_the_vendors_error(folder_of: Written) -> None:
    """Grouped products of widths that are not multiples of 16 bytes do not exist; the model is not to blame."""
    folder = folder_of("olmoe, odd widths")
    assert "top_k" not in find_model(str(folder)).limits.unsupported
    with pytest.raises(
        ConfigurationError, match=r"loaded on cpu \(bfloat16, .*grouped_mm.*\), cannot run a prompt: "
    ) as error:
        loaded(folder, "--precision", "bfloat16", "--experts_implementation", "grouped_mm")
    assert str(error.value).endswith("; give another --precision, --quantization or --experts_implementation")
    assert "by itself" not in str(error.value) and "\n" not in str(error.value)
    loaded(folder, "--precision", "bfloat16", "--experts_implementation", "batched_mm")


# --- weights ------------------------------------------------------------------------------------------------------


def test_no_weights_is_one_line_with_the_way_out(folder_of: Written, tmp_path: Path) -> None:
    shutil.copytree(folder_of("llama"), tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors; .*or --random_weights"):
        loaded(tmp_path)
    first, second = (loaded(tmp_path, "--random_weights", "--precision", "bfloat16").model for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert first.dtype == torch.bfloat16 and not first.training


def test_what_no_memory_has_is_refused_before_a_weight_is_made(folder_of: Written, tmp_path: Path) -> None:
    """A matrix of a feed-forward part has 2^40 numbers, and there are three in each of 3 blocks: 40 TB in float32."""
    shutil.copytree(folder_of("llama"), tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"hidden_size": 2**20, "intermediate_size": 2**20}))
    what = r"needs [\d.e+]+ GB in float32, cpu has [\d.e+]+ GB free; use a smaller model$"
    with pytest.raises(ConfigurationError, match=what):
        loaded(tmp_path, "--random_weights")
    with pytest.raises(ConfigurationError, match=what):
        describe_plan(requested(tmp_path, "--random_weights", "--num_samples", "2"))


@pytest.mark.parametrize("more", [(), ("--random_weights",)])
def test_without_a_gpu_there_is_nothing_to_spread_a_model_over(folder_of: Written, more: tuple[str, ...]) -> None:
    flags = ("--device_map", "auto", *more)
    for refused in (loaded, lambda *given: describe_plan(requested(*given))):
        with pytest.raises(ConfigurationError, match="^--device_map auto shards a model over GPUs, and this"):
            refused(folder_of("llama"), *flags)


def test_weights_that_do_not_fit_the_config_are_refused(folder_of: Written, tmp_path: Path) -> None:
    shutil.copytree(folder_of("olmoe"), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigurationError, match=r"do not fit its config: \d+ missing keys"):
        loaded(tmp_path)


# --- what is in force ---------------------------------------------------------------------------------------------


def test_implementations_and_precision_are_reported_as_they_are_in_force(folder_of: Written) -> None:
    folder = folder_of("qwen3_vl_moe")
    by_default = loaded(folder).describe()
    assert (by_default["dtype"], by_default["attn_implementation"]) == ("float32", "sdpa")
    assert (by_default["experts_implementation"], by_default["quantisation"]) == ("grouped_mm", None)
    flags = ("--attn_implementation", "eager", "--experts_implementation", "batched_mm", "--precision", "bfloat16")
    for more in ((), ("--random_weights",)):
        chosen = loaded(folder, *flags, *more).describe()
        assert (chosen["dtype"], chosen["attn_implementation"]) == ("bfloat16", "eager")
        assert chosen["experts_implementation"] == chosen["experts_implementation_decode"] == "batched_mm"


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("llama", ("--experts_implementation", "eager"), "this llama has no experts .*; drop it"),
        ("olmoe", ("--experts_implementation", "abacus"), "the experts implementation abacus is not available"),
        ("olmoe", ("--attn_implementation", "abacus"), "abacus"),
        ("olmoe", ("--random_weights", "--quantization", "8bit"), "--random_weights cannot be quantised: .*; drop"),
    ],
)
def test_what_cannot_be_in_force_is_refused(
    folder_of: Written, family: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        loaded(folder_of(family), *flags)
    assert "\n" not in str(caught.value)


# Of tiny_llama's 2 layers of width 64, with 2 of 4 heads for keys and values and 128 inside the feed-forward part.
LINEAR = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
OTHERS = 2 * 512 * 64 + (2 * 2 + 1) * 64


@NEEDS_BITSANDBYTES
def test_fp8_is_that_of_transformers_and_a_byte_a_weight_where_the_gpu_has_it(wide_llama: Path) -> None:
    config = parse_config(["--model_path", str(wide_llama), "--quantization", "fp8", "--device", "cpu"])
    requested = RequestedQuantisation.of(config.model)
    assert isinstance(transformers_config(requested, torch.bfloat16), FineGrainedFP8Config)
    source = find_requested_checkpoint(config)
    sizes, loading = source.memory_of(config.model, torch.device("cpu"))
    linear = sum(layer.weight.numel() for layer in sizes.linear)
    assert loading.weights_bytes(sizes) == linear + 4 * (sizes.elements - linear)
    with pytest.raises(ConfigurationError, match="^the requested quantisation cannot be done here: float8 needs a GPU"):
        source.load(config.model, torch.device("cpu"))


@pytest.mark.parametrize(("width", "bytes_each"), [("8bit", 1.0), ("4bit", 0.5)])
def test_quantised_weights_are_reported_with_their_fraction(wide_llama: Path, width: str, bytes_each: float) -> None:
    model = loaded(wide_llama, "--quantization", width)
    found = model.describe()
    known = found["quantisation"]
    assert (known["method"], known["quantised_parameters"]) == ("bitsandbytes", LINEAR)
    assert known["quantised_share"] == LINEAR / (LINEAR + OTHERS)
    assert found["total_parameters"] == LINEAR + OTHERS
    assert known["settings"][f"load_in_{width}"] is True
    buffers = sum(each.numel() * each.element_size() for each in model.model.buffers())
    assert stored_bytes(model.model) == LINEAR * bytes_each + OTHERS * 4 + buffers
    assert model.knobs.blocks_unsupported_reason is None
    json.dumps(dict(found))


@NEEDS_BITSANDBYTES
def test_quantising_twice_is_refused(wide_llama: Path, tmp_path: Path) -> None:
    quantised = loaded(wide_llama, "--quantization", "8bit").model
    quantised.save_pretrained(tmp_path)
    for file in wide_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    again = loaded(tmp_path)
    assert again.describe()["quantisation"]["method"] == "bitsandbytes"
    with pytest.raises(ImpossibleCombination, match="quantised already .bitsandbytes."):
        loaded(tmp_path, "--quantization", "4bit")


def test_molmoe_is_not_quantised(tiny_checkpoint: Path) -> None:
    config = requested(tiny_checkpoint).replaced(quantization="8bit")
    with pytest.raises(ConfigurationError, match="--quantization 8bit is for models of transformers; Molmo runs in"):
        find_model(str(tiny_checkpoint)).load(config.model, CPU)


def test_molmoe_stays_on_one_device(tiny_checkpoint: Path) -> None:
    config, source = requested(tiny_checkpoint, "--device_map", "auto"), find_model(str(tiny_checkpoint))
    for refused in (lambda: source.load(config.model, CPU), lambda: describe_plan(config)):
        with pytest.raises(ConfigurationError, match="--device_map auto is for models of transformers; .*; drop it"):
            refused()


def test_a_model_that_reads_pictures_by_cross_attention_is_refused_in_one_line(tmp_path: Path) -> None:
    MllamaConfig(text_config={"num_hidden_layers": 2, "cross_attention_layers": [1]}).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="a mllama, reads pictures by cross-attention") as raised:
        find_hf_model("it", tmp_path, {})
    assert "\n" not in str(raised.value)
