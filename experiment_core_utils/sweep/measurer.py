"""One process's shard of the samples of a setting, measured and written to its journal."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from experiment_core_utils.config.parts import MeasuringConfig
from experiment_core_utils.d_energy_tracking import energy_of_setting, runs_beside_power
from experiment_core_utils.e_inference import run_staged, sample_record
from experiment_core_utils.k_results_aggregation import SharedSetting
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.meters.load import ConditionsMeter, LoadSampler, conditions_meter, load_sampler
from experiment_core_utils.meters.stability import PrecisionGoal, needs_another_run, warm_up_of
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.common.finite_logits import failure_named
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import (
    MemoryWindow,
    out_of_memory_named,
    release_cached_memory,
    synchronize,
)
from experiment_core_utils.primitives.errors import (
    GenerationFailed,
    KnobDidNotAct,
    SampleError,
    SettingError,
    Stopped,
    library_faults_named,
)
from experiment_core_utils.primitives.interruption import StopRequest, time_limit
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, finished_samples
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.requests import KnobProof, PreparedRequest, RequestShape
from experiment_core_utils.records.sample_result import FailedSample, failed_sample
from experiment_core_utils.records.settings import (
    FinishedSample,
    JournalHeader,
    MeasuredSample,
    SettingFailure,
    SettingLoad,
    ShardDone,
)
from experiment_core_utils.sweep.batches import BatchAnswerer, Bench
from experiment_core_utils.sweep.profiles import TorchProfiles
from experiment_core_utils.sweep.steadiness import disturbances
from experiment_core_utils.tasks.interface import Sample, check_scorable

T = TypeVar("T")
SAMPLE_EVERY_S = 0.5
# Between disturbed runs and their repeat.
REPEAT_AFTER_S = 0.5


@contextmanager
def load_noted(sampler: LoadSampler, journal: Journal, origin: JournalHeader, with_timeline: bool) -> Iterator[None]:
    """A window of the sampler; at its end a line of the journal, also where the attempt failed or was stopped."""

    def note() -> None:
        journal.append(SettingLoad(origin.experiment_id, origin.rank, sampler.trace, with_timeline))

    try:
        with sampler:
            yield
    except (SettingError, Stopped):
        note()
        raise
    note()


class Shard:
    """The ids of one process's samples, in order, and those that are finished.

    Whether there are enough is decided in that order, before each id, from the samples in front of it alone. So a run
    that was killed and resumed stops at the same id.

    Args:
        finished: samples by id; those of other processes are left out.
        goal: None where every sample is requested.
    """

    def __init__(
        self, sample_ids: Sequence[int], finished: Mapping[int, FinishedSample], goal: PrecisionGoal | None
    ) -> None:
        self.sample_ids = tuple(sample_ids)
        self.finished = {each: finished[each] for each in self.sample_ids if each in finished}
        self._goal = goal

    def add(self, sample: FinishedSample) -> None:
        """Note that one more sample is finished."""
        self.finished[sample.sample_id] = sample

    def until_enough(self) -> Iterator[int]:
        """The ids from the first on, finished ones too; ends where those in front of the next one are enough."""
        totals_s: list[float] = []
        pictures: list[str] = []
        for sample_id in self.sample_ids:
            if self._goal is not None and self._goal.is_reached(totals_s, pictures):
                return
            yield sample_id
            done = self.finished.get(sample_id)
            if done is not None and done.measured is not None and done.measured.run is not None:
                totals_s.append(done.measured.run.total_s)
                pictures.append(done.measured.image_id)

    @property
    def num_finished(self) -> int:
        """How many of its samples are finished."""
        return len(self.finished)

    @property
    def num_requested(self) -> int:
        """How many ids from the front are requested, as far as the finished samples show."""
        if self._goal is None:
            return len(self.sample_ids)
        return sum(1 for _ in self.until_enough())

    @property
    def is_done(self) -> bool:
        """Whether all that is requested is finished."""
        return all(each in self.finished for each in self.sample_ids[: self.num_requested])


@dataclass(frozen=True)
class RunContext:
    """The place of this process in a run, and where the run keeps what it has measured."""

    experiment_id: str
    rank: int
    #: the samples of each process, by rank, in the order in which they are measured
    shards: Mapping[int, tuple[int, ...]]
    ledger: Ledger
    journals: Path  #: folder of the journals of all processes
    stop: StopRequest  #: looked at before every sample

    @property
    def is_main(self) -> bool:
        """Whether this process pools, saves and reports."""
        return self.rank == 0

    @property
    def num_processes(self) -> int:
        """How many processes measure the run."""
        return len(self.shards)

    @property
    def own_ids(self) -> tuple[int, ...]:
        """The samples of this process."""
        return self.shards[self.rank]

    @property
    def fingerprint(self) -> str:
        """What the results and journals of the run are recognised by."""
        return self.ledger.fingerprint

    def shared_setting(self, key: str, shards: Mapping[int, Sequence[int]]) -> SharedSetting:
        """A setting of the run, of which each process measures the samples under its rank."""
        return SharedSetting(self.journals, key, self.fingerprint, self.experiment_id, shards, self.rank)


@dataclass
class ShardMeasurer:
    """Measures one process's shard of the samples, setting by setting.

    A shard is a list of ids in the order in which they are measured. It may be the beginning of a longer one: what was
    measured on the first n ids of an order is taken up when the same setting comes again with more of them, as long as
    its journals are there. Sampling may also stop inside a shard, where there are enough samples
    (`--until_precision`); the end of the journal says how many ids it was given and how many it requested.
    """

    config: MeasuringConfig
    context: RunContext
    bench: Bench
    profiles: TorchProfiles | None = None  #: decides which samples are run once more under a profiler; None for none
    conditions: ConditionsMeter | None = None  #: read around and between samples; None for that of the model's device
    #: measures the energy of samples' runs and (main process) of each setting's stages; None for none
    energy: StageMeasurement | None = None

    def __post_init__(self) -> None:
        config, context = self.config, self.context
        folder = context.ledger.output_dir
        self._answerer = BatchAnswerer(self.bench, config.accuracy_batch_size, config.sample_timeout, folder)
        device = self.bench.model.device
        self._conditions = self.conditions or conditions_meter(context.experiment_id, context.rank, device)
        self._energy = None if self.energy is None else replace(self.energy, stop=context.stop)
        self._load = load_sampler(SAMPLE_EVERY_S)
        self._warm_layouts: set[Hashable] = set()
        self._following: Sequence[Setting] = ()
        self._goal: PrecisionGoal | None = None
        if config.until_precision is not None:
            self._goal = PrecisionGoal(config.until_precision).of_shard(context.num_processes)

    def measure_shard(
        self,
        setting: Setting,
        progress: Progress,
        following: Sequence[Setting] = (),
        sample_ids: Sequence[int] | None = None,
    ) -> ShardDone:
        """Bring the journal of the setting to its end, from wherever an earlier run left it.

        Args:
            following: the settings after this one, in order, for which requests are prepared ahead.
            sample_ids: the shard, in order; None for the whole of the process's own.

        Raises:
            Stopped, ResultsNotSaved, ResultsError: every sample that was finished is in the journal.
        """
        given = self.context.own_ids if sample_ids is None else tuple(sample_ids)
        shard = Shard(given, finished_samples(self.context.journals, setting.key, self.context.fingerprint), self._goal)
        progress.start(setting.key, shard.num_finished)
        self._following = following
        with Journal(self.context.journals, self._header(setting, given)) as journal:
            earlier = journal.before.end if journal.before is not None else None
            if earlier is not None and earlier.failure is None and shard.is_done:
                done = replace(earlier, experiment_id=self.context.experiment_id)
            else:
                done = self._measure_with_retries(setting, journal, shard, progress)
            if done.failure is None and self._energy is not None and self.context.rank == 0:
                self._measure_energy_once(setting, journal, given, self._energy)
            done = replace(done, num_given=len(given), num_asked=shard.num_requested)
            journal.append(done)
        return done

    def _header(self, setting: Setting, sample_ids: tuple[int, ...]) -> JournalHeader:
        context = self.context
        return JournalHeader(
            schema_version=JOURNAL_VERSION,
            key=setting.key,
            fingerprint=context.fingerprint,
            rank=context.rank,
            num_processes=context.num_processes,
            experiment_id=context.experiment_id,
            sample_ids=sample_ids,
            engines=self.bench.engines,
        )

    def _measure_energy_once(
        self, setting: Setting, journal: Journal, sample_ids: Sequence[int], how: StageMeasurement
    ) -> None:
        """Measure the energy of the first sample that can be read, after all others of the setting: it disturbs no
        time.

        Not again where an earlier run, or an earlier part of the shard, did it.
        """
        if journal.before is not None and journal.before.energy is not None:
            return
        self.bench.model.apply(setting)
        context, bench = self.context, self.bench
        request = self._of_first_readable(
            setting, sample_ids, lambda sample_id, request: (sample_id, bench.model.to_device(request.inputs))
        )
        if request is not None:
            bench.model.warm_up(request[1], bench.max_new_tokens)
        journal.append(
            energy_of_setting(bench.model, request, bench.max_new_tokens, how, context.experiment_id, context.rank)
        )

    def _of_first_readable(
        self, setting: Setting, sample_ids: Sequence[int], use: Callable[[int, PreparedRequest], T]
    ) -> T | None:
        """What `use` makes of the first sample that can be read and run; None where there is none."""
        for sample_id in sample_ids:
            try:
                with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                    with time_limit(self.config.sample_timeout):
                        request = self.bench.requests.take(sample_id, vision_of(setting).bounds)[1]
                    with self._failure_named(sample_id):
                        return use(sample_id, request)
            except SampleError:  # not counted: it is recorded among the samples
                continue
        return None

    def _measure_with_retries(self, setting: Setting, journal: Journal, shard: Shard, progress: Progress) -> ShardDone:
        """Every attempt takes up what the ones before did not finish; in the last, samples fail for good."""
        attempts = self.config.max_config_retries + 1
        for attempt in range(1, attempts + 1):
            is_last = attempt == attempts
            try:
                proof, window = self._measure(setting, journal, shard, progress, is_last)
            except SettingError as error:
                release_cached_memory(self.bench.model.device)
                # Neither depends on when it is tried.
                if is_last or isinstance(error, KnobDidNotAct | GenerationFailed):
                    failure = SettingFailure(type(error).__name__, str(error), attempt)
                    return ShardDone(self.context.experiment_id, None, None, failure)
            else:
                if shard.is_done:
                    break
            self.context.stop.sleep(self.config.config_retry_delay)
        return ShardDone(self.context.experiment_id, proof, window.reading, None)

    def _measure(
        self, setting: Setting, journal: Journal, shard: Shard, progress: Progress, is_last_attempt: bool
    ) -> tuple[KnobProof | None, MemoryWindow]:
        """Warm up and prove the knobs on the first sample that can be read, then run every sample not yet finished."""
        self.bench.model.apply(setting)
        self._announce(setting, shard)
        proof: KnobProof | None = None
        journal.append(self._conditions.read("open"))
        load = load_noted(self._load, journal, self._header(setting, shard.sample_ids), self.config.memory_timeline)
        with load, out_of_memory_named(), MemoryWindow(self.bench.model.device) as window:

            def note(outcome: MeasuredSample | FailedSample) -> None:
                self._note(outcome, shard, journal, window, progress, is_last_attempt)

            for sample_id in shard.until_enough():
                measured = None
                is_finished = sample_id in shard.finished
                if sample_id not in self.bench.latency_ids or (is_finished and proof is not None):
                    continue
                self.context.stop.raise_if_requested()
                try:
                    # Whatever a library raises for this sample ends here, and the run goes on with the next one.
                    with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                        with time_limit(self.config.sample_timeout):
                            sample, request = self.bench.requests.take(sample_id, vision_of(setting).bounds)
                        with self._failure_named(sample_id):
                            if proof is None:
                                with progress.step("warming up"):
                                    proof = self._warm_up(setting, request, journal)
                            if not is_finished:
                                with time_limit(self.config.sample_timeout):
                                    measured = self._measure_sample(setting, sample, request)
                    if measured is not None:
                        note(measured)
                except SampleError as error:
                    note(failed_sample(sample_id, error, self.context.ledger.output_dir))
                if measured is not None and self.profiles is not None and self.profiles.needs(setting.key):
                    # One more run of a sample that is on the disk already, outside its time limit.
                    inputs = self.bench.model.to_device(request.inputs)
                    self.bench.model.warm_up(inputs, self.bench.max_new_tokens)
                    self.profiles.take(self.bench.model, setting.key, sample_id, inputs, self.bench.max_new_tokens)
            if proof is None:
                # None is measured here.
                answered = split_by(self.bench.latency_ids, shard.sample_ids)[1]
                with progress.step("warming up"):
                    proof = self._of_first_readable(
                        setting, answered, lambda _, request: self._warm_up(setting, request, journal)
                    )
            self._answer_the_rest(setting, shard, note)
        journal.append(self._conditions.read("close"))
        return proof, window

    def _failure_named(self, sample_id: int) -> AbstractContextManager[None]:
        return failure_named(f"sample {sample_id}", self.bench.model.describe)

    def _announce(self, setting: Setting, shard: Shard) -> None:
        """Say which requests will be taken: the first for the warm-up, then those of samples not yet finished."""
        measured, answered = split_by(self.bench.latency_ids, shard.sample_ids)
        order = (*measured, *answered)
        todo = [each for place, each in enumerate(order) if place == 0 or each not in shard.finished]
        self.bench.requests.announce(
            vision_of(setting).bounds, todo, [vision_of(each).bounds for each in self._following]
        )

    def _note(
        self,
        outcome: MeasuredSample | FailedSample,
        shard: Shard,
        journal: Journal,
        window: MemoryWindow,
        progress: Progress,
        is_last_attempt: bool,
    ) -> None:
        """Write down what became of a sample; one that failed is left for the next attempt where there is one."""
        failed = outcome if isinstance(outcome, FailedSample) else None
        done = outcome if isinstance(outcome, MeasuredSample) else None
        if outcome.sample_id in shard.finished or (failed is not None and not is_last_attempt):
            return
        finished = FinishedSample(done, failed, window.read())
        journal.append(finished)
        shard.add(finished)
        progress.advance()
        reading = self._conditions.read_if_due()
        if reading is not None:
            journal.append(reading)

    def _answer_the_rest(
        self, setting: Setting, shard: Shard, note: Callable[[MeasuredSample | FailedSample], None]
    ) -> None:
        """The samples that are not measured, in batches."""
        _, answered = split_by(self.bench.latency_ids, shard.sample_ids)
        for outcomes in self._answerer.outcomes(setting, [each for each in answered if each not in shard.finished]):
            for outcome in outcomes:
                note(outcome)
            self.context.stop.raise_if_requested("between two batches")

    def _warm_up(self, setting: Setting, request: PreparedRequest, journal: Journal) -> KnobProof:
        """Prove the knobs, then run until the times agree; each run has the time of a sample."""
        with time_limit(self.config.sample_timeout):
            inputs = self.bench.model.to_device(request.inputs)
            self.bench.model.warm_up(inputs, self.bench.max_new_tokens)
            proof = self.bench.proofs.get(setting.key) or self.bench.model.prove(setting, inputs)
        unseen = check_proof(proof, setting, self.bench.model)
        proof = replace(proof, knobs_not_seen=unseen) if unseen else proof
        least, totals_s = self.config.num_warmup_runs, list[float]()
        while needs_another_run(totals_s, least, self.config.max_warmup_runs):
            with time_limit(self.config.sample_timeout):
                totals_s.append(run_staged(self.bench.model, inputs, self.bench.max_new_tokens).total_s)
        self._warm_layouts.add(request.shape.layout)
        journal.append(warm_up_of(totals_s, least, self.context.experiment_id, self.context.rank))
        return proof

    def _warm_up_shape(self, shape: RequestShape, inputs: Mapping[str, Any]) -> None:
        """One unmeasured run for a layout that this process meets first: libraries prepare kernels for new shapes."""
        if self.config.num_warmup_runs and shape.layout not in self._warm_layouts:
            run_staged(self.bench.model, inputs, self.bench.max_new_tokens)
        self._warm_layouts.add(shape.layout)

    def _measure_sample(self, setting: Setting, sample: Sample, request: PreparedRequest) -> MeasuredSample:
        # Scored at the merge, with all others; one that no answer could score is not worth the time of its runs.
        check_scorable(sample, self.bench.metric)
        clock = HostClock()
        started_s = clock.now_s()
        inputs = self.bench.model.to_device(request.inputs)
        synchronize(self.bench.model.device)
        transfer_s = clock.now_s() - started_s
        self.bench.model.warm_up(inputs, self.bench.max_new_tokens)
        self._warm_up_shape(request.shape, inputs)
        discarded = 0
        while True:
            before = self._conditions.beside_runs()
            runs, energy = runs_beside_power(
                lambda: run_staged(self.bench.model, inputs, self.bench.max_new_tokens),
                self.config.num_runs_per_sample,
                None if self._energy is None else self._energy.using,
            )
            after = self._conditions.beside_runs()
            found = disturbances(before, after, self.context.num_processes)
            # The runs take as long again, and the sample must end within its time.
            ends_s = clock.now_s() - started_s + 1.5 * (after.monotonic_s - before.monotonic_s) + REPEAT_AFTER_S
            is_late = self.config.sample_timeout is not None and ends_s > self.config.sample_timeout
            if not found or is_late or discarded >= self.config.max_repeats * len(runs):
                break
            discarded += len(runs)
            self.context.stop.sleep(REPEAT_AFTER_S)
        record = sample_record(self.bench.model, setting, sample, request, runs, transfer_s)
        return replace(record, energy=energy, num_discarded_runs=discarded, disturbances=found)


def split_by(chosen: Set[int], sample_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that are chosen and those that are not, each in their order."""
    return tuple(each for each in sample_ids if each in chosen), tuple(
        each for each in sample_ids if each not in chosen
    )


def check_proof(proof: KnobProof, setting: Setting, model: StagedModel) -> dict[str, str]:
    """Why the knobs' acting cannot be seen, by knob; raises KnobDidNotAct where what ran is not what was requested."""
    seen = {
        knob.name: knob.prove(proof, setting, model) for knob in all_knobs() if setting.value(knob.name) is not None
    }
    # Of a knob at rest nothing is to be seen.
    return {name: seen_not.reason for name in setting.values if (seen_not := seen[name]) is not None}


def unseen_caveats(proof: KnobProof | None) -> list[Caveat]:
    """The caveat of knobs of which nothing that was counted shows whether they acted; none where all were seen."""
    return [caveat("knobs_not_seen", reasons=dict(proof.knobs_not_seen))] if proof and proof.knobs_not_seen else []
