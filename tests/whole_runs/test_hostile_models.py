"""Model folders, numbers and environments that cannot work: each ends in one line that says so, with exit code 2."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiment_core_utils.b_model_loader import load_model_tokenizer
from experiment_core_utils.config.command import libraries_loading, run_command
from experiment_core_utils.config.text import validated
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiments.core_exp import acc_lat_profiling
from experiments.performance_prediction import predict, run_profile
from experiments.text_exp import run_text_generation
from tests.models.tiny_checkpoints import write_checkpoint
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

Spoil = Callable[[Path], Any]
DEEP = "[" * 100_000
DRIVER = ("--device", "cpu", "--num_samples", "1", "--dry_run")
TEXT = ("--set", "device=cpu", "--set", "track_energy=false", "--num_input_prompts", "1", "--max_output_tokens", "2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")


def written(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def config(part: str | None = None, /, **values: Any) -> Spoil:
    """Values put into config.json, or into one of its parts."""
    return changed("config.json", lambda content: (content if part is None else content[part]).update(values))


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def pipe(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def a_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def weight(value: float) -> Spoil:
    """One number of one weight."""

    def spoil(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[-1]
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1)[-1] = value
        save_file(tensors, file, metadata={"format": "pt"})

    return spoil


def code(name: str, **values: Any) -> Spoil:
    """Code beside the config that leaves a file where it is run; `name` points to it."""
    classes = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", "own.T"]}

    def spoil(folder: Path) -> None:
        (folder / "own.py").write_text(f"open({str(folder / 'was_run')!r}, 'w').close()\n")
        changed(name, lambda content: content.update(auto_map=classes, **values))(folder)

    return spoil


# case, what is done to the embedded model, words of the line.
MOLMOE: dict[str, tuple[Spoil, str]] = {
    "config nested deeply": (written("config.json", DEEP), "config.json is nested too deeply"),
    "config is null": (written("config.json", "null"), "config.json contains no JSON object but NoneType"),
    "config is a pipe": (pipe("config.json"), "config.json is a pipe or a device"),
    "config is a folder": (a_folder("config.json"), "config.json is a folder"),
    "generation config nested deeply": (written("generation_config.json", DEEP), "generation_config.json is nested"),
    "generation config a list": (written("generation_config.json", "[1]"), "contains no JSON object but list"),
    "end of sequence an object": (
        changed("generation_config.json", lambda content: content.update(eos_token_id={"a": 1})),
        "generation_config.json",
    ),
    "importance nested deeply": (written("block_importance.json", DEEP), "block_importance.json is nested"),
    "tokenizer without its parts": (written("tokenizer.json", '{"a": 1}'), "no usable tokenizer or image processor"),
    "tokenizer a pipe": (pipe("tokenizer.json"), "tokenizer.json is a pipe"),
    "preprocessor a string": (written("preprocessor_config.json", '"x"'), "contains no JSON object but str"),
    "crops of another size": (
        changed("preprocessor_config.json", lambda content: content.update(crop_size="x")),
        "cannot be used: crop_size is 'x'; the model's is 336",
    ),
    "colours without means": (
        changed("preprocessor_config.json", lambda content: content.update(image_mean=[])),
        "cannot be used: image_mean is (); give 3 numbers",
    ),
    "text part a string": (config(text_config="x"), "config.json is not possible: text_config"),
    "vision part a number": (config(vision_config=5), "config.json is not possible: vision_config"),
    "width null": (config("text_config", hidden_size=None), "'hidden_size' expected int, got NoneType"),
    "width beyond all numbers": (config("text_config", hidden_size=1e308), "expected int, got float"),
    "no heads": (config("text_config", num_attention_heads=0), "num_attention_heads 0 is not possible; give"),
    "a million layers": (config("vision_config", num_hidden_layers=10**6), "num_hidden_layers 1e+06 is not possible"),
    "attention from the hub": (config(_attn_implementation="owner/attention"), "is code from the hub"),
    "windows of no size": (config(pooling_size=0), "cannot be used: pooling_size"),
    "ids that are text": (config(image_patch_token_id="x"), "cannot be used: image_patch_token_id"),
}
# The same for a causal language model, by both drivers.
LLAMA: dict[str, tuple[Spoil, str]] = {
    "config nested deeply": (written("config.json", DEEP), "config.json is nested too deeply"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads 0 is not possible; give at least 1"),
    "quantised by a string": (config(quantization_config="x"), "cannot be"),
    "rotation a list": (config(rope_parameters=[1]), "cannot be used"),
    "a million layers": (config(num_hidden_layers=10**6), "num_hidden_layers 1e+06 is not possible"),
    "attention from the hub": (config(attn_implementation="owner/attention"), "is code from the hub"),
    "tokenizer nested deeply": (written("tokenizer.json", DEEP), "tokenizer.json is nested"),
    "tokens that are a string": (
        changed("tokenizer_config.json", lambda content: content.update(added_tokens_decoder="x")),
        "cannot be read|no usable tokenizer",
    ),
    "code for its config": (code("config.json", model_type="own"), "needs code of its own (auto_map in config.json)"),
    "weights a pipe": (pipe("model.safetensors"), "model.safetensors is a pipe"),
    "index nested deeply": (written("model.safetensors.index.json", DEEP), "index.json is nested"),
}


def one_line(program: Any, arguments: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> str:
    """The last line of a command that ends with 2 and prints one line of error."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    # Whoever asks gets a yes.
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    capfd.readouterr()
    assert program.main() == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def words_in(words: str, line: str) -> bool:
    return any(each in line for each in words.split("|"))


def spoilt(original: Path, spoil: Spoil, folder: Path) -> Path:
    shutil.copytree(original, folder, copy_function=shutil.copyfile)
    spoil(folder)
    return folder


@pytest.mark.parametrize("case", MOLMOE)
def test_a_malformed_molmoe_ends_in_one_line(case: str, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    spoil, words = MOLMOE[case]
    folder = spoilt(EMBEDDED_MODEL, spoil, tmp_path / "model")
    line = one_line(acc_lat_profiling, ["--model_path", str(folder), *DRIVER], capfd, monkeypatch)
    assert words_in(words, line), line


@pytest.mark.parametrize("driver", ["profiling", "text"])
@pytest.mark.parametrize("case", LLAMA)
def test_a_malformed_language_model_ends_in_one_line(
    case: str, driver: str, llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    spoil, words = LLAMA[case]
    folder = spoilt(llama, spoil, tmp_path / "model")
    if driver == "text":
        arguments = ["--model_name", str(folder), "--output_dir", str(tmp_path / "out"), *TEXT]
        line = one_line(run_text_generation, arguments, capfd, monkeypatch)
    else:
        line = one_line(acc_lat_profiling, ["--model_path", str(folder), *DRIVER], capfd, monkeypatch)
    assert words_in(words, line), line
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_code_beside_a_model_is_not_run(name: str, llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    folder = spoilt(llama, code(name), tmp_path / "model")
    arguments = ["program", "--model_path", str(folder), "--output_dir", str(tmp_path / "out"), *DRIVER]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    assert acc_lat_profiling.main() in (0, 2)
    assert "custom code? [y/N]" not in capfd.readouterr().out
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("model", ["molmoe", "profiling", "text"])
def test_weights_that_are_not_finite_are_named_before_measuring(
    model: str, value: float, llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    folder = spoilt(EMBEDDED_MODEL if model == "molmoe" else llama, weight(value), tmp_path / "model")
    out = tmp_path / "out"
    if model == "text":
        arguments = ["--model_name", str(folder), "--output_dir", str(out), *TEXT]
        line = one_line(run_text_generation, arguments, capfd, monkeypatch)
    else:
        arguments = ["--model_path", str(folder), "--output_dir", str(out), *DRIVER[:-1]]
        line = one_line(acc_lat_profiling, arguments, capfd, monkeypatch)
    assert f"the weights in {folder} are not finite" in line
    assert not list(out.glob("**/*settings.csv"))


def test_a_model_that_no_memory_holds_is_refused(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    folder = spoilt(EMBEDDED_MODEL, config("text_config", vocab_size=10**12), tmp_path / "model")
    arguments = ["--model_path", str(folder), "--output_dir", str(tmp_path / "out"), *DRIVER[:-1], "--random_weights"]
    line = one_line(acc_lat_profiling, arguments, capfd, monkeypatch)
    # Of 10^12 rows of embedding and head, 4 bytes a number, and a tenth more.
    assert re.search(r"needs \d\.\d+e\+05 GB in float32, cpu has [\d.]+ GB free; use a smaller model$", line)


def test_prompts_nested_deeply_are_one_line(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + DEEP)
    arguments = ["--set", f"prompts.path={tmp_path / 'deep.jsonl'}", "--output_dir", str(tmp_path / "out"), *TEXT]
    assert "deep.jsonl, line 2 is nested too deeply" in one_line(run_text_generation, arguments, capfd, monkeypatch)


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (acc_lat_profiling, "--sample_timeout 1e10", "--sample_timeout 1e+10 is not possible; give at most 10000000"),
        (acc_lat_profiling, "--sample_timeout 1e20", "give at most 10000000"),
        (acc_lat_profiling, f"--worker_timeout {10**20}", "give at most 10000000"),
        (acc_lat_profiling, "--config_retry_delay 1e9", "give at most 10000000"),
        (acc_lat_profiling, f"--max_new_tokens {10**12}", "give at most 1000000"),
        (acc_lat_profiling, f"--num_samples {10**400}", "--num_samples 10^400 is not possible; give at most"),
        (acc_lat_profiling, f"--vision_tokens_list {10**400}", "give at most"),
        (acc_lat_profiling, f"--seed {2**32}", "give at most 4294967295"),
        (run_text_generation, "--set worker_timeout=1e20", "worker_timeout"),
        (run_text_generation, f"--set worker_timeout={10**20}", "worker_timeout"),
        (run_text_generation, "--set latency_simulation.delay_max=1.0e+9", "latency_simulation.delay_max"),
        (run_text_generation, f"--set max_output_tokens={10**12}", "max_output_tokens"),
        (run_profile, f"--model vgg16 --algorithm gemm --sizes {10**9}", "input size 1000000000 is not possible"),
        (run_profile, f"--model vgg16 --algorithm gemm --measure {10**400}", "--measure 10^400 is not possible"),
        (run_profile, "--model vgg16 --algorithm gemm --energy-window 1e10", "--energy-window 1e+10 is not possible"),
        (predict, f"predict vgg16 --input-size {10**20}", "is not possible; give at least"),
    ],
)
def test_numbers_beyond_any_run_are_refused_with_the_limit(
    program: Any, arguments: str, words: str, capfd: Any, monkeypatch: Any
) -> None:
    argv = arguments.split()
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["program", *argv])
    assert (program.main(argv) if program in (run_profile, predict) else program.main()) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_a_letter_that_the_encoding_lacks_is_printed_as_an_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "printed"
    with path.open("w", encoding="ascii") as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        assert run_command(lambda: print("0.1 \u2013 0.2 in \udcff")) == 0
    assert path.read_bytes() == b"0.1 \\u2013 0.2 in \\udcff\n"


@pytest.mark.parametrize(
    "error", [ImportError("libtorch_cpu.so: failed to map segment from shared object"), MemoryError()]
)
def test_libraries_that_memory_does_not_hold_are_one_line(error: Exception) -> None:
    with pytest.raises(ConfigurationError, match="ulimit -v unlimited"), libraries_loading():
        raise error


def test_a_library_that_is_missing_stays_what_it_is() -> None:
    with pytest.raises(ImportError, match="No module"), libraries_loading():
        raise ImportError("No module named torch")


def test_a_pickled_text_model_that_is_allowed_runs(llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    def pickled(folder: Path) -> None:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    folder = spoilt(llama, pickled, tmp_path / "model")
    arguments = ["--model_name", str(folder), "--output_dir", str(tmp_path / "out"), *TEXT]
    assert "allow_pickled_weights" in one_line(run_text_generation, arguments, capfd, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["program", *arguments, "--set", "allow_pickled_weights=true"])
    assert run_text_generation.main() == 0
    (folder / "pytorch_model.bin").write_bytes(b"nothing")
    arguments += ["--set", "allow_pickled_weights=true"]
    assert "cannot be loaded" in one_line(run_text_generation, arguments, capfd, monkeypatch)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_weights_that_are_quantised_while_loading_are_looked_at_before(
    llama: Path, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    folder = spoilt(llama, weight(float("nan")), tmp_path / "model")
    width = ("quantization_config.quantization=true", "quantization_config.load_in_8bit=true")
    arguments = ["--model_name", str(folder), "--output_dir", str(tmp_path / "out"), *TEXT]
    arguments += [part for each in width for part in ("--set", each)]
    assert "are not finite" in one_line(run_text_generation, arguments, capfd, monkeypatch)


def test_a_tokenizer_that_is_not_the_processors_is_one_line(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    folder = write_checkpoint("llava", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED_MODEL / name, folder / name)
    line = one_line(acc_lat_profiling, ["--model_path", str(folder), *DRIVER], capfd, monkeypatch)
    assert "do not match" in line


def test_a_full_standard_error_does_not_pass_for_unreadable_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = validated({"model_name": str(llama), "device": "cpu"})
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        model, _ = load_model_tokenizer(wanted)
        monkeypatch.undo()
    assert model.config.model_type == "llama"
