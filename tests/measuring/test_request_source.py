"""Requests kept and prepared ahead, in this process and by others: how often each is made, and what goes wrong."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image

from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.measuring.request_source import (
    RequestKey,
    RequestSource,
    SamplePreparer,
    num_preparation_workers,
    picture_bytes,
    request_bytes,
)
from experiment_core_utils.primitives.errors import DataChanged, SampleError, SampleTimedOut
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.records.requests import PreparedRequest, RequestShape
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import load_task
from tests.scripted.scripted_model import ScriptedModel

LOW, HIGH = CropRange(1, 3), CropRange(9, 12)
UNREADABLE, SLOW, HANGS, FATAL = 90, 91, 92, 93


def keys(crops: CropRange, sample_ids: Sequence[int], following: Sequence[CropRange]) -> list[RequestKey]:
    """These samples with these crops, then with those that follow."""
    return [RequestKey(sample_id, each) for each in (crops, *following) for sample_id in sample_ids]


class NotedTask:
    """Samples whose pictures are 10 x 10 RGB (300 bytes); every making is a line in a file that processes share."""

    name, split, metric, max_new_tokens = "noted", "all", "exact", 4
    source: ClassVar = {"read_from": "test"}

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Sample:
        self.note(f"sample {index}")
        if index == UNREADABLE:
            raise SampleError("sample 90: nothing there")
        if index == SLOW:
            time.sleep(30)
        if index == HANGS:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(30)
        if index == FATAL and os.getpid() != self.main:
            os._exit(9)
        return Sample(index, f"picture-{index}", "what?", ("stop",), Image.new("RGB", (10, 10)), "reading")

    main = os.getpid()

    def question_type(self, index: int) -> str:
        return "reading"

    def prompt(self, sample: Sample) -> str:
        return "p" * (sample.sample_id + 1)

    def note(self, line: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{line}\n")

    def noted(self, start: str) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return sorted(line for line in lines if line.startswith(start))


class NotedModel(ScriptedModel):
    """Every request holds 4 float32 (16 bytes) filled with the sample's id, and an empty tensor."""

    task: NotedTask

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        self.task.note(f"request {sample.sample_id} of {crops and crops.max_crops}")
        inputs = {
            "pixel_values": torch.full((1, 2, 2), float(sample.sample_id)),
            "none": torch.empty(0, dtype=torch.long),
            "text": prompt,
        }
        return PreparedRequest(inputs, RequestShape(None, None, 0, 0, len(prompt), 0.25))


@pytest.fixture
def task(tmp_path: Path) -> NotedTask:
    return NotedTask(tmp_path / "notes")


@pytest.fixture(params=[0, 2], ids=["inline", "workers"])
def num_workers(request: pytest.FixtureRequest) -> Iterator[int]:
    return request.param


def source(task: NotedTask, ids: tuple[int, ...], budget: int, workers: int, limit_s: float | None = None):
    model = NotedModel()
    model.task = task
    return RequestSource(task, model, ids, budget, workers, limit_s, keep_pictures=True)


def test_a_sample_that_has_changed_is_refused_wherever_it_is_prepared(task: NotedTask, num_workers: int) -> None:
    model = NotedModel()
    model.task = task
    of_other_data = RequestSource(task, model, (3, 5), 0, num_workers, None, keep_pictures=True, digests={3: "f00d"})
    with of_other_data as requests:
        requests.announce(keys(LOW, (5, 3), ()))
        assert requests.take(5, LOW)[0].picture_sha256 is not None
        with pytest.raises(DataChanged, match="^sample 3 of noted has changed since this run began"):
            requests.take(3, LOW)


def test_a_request_is_the_same_from_wherever_it_comes(task: NotedTask, num_workers: int) -> None:
    with source(task, (3, 5), 10_000, num_workers) as requests:
        requests.announce(keys(LOW, (3, 5), ()))
        for _ in range(2):
            for sample_id in (3, 5):
                sample, request = requests.take(sample_id, LOW)
                assert (sample.sample_id, sample.image, sample.answers) == (sample_id, None, ("stop",))
                assert torch.equal(request.inputs["pixel_values"], torch.full((1, 2, 2), float(sample_id)))
                assert request.inputs["none"].shape == (0,)
                assert request.inputs["none"].dtype == torch.long
                assert request.inputs["text"] == "p" * (sample_id + 1)
                assert request.shape == RequestShape(None, None, 0, 0, sample_id + 1, 0.25)
        assert task.noted("request") == ["request 3 of 3", "request 5 of 3"]
        assert requests.cached_bytes == 2 * 16


def test_settings_with_the_same_crops_share_and_others_share_the_picture(task: NotedTask, num_workers: int) -> None:
    ids = (0, 1, 2, 3)
    with source(task, ids, 100_000, num_workers) as requests:
        for place, crops in enumerate((LOW, LOW, HIGH, HIGH)):
            following = (LOW, LOW, HIGH, HIGH)[place + 1 :]
            requests.announce(keys(crops, ids, following))
            for sample_id in ids:
                assert requests.take(sample_id, crops)[1].shape.text_tokens == sample_id + 1
    assert task.noted("request") == [f"request {each} of {most}" for each in ids for most in (12, 3)]
    assert task.noted("sample") == [f"sample {each}" for each in ids]


def test_what_is_not_needed_any_more_makes_room(task: NotedTask) -> None:
    """80 % of 100 bytes hold 5 requests of 16; a picture of 300 is too large for the other 20."""
    ids = tuple(range(6))
    with source(task, ids, 100, 0) as requests:
        for crops, following in ((LOW, [LOW]), (LOW, [HIGH]), (HIGH, [])):
            requests.announce(keys(crops, ids, following))
            for sample_id in ids:
                requests.take(sample_id, crops)
            assert requests.cached_bytes == 5 * 16
    assert task.noted("request 5 of 3") == ["request 5 of 3"] * 2  # no room, so made anew by the second setting
    assert task.noted("request 0 of 3") == ["request 0 of 3"]
    assert task.noted("request 5 of 12") == ["request 5 of 12"]
    assert len(task.noted("sample")) == 7 + 6


def test_what_is_let_go_makes_room(task: NotedTask) -> None:
    with source(task, (0, 1), 100_000, 0) as requests:
        requests.announce(keys(LOW, (0, 1), ()))
        requests.take(0, LOW)
        requests.take(1, LOW)
        requests.let_go([RequestKey(0, LOW), RequestKey(7, LOW)])
        assert requests.cached_bytes == 16
        requests.take(0, LOW)
    assert task.noted("request 0 of 3") == ["request 0 of 3"] * 2


def test_without_memory_nothing_is_kept_and_nothing_piles_up(task: NotedTask, num_workers: int) -> None:
    ids = tuple(range(10))
    with source(task, ids, 0, num_workers) as requests:
        for _ in range(2):
            requests.announce(keys(LOW, ids, [LOW]))
            for sample_id in ids:
                assert requests.take(sample_id, LOW)[0].sample_id == sample_id
                assert requests.cached_bytes == 0
    assert len(task.noted("request 0 ")) == 2
    # The second setting is the last that was announced to be followed by another: at most 4 of it are made in vain.
    assert 20 <= len(task.noted("request")) <= 24


def test_workers_run_ahead_of_what_is_taken(task: NotedTask) -> None:
    ids = tuple(range(20))
    with source(task, ids, 0, 2) as requests:
        requests.announce(keys(LOW, ids, ()))
        requests.take(0, LOW)
        deadline = time.monotonic() + 20
        while len(task.noted("request")) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        # Each has one request done and waiting in its pipe: beside the one taken, not the whole split.
        assert 3 <= len(task.noted("request")) <= 5


def test_a_sample_that_fails_fails_alone_and_is_tried_again(task: NotedTask, num_workers: int) -> None:
    ids = (1, UNREADABLE, 2)
    with source(task, ids, 10_000, num_workers) as requests:
        for attempt in (1, 2):
            requests.announce(keys(LOW, ids, ()))
            requests.take(1, LOW)
            with pytest.raises(SampleError, match=r"^sample 90: nothing there$"):
                requests.take(UNREADABLE, LOW)
            requests.take(2, LOW)
            assert len(task.noted("sample 90")) == attempt


@pytest.mark.parametrize("which", [SLOW, HANGS])
def test_a_slow_preparation_is_out_of_time_and_the_others_go_on(task: NotedTask, which: int) -> None:
    ids = (1, 2, which, 3, 4)
    with source(task, ids, 10_000, 2, limit_s=0.5) as requests:
        requests.announce(keys(LOW, ids, ()))
        for sample_id in ids:
            if sample_id == which:
                with pytest.raises(SampleTimedOut, match=r"not done after 0\.5 s"), time_limit(0.5):
                    requests.take(which, LOW)
            else:
                with time_limit(10):
                    assert requests.take(sample_id, LOW)[0].sample_id == sample_id
        assert len(requests._workers) == (2 if which == SLOW else 1)


def test_a_process_that_dies_is_done_without(task: NotedTask) -> None:
    ids = (FATAL, 1, 2, 3)
    with source(task, ids, 10_000, 2) as requests:
        requests.announce(keys(LOW, ids, ()))
        assert [requests.take(sample_id, LOW)[0].sample_id for sample_id in ids] == list(ids)
        assert len(requests._workers) == 0  # the second one died of the same sample, then it was made here


def test_no_process_outlives_the_one_that_asks(task: NotedTask, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = os.fork()
    if not child:
        requests = source(task, (1, SLOW), 10_000, 2)
        requests.__enter__()
        requests.announce(keys(LOW, (1, SLOW), ()))
        requests.take(1, LOW)
        pids.write_text(" ".join(str(worker._process.pid) for worker in requests._workers))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    alive = [int(pid) for pid in pids.read_text().split()]
    assert len(alive) == 2
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if _is_running(pid)]
        time.sleep(0.01)
    assert not alive


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_cpu_is_left_to_what_is_measured() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert num_preparation_workers(cpu, 64) == 0
    assert [num_preparation_workers(gpu, cores) for cores in (0, 1, 2, 4, 16)] == [0, 0, 1, 3, 4]


def test_bytes_are_those_of_tensors_and_pixels(task: NotedTask) -> None:
    sample = task[7]
    assert picture_bytes(sample) == 10 * 10 * 3
    with source(task, (7,), 1000, 0) as requests:
        requests.announce(keys(LOW, (7,), ()))
        requests.take(7, LOW)
        assert request_bytes(requests._cached[RequestKey(7, LOW)]) == 4 * 4


def test_a_request_has_the_tasks_prompt_and_the_requested_crops() -> None:
    model, task = ScriptedModel(), load_task("reference_vqa", "validation")
    sample = task[0]
    ready = SamplePreparer(task, model, 0).prepare(RequestKey(0, CropRange(4, 8)))
    assert model.calls == [f"prepare {' User: ' + sample.question + ' Assistant:'!r} 4-8"]
    assert ready.request.shape.prompt_tokens == len(task.prompt(sample))
    assert ready.sample.metadata == {**sample.metadata, "prompt": task.prompt(sample)}
