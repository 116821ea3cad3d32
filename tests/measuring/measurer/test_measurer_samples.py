"""What a shard's measurement does with each sample: warm-ups of new layouts, finished ones, and where it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, tier_target
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.requests import PreparedRequest, RequestShape, VisionGeometry
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import FinishedSample, JournalHeader, ShardDone
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.hand_made_records import measured_sample, staged_run
from tests.scripted.scripted_model import ScriptedModel

SETTING = Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1)))
WIDE, HIGH = VisionGeometry(2, (1, 2), (336, 672), 432), VisionGeometry(2, (2, 1), (672, 336), 432)
WIDER = VisionGeometry(2, (1, 2), (336, 680), 432)


@dataclass
class PicturesModel(ScriptedModel):
    """Each sample has a picture of the size that is given by its id; of those in `unreadable` none."""

    geometries: dict[int, VisionGeometry] = field(default_factory=dict)
    unreadable: tuple[int, ...] = ()

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        self.calls.append(f"sample {sample.sample_id}")
        if sample.sample_id in self.unreadable:
            raise SampleError("its picture is gone")
        geometry = self.geometries.get(sample.sample_id)
        inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
        return PreparedRequest(inputs, RequestShape(geometry, geometry, 384 if geometry else 0, 0, 4, 0.0))


def measure(
    folder: Path, model: ScriptedModel, ids: Sequence[int], *flags: str, num_warmup_runs: int = 1
) -> tuple[ShardDone, list[FinishedSample]]:
    """The shard's end and the samples of its journal."""
    warmup = [word for name in ("num", "max") for word in (f"--{name}_warmup_runs", str(num_warmup_runs))]
    config = parse_config(["--num_runs_per_sample", "1", "--config_retry_delay", "0", *warmup, *flags])
    task = load_task("reference_vqa", "validation")
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    context = RunContext("0002", 0, {0: tuple(ids)}, Ledger(folder, "f"), folder, StopRequest())
    bench = Bench(model, requests, 4, get_metric(task.metric), frozenset(ids))
    with Progress(1, len(ids), shown=False) as progress:
        measurer = ShardMeasurer(config.measuring, context, bench, RoundOrder((SETTING.key,), 0))
        done = measurer.measure({SETTING: ids}, progress)[SETTING.key]
    (path,) = folder.glob("*.jsonl")
    content = read_journal(path)
    assert content is not None
    return done, list(content.finished)


def leave_journal(folder: Path, ids: Sequence[int], finished: Sequence[int]) -> None:
    """A killed run's journal, in which these samples took exactly a second each."""
    header = JournalHeader(JOURNAL_VERSION, SETTING.key, "f", 0, 1, "0001", tuple(ids))
    run = staged_run(vision_s=None, prefill_s=1.0, inter_token_s=())
    with Journal(folder, header) as journal:
        for at in finished:
            journal.append(FinishedSample(measured_sample(at, run), None, MemoryReading(None, None, 9, "cpu")))


def test_each_layout_runs_once_unmeasured_before_its_first_sample(tmp_path: Path) -> None:
    model = PicturesModel(geometries={0: WIDE, 10: HIGH, 20: WIDE, 30: WIDER, 40: HIGH})
    measure(tmp_path, model, (0, 10, 20, 30, 40, 50))
    # The first warms up, then it is measured; of the others 1 more where tiling or size are new, or no picture is.
    places = [at for at, call in enumerate(model.calls) if "sample" in call]
    counts = [
        model.calls[place:end].count("encode_image")
        for place, end in zip(places, [*places[1:], len(model.calls)], strict=True)
    ]
    assert counts == [1, 1, 2, 1, 2, 1, 2]


def test_without_warm_ups_no_layout_is_run_before(tmp_path: Path) -> None:
    model = PicturesModel(geometries={0: WIDE, 10: HIGH})
    measure(tmp_path, model, (0, 10), num_warmup_runs=0)
    assert model.calls.count("encode_image") == 2


def test_a_sample_that_is_finished_stays_so_when_its_picture_is_gone(tmp_path: Path) -> None:
    """It is only read again to warm the setting up; the next one does that in its place."""
    leave_journal(tmp_path, (20, 10, 0), (20,))
    model = PicturesModel(unreadable=(20, 0))
    done, samples = measure(tmp_path, model, (20, 10, 0))
    assert done.failure is None and done.proof is not None
    assert [(each.sample_id, each.failed is None) for each in samples] == [(20, True), (10, True), (0, False)]
    assert samples[0].measured is not None and samples[0].measured.runs[0].total_s == 1.0


def test_the_end_says_how_many_ids_were_given(tmp_path: Path) -> None:
    ids = tuple(range(140, 0, -10))
    leave_journal(tmp_path, ids, ids[:12])
    # A setting alone has no ratio that could be precise.
    done, samples = measure(tmp_path, PicturesModel(), ids, "--until_precision", "0.02")
    assert (done.num_given, done.num_asked, len(samples)) == (14, 14, 14)
