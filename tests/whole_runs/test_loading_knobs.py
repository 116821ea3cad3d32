"""Whole runs with several copies of a model in memory: what each setting ran by, and which answers are those of a run
with that copy alone.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.fingerprint import agreed_fingerprint
from experiment_core_utils.planning.plan import requested_run
from experiment_core_utils.planning.run import device_of_run
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiments.analyses.sweeps import load_sweep
from tests.models.tiny_checkpoints import write_checkpoint

FLAGS = ["--ids", "3", "1", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--num_threads", "1",
         "--max_new_tokens", "4", "--num_runs_per_sample", "1", "--tier_list", "low",
         "--num_active_blocks_list", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that sees, whose pictures are sent in its number format."""
    return write_checkpoint("llava_next", tmp_path_factory.mktemp("llava_next"))


def config_for(folder: Path, output_dir: Path, *more: str) -> ProfilingConfig:
    return parse_config(["--model_path", str(folder), "--output_dir", str(output_dir), *FLAGS, *more])


def test_each_copy_answers_as_it_does_alone_and_results_say_which_it_was(folder: Path, tmp_path: Path) -> None:
    both = ("--precision_list", "own", "bfloat16", "--execution_list", "eager", "--no_reference")
    report = run_profiling(config_for(folder, tmp_path / "together", *both))
    assert not report.failed
    found = {result.provenance.model.dtype: result for result in report.results}
    values = {dtype: (result.knobs.get("number_format"), result.knobs["engine"]) for dtype, result in found.items()}
    assert values == {"float32": (None, "eager"), "bfloat16": ("bfloat16", "eager")}
    for dtype, together in found.items():
        (alone,) = run_profiling(
            config_for(folder, tmp_path / dtype, "--precision", dtype, "--execution", "eager", "--no_reference")
        ).results
        own, other = together.content(), alone.content()
        assert own["provenance"]["model"] == other["provenance"]["model"]
        for one, same in zip(own["per_sample_results"], other["per_sample_results"], strict=True):
            for key in ("sample_id", "pred", "output_tokens", "prompt_tokens", "prefill_flops"):
                assert one[key] == same[key]
    sweep = load_sweep(tmp_path / "together")
    assert [each.key for each in sweep.settings] == [
        "tier-low_blocks2_format-bfloat16_run-eager", "tier-low_blocks2_run-eager",
    ]  # fmt: skip
    # All is there: a second run has nothing to measure.
    again = run_profiling(config_for(folder, tmp_path / "together", *both))
    assert [each.content() for each in again.results] == [each.content() for each in report.results]


def test_a_copy_that_is_the_model_as_it_is_fails_its_setting_alone(folder: Path, tmp_path: Path) -> None:
    report = run_profiling(config_for(folder, tmp_path, "--precision_list", "own", "float32", "--execution", "eager"))
    ((key, failure),) = report.failed.items()
    assert key == "tier-low_blocks2_format-float32"
    assert failure.reason == f"{key}: number format is float32, as in the model as it is; leave the value out"
    assert {result.provenance.model.dtype for result in report.results} == {"float32"}


def another_of(folder: Path, place: Path) -> Path:
    """The same model with other weights."""
    shutil.copytree(folder, place)
    for file in place.glob("*.safetensors"):
        weights = {name: tensor * 1.125 for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return place


def test_another_checkpoint_answers_as_it_does_alone_and_is_asked_as_the_model_itself(
    folder: Path, tmp_path: Path
) -> None:
    changed = another_of(folder, tmp_path / "changed")
    modules = ("--execution", "eager", "--no_reference")
    together = run_profiling(config_for(folder, tmp_path / "together", "--variant", f"q4={changed}", *modules))
    (alone,) = run_profiling(config_for(changed, tmp_path / "alone", *modules)).results
    assert not together.failed
    results = {result.knobs.get("variant"): result for result in together.results}
    assert set(results) == {None, "q4"}
    for one, same in zip(results["q4"].per_sample_results, alone.per_sample_results, strict=True):
        for key in ("sample_id", "pred", "output_tokens", "prompt_tokens"):
            assert getattr(one, key) == getattr(same, key)
    counted = (results["q4"].realised or {})["counted"]["loading"]
    # As many bytes, since only the numbers are others.
    assert counted["weights_bytes"] == counted["own_weights_bytes"] > 0 and counted["logits_distance"] > 0.01
    assert "counted" not in (results[None].realised or {})
    flags = results[None].provenance.experimental_variables.knob_flags
    assert flags == {"variant": [f"q4={changed}"]}
    # The content of a checkpoint is a part of what results are recognised by.
    another_of(changed, tmp_path / "third")
    shutil.copytree(tmp_path / "third", changed, dirs_exist_ok=True)
    again = requested_run(config_for(folder, tmp_path / "together", "--variant", f"q4={changed}", *modules))
    assert agreed_fingerprint(again, Accelerator(cpu=True)) != results[None].fingerprint


def test_a_checkpoint_of_another_model_or_vocabulary_is_refused_at_the_door(folder: Path, tmp_path: Path) -> None:
    llama = write_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(ConfigurationError, match=r"--variant q4=.* is another model than .*: its taking of pictures"):
        requested_run(config_for(folder, tmp_path, "--variant", f"q4={llama}"))
    changed = another_of(folder, tmp_path / "changed")
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    one, two = [token for token in ids if token.isalpha()][:2]
    ids[one], ids[two] = ids[two], ids[one]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigurationError, match="2 tokens of the vocabulary have another id, such as "):
        requested_run(config_for(folder, tmp_path, "--variant", f"q4={changed}"))


def test_one_process_measures_several_copies(folder: Path, tmp_path: Path) -> None:
    requested = requested_run(config_for(folder, tmp_path, "--precision_list", "own", "bfloat16"))
    several: Any = SimpleNamespace(num_processes=2, local_process_index=0)
    with pytest.raises(
        ConfigurationError, match=r"2 models in memory \(as it is, bfloat16\) are measured by one process, and 2 were"
    ):
        device_of_run(requested, several, 2)


@pytest.mark.parametrize("model", ["modules", "engines", "MolmoE"])
def test_a_limit_of_answers_cuts_those_of_timed_and_of_batched_samples(
    model: str, folder: Path, tmp_path: Path
) -> None:
    """What is left are the first tokens of the answers without it."""
    given = str(EMBEDDED_MODEL if model == "MolmoE" else folder)
    ways = ("--execution", "eager", "--num_latency_samples", "2") if model == "modules" else ()
    flags = [*FLAGS, "--model_path", given, "--output_dir", str(tmp_path), "--no_reference", *ways]
    report = run_profiling(parse_config([*flags, "--answer_limit_list", "1", "4"]))
    assert not report.failed
    both = {result.knobs["answer_limit"]: result for result in report.results if result.top_k in (None, 8)}
    cut, whole = both[1], both[4]
    for short, long in zip(cut.per_sample_results, whole.per_sample_results, strict=True):
        assert short.sample_id == long.sample_id and long.output_tokens > 1
        assert (short.output_tokens, short.output_ended) == (1, False)
        # A character may be cut in two.
        assert long.pred.startswith(short.pred.rstrip("\ufffd"))
    assert ["timed" if each.runs else "batched" for each in cut.per_sample_results].count("batched") == (
        1 if model == "modules" else 0
    )
