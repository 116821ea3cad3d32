"""What is done with one sample at one setting: its request, its runs, and what is written down of them."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from experiment_core_utils.config.parts import MeasuringConfig
from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.j_results_saving import save_samples
from experiment_core_utils.knobs.answer_limit import answer_limit_at
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.loading import loading_of
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.measuring.arrivals import arrivals_s, arrive, trace_of
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.profiles import TorchProfiles
from experiment_core_utils.measuring.request_batches import Batch, RequestBatches, Take
from experiment_core_utils.measuring.staged_runs import run_batch, run_staged, warm_up_batch
from experiment_core_utils.meters.load import LoadSampler
from experiment_core_utils.meters.stability import needs_another_run, warm_up_of
from experiment_core_utils.meters.steadiness import Outlook
from experiment_core_utils.models.common.side_by_side import ModelsSideBySide
from experiment_core_utils.models.interface import Concurrent, Runnable, Stepwise, devices_of
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import (
    MemoryReading,
    MemoryWindow,
    out_of_memory_named,
    release_cached_memory,
    synchronize,
)
from experiment_core_utils.primitives.errors import SampleError, SettingError, Stopped, library_faults_named
from experiment_core_utils.primitives.finite_logits import failure_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.journal import Journal
from experiment_core_utils.records.requests import KnobProof, PreparedRequest, StagedRun, whole_window
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.sample_result import FailedSample, failed_sample
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ArrivedGroup,
    FinishedSample,
    JournalHeader,
    MeasuredSample,
    SettingFailure,
    SettingLoad,
    ShardDone,
)
from experiment_core_utils.tasks.interface import Sample, check_scorable
from experiment_core_utils.tasks.sampling import split_by

T = TypeVar("T")


@dataclass
class TakenRequest:
    """A request of a group of samples, which settings with the same crops share."""

    sample: Sample | None  #: None where the request alone is needed
    request: PreparedRequest
    inputs: Mapping[str, Any] | None = None  #: on the device; None until a setting needs them
    transfer_s: float = 0.0  #: that bringing them there took


Taken = dict[tuple[int, CropRange | None], TakenRequest | SampleError]


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

    Args:
        finished: samples by id; those of other processes are left out.
    """

    def __init__(self, sample_ids: Sequence[int], finished: Mapping[int, FinishedSample]) -> None:
        self.sample_ids = tuple(sample_ids)
        self.finished = {each: finished[each] for each in self.sample_ids if each in finished}
        self._ids = frozenset(sample_ids)

    def timed(self, place: int) -> dict[int, MeasuredSample]:
        """The samples in front of this place that have times, by id."""
        done = [self.finished[each].measured for each in self.sample_ids[:place] if each in self.finished]
        return {each.sample_id: each for each in done if each is not None and each.runs}

    @property
    def has_times(self) -> bool:
        """Whether a sample was measured."""
        return any(each.measured is not None and bool(each.measured.runs) for each in self.finished.values())

    def add(self, sample: FinishedSample) -> None:
        """Note that one more sample is finished."""
        self.finished[sample.sample_id] = sample

    @property
    def num_finished(self) -> int:
        """How many of its samples are finished."""
        return len(self.finished)

    def lacks(self, sample_id: int) -> bool:
        """Whether a sample is one of the shard's and not finished."""
        return sample_id in self._ids and sample_id not in self.finished

    def has_first(self, number: int) -> bool:
        """Whether so many ids from the front are finished."""
        return all(each in self.finished for each in self.sample_ids[:number])


@dataclass(eq=False)
class SettingAtWork:
    """One setting whose journal is open, and what this attempt knows of it."""

    setting: Setting
    journal: Journal
    shard: Shard
    header: JournalHeader
    proof: KnobProof | None = None
    memory: MemoryReading | None = None  #: peaks of this process's window so far
    error: SettingError | None = None  #: why the setting is out of the attempt
    failure: SettingFailure | None = None  #: why it is out for good
    was_measured: bool = False  #: whether this run has begun to measure it
    failed_now: dict[int, FailedSample] = field(default_factory=dict)  #: samples that failed in this attempt

    @property
    def key(self) -> str:
        """Key of the setting."""
        return self.setting.key

    @property
    def end_before(self) -> ShardDone | None:
        """The end to which an earlier run came; None where it came to none."""
        return None if self.journal.before is None else self.journal.before.end

    def needs(self, sample_id: int) -> bool:
        """Whether a sample is to be run in this attempt."""
        return self.error is None and self.shard.lacks(sample_id) and sample_id not in self.failed_now

    def begin_attempt(self) -> None:
        """Forget what failed before."""
        self.error, self.was_measured = None, True
        self.failed_now.clear()

    def is_done(self, number: int) -> bool:
        """Whether the first so many samples are finished, and an earlier run or this one came to the end with them."""
        is_ended = self.was_measured or (self.end_before is not None and self.end_before.failure is None)
        return is_ended and self.shard.has_first(number)

    @property
    def crops(self) -> CropRange | None:
        """Limits of the crops of its requests; None for the model's own."""
        return vision_of(self.setting).bounds

    @contextmanager
    def memory_window(self, model: Runnable) -> Iterator[None]:
        """A context in which memory is measured for the setting."""
        with MemoryWindow(*devices_of(model)) as window:
            yield
        if window.reading is not None:
            self.note_memory(window.reading)

    def note_memory(self, reading: MemoryReading) -> None:
        """Take in the reading of a window."""
        self.memory = whole_window([reading] if self.memory is None else [self.memory, reading])


@dataclass(eq=False)
class SampleAtWork:
    """One sample at one setting while its rounds run."""

    of: SettingAtWork
    sample: Sample
    request: PreparedRequest
    inputs: Mapping[str, Any]  #: on the model's device
    transfer_s: float
    batch: Batch  #: all requests that run together, its own first
    spent_s: float = 0.0  #: of its time limit
    runs: list[StagedRun] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  #: of each run in its round
    num_discarded: int = 0
    disturbances: dict[str, None] = field(default_factory=dict)  #: of runs that were kept

    @property
    def sample_id(self) -> int:
        """Position of the sample in the task's split."""
        return self.sample.sample_id


@dataclass
class SampleRunner:
    """Runs single samples of a process at single settings, and writes down what became of them."""

    config: MeasuringConfig
    context: RunContext
    bench: Bench
    batches: RequestBatches
    progress: Progress
    outlook: Outlook  #: of the run
    profiles: TorchProfiles | None = None  #: decides which samples are run once more under a profiler; None for none
    #: layouts of requests that this process has met
    warm_layouts: set[Hashable] = field(default_factory=set)
    is_last_attempt: bool = True  #: whether a sample that fails now fails for good

    def __post_init__(self) -> None:
        self._clock = HostClock()
        #: by setting what its open group has so far; None where each sample is written down alone
        self._group: dict[str, list[ArrivalsTrace | FinishedSample]] | None = None

    @contextmanager
    def setting_boundary(self, each: SettingAtWork) -> Iterator[None]:
        """A context whose errors of the setting end its part of the attempt."""
        try:
            with out_of_memory_named():
                yield
        except SettingError as error:
            each.error = error
            release_cached_memory(self.bench.model.device)

    @contextmanager
    def sample_boundary(self, each: SettingAtWork, sample_id: int) -> Iterator[None]:
        """A context of one sample at one setting: whatever a library raises for it ends here, and the run goes on."""
        try:
            with self.setting_boundary(each), library_faults_named(f"sample {sample_id}"), out_of_memory_named():  # noqa: SIM117
                with failure_named(f"sample {sample_id}", self.bench.model.describe):
                    yield
        except SampleError as error:
            self.note(each, failed_sample(sample_id, error, self.context.ledger.output_dir))

    def open_setting(self, each: SettingAtWork) -> None:
        """Put a setting in force for the first time: prove its knobs and warm it up on the first sample that can be
        read, of those that are measured where there are any.
        """
        self.bench.model.apply(each.setting)
        with each.memory_window(self.bench.model):
            measured, answered = split_by(self.bench.latency_ids, each.shard.sample_ids)
            for sample_id in (*measured, *answered):
                with self.sample_boundary(each, sample_id):
                    with time_limit(self.config.sample_timeout):
                        request = self.bench.requests.take(sample_id, each.crops)[1]
                    each.proof = self._warm_up(each, sample_id, request)
                if each.proof is not None or each.error is not None:
                    return

    def _limit_s(self, each: SettingAtWork) -> float | None:
        """The time limit of what runs together at a setting."""
        limit_s = self.config.sample_timeout
        return None if limit_s is None else limit_s * batch_size_of(each.setting)

    def _warm_up(self, each: SettingAtWork, sample_id: int, request: PreparedRequest) -> KnobProof:
        """Prove the knobs, then run until the times agree; each run has the time of a sample."""
        setting, model = each.setting, self.bench.model
        with time_limit(self.config.sample_timeout):
            inputs = model.to_device(request.inputs)
            model.warm_up(inputs, self.bench.max_new_tokens)
            proof = self.bench.proofs.get(setting.key) or model.prove(setting, inputs)
        unseen = check_proof(proof, setting, model)
        proof = replace(proof, knobs_not_seen={**proof.knobs_not_seen, **unseen})
        with time_limit(self._limit_s(each)):
            taken: Taken = {(sample_id, each.crops): TakenRequest(None, request, inputs)}
            batch = tuple(self._batch(each, sample_id, taken).values())
        least, totals_s = self.config.num_warmup_runs, list[float]()
        while needs_another_run(totals_s, least, self.config.max_warmup_runs):
            with time_limit(self._limit_s(each)):
                totals_s.append(run_batch(model, batch, self.bench.max_new_tokens).total_s)
        self.warm_layouts.add(self._layout(each, request))
        each.journal.append(warm_up_of(totals_s, least, self.context.experiment_id, self.context.rank))
        return proof

    def begin(self, each: SettingAtWork, sample_id: int, taken: Taken) -> SampleAtWork:
        """Everything before a sample's first run: its request on the device, and what its shape needs.

        Args:
            taken: requests of the round so far, to which this one is added.
        """
        with time_limit(self.config.sample_timeout):
            found = self._taken(each, sample_id, taken)
        # Scored at the merge, with all others; one that no answer could score is not worth the time of its runs.
        assert found.sample is not None
        check_scorable(found.sample, self.bench.metric)
        model, started_s = self.bench.model, self._clock.now_s()
        with time_limit(self._limit_s(each)):
            model.apply(each.setting)
            batch = self._batch(each, sample_id, taken, self._layout(each, found.request))
        spent_s = self._clock.now_s() - started_s
        return SampleAtWork(each, found.sample, found.request, batch[sample_id], found.transfer_s, batch, spent_s)

    def _batch(
        self, each: SettingAtWork, sample_id: int, taken: Taken, layout: tuple[object, ...] | None = None
    ) -> Batch:
        """A sample's batch at the setting in force, for which everything is prepared.

        Args:
            taken: as of `begin`.
            layout: that is warmed up, see `_warm_up_shape`; None for none.
        """

        def prepared(batch: Batch) -> None:
            inputs = tuple(batch.values())
            warm_up_batch(self.bench.model, inputs, self.bench.max_new_tokens)
            if layout is not None:
                self._warm_up_shape(layout, inputs)

        own = each.setting, sample_id, self._sender(each, taken)
        return self.batches.ran(*own, self.batches.of(*own), prepared)[0]

    def _sender(self, each: SettingAtWork, taken: Taken) -> Take:
        """What takes requests of a setting and sends them to the device, each once."""
        model = self.bench.model

        def sent(own_id: int) -> tuple[PreparedRequest, Mapping[str, Any]]:
            found = self._taken(each, own_id, taken)
            if found.inputs is None:
                sent_s = self._clock.now_s()
                found.inputs = model.to_device(found.request.inputs)
                synchronize(*devices_of(model))
                found.transfer_s = self._clock.now_s() - sent_s
            return found.request, found.inputs

        return sent

    def _layout(self, each: SettingAtWork, request: PreparedRequest) -> tuple[object, ...]:
        """What requests have in common that libraries prepare the same kernels for; its loading is first."""
        size = batch_size_of(each.setting)
        return loading_of(each.setting), request.shape.layout, *((size,) if size > 1 else ())

    def _taken(self, each: SettingAtWork, sample_id: int, taken: Taken) -> TakenRequest:
        place = sample_id, each.crops
        if place not in taken:
            try:
                with library_faults_named(f"sample {sample_id}"):
                    taken[place] = TakenRequest(*self.bench.requests.take(*place))
            except SampleError as error:  # raised below, for each setting that needs it
                taken[place] = error
        found = taken[place]
        if isinstance(found, SampleError):
            raise found
        return found

    def _warm_up_shape(self, layout: tuple[object, ...], batch: Sequence[Mapping[str, Any]]) -> None:
        """One unmeasured run for a layout that a model meets first: libraries prepare kernels for new shapes."""
        if self.config.num_warmup_runs and layout not in self.warm_layouts:
            run_batch(self.bench.model, batch, self.bench.max_new_tokens)
        self.warm_layouts.add(layout)

    def run(self, at: SampleAtWork) -> tuple[StagedRun, float]:
        """One measured run of a sample, and the seconds that it took to put its setting in force.

        All runs of a sample are of one batch, which the first decides.
        """
        if at.runs:
            return self._run(at, at.batch)
        taken: Taken = {(at.sample_id, at.of.crops): TakenRequest(at.sample, at.request, at.inputs)}
        take, work = self._sender(at.of, taken), partial(self._run, at)
        at.batch, found = self.batches.ran(at.of.setting, at.sample_id, take, at.batch, work)
        return found

    def _run(self, at: SampleAtWork, batch: Batch) -> tuple[StagedRun, float]:
        model, limit_s, started_s = self.bench.model, self._limit_s(at.of), self._clock.now_s()
        inputs = tuple(batch.values())
        # What is left is never 0, which would be no limit.
        with time_limit(None if limit_s is None else max(limit_s - at.spent_s, 1e-3)):
            model.apply(at.of.setting)
            switch_s = self._clock.now_s() - started_s
            # For what is prepared already it costs next to nothing.
            warm_up_batch(model, inputs, self.bench.max_new_tokens)
            with at.of.memory_window(model):
                run = run_batch(model, inputs, self.bench.max_new_tokens)
        at.spent_s += self._clock.now_s() - started_s
        return run, switch_s

    def run_arriving(
        self, group: Sequence[SampleAtWork], rate: float, seed: Sequence[int]
    ) -> tuple[list[Callable[[], tuple[StagedRun, float]]], ArrivalsTrace]:
        """One measured run of samples of one setting that arrive at a rate, as a call for each that gives what `run`
        would; the time limit of each begins when it is due.

        Args:
            seed: of the arrivals.
        """
        model, setting, started_s = self.bench.model, group[0].of, self._clock.now_s()
        model.apply(setting.setting)
        switch_s = self._clock.now_s() - started_s
        works = [partial(run_staged, model, at.inputs, self.bench.max_new_tokens) for at in group]
        after_s = arrivals_s(len(group), rate, seed)
        with setting.memory_window(model):
            futures, marks = arrive(works, after_s, self.config.sample_timeout, self.context.stop, self._clock)
        trace = trace_of(futures, marks, rate, self.context.experiment_id, self.context.rank)
        trace = replace(trace, sample_ids=tuple(at.sample_id for at in group))
        return [partial(_with_switch, each, switch_s) for each in futures], trace

    def finish(self, at: SampleAtWork, now_unix_s: float, *, in_rounds: bool) -> None:
        """Write down a sample whose runs are done, and profile it where that is requested.

        Args:
            now_unix_s: when they were done, with those of the samples that took turns with it.
        """
        model = self.bench.model
        parts = model, at.of.setting, at.sample, at.request, tuple(at.runs), at.transfer_s
        record = sample_record(*parts, scored_ids=self._scored_ids(at))
        self.note(
            at.of,
            replace(
                record,
                num_discarded_runs=at.num_discarded,
                disturbances=tuple(at.disturbances),
                round_places=tuple(at.places) if in_rounds else None,
            ),
            now_unix_s,
        )
        is_alone = len(at.batch) == 1
        if self.profiles is not None and is_alone and self.profiles.needs(at.of.key) and isinstance(model, Stepwise):
            # One more run of a sample that is on the disk already, outside its time limit.
            limit = answer_limit_at(at.of.setting, self.bench.max_new_tokens)
            model.apply(at.of.setting)
            model.warm_up(at.inputs, limit)
            inputs = model.sent(at.inputs) if isinstance(model, ModelsSideBySide) else at.inputs
            self.profiles.take(model, at.of.key, at.sample.sample_id, inputs, limit)

    def _scored_ids(self, at: SampleAtWork) -> tuple[int, ...] | None:
        """The answer that is scored where its timed requests are others; None where it is theirs."""
        model = self.bench.model
        model.apply(at.of.setting)
        if not isinstance(model, Concurrent) or not model.is_salted:
            return None
        with time_limit(self.config.sample_timeout):
            return model.answer_batch([at.inputs], self.bench.max_new_tokens)[0]

    def note(
        self, each: SettingAtWork, outcome: MeasuredSample | FailedSample, now_unix_s: float | None = None
    ) -> None:
        """Write down what became of a sample; one that failed is left for the next attempt where there is one."""
        failed = outcome if isinstance(outcome, FailedSample) else None
        if failed is not None:
            each.failed_now[failed.sample_id] = failed
        done = outcome if isinstance(outcome, MeasuredSample) else None
        if outcome.sample_id in each.shard.finished or (failed is not None and not self.is_last_attempt):
            return
        memory = each.memory or MemoryWindow(*devices_of(self.bench.model)).read()
        finished = FinishedSample(done, failed, memory, time.time() if now_unix_s is None else now_unix_s)
        if self._group is not None:
            self._group.setdefault(each.key, []).append(finished)
            return
        save_samples(each.journal, finished)
        self._add(each, finished)
        self.progress.advance()

    def _add(self, each: SettingAtWork, finished: FinishedSample) -> None:
        """Count a sample that is written down; one that failed or was disturbed may make the run INVALID."""
        each.shard.add(finished)
        if finished.measured is None or finished.measured.disturbances:
            self.look(each)

    def look(self, each: SettingAtWork) -> None:
        """Say at once where the finished samples of a setting make the run INVALID."""
        self.outlook.look(each.key, each.shard.finished.values(), self.progress.say)

    @contextmanager
    def written_together(self, settings: Sequence[SettingAtWork]) -> Iterator[None]:
        """A context of samples that arrive together, which are written down at its end, those of a setting in one line.

        Where a setting fails inside, or the run is stopped, none of its samples is.
        """
        self._group = {}
        try:
            yield
            group = self._group
        finally:
            self._group = None
        now_unix_s = time.time()
        with self.progress.at_once():
            for each in settings:
                parts = group.get(each.key, ())
                traces = tuple(part for part in parts if isinstance(part, ArrivalsTrace))
                done = [replace(part, finished_unix_s=now_unix_s) for part in parts if isinstance(part, FinishedSample)]
                if done and each.error is None:
                    save_samples(each.journal, ArrivedGroup(traces, tuple(done)))
                    for finished in done:
                        self._add(each, finished)
                    self.progress.advance(len(done))

    def note_arrivals(self, each: SettingAtWork, trace: ArrivalsTrace) -> None:
        """Keep what a batch of the open group showed."""
        assert self._group is not None
        self._group.setdefault(each.key, []).append(trace)


def _with_switch(future: Future[StagedRun], switch_s: float) -> tuple[StagedRun, float]:
    return future.result(), switch_s


def check_proof(proof: KnobProof, setting: Setting, model: Runnable) -> dict[str, str]:
    """Why the knobs' acting cannot be seen, by knob; raises KnobDidNotAct where what ran is not what was requested."""
    seen = {
        knob.name: knob.prove(proof, setting, model) for knob in all_knobs() if setting.value(knob.name) is not None
    }
    # Of a knob at rest nothing is to be seen.
    return {name: seen_not.reason for name in setting.values if (seen_not := seen[name]) is not None}
