"""Finding a checkpoint before any weight is read, and loading it in the requested precision and implementation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from experiment_core_utils.b_model_loader import (
    ModelWrapper,
    detect_supported_quant_types,
    find_model,
    load_model_tokenizer,
)
from experiment_core_utils.config.parts import Precision
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.config.text import published_form, validated
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.models.text_model import validate_loadable
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.molmoe.golden_model import load_goldens
from tests.same_floats import assert_same_floats
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama, tiny_olmoe

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
    model = find_model(config.model.model_path).load(config.model, CPU)
    assert isinstance(model, MolmoeStagedModel)
    return model


def test_a_native_folder_has_the_limits_of_the_knobs(tiny_checkpoint: Path) -> None:
    source = find_model(str(tiny_checkpoint))
    assert (source.limits.num_total_blocks, source.limits.num_experts, source.limits.default_top_k) == (4, 8, 4)
    assert (source.folder, source.is_published_layout, source.revision) == (tiny_checkpoint, False, None)


def test_the_published_layout_is_recognised(tmp_path: Path) -> None:
    published = load_goldens().spec["config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    source = find_model(str(tmp_path))
    assert source.is_published_layout
    assert source.limits.num_total_blocks == published["n_layers"]
    assert source.limits.num_experts == published["moe_num_experts"]
    assert source.limits.default_top_k == published["moe_top_k"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "there is no model folder ./nowhere; give a folder"),
        ("/nowhere/at/all", "there is no model folder"),
        ("nowhere", "there is no model folder nowhere"),
        ("someone/something", "someone/something is not a folder, and the hub did not give it"),
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
        ("{}", "the config in .* cannot be used"),
        ('{"model_type": "vit"}', "is a vit, which transformers has neither"),
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
        loaded(config.replaced(model_path=str(without_weights)))


def test_random_weights_need_no_file_and_are_the_same_each_time(config: ProfilingConfig, without_weights: Path) -> None:
    random = config.replaced(model_path=str(without_weights), random_weights=True, precision="bfloat16")
    first, second = loaded(random).model.state_dict(), loaded(random).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_turning_knobs_does_not_change_the_source(config: ProfilingConfig) -> None:
    source = find_model(config.model.model_path)
    model = source.load(config.model.model_copy(update={"random_weights": True}), CPU)
    model.apply(Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1))))
    assert source.limits.num_total_blocks == 4


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_requested_precision_is_what_runs(config: ProfilingConfig, precision: Precision) -> None:
    described = loaded(config.replaced(precision=precision)).describe()
    assert described["dtype"] == precision
    assert described["num_total_blocks"] == 4


def test_the_requested_implementations_are_what_runs(config: ProfilingConfig) -> None:
    described = loaded(config.replaced(attn_implementation="eager", experts_implementation="eager")).describe()
    assert (described["attn_implementation"], described["experts_implementation"]) == ("eager", "eager")


@pytest.mark.parametrize("what", ["attn_implementation", "experts_implementation"])
def test_an_unknown_implementation_is_refused(config: ProfilingConfig, what: str) -> None:
    with pytest.raises(ConfigurationError, match="requested implementation is not available"):
        loaded(config.replaced(**{what: "abacus"}))  # type: ignore[arg-type]


# --- text experiments -----------------------------------------------------------------------------------------------


PROMPTS = ("what is this", "a", "count the red circles and the blue squares", "is it")


def test_the_embedded_model_generates_in_padded_batches_what_it_generates_alone() -> None:
    model, tokenizer = load_model_tokenizer({"device": "cpu"})
    options = {"max_new_tokens": 10, "do_sample": False}
    batch = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    assert batch["attention_mask"].min() == 0
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for row, prompt in zip(together, PROMPTS, strict=True):
        single = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**single, **options)[0, single["input_ids"].shape[1] :]
        assert row[: len(alone)].tolist() == alone.tolist()
        assert set(row[len(alone) :].tolist()) <= {tokenizer.pad_token_id}


def test_a_checkpoint_loads_from_every_form_of_a_configuration(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_llama(), tmp_path)
    values = {"model_name": str(folder), "device": "cpu", "fp_precision": "bfloat16"}
    for form in (values, validated(values), published_form(**values)):
        validate_loadable(validated(form))
        model, tokenizer = load_model_tokenizer(form)
        assert (type(model).__name__, model.dtype, model.training) == ("LlamaForCausalLM", torch.bfloat16, False)
        assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", tokenizer.eos_token)
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_an_end_of_sequence_that_the_model_does_not_name_is_the_tokenizers(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_llama(eos_token_id=None), tmp_path)
    model, tokenizer = load_model_tokenizer({"model_name": str(folder), "device": "cpu"})
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_configuration_that_is_not_allowed_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ConfigurationError, match="fp_precision"):
        load_model_tokenizer({"model_name": "./nowhere", "fp_precision": "float7"})
    with pytest.raises(ConfigurationError, match="there is no model folder ./nowhere"):
        load_model_tokenizer({"model_name": "./nowhere"})


def test_what_is_supported_here_is_reported_without_an_error() -> None:
    found = detect_supported_quant_types()
    assert found["supports_4bit"] == (found["default_4bit_quant_type"] == "nf4")
    assert found["supports_8bit"] == (found["default_8bit_quant_type"] in ("int8", "fp8"))


@pytest.mark.parametrize("build", [tiny_llama, tiny_olmoe])
def test_wrapped_models_give_logits_for_ids(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = build(), torch.tensor([[5, 9, 30], [7, 8, 9]])
    with torch.inference_mode():
        logits = ModelWrapper(model)(ids)
        assert logits.shape == (2, 3, 512)
        assert_same_floats(logits, model(ids).logits)


@pytest.mark.parametrize(
    ("flags", "runs", "reason"),
    [
        ([], "cpu", "there are no CUDA graphs on the CPU"),
        (["--use_profiler"], "eager", "only the model's modules follow --use_profiler"),
        (
            ["--attn_implementation", "eager", "--experts_implementation", "eager"],
            "eager",
            "only the model's modules follow --attn_implementation and --experts_implementation",
        ),
        (["--execution", "eager", "--use_profiler"], "eager", None),
    ],
)
def test_the_default_takes_engines_unless_a_flag_is_about_the_modules(
    flags: list[str], runs: str, reason: str | None
) -> None:
    """Of the embedded model every stage has a compiled kernel."""
    config = parse_config(["--device", "cpu", "--precision", "float32", *flags])
    model = find_model(config.model.model_path).load(
        config.model, CPU, is_profiled=config.measuring.profiler is not None
    )
    described = model.describe()
    assert described["execution"] == runs
    output = described["execution_reason"]
    assert output is None if reason is None else output.endswith(reason)
    engines = ["modules"] * 3 if runs == "eager" else ["cpu blocks", "cpu blocks", "cpu step"]
    assert [described["execution_stages"][stage] for stage in ("vision", "prefill", "decode")] == engines
