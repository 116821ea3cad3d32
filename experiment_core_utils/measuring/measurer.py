"""One process's shard of the samples, measured in rounds and written to the journals of the settings."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from experiment_core_utils.config.parts import MeasuringConfig
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.loading import Loading, loading_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.arrivals import MOST_ARRIVALS, batch_size
from experiment_core_utils.measuring.batches import BatchAnswerer, Bench
from experiment_core_utils.measuring.energy_budget import EnergyBudget
from experiment_core_utils.measuring.live_table import LiveTable
from experiment_core_utils.measuring.passes import EnergyPasses, MemoryPasses, there_and_back
from experiment_core_utils.measuring.profiles import TorchProfiles
from experiment_core_utils.measuring.request_batches import RequestBatches
from experiment_core_utils.measuring.request_source import RequestKey
from experiment_core_utils.measuring.rounds import RoundOrder, RoundsSeen, RoundTimes, common_factor
from experiment_core_utils.measuring.sample_runs import (
    SampleAtWork,
    SampleRunner,
    SettingAtWork,
    Shard,
    Taken,
    load_noted,
)
from experiment_core_utils.meters.load import ConditionsMeter, conditions_meter, load_sampler
from experiment_core_utils.meters.stability import LEAST_SAMPLES_TO_STOP, PrecisionGoal
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.steadiness import Outlook, disturbances
from experiment_core_utils.models.common.side_by_side import ModelsInTurn
from experiment_core_utils.models.interface import Concurrent, Served, Switchable, devices_of
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import MemoryWindow, out_of_memory_named
from experiment_core_utils.primitives.errors import (
    GenerationFailed,
    KnobDidNotAct,
    SampleError,
    SettingError,
    library_faults_named,
)
from experiment_core_utils.primitives.files import allow_open_files
from experiment_core_utils.primitives.progress import Progress, WaitingLines
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, finished_samples
from experiment_core_utils.records.requests import StagedRun
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import ArrivalsTrace, JournalHeader, SettingFailure, ShardDone, When
from experiment_core_utils.tasks.sampling import split_by

SAMPLE_EVERY_S = 0.5
# Between a disturbed round and its repeat.
REPEAT_AFTER_S = 0.5
# Files that are open beside the journals.
_OTHER_FILES = 200


@dataclass
class ShardMeasurer:
    """Measures one process's shard of the samples, in rounds: a sample at every setting, then the next sample.

    A shard is a list of ids in the order in which they are measured. It may be the beginning of a longer one: what was
    measured on the first n ids of an order is taken up when the same setting comes again with more of them, as long as
    its journals are there. Sampling may also stop inside a shard, where there are enough samples to compare all
    settings (`--until_precision`); the end of each journal says how many ids it was given and how many it requested.

    What is not measured is answered afterwards, setting by setting.
    """

    config: MeasuringConfig
    context: RunContext
    bench: Bench
    order: RoundOrder  #: of the settings in each round
    profiles: TorchProfiles | None = None  #: decides which samples are run once more under a profiler; None for none
    conditions: ConditionsMeter | None = None  #: read around and between rounds; None for that of the model's device
    #: measures the energy of each setting, in the main process; None for none
    energy: StageMeasurement | None = None
    publish: Callable[[], None] = lambda: None  #: called between two rounds of several settings

    def __post_init__(self) -> None:
        config, context = self.config, self.context
        folder = context.ledger.output_dir
        model, at_a_time, pids = self.bench.model, config.accuracy_batch_size, context.other_pids
        self.request_rate: float | None = None
        if isinstance(model, Served):
            pids = None if pids is None else (*pids, *model.server_pids)
        if isinstance(model, Concurrent):
            at_a_time, self.request_rate = model.concurrency, model.request_rate
        self._answerer = BatchAnswerer(self.bench, at_a_time, config.sample_timeout, folder)
        device = model.device
        self._conditions = self.conditions or conditions_meter(context.experiment_id, context.rank, device, pids)
        self._energy = None if self.energy is None else replace(self.energy, stop=context.stop)
        self._load = load_sampler(SAMPLE_EVERY_S)
        self._clock = HostClock()
        self._warm_layouts: set[object] = set()
        num_samples = sum(map(len, context.shards.values()))
        self._outlook = Outlook(len(self.bench.latency_ids), num_samples)
        self.goal: PrecisionGoal | None = None
        if config.until_precision is not None:
            self.goal = PrecisionGoal(config.until_precision).of_shard(context.num_processes)

    def measure(self, requested: Mapping[Setting, Sequence[int]], progress: Progress) -> dict[str, ShardDone]:
        """Bring the journals of these settings to their ends, from wherever an earlier run left them.

        Args:
            requested: the shard of each setting, in order.

        Raises:
            Stopped, ResultsNotSaved, ResultsError: every sample that was finished is in the journals.
        """
        self._started_s = self._clock.now_s()
        allow_open_files(len(requested) + _OTHER_FILES + (0 if self.request_rate is None else MOST_ARRIVALS))
        done: dict[str, ShardDone] = {}
        with ExitStack() as stack:
            at_work = [self._opened(stack, setting, tuple(ids)) for setting, ids in requested.items()]
            progress.start(
                at_work[0].key if len(at_work) == 1 else f"rounds of {len(at_work)} settings",
                sum(each.shard.num_finished for each in at_work),
                sum(len(each.shard.sample_ids) for each in at_work),
            )
            progress.show(LiveTable(at_work, self.bench.metric).lines)
            if isinstance(self.bench.model, Concurrent):
                self.bench.model.while_waiting(WaitingLines(self.context.stop, progress.say))
            timed_ids, _ = split_by(self.bench.latency_ids, ids_of(at_work))
            batches = RequestBatches(self.bench.model, self.bench.max_new_tokens, timed_ids)
            at = self.config, self.context, self.bench, batches, progress, self._outlook
            runner = SampleRunner(*at, self.profiles, self._warm_layouts)
            for each in at_work:
                # What an earlier run left.
                runner.look(each)
            self._measure_with_retries(at_work, runner)
            self._measure_in_passes([each for each in at_work if each.failure is None], batches, progress)
            number = num_requested(at_work, self.goal)
            for each in at_work:
                end = each.end_before
                if end is None or each.was_measured:
                    end = ShardDone(self.context.experiment_id, each.proof, each.memory, each.failure)
                given = len(each.shard.sample_ids)
                done[each.key] = replace(
                    end, experiment_id=self.context.experiment_id, num_given=given, num_asked=min(number, given)
                )
                each.journal.append(done[each.key])
        self._answerer.warn_of_refused()
        return done

    def _opened(self, stack: ExitStack, setting: Setting, sample_ids: tuple[int, ...]) -> SettingAtWork:
        context = self.context
        finished = finished_samples(context.journals, setting.key, context.fingerprint)
        header = JournalHeader(
            schema_version=JOURNAL_VERSION,
            key=setting.key,
            fingerprint=context.fingerprint,
            rank=context.rank,
            num_processes=context.num_processes,
            experiment_id=context.experiment_id,
            sample_ids=sample_ids,
            engines=self.bench.engines,
            run_uid=context.run_uid,
        )
        journal = stack.enter_context(Journal(context.journals, header))
        return SettingAtWork(setting, journal, Shard(sample_ids, finished), header)

    def _measure_in_passes(self, at_work: Sequence[SettingAtWork], batches: RequestBatches, progress: Progress) -> None:
        """Measure memory and energy of these settings after all of their samples: it disturbs no time."""
        context, journals = self.context, {each.key: each.journal for each in at_work}
        measured = {
            each.key: [done.measured for done in each.shard.finished.values() if done.measured is not None]
            for each in at_work
        }
        # One of which no sample was timed has none to measure; where that is all of them, their ends say so.
        timed = [each for each in at_work if each.shard.has_times]
        settings = [each.setting for each in timed or at_work]
        here: dict[str, Any] = {
            "bench": self.bench,
            "batches": batches,
            "experiment_id": context.experiment_id,
            "rank": context.rank,
            "sample_timeout_s": self.config.sample_timeout,
        }
        is_requested = self.config.energy != "auto"
        # Before memory, whose passes release what is prepared for other settings.
        if (timed or (settings and is_requested)) and self._energy is not None and context.rank == 0:
            elapsed_s = self._clock.now_s() - self._started_s
            budget = None if is_requested else EnergyBudget.of_run(elapsed_s, measured)
            passes = EnergyPasses(how=self._energy, budget=budget, **here)
            ids_timed = [{sample.sample_id for sample in measured[each.key] if sample.runs} for each in settings]
            common = set.intersection(*ids_timed)
            ids = [sample_id for sample_id in ids_of(timed or at_work) if sample_id in common]
            passes.measure_energy(settings, ids, journals, context.stop, progress)
            if is_requested:
                passes.measure_stages(settings, measured, journals, context.stop, progress)
        # Of one setting nothing else was prepared in its runs.
        if len(timed) > 1 and any(device.type == "cuda" for device in devices_of(self.bench.model)):
            MemoryPasses(**here).measure_memory(settings, measured, journals, context.stop, progress)

    def _measure_with_retries(self, at_work: Sequence[SettingAtWork], runner: SampleRunner) -> None:
        """Every attempt takes up what the ones before did not finish; in the last, samples fail for good."""
        attempts = self.config.max_config_retries + 1
        for attempt in range(1, attempts + 1):
            number = num_requested(at_work, self.goal)
            due = [each for each in at_work if each.failure is None and not each.is_done(number)]
            if not due:
                return
            if attempt > 1:
                self.context.stop.sleep(self.config.config_retry_delay)
            runner.is_last_attempt = attempt == attempts
            self._attempt(due, at_work, runner)
            for each in due:
                # Neither depends on when it is tried.
                is_final = attempt == attempts or isinstance(each.error, KnobDidNotAct | GenerationFailed)
                if each.error is not None and is_final:
                    each.failure = SettingFailure(type(each.error).__name__, str(each.error), attempt)

    def _attempt(self, due: Sequence[SettingAtWork], at_work: Sequence[SettingAtWork], runner: SampleRunner) -> None:
        """Warm up and prove each setting, run the rounds of every sample not yet finished, then answer the rest."""
        self._note_conditions("open", due)
        is_alone = len(due) == 1
        with ExitStack() as window:
            if is_alone:
                window.enter_context(self._load_noted(due[0]))
            self._announce(due)
            is_last, arrives = runner.is_last_attempt, self.request_rate is not None
            runner.is_last_attempt = is_last and not arrives
            with nullcontext() if is_alone else runner.progress.announced(f"warming up {len(due)} settings"):
                self._warm_up(due, runner, is_alone=is_alone)
            # Of arriving requests none is asked again, and none is left out: others would come when fewer do.
            runner.is_last_attempt = is_last or arrives
            for each in due if arrives else ():
                if each.proof is not None:
                    each.failed_now.clear()
                elif is_last:
                    # None could be run: the setting is neither proven nor warm.
                    for failed in tuple(each.failed_now.values()):
                        runner.note(each, failed)
            RoundsOfAttempt(self, runner, [each for each in due if each.error is None], at_work).run()
            runner.is_last_attempt = is_last
            for each in due:
                if each.error is None:
                    with runner.setting_boundary(each):
                        self._answer_the_rest(each, runner)
        self._note_conditions("close", due)

    def _warm_up(self, due: Sequence[SettingAtWork], runner: SampleRunner, *, is_alone: bool) -> None:
        """Prove each setting and warm it up."""
        for each in due:
            each.begin_attempt()
            with runner.setting_boundary(each), ExitStack() as own:
                if not is_alone:
                    own.enter_context(self._load_noted(each))
                with runner.progress.step("warming up" if is_alone else f"warming up {each.key}"):
                    runner.open_setting(each)
            self.context.stop.raise_if_requested("between two settings")

    def _load_noted(self, each: SettingAtWork) -> AbstractContextManager[None]:
        return load_noted(self._load, each.journal, each.header, self.config.memory_timeline)

    def _note_conditions(self, when: When, due: Sequence[SettingAtWork]) -> None:
        reading = self._conditions.read(when)
        for each in due:
            each.journal.append(reading)

    def note_conditions_if_due(self, due: Sequence[SettingAtWork]) -> None:
        """Read the conditions between two rounds, every ten seconds."""
        reading = self._conditions.read_if_due()
        if reading is not None:
            for each in due:
                each.journal.append(reading)

    def disturbed_runs(self) -> "DisturbanceWatch":
        """A watch on what disturbs a round, from now on."""
        return DisturbanceWatch(self._conditions)

    def _announce(self, due: Sequence[SettingAtWork]) -> None:
        """Say which requests will be taken: samples in order, each with the crops of every setting that needs it; then
        setting by setting those of samples that are only answered.
        """
        measured, answered = split_by(self.bench.latency_ids, ids_of(due))
        first = (measured or answered)[:1]
        coming = [
            RequestKey(sample_id, each.crops)
            for sample_id in measured
            for each in due
            if sample_id in first or sample_id not in each.shard.finished
        ]
        coming += [
            RequestKey(sample_id, each.crops)
            for each in due
            for sample_id in answered
            if sample_id in first or sample_id not in each.shard.finished
        ]
        self.bench.requests.announce(coming)

    def _answer_the_rest(self, each: SettingAtWork, runner: SampleRunner) -> None:
        """The samples that are not measured."""
        _, answered = split_by(self.bench.latency_ids, each.shard.sample_ids)
        left = [sample_id for sample_id in answered if each.needs(sample_id)]
        if not left:
            return
        self.bench.model.apply(each.setting)
        with MemoryWindow(*devices_of(self.bench.model)) as window:
            for outcomes in self._answerer.outcomes(each.setting, left):
                each.note_memory(window.read())
                for outcome in outcomes:
                    runner.note(each, outcome)
                self.note_conditions_if_due([each])
                self.context.stop.raise_if_requested("between two batches")


def ids_of(at_work: Sequence[SettingAtWork]) -> tuple[int, ...]:
    """Ids of the samples of all these settings, in the order of the longest shard."""
    by_length = sorted((each.shard.sample_ids for each in at_work), key=len, reverse=True)
    return tuple(dict.fromkeys(sample_id for ids in by_length for sample_id in ids))


def num_requested(at_work: Sequence[SettingAtWork], goal: PrecisionGoal | None) -> int:
    """How many ids from the front are requested: up to where there are enough, all without a goal."""
    most = max(len(each.shard.sample_ids) for each in at_work)
    looks = sorted({PrecisionGoal.last_look(place) for place in range(LEAST_SAMPLES_TO_STOP, most)})
    return next((look for look in looks if has_enough(at_work, look, goal)), most)


def has_enough(at_work: Sequence[SettingAtWork], place: int, goal: PrecisionGoal | None) -> bool:
    """Whether the settings that are still in have enough samples among the first `place` ids.

    It is decided from these alone, so that a run that was killed and resumed stops at the same id.
    """
    look = PrecisionGoal.last_look(place)
    alive = [each.shard.timed(look) for each in at_work if each.failure is None and each.error is None]
    if goal is None or not look:
        return False
    pictures = {sample_id: sample.image_id for samples in alive for sample_id, sample in samples.items()}
    times = [[samples[each].mean_log_s if each in samples else math.nan for each in pictures] for samples in alive]
    return goal.is_reached(np.array(times), [*pictures.values()])


@dataclass
class DisturbanceWatch:
    """What disturbed the runs since it was made: throttling of the GPU, other load of the CPUs."""

    conditions: ConditionsMeter

    def __post_init__(self) -> None:
        self._before = self.conditions.beside_runs()
        self.elapsed_s = 0.0

    def found(self) -> tuple[str, ...]:
        """See `disturbances`; `elapsed_s` is then the time since the beginning."""
        after = self.conditions.beside_runs()
        self.elapsed_s = after.monotonic_s - self._before.monotonic_s
        return disturbances(self._before, after)


@dataclass
class RoundsOfAttempt:
    """The rounds of one attempt: every timed sample that is due, at every setting that is due."""

    measurer: ShardMeasurer
    runner: SampleRunner
    settings: Sequence[SettingAtWork]
    all_settings: Sequence[SettingAtWork]  #: with those that are done already, which are as precise as they are
    seen: RoundsSeen = field(default_factory=RoundsSeen)
    #: the samples that arrive together by their setting, those that failed among them, so that no round has fewer
    arriving: dict[str, list[SampleAtWork]] = field(default_factory=dict)
    #: of each batch of them that counts, by its setting and round
    arrived: dict[tuple[str, int], ArrivalsTrace] = field(default_factory=dict)
    taken: Taken = field(default_factory=dict)  #: requests of the last group and of its batches

    def run(self) -> None:
        """Run group after group of samples; at the end repeat the first one's round, which shows the machine's change.

        Raises:
            Stopped: a stop was requested; samples that had not finished all their rounds are run again by the next run.
        """
        if not self.settings:
            return
        if isinstance(self.measurer.bench.model, ModelsInTurn):
            self._run_in_loads(self.measurer.bench.model)
            self._kept_for(())
            return
        bench, context = self.measurer.bench, self.measurer.context
        model = bench.model
        timed = [(place, each) for place, each in enumerate(ids_of(self.settings)) if each in bench.latency_ids]
        first: list[SampleAtWork] = []
        begin = size = 0
        while begin < len(timed) and not has_enough(self.all_settings, timed[begin][0], self.measurer.goal):
            size = model.samples_per_round(len(self.settings)) if isinstance(model, Switchable) else 1
            size = size if self.measurer.request_rate is None else batch_size(len(timed))
            ids = [sample_id for _, sample_id in timed[begin : begin + size]]
            arrives = self.measurer.request_rate is not None
            with self.runner.written_together(self.settings) if arrives else nullcontext():
                done = self._group(begin // size, ids)
            first, begin = first or done, begin + size
        self._kept_for(())
        if len(self.settings) > 1 and self.seen.num_rounds:
            if self.measurer.request_rate is None:
                self._close(first)
            seed = self.measurer.order.seed
            trace = self.seen.trace(context.experiment_id, context.rank, len(self.settings), seed, size)
            for each in self.settings:
                each.journal.append(trace)

    def _run_in_loads(self, model: ModelsInTurn) -> None:
        """One run of every sample at every setting in each pass over the copies of the model, there and back; each copy
        is loaded anew in each pass, and its settings take turns.

        Raises:
            Stopped: a stop was requested; samples that the last pass had not come to are run again by the next run.
        """
        by_loading: dict[Loading, list[SettingAtWork]] = {}
        for each in self.settings:
            by_loading.setdefault(loading_of(each.setting), []).append(each)
        timed = [sample_id for sample_id in ids_of(self.settings) if sample_id in self.measurer.bench.latency_ids]
        earlier: dict[tuple[str, int], SampleAtWork] = {}
        for number in range(self.measurer.config.num_runs_per_sample):
            for loading in there_and_back(tuple(by_loading), number):
                model.drop()
                # Libraries prepare kernels of a load anew.
                layouts = self.runner.warm_layouts
                layouts -= {each for each in layouts if isinstance(each, tuple) and each[0] == loading}
                for place, sample_id in enumerate(timed):
                    self._run_of_load(number, place, sample_id, by_loading[loading], earlier)

    def _run_of_load(
        self,
        number: int,
        place: int,
        sample_id: int,
        settings: Sequence[SettingAtWork],
        earlier: dict[tuple[str, int], SampleAtWork],
    ) -> None:
        """The run of this number of a sample at the settings of the copy in memory; the last one finishes it.

        Args:
            place: of the sample among those that are timed.
            earlier: its runs so far, by setting and sample.
        """
        runner, config = self.runner, self.measurer.config
        self.measurer.context.stop.raise_if_requested()
        taken = self._kept_for([sample_id])
        at_work: dict[str, list[SampleAtWork]] = {}
        for each in settings:
            if each.needs(sample_id):
                with runner.sample_boundary(each, sample_id):
                    at = runner.begin(each, sample_id, taken)
                    if (before := earlier.get((each.key, sample_id))) is not None:
                        at.runs, at.places = before.runs, before.places
                        at.num_discarded, at.disturbances = before.num_discarded, before.disturbances
                    # The first of a load is as cold as the first of a run.
                    for _ in range(0 if place else config.num_warmup_runs):
                        runner.run(at)
                    at_work[each.key] = [at]
        self._round(place * config.num_runs_per_sample + number, at_work)
        for at in [at for group in at_work.values() for at in group]:
            if number + 1 == config.num_runs_per_sample:
                with runner.sample_boundary(at.of, sample_id):
                    runner.finish(at, time.time(), in_rounds=len(self.settings) > 1)
            else:
                earlier[at.of.key, sample_id] = replace(at, inputs={}, batch={})
        self.measurer.note_conditions_if_due(self.settings)

    def _kept_for(self, sample_ids: Sequence[int]) -> Taken:
        """What is taken already of the requests of these samples and of their batches; the rest is let go."""
        largest = max(batch_size_of(each.setting) for each in self.settings)
        needed = self.runner.batches.needed(sample_ids, largest)
        gone = [key for key in self.taken if key[0] not in needed]
        for key in gone:
            del self.taken[key]
        if len(self.settings) > 1:
            # All settings have had them.
            self.measurer.bench.requests.let_go(RequestKey(*key) for key in gone)
        return self.taken

    def _group(self, place: int, sample_ids: Sequence[int]) -> list[SampleAtWork]:
        """All rounds of a group of samples, which has that place among the groups; what was measured."""
        runner, num_runs = self.runner, self.measurer.config.num_runs_per_sample
        self.measurer.context.stop.raise_if_requested()
        taken = self._kept_for(sample_ids)
        at_work: dict[str, list[SampleAtWork]] = {}
        for sample_id in sample_ids:
            for each in self.settings:
                if each.needs(sample_id):
                    with runner.sample_boundary(each, sample_id):
                        at_work.setdefault(each.key, []).append(runner.begin(each, sample_id, taken))
        if not at_work:
            return []
        self.arriving, self.arrived = {key: list(group) for key, group in at_work.items()}, {}
        self.seen.add([self._round(place * num_runs + number, at_work) for number in range(num_runs)])
        for (key, _), trace in self.arrived.items():
            runner.note_arrivals(self.arriving[key][0].of, trace)
        done, now_unix_s = [at for group in at_work.values() for at in group], time.time()
        with runner.progress.at_once():
            for at in done:
                with runner.sample_boundary(at.of, at.sample_id):
                    runner.finish(at, now_unix_s, in_rounds=len(self.settings) > 1)
        if len(self.settings) > 1:
            self.measurer.publish()
        self.measurer.note_conditions_if_due(self.settings)
        return done

    def _round(self, number: int, at_work: dict[str, list[SampleAtWork]]) -> RoundTimes:
        """One round, measured again where something disturbed it and that may help; seconds by setting and sample."""
        config, repeats = self.measurer.config, 0
        while True:
            watch = self.measurer.disturbed_runs()
            runs = self._runs(number, at_work)
            found = watch.found()
            # The runs take as long again, and each sample must end within its time.
            again_s = 1.5 * watch.elapsed_s / max(len(runs), 1) + REPEAT_AFTER_S
            limit_s = config.sample_timeout
            is_late = limit_s is not None and any(at.spent_s + again_s > limit_s for at, *_ in runs)
            is_in_vain = "disturbed" in self.runner.outlook.kinds
            if not found or not runs or is_late or is_in_vain or repeats == config.max_repeats:
                break
            repeats += 1
            for at, *_ in runs:
                at.num_discarded += 1
            self.measurer.context.stop.sleep(REPEAT_AFTER_S)
        for at, run, place in runs:
            at.runs.append(run)
            at.places.append(place)
            at.disturbances |= dict.fromkeys(found)
        return {(at.of.key, at.sample_id): run.total_s for at, run, _ in runs}

    def _runs(self, number: int, at_work: dict[str, list[SampleAtWork]]) -> list[tuple[SampleAtWork, StagedRun, int]]:
        """One run of each sample of the group at each setting, with the setting's place; what fails leaves it."""
        done: list[tuple[SampleAtWork, StagedRun, int]] = []
        order = self.measurer.order.of_round(number + self.measurer.context.rank, at_work)
        for place, key in enumerate(order):
            left = []
            for at, result in zip(at_work[key], self._results(number, at_work[key]), strict=True):
                # Of a single setting the sample at work ends; in rounds that may take long.
                if len(self.settings) > 1:
                    self.measurer.context.stop.raise_if_requested("between two runs")
                if at.of.error is None:
                    with self.runner.sample_boundary(at.of, at.sample_id):
                        run, switch_s = result()
                        done.append((at, run, place))
                        self.seen.switches_s.append(switch_s)
                        left.append(at)
            at_work[key] = left
        for key in [key for key, left in at_work.items() if not left]:
            del at_work[key]
        return done

    def _results(self, number: int, group: Sequence[SampleAtWork]) -> list[Callable[[], tuple[StagedRun, float]]]:
        """A call for each sample of a setting that gives its run; those that arrive together have run by then."""
        rate = self.measurer.request_rate
        if rate is None:
            return [partial(self.runner.run, at) for at in group]
        self.measurer.note_conditions_if_due(self.settings)
        # The same at every setting and in every run of a sample, so that only these differ.
        seed = self.measurer.order.seed, number // self.measurer.config.num_runs_per_sample
        key = group[0].of.key
        results, self.arrived[key, number] = self.runner.run_arriving(self.arriving[key], rate, seed)
        return [result for at, result in zip(self.arriving[key], results, strict=True) if at in group]

    def _close(self, first: Sequence[SampleAtWork]) -> None:
        """Run the first group's round once more, into no statistic; without it where the group cannot run again."""
        again: dict[tuple[str, int], float] = {}
        for at in first:
            at.spent_s = 0.0
            if at.of.error is not None:
                continue
            with (
                suppress(SampleError, SettingError),
                library_faults_named(f"sample {at.sample_id}"),
                out_of_memory_named(),
            ):
                again[at.of.key, at.sample_id] = self.runner.run(at)[0].total_s
        self.seen.closing_factor = common_factor(self.seen.first, again)
