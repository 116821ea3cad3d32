"""What a result depends on beside the knobs: how it was executed is part of it, and older results keep theirs."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate import Accelerator
from PIL import Image

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.facts.variables import variables_of
from experiment_core_utils.planning.fingerprint import agreed_fingerprint, fingerprint_parts, refuse_other_engines
from experiment_core_utils.planning.plan import RequestedRun, chosen_blocks, requested_run
from experiment_core_utils.planning.remarks import NOT_IN_FINGERPRINT, replaced_results_lines
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.provenance import Variables
from experiment_core_utils.records.settings import JournalHeader
from tests.given_flags import over
from tests.hand_made_records import measured_sample, part, stored_result


def requested(*flags: str) -> RequestedRun:
    return requested_run(parse_config(over(["--device", "cpu", "--ids", "1", "2"], flags)))


def parts(*flags: str) -> tuple[object, ...]:
    return fingerprint_parts(requested(*flags), Accelerator(cpu=True))


def test_execution_belongs_to_a_result_and_eager_adds_nothing() -> None:
    eager = parts("--execution", "eager")
    assert parts("--execution", "graph") == (*eager, ("execution", "graph"))
    assert parts() == parts("--execution", "auto") == (*eager, ("execution", "auto"))


def test_threads_of_the_environment_belong_to_a_result_where_no_flag_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    two, flagged = parts(), parts("--num_threads", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [each for each in two if each not in parts()] == [("OMP_NUM_THREADS", 2)]
    assert parts("--num_threads", "1") == flagged


# What each parameter is set by, to another value than by default.
FINGERPRINTED = {
    "max_new_tokens": ["--max_new_tokens", "5"],
    "stop": ["--stop", "Q:", "User:"],
    "ignore_eos": ["--ignore_eos"],
    "num_runs_per_sample": ["--num_runs_per_sample", "7"],
    "num_warmup_runs": ["--num_warmup_runs", "5"],
    "max_warmup_runs": ["--max_warmup_runs", "20"],
    "max_repeats": ["--max_repeats", "3"],
    "until_precision": ["--until_precision", "0.1"],
    "energy": ["--energy", "optional"],
    "num_latency_samples": ["--num_latency_samples", "1"],
    "accuracy_batch_size": ["--num_latency_samples", "1", "--accuracy_batch_size", "3"],
    "precision": ["--precision", "bfloat16"],
    "execution": ["--execution", "eager"],
    "quantization": ["--quantization", "8bit"],
    "device_map": ["--device_map", "auto"],
    "tensor_parallel": ["--tensor_parallel", "2"],
    "concurrency": ["--endpoint", "http://localhost:1/v1", "--model", "m", "--concurrency", "2"],
    "request_rate": ["--endpoint", "http://localhost:1/v1", "--model", "m", "--request_rate", "2"],
    "num_threads": ["--num_threads", "1"],
    "random_weights": ["--random_weights"],
    "profiler": ["--use_profiler"],
    "use_profiler_on_all_samples": ["--use_profiler_on_all_samples"],
}
NOT_FINGERPRINTED = {
    "sampling_strategy": ["--sampling_strategy", "full"],
    "enable_memory_optimization": ["--enable_memory_optimization"],
    "max_config_retries": ["--max_config_retries", "5"],
    "sample_timeout_s": ["--sample_timeout", "99"],
}
# In it by the samples that they draw, by files or for tasks that this one is not, or always the same.
OTHERWISE = {
    "num_samples", "sample_by", "seed", "ids", "dataset_revision", "prompt_template", "importance_scores_file",
    "block_sets_file", "batch_size", "decoding", "first_block_top_k_rule", "columns", "text_only", "system_prompt",
    "no_chat_template", "knob_flags", "endpoint", "model",
}  # fmt: skip


def test_what_a_run_says_to_differ_from_replaced_results_is_what_the_fingerprint_contains() -> None:
    own = parts()
    assert all(parts(*flags) != own for flags in FINGERPRINTED.values())
    # Whether there is a counter is no question of what was measured before there was a default.
    assert parts("--energy", "off") == parts("--energy", "auto") == own
    # These two do nothing alone; they differ from the flag that they need, too.
    batched, profiled = FINGERPRINTED["accuracy_batch_size"], FINGERPRINTED["use_profiler_on_all_samples"]
    assert parts(*batched) != parts(*FINGERPRINTED["num_latency_samples"])
    assert parts(*profiled) != parts(*FINGERPRINTED["profiler"])
    assert all(parts(*flags) == own for flags in NOT_FINGERPRINTED.values())
    assert set(NOT_FINGERPRINTED) == NOT_IN_FINGERPRINT
    assert set(Variables.model_fields) == {*FINGERPRINTED, *NOT_FINGERPRINTED, *OTHERWISE}


def test_passwords_of_servers_are_in_no_record_and_no_difference(tmp_path: Path) -> None:
    flags = ("--model", "m", "--output_dir", str(tmp_path))
    run = requested("--endpoint", "http://me:secret@localhost:1/v1", *flags)
    ledger, (key,) = Ledger(tmp_path, "other"), run.keys
    variables = variables_of(run.config, 5, chosen_blocks(run.config, run.source)).content()
    assert variables["endpoint"] == ["http://localhost:1/v1"]
    content = {"fingerprint": "f00d", "provenance": {"experimental_variables": {"endpoint": ["http://me:secret@h/v1"]}}}
    write_json_atomically(content, tmp_path / f"reference-questions_imgsize{key}.json")
    (line,) = replaced_results_lines(run, ledger, [key])
    assert "(--endpoint http://localhost:1/v1, there http://h/v1)" in line


def fingerprint(model: Path, output_dir: Path) -> str:
    run = requested("--model_path", str(model), "--output_dir", str(output_dir))
    return agreed_fingerprint(run, Accelerator(cpu=True))


def test_a_model_is_known_by_its_content_not_by_place_and_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    own = fingerprint(tiny_checkpoint, tmp_path)
    copied = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copied"))
    weights = next(copied.glob("*.safetensors"))
    os.utime(weights, (1.0, 1.0))
    (copied / "block_importance.provenance.json").write_text("{}")
    assert fingerprint(copied, tmp_path) == own
    # One byte of the last weight, the size unchanged.
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copied, tmp_path) != own


def data_run(output_dir: Path, data_dir: Path) -> RequestedRun:
    """Two questions in a file about pictures in a folder."""
    file = output_dir / "my.jsonl"
    file.write_text("\n".join(f'{{"image": "{name}.bmp", "question": "Q?", "answer": "a"}}' for name in "ab"))
    flags = ["--device", "cpu", "--data_file", str(file), "--data_dir", str(data_dir), "--output_dir", str(output_dir)]
    return requested_run(parse_config(flags))


def data_fingerprint(output_dir: Path, data_dir: Path) -> str:
    return agreed_fingerprint(data_run(output_dir, data_dir), Accelerator(cpu=True))


def test_data_are_known_by_their_content_not_by_their_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    Image.new("RGB", (8, 8), "red").save(first / "a.bmp")
    own = data_fingerprint(tmp_path, first)
    shutil.copytree(first, second)
    (second / "unrelated.txt").write_text("not one of the pictures")
    assert data_fingerprint(tmp_path, second) == own
    size = (second / "a.bmp").stat().st_size
    Image.new("RGB", (8, 8), "blue").save(second / "a.bmp")
    assert (second / "a.bmp").stat().st_size == size
    assert data_fingerprint(tmp_path, second) != own


COMPILED = {"vision": "reference", "prefill": "reference", "decode": "cpu step"}
PLAIN = {"vision": "reference", "prefill": "reference", "decode": "reference"}
MODULES = {"vision": "modules", "prefill": "modules", "decode": "modules"}


def refuse(engines: dict[str, str], folder: Path) -> None:
    refuse_other_engines(engines, Ledger(folder, "f00d"), ["a"], folder / ".parts", Accelerator(cpu=True))


def test_a_started_setting_resumes_with_its_engines_only(tmp_path: Path) -> None:
    """A journal of another run says nothing, nor does one from before engines were noted."""
    header = JournalHeader(JOURNAL_VERSION, "a", "f00d", 0, 1, "0001", (1,))
    for each in (replace(header, key="b", fingerprint="beef", engines=PLAIN), header):
        Journal(tmp_path / ".parts", each).__exit__(None, None, None)
    refuse(COMPILED, tmp_path)
    Journal(tmp_path / ".parts", replace(header, key="c", engines=COMPILED)).__exit__(None, None, None)
    refuse(COMPILED, tmp_path)
    output = (
        r"contains a part of this run that was measured with other engines \(vision reference, prefill reference, "
        r"decode "
        r"cpu step\) than run here now \(vision reference, prefill reference, decode reference\); give another"
    )
    with pytest.raises(ConfigurationError, match=output):
        refuse(PLAIN, tmp_path)


def test_a_result_says_which_engines_ran(tmp_path: Path) -> None:
    result = stored_result(part(measured_sample(1)))
    result["provenance"]["model"] = {"execution_stages": PLAIN}
    write_json_atomically(result, tmp_path / "a.json")
    Ledger(tmp_path, "f00d").mark_done("a", "a.json")
    refuse(PLAIN, tmp_path)
    with pytest.raises(ConfigurationError, match="vision modules"):
        refuse(MODULES, tmp_path)
