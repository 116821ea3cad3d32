"""Whole runs with several copies of a model in memory: what each setting ran by, and which answers are those of a run
with that copy alone.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.fingerprint import agreed_fingerprint
from experiment_core_utils.planning.plan import loads_decided, requested_run
from experiment_core_utils.planning.run import device_of_run
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.records.setting_result import setting_key
from experiments.analyses.knobs.grid import grids_of
from experiments.analyses.sweeps import load_sweep
from tests.models.tiny_checkpoints import write_checkpoint
from tests.models.tiny_gguf import write_tiny_gguf
from tests.processes.forked_runs import Run, RunServer, of_rank

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
    """Which attention a model takes by itself is known of the loaded model alone; its number format before."""
    both = ("--attention_list", "own", "sdpa", "--precision_list", "float32", "--execution", "eager")
    report = run_profiling(config_for(folder, tmp_path, *both))
    ((key, failure),) = report.failed.items()
    assert key == "tier-low_blocks2_attn-sdpa"
    assert failure.reason == f"{key}: attention is sdpa, as in the model as it is; leave the value out"
    assert {result.provenance.model.dtype for result in report.results} == {"float32"}


def test_a_copy_that_cannot_be_loaded_is_refused_before_any_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    words = ["--dataset_name", "reference_questions", "--num_samples", "2", "--quantization_list", "own", "8bit"]
    with pytest.raises(ConfigurationError, match="is a GGUF file .* not quantised again"):
        run_profiling(parse_config(["--model_path", str(gguf), "--output_dir", str(tmp_path / "out"), *words]))
    assert "loading" not in capfd.readouterr().err


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


def test_copies_that_are_loaded_in_turn_answer_alike_and_are_compared_over_loads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("--variant", f"q4={another_of(folder, tmp_path / 'changed')}", "--execution", "eager", "--no_reference")
    more: dict[str, Any] = {"num_active_blocks_list": (2, 3), "num_runs_per_sample": 3}
    together = run_profiling(config_for(folder, tmp_path / "together", *both).replaced(**more))
    assert "in memory together and by turns" in capsys.readouterr().err
    in_turn = run_profiling(config_for(folder, tmp_path / "in_turn", *both, "--loads", "in_turn").replaced(**more))
    lines = capsys.readouterr().err.splitlines()
    assert any("one at a time (--loads in_turn); each of 3 runs of a sample is of a new load" in line for line in lines)
    # Warm-up needs both, then A B, B A, A B, and each time a new load.
    loads = [re.findall(r"\((q4|as it is)\) on cpu:", line) for line in lines]
    assert [name for found in loads for name in found][-8:] == [
        "as it is", "q4", "as it is", "q4", "q4", "as it is", "as it is", "q4",
    ]  # fmt: skip
    assert not in_turn.failed and len(in_turn.results) == 4
    for one, same in zip(in_turn.results, together.results, strict=True):
        assert one.knobs == same.knobs and one.provenance.model == same.provenance.model
        assert (one.realised or {}).get("counted") == (same.realised or {}).get("counted")
        assert one.setting_order is not None and one.setting_order.how == "loads" and one.rounds == []
        assert any(each.startswith("loads: 2 copies of the model were in memory") for each in one.provenance.caveats)
        for sample, alike in zip(one.per_sample_results, same.per_sample_results, strict=True):
            assert (sample.sample_id, sample.pred) == (alike.sample_id, alike.pred) and len(sample.runs) == 3
    (grid,) = grids_of(load_sweep(tmp_path / "in_turn"))
    assert grid.times.levels == ("sample", "picture", "load") and grid.times.components[0].replicates == 3
    # The differences of the mean logarithms by load have this variance over three loads.
    results = [point.result for point in load_sweep(tmp_path / "in_turn").settings]
    by_load = np.log([[[run.T_total for run in each.runs] for each in one.per_sample_results] for one in results])
    apart = by_load.mean(axis=1)[0] - by_load.mean(axis=1)[1]
    assert grid.times.variances(0)[1] == pytest.approx(apart.var(ddof=1) / 3)


def test_copies_are_loaded_in_turn_where_their_estimate_is_above_free_memory(folder: Path, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    pair = ("--precision_list", "own", "bfloat16")

    def reason(model: Path, *more: str) -> str | None:
        return loads_decided(requested_run(config_for(model, tmp_path, *more)), cpu, 1).in_turn_reason

    assert reason(folder, *pair) is None and reason(folder, *pair, "--loads", "in_turn") == "--loads in_turn"
    with pytest.raises(ConfigurationError, match="--loads in_turn is of several copies of the model, and there is one"):
        reason(folder, "--loads", "in_turn")
    with pytest.raises(ConfigurationError, match="--until_precision looks at rounds"):
        reason(folder, *pair, "--loads", "in_turn", "--until_precision", "0.1")
    large = another_of(folder, tmp_path / "large")
    config = json.loads((large / "config.json").read_text())
    # 3 blocks of 3 products of 32 x 2**31 numbers of 4 and of 2 bytes, and a tenth more: 4083 GB.
    config["text_config"]["intermediate_size"] = 2**31
    (large / "config.json").write_text(json.dumps(config))
    assert re.match(r"together they need 4\.08e\+03 GB, and cpu has .* GB free", str(reason(large, *pair)))
    assert reason(large, *pair, "--loads", "together") is None


def test_processes_that_share_weights_do_not_compare_several_copies(folder: Path, tmp_path: Path) -> None:
    requested = requested_run(config_for(folder, tmp_path, "--precision_list", "own", "bfloat16"))
    shared = replace(requested, config=requested.config.replaced(tensor_parallel=2))
    with pytest.raises(
        ConfigurationError, match=r"2 models \(as it is, bfloat16\) are compared by processes that have"
    ):
        device_of_run(shared, Accelerator(cpu=True), 2)


@pytest.mark.parametrize("loads", ["together", "in_turn"])
def test_two_processes_have_their_copies_each(loads: str, folder: Path, tmp_path: Path, run_server: RunServer) -> None:
    both = ("--precision_list", "own", "bfloat16", "--execution", "eager", "--loads", loads, "--no_reference")
    alone = run_profiling(config_for(folder, tmp_path / "alone", *both))
    flags = ["--model_path", str(folder), "--output_dir", str(tmp_path / "two"), *FLAGS, *both]
    logs = [str(tmp_path / f"{rank}.log") for rank in range(2)]
    ended = run_server.run(*(Run(flags, logs[rank], of_rank(rank, 29561)) for rank in range(2)))
    assert [each.code for each in ended] == [0, 0], Path(logs[0]).read_text() + Path(logs[1]).read_text()
    found = {each.setting.key: each.result for each in load_sweep(tmp_path / "two").settings}
    assert len(found) == 2
    for one in alone.results:
        other = found[setting_key(one)]
        assert other.provenance.num_processes == 2
        assert [each.pred for each in other.per_sample_results] == [each.pred for each in one.per_sample_results]


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
