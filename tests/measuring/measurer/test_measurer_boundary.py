"""Whatever a library raises for one sample fails that sample alone, with its traceback in a file."""

import errno
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.meters.load import ConditionsMeter
from experiment_core_utils.primitives.errors import (
    DeviceLost,
    GenerationFailed,
    KnobDidNotAct,
    LibraryFault,
    OutOfMemory,
    ProfilerError,
)
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.journal import read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import CpuReading, FinishedSample, ShardDone
from experiment_core_utils.tasks.interface import Sample
from tests.hand_made_records import ReadOff
from tests.measuring.measurer.every_error import every_error
from tests.meters.test_steadiness import GPU
from tests.scripted.scripted_model import ScriptedModel

ODD = 7
FINE = (30, 12)
SETTING = Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1)))
OF_TASK = ("__getitem__", "prompt")
OF_HOST = (*OF_TASK, "prepare")
OF_MODEL = ("prepare", "to_device", "warm_up", "generate_timed", "decode_text", "count_flops")
IN_BATCHES = (*OF_TASK, "prepare", "to_device", "answer_batch", "decode_text", "count_flops")


class Thrower:
    """Raises errors in one call, each for one sample."""

    def __init__(self, place: str, errors: Mapping[int, BaseException]) -> None:
        self.place, self.errors, self.sample_id = place, errors, -1

    def at(self, place: str, sample_id: int | None = None) -> None:
        self.sample_id = self.sample_id if sample_id is None else sample_id
        if self.place == place and self.sample_id in self.errors:
            raise self.errors[self.sample_id]


class OddTask:
    """The question of a sample is its id."""

    name, split, metric, max_new_tokens = "odd", "all", "read_off", 4
    source: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, thrower: Thrower) -> None:
        self._thrower = thrower

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Sample:
        self._thrower.at("__getitem__", index)
        return Sample(index, f"picture-{index}", str(index), ("stop",), None, "reading")

    def question_type(self, index: int) -> str:
        return "reading"

    def prompt(self, sample: Sample) -> str:
        self._thrower.at("prompt", sample.sample_id)
        return sample.question


class OddModel(ScriptedModel):
    """A model each of whose calls may raise the thrower's error."""

    thrower: Thrower

    def prepare(self, sample: Sample, prompt: str, crops: Any) -> Any:
        self.thrower.at("prepare", sample.sample_id)
        made = super().prepare(sample, prompt, crops)
        return type(made)({**made.inputs, "sample_id": sample.sample_id}, made.shape)

    def to_device(self, inputs: Any) -> Any:
        self.thrower.at("to_device", inputs["sample_id"])
        return super().to_device(inputs)

    def warm_up(self, inputs: Any, max_new_tokens: int) -> None:
        self.thrower.at("warm_up", inputs["sample_id"])

    def generate_timed(self, inputs: Any, max_new_tokens: int, marks: Any) -> Any:
        self.thrower.at("generate_timed", inputs["sample_id"])
        return super().generate_timed(inputs, max_new_tokens, marks)

    def answer_batch(self, inputs_list: Any, max_new_tokens: int) -> Any:
        for inputs in inputs_list:
            self.thrower.at("answer_batch", inputs["sample_id"])
        return super().answer_batch(inputs_list, max_new_tokens)

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        self.thrower.at("decode_text")
        return super().decode_text(token_ids)

    def count_flops(self, setting: Any, shape: Any, output_tokens: int) -> None:
        self.thrower.at("count_flops")


class Lenient(ReadOff):
    """Scores every text."""

    def score(self, answers):  # type: ignore[no-untyped-def]
        return super().score([type(answer)("none", ("stop",)) for answer in answers])


def measured(
    folder: Path, place: str, errors: Mapping[int, BaseException], *, in_batches: bool = False
) -> tuple[ShardDone, dict[int, FinishedSample]]:
    """The end of the shard and the finished samples, by id, where these errors come up at this place."""
    thrower, ids = Thrower(place, errors), (FINE[0], *errors, FINE[1])
    task, model = OddTask(thrower), OddModel()
    model.thrower = thrower
    config = parse_config(
        ["--num_runs_per_sample", "1", "--num_warmup_runs", "0", "--max_config_retries", "0", "--max_repeats", "0"]
    )
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    ledger = Ledger(folder, "f")
    context = RunContext("0001", 0, {0: ids}, ledger, folder / "parts", StopRequest())
    bench = Bench(model, requests, 4, Lenient(), frozenset() if in_batches else frozenset(ids))
    if in_batches and place in ("decode_text", "count_flops"):
        # Answers of a batch are recorded one after the other; only a batch of one tells the calls apart.
        config = config.replaced(accuracy_batch_size=1)
    reading = iter(float(each) for each in range(10**6))
    idle = CpuReading(0.0, 0.0, 0.0, None)
    meter = ConditionsMeter("0001", 0, lambda: GPU, None, lambda: idle, lambda: next(reading))
    with Progress(1, len(ids), shown=False) as progress:
        measurer = ShardMeasurer(config.measuring, context, bench, RoundOrder((SETTING.key,), 0), conditions=meter)
        done = measurer.measure({SETTING: ids}, progress)[SETTING.key]
    (path,) = (folder / "parts").glob("*.jsonl")
    content = read_journal(path)
    assert content is not None
    return done, {each.sample_id: each for each in content.every(FinishedSample)}


CASES = [(place, False) for place in (*OF_TASK, *OF_MODEL)] + [(place, True) for place in IN_BATCHES]


@pytest.mark.parametrize(("place", "in_batches"), CASES)
def test_an_error_of_any_class_fails_its_sample_and_the_others_are_measured(
    place: str, in_batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    # Lack of memory while the model runs is the setting's, below.
    kept = [each for each in every_error() if place in OF_HOST or not isinstance(each, MemoryError)]
    errors = dict(enumerate(kept, 100))
    done, finished = measured(tmp_path, place, errors, in_batches=in_batches)
    assert done.failure is None and len(errors) > 60
    assert {each for each in finished if finished[each].failed is None} == set(FINE)
    for sample_id, error in errors.items():
        failed = finished[sample_id].failed
        assert failed is not None
        # Python itself makes a RuntimeError of one that leaves a generator.
        stops = isinstance(error, StopIteration | StopAsyncIteration)
        assert failed.error == type(error).__name__ or (stops and failed.error == "RuntimeError")
        assert failed.reason.startswith(f"sample {sample_id}: {failed.error}") and failed.reason.isprintable()
        trace = re.fullmatch(r".* \(traceback: (tracebacks/\w+-[0-9a-f]{16}\.txt)\)", failed.reason)
        assert trace is not None
        assert f", in {place}" in (tmp_path / trace[1]).read_text()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("generate_timed", MemoryError()),
        ("generate_timed", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("generate_timed", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        ("prepare", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ],
)
def test_lack_of_memory_while_it_runs_or_on_the_device_is_of_the_setting(
    place: str, error: Exception, tmp_path: Path
) -> None:
    done, finished = measured(tmp_path, place, {ODD: error})
    assert done.failure is not None and done.failure.error == "OutOfMemory" and set(finished) == {FINE[0]}


@pytest.mark.parametrize(
    ("place", "in_batches"), [("generate_timed", False), ("to_device", False), ("answer_batch", True)]
)
def test_a_broken_gpu_ends_the_run_at_once(place: str, in_batches: bool, tmp_path: Path) -> None:
    error = torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")
    with pytest.raises(DeviceLost, match=r"^the GPU does no further work .*device-side assert triggered\); ") as found:
        measured(tmp_path, place, {ODD: error}, in_batches=in_batches)
    assert "\n" not in str(found.value) and not (tmp_path / "tracebacks").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceLost("gone")])
def test_what_ends_the_run_passes(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        measured(tmp_path, "prepare", {ODD: error})


@pytest.mark.parametrize("error", [OutOfMemory("full"), KnobDidNotAct("inert"), GenerationFailed("not finite")])
def test_an_error_of_the_setting_stays_one(error: ProfilerError, tmp_path: Path) -> None:
    failure = measured(tmp_path, "generate_timed", {ODD: error})[0].failure
    assert failure is not None and failure.error == type(error).__name__
    # That logits are not finite is said with the sample and the remedy.
    reason = f"{error} at sample {ODD} (" if isinstance(error, GenerationFailed) else str(error)
    assert failure.reason.startswith(reason)


def test_a_fault_from_another_process_brings_its_traceback_along() -> None:
    fault = LibraryFault("sample 3: KeyError")
    fault.kind, fault.trace = "KeyError", "Traceback ..."
    again = pickle.loads(pickle.dumps(fault))
    assert (str(again), again.kind, again.trace) == ("sample 3: KeyError", "KeyError", "Traceback ...")
