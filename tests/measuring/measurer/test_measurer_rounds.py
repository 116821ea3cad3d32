"""Several settings in rounds, by a model that notes its calls: who runs when, and what a failure or a stop leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.primitives.errors import GenerationFailed, SampleError, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.journal import JournalContent, journal_path, read_journal
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import RoundsTrace, ShardDone
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.scripted.scripted_model import ScriptedModel

SETTINGS = tuple(
    Setting.of(vision=tier_target("low"), top_k=top_k, num_active_blocks=RunningBlocks.of((0, 1)))
    for top_k in (1, 2, 3)
)
KEYS = tuple(each.key for each in SETTINGS)
IDS = (30, 10, 20)


@dataclass
class TakingTurns(ScriptedModel):
    """Notes the setting of each measured run; fails at its n-th run, or asks for a stop there."""

    fails_at: int | None = None
    error: Exception | None = None
    stop: StopRequest | None = None
    group: int = 1

    def samples_per_round(self, num_settings: int) -> int:
        return self.group

    def generate_timed(self, inputs: Any, max_new_tokens: int, marks: Any) -> Any:
        self.calls.append(f"run {self.active_setting[0]}")
        if self.fails_at is not None and len(self.turns) - 1 == self.fails_at:
            if self.error is not None:
                raise self.error
            assert self.stop is not None
            self.stop.note(2, None)
        return super().generate_timed(inputs, max_new_tokens, marks)

    def to_device(self, inputs: Any) -> Any:
        self.calls.append("to device")
        return super().to_device(inputs)

    @property
    def turns(self) -> list[int]:
        """Top-k of each run, in order."""
        return [int(call.split()[1]) for call in self.calls if call.startswith("run ")]


def measure(
    folder: Path, model: TakingTurns, *flags: str, stop: StopRequest | None = None, ids: Sequence[int] = IDS
) -> dict[str, ShardDone]:
    given = ["--num_runs_per_sample", "2", "--num_warmup_runs", "0", "--max_repeats", "0", "--config_retry_delay", "0"]
    config = parse_config([*given, *flags])
    task = load_task("reference_vqa", "validation")
    requests = RequestSource(task, model, ids, 0, 0, None, keep_pictures=False)
    ledger = Ledger(folder, "f")
    context = RunContext("0001", 0, {0: tuple(ids)}, ledger, folder, stop or StopRequest())
    bench = Bench(model, requests, 4, get_metric(task.metric), frozenset(ids))
    measurer = ShardMeasurer(config.measuring, context, bench, RoundOrder(KEYS, 5))
    with Progress(1, 3 * len(ids), shown=False) as progress:
        return measurer.measure(dict.fromkeys(SETTINGS, ids), progress)


def journal_of(folder: Path, key: str) -> JournalContent:
    content = read_journal(journal_path(folder, key, 0))
    assert content is not None
    return content


def expected_turns(rounds: Sequence[int]) -> list[int]:
    """Top-k in the order of these rounds."""
    order = RoundOrder(KEYS, 5)
    return [SETTINGS[KEYS.index(key)].values["top_k"] for number in rounds for key in order.of_round(number, KEYS)]


def test_each_sample_runs_at_every_setting_before_the_next_one_and_the_first_round_once_more_at_the_end(
    tmp_path: Path,
) -> None:
    model = TakingTurns()
    done = measure(tmp_path, model)
    assert all(each.failure is None for each in done.values())
    # Two rounds of each of three samples; then the first sample once more, at each setting.
    assert model.turns[:18] == expected_turns(range(6)) and sorted(model.turns[18:]) == [1, 2, 3]
    # One request to warm up each setting, and one of each sample, which all settings share.
    assert model.calls.count("to device") == 3 + 3
    ended = [each.finished_unix_s for each in journal_of(tmp_path, KEYS[0]).finished]
    for place, key in enumerate(KEYS):
        content = journal_of(tmp_path, key)
        assert [each.sample_id for each in content.finished] == list(IDS)
        for number, each in enumerate(content.finished):
            assert each.measured is not None and len(each.measured.runs) == 2
            turns = [expected_turns([2 * number + run]).index(place + 1) for run in (0, 1)]
            assert each.measured.round_places == tuple(turns)
        # They took the time before it together.
        assert [each.finished_unix_s for each in content.finished] == ended
        (trace,) = content.every(RoundsTrace)
        assert (trace.num_settings, trace.num_rounds, trace.group_size) == (3, 6, 1)
        assert trace.closing_factor is not None and trace.factors is not None


def test_where_preparing_again_is_dear_each_setting_runs_a_group_of_samples(tmp_path: Path) -> None:
    model = TakingTurns(group=2)
    measure(tmp_path, model)
    twice = [turn for turn in expected_turns([0, 1]) for _ in range(2)]
    assert model.turns[:18] == [*twice, *expected_turns([2, 3])]
    assert journal_of(tmp_path, KEYS[0]).every(RoundsTrace)[0].group_size == 2


def test_a_sample_that_fails_at_one_setting_is_measured_at_the_others(tmp_path: Path) -> None:
    model = TakingTurns(fails_at=4, error=SampleError("odd"))
    done = measure(tmp_path, model, "--max_config_retries", "0")
    assert all(each.failure is None for each in done.values())
    lost = KEYS[model.turns[4] - 1]
    failed = {key: [each.sample_id for each in journal_of(tmp_path, key).finished if each.failed] for key in KEYS}
    assert failed == {key: [IDS[0]] if key == lost else [] for key in KEYS}


def test_a_setting_that_fails_is_out_of_all_later_rounds(tmp_path: Path) -> None:
    model = TakingTurns(fails_at=7, error=GenerationFailed("not finite"))
    done = measure(tmp_path, model)
    lost = model.turns[7]
    assert {key for key, each in done.items() if each.failure is not None} == {KEYS[lost - 1]}
    assert lost not in model.turns[8:]
    assert [each.sample_id for each in journal_of(tmp_path, KEYS[lost - 1]).finished] == [IDS[0]]
    others = [key for key in KEYS if key != KEYS[lost - 1]]
    assert all([each.sample_id for each in journal_of(tmp_path, key).finished] == list(IDS) for key in others)


def test_a_run_that_is_stopped_has_the_same_samples_at_every_setting_and_goes_on_there(tmp_path: Path) -> None:
    stop = StopRequest()
    model = TakingTurns(fails_at=8, stop=stop)
    with pytest.raises(Stopped):
        measure(tmp_path, model, stop=stop)
    assert all([each.sample_id for each in journal_of(tmp_path, key).finished] == [IDS[0]] for key in KEYS)
    again = TakingTurns()
    measure(tmp_path, again)
    assert again.turns[:12] == expected_turns(range(2, 6))
    assert all([each.sample_id for each in journal_of(tmp_path, key).finished] == list(IDS) for key in KEYS)
    # Nothing is left: nothing runs.
    last = TakingTurns()
    measure(tmp_path, last)
    assert last.turns == []


def test_rounds_end_together_once_every_setting_is_precise(tmp_path: Path) -> None:
    ids = tuple(range(0, 140, 10))
    model = TakingTurns(prefill_s=0.004)
    done = measure(tmp_path, model, "--until_precision", "0.9", ids=ids)
    assert {(each.num_given, each.num_asked) for each in done.values()} == {(14, 10)}
    assert all(len(journal_of(tmp_path, key).finished) == 10 for key in KEYS)
