"""Runs that were throttled or beside other load are measured again, as often as allowed, by a meter that plays them.

Warm-up runs, which are not measured, are counted here, too.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring import measurer
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.meters.load import ConditionsMeter
from experiment_core_utils.meters.steadiness import Outlook, disturbances
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.journal import read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.requests import MemoryReading
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import CpuReading, FinishedSample, GpuReading, MeasuredSample
from experiment_core_utils.saved_results.result_caveats import discarded_caveats
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.given_flags import over
from tests.hand_made_records import failed_sample, measured_sample, staged_run
from tests.meters.test_steadiness import GPU, reading
from tests.scripted.scripted_model import ScriptedModel

IDS = (0, 10)
HOT = replace(GPU, throttle_reasons=("hw_thermal_slowdown",))


def played_meter(gpus: Sequence[GpuReading]) -> ConditionsMeter:
    """A second passes between readings. The first is of the opening window; two are around each round."""
    played: Iterator[GpuReading] = chain([GPU], gpus, repeat(GPU))
    seconds = count()
    idle = CpuReading(0.0, 0.0, 0.0, None)
    return ConditionsMeter("0001", 0, lambda: next(played), None, lambda: idle, lambda: float(next(seconds)))


def measured(
    folder: Path,
    gpus: Sequence[GpuReading],
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    model: ScriptedModel | None = None,
    said: io.StringIO | None = None,
) -> list[MeasuredSample]:
    monkeypatch.setattr(measurer, "REPEAT_AFTER_S", 0.0)
    model = ScriptedModel(prefill_s=0.001) if model is None else model
    config = parse_config(over(["--num_runs_per_sample", "2", "--num_warmup_runs", "0"], flags))
    task = load_task("reference_vqa", "validation")
    requests = RequestSource(task, model, IDS, 0, 0, None, keep_pictures=False)
    ledger = Ledger(folder, "f")
    context = RunContext("0001", 0, {0: IDS}, ledger, folder, StopRequest())
    bench = Bench(model, requests, 4, get_metric(task.metric), frozenset(IDS))
    setting = Setting.of(vision=tier_target("low"), top_k=1, num_active_blocks=RunningBlocks.of((0, 1)))
    with Progress(1, len(IDS), shown=said is not None, stream=said) as progress:
        order, meter = RoundOrder((setting.key,), 0), played_meter(gpus)
        ShardMeasurer(config.measuring, context, bench, order, conditions=meter).measure({setting: IDS}, progress)
    (path,) = folder.glob("*.jsonl")
    content = read_journal(path)
    assert content is not None
    return [each.measured for each in content.every(FinishedSample) if each.measured is not None]


def test_throttled_runs_are_discarded_counted_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hot after the first round, cool around its repeat and the second one.
    first, second = measured(tmp_path, [GPU, HOT, GPU, GPU], monkeypatch)
    assert (first.num_discarded_runs, first.disturbances, len(first.runs)) == (1, (), 2)
    assert (second.num_discarded_runs, second.disturbances, len(second.runs)) == (0, (), 2)
    (caveat,) = discarded_caveats([first, second])
    assert caveat.sentence == "discarded and measured again: 1 disturbed run; disturbed still: 0 samples"
    assert discarded_caveats([second]) == []


def test_repeats_are_bounded_and_the_last_runs_are_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three times the first round, and once the second one.
    first, second = measured(tmp_path, [HOT] * 7, monkeypatch)
    assert (first.num_discarded_runs, first.disturbances) == (3, ("hw_thermal_slowdown",))
    assert (second.num_discarded_runs, second.disturbances) == (0, ())


def test_rounds_are_not_repeated_once_the_run_is_certain_to_be_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both rounds of the first sample three times; then 1 of 2 samples is more than 5 %.
    said = io.StringIO()
    first, second = measured(tmp_path, [HOT] * 100, monkeypatch, said=said)
    assert [(each.num_discarded_runs, each.disturbances) for each in (first, second)] == [
        (4, ("hw_thermal_slowdown",)),
        (0, ("hw_thermal_slowdown",)),
    ]
    (line,) = [line for line in said.getvalue().splitlines() if "INVALID" in line]
    assert line == (
        "this run will be INVALID: 1 of 2 timed samples of tier-low_topk1_blocks2 disturbed (hw_thermal_slowdown); "
        "rounds are no longer repeated; end what disturbs it, measure into a new folder"
    )
    (caveat,) = discarded_caveats([first, second])
    assert caveat.voids
    assert caveat.sentence == (
        "discarded and measured again: 4 disturbed runs; disturbed still: 2 samples, 1 of them not repeated"
    )


def test_a_run_is_invalid_when_no_other_sample_could_undo_it() -> None:
    def sample(at: int, *disturbances: str) -> FinishedSample:
        done = replace(measured_sample(at, staged_run()), disturbances=disturbances)
        return FinishedSample(done, None, MemoryReading(None, None, 9, "cpu"))

    def failed(at: int) -> FinishedSample:
        return FinishedSample(None, failed_sample(at, "no picture"), sample(0).memory)

    outlook, said = Outlook(num_timed=40, num_samples=100), list[str]()
    # 5 % of 40 are 2, 1 % of 100 is 1.
    outlook.look("a", [sample(3, "other load"), sample(1), sample(2, "other load"), failed(7)], said.append)
    assert (said, outlook.kinds) == ([], set())
    many = [sample(at, "other load") for at in (9, 2, 4)]
    outlook.look("b", many, said.append)
    outlook.look("a", [*many, failed(7), failed(5)], said.append)
    assert [line.split(";")[0] for line in said] == [
        "this run will be INVALID: 3 of 40 timed samples of b disturbed (other load)",
        "this run will be INVALID: 2 of 100 samples of a failed, the first with: no picture",
    ]
    assert outlook.kinds == {"disturbed", "failed"}


@pytest.mark.parametrize("flags", [("--max_repeats", "0"), ("--sample_timeout", "1.4")])
def test_nothing_is_repeated_where_it_is_off_or_there_is_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, str]
) -> None:
    # The runs take 1 s by the meter's clock, and would take that and a half again.
    first, second = measured(tmp_path, [GPU, HOT], monkeypatch, *flags)
    assert (first.num_discarded_runs, first.disturbances) == (0, ("hw_thermal_slowdown",))
    (caveat,) = discarded_caveats([second, first])
    assert caveat.voids and caveat.figures == {"num_runs": 0, "num_kept": 1, "num_unrepeated": 1, "num_samples": 2}


def test_the_layout_of_the_warm_up_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both samples have one layout: 3 warm-up runs and 2 measured ones of each.
    model = ScriptedModel()
    measured(tmp_path, [], monkeypatch, "--num_warmup_runs", "3", "--max_warmup_runs", "3", model=model)
    assert model.calls.count("encode_image") == 3 + 2 * 2


def test_other_load_disturbs_where_it_can_be_known() -> None:
    before = reading("between", 0, 0, 0)
    # 4 CPUs: 0.44 of 4 s are others' (11 %), 0.36 are 9 %.
    assert disturbances(before, reading("between", 1, 1.44, 1)) == ("other load",)
    assert disturbances(before, reading("between", 1, 1.36, 1)) == ()
    assert disturbances(before, reading("between", 0.4, 0.8, 0.4)) == ()
    unseen = replace(before, cpu=replace(before.cpu, own_s=None))
    assert disturbances(unseen, reading("between", 1, 1.44, 1)) == ()
