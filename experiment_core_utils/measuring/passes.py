"""What cannot take turns in a round: windows of energy and of memory, settings in the order A B C ... C B A.

A window is one setting's. A pass is a window of every setting; every second pass goes through them in the reverse
order, so that a machine that slowly changes does so for all settings alike. Energy has windows of its own, in which
samples run back to back or a request's stages are repeated, because a timed run takes less time than a counter's tick;
memory has, because in rounds what is kept for other settings is in each setting's peak.
"""

import gc
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from experiment_core_utils.knobs.answer_limit import answer_limit_at
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.energy_budget import CounterTicks, EnergyBudget, WindowPlan
from experiment_core_utils.measuring.request_batches import RequestBatches
from experiment_core_utils.measuring.staged_runs import run_batch, warm_up_batch
from experiment_core_utils.meters.energy_statistics import preferred_act
from experiment_core_utils.meters.power import allocated_to_runs
from experiment_core_utils.meters.setting_energy import divided_acts
from experiment_core_utils.meters.stages import StagedRequest, StageMeasurement, StageRounds, are_narrow
from experiment_core_utils.meters.windows import (
    WARM_AGAIN_S,
    energy_of_act,
    energy_of_whole_acts,
    idle_power,
    poll_error_s,
)
from experiment_core_utils.models.common.side_by_side import ModelsInTurn, ModelsSideBySide
from experiment_core_utils.models.interface import Stepwise, Switchable, devices_of
from experiment_core_utils.primitives.device import MemoryWindow, out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import MeterUnavailable, SampleError, SettingError, library_faults_named
from experiment_core_utils.primitives.interruption import StopRequest, time_limit
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.primitives.replication import PASSES_THAT_DECIDE
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.energy import (
    ActEnergy,
    AllocatedJoules,
    EnergyPass,
    EnergyPassesEnd,
    IdlePower,
    PassesEnd,
    SettingEnergy,
)
from experiment_core_utils.records.journal import Journal
from experiment_core_utils.records.requests import PreparedRequest
from experiment_core_utils.records.settings import MeasuredSample, MemoryPass
from experiment_core_utils.tasks.sampling import choose_latency_ids

# Samples whose energy is measured, of those that are timed.
ENERGY_SAMPLES = 32
# Passes come in pairs, there and back.
PAIR = 2
# The goal ends them after as many: two that agree by chance would leave an interval that is too narrow.
LEAST_PASSES = PASSES_THAT_DECIDE
# No further pair is begun after windows of so many seconds for each setting.
LIMIT_S = 20.0
# Ticks by which counters are calibrated where the time is part of a budget.
BUDGET_TICKS = 5
_STOPPED = "while energy was measured"
Inputs = Mapping[str, Any]
Taken = dict[int, tuple[PreparedRequest, Inputs]]
Measured = Mapping[str, Sequence[MeasuredSample]]
T = TypeVar("T")
LOGGER = logging.getLogger(__name__)


@dataclass
class _SettingPasses:
    """A setting, and what there is of it."""

    setting: Setting
    journal: Journal
    passes: list[EnergyPass]
    is_ended: bool
    reason: str | None = None  #: why it cannot be measured

    @classmethod
    def of(cls, setting: Setting, journal: Journal) -> "_SettingPasses":
        """What an earlier run left in the journal."""
        before = journal.before
        if before is None:
            return cls(setting, journal, [], False)
        return cls(setting, journal, list(before.every(EnergyPass)), before.energy_end is not None)

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """The samples of its first window, which are those of all; none before it."""
        return self.passes[0].sample_ids if self.passes else ()

    def add(self, line: EnergyPass) -> None:
        """Write a window into the journal."""
        self.journal.append(line)
        self.passes.append(line)


def there_and_back(settings: Sequence[T], index: int) -> Sequence[T]:
    """The settings in the order of the pass of this index."""
    return settings[:: -1 if index % PAIR else 1]


@dataclass(kw_only=True)
class _Passes:
    """Passes over the settings of one process, after their samples were timed."""

    bench: Bench
    #: experiment_id, rank: of the run and this process
    experiment_id: str
    rank: int
    sample_timeout_s: float | None = None  #: limit for the preparation of each sample
    batches: RequestBatches | None = None  #: of the samples that were timed here; None for all that were timed

    def _batch(self, setting: Setting, sample_id: int, taken: Taken) -> tuple[Inputs, ...]:
        """The inputs of a sample's batch, as it was timed, with what the model keeps for their shape.

        Args:
            taken: requests so far, to which these are added.
        """
        batches = self.batches or RequestBatches(
            self.bench.model, self.bench.max_new_tokens, sorted(self.bench.latency_ids)
        )

        def take(own_id: int) -> tuple[PreparedRequest, Inputs]:
            if own_id not in taken:
                taken[own_id] = self._take(setting, own_id)
            return taken[own_id]

        with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
            batch = tuple(batches.of(setting, sample_id, take).values())
            warm_up_batch(self.bench.model, batch, self.bench.max_new_tokens)
        return batch

    def _take(self, setting: Setting, sample_id: int) -> tuple[PreparedRequest, Inputs]:
        """A sample's request, and its inputs on the device with what the model keeps for their shape."""
        with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
            with time_limit(self.sample_timeout_s):
                request = self.bench.requests.take(sample_id, vision_of(setting).bounds)[1]
            inputs = self.bench.model.to_device(request.inputs)
            self.bench.model.warm_up(inputs, self.bench.max_new_tokens)
        return request, inputs


@dataclass(kw_only=True)
class MemoryPasses(_Passes):
    """Measures the peaks of memory of settings, each alone."""

    window: Callable[..., MemoryWindow] = MemoryWindow  #: opens a window on devices

    def measure_memory(
        self,
        settings: Sequence[Setting],
        measured: Measured,
        journals: Mapping[str, Journal],
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Measure all settings in two passes, and write each window into the setting's journal.

        A setting that cannot be run alone, for which a warning says why, has the peaks of its runs in rounds.

        Args:
            settings: in the order of the first pass.
            measured: the samples that ran at each setting, by key; the largest requests of them run in its windows.
            journals: the open one of each setting, by key; what an earlier run left there is not measured again.

        Raises:
            Stopped: a stop was requested; every window that was closed is in the journals.
            ResultsNotSaved: the disk does not take a line.
        """
        left = {each: journals[each.key].before for each in settings}
        done = {each: 0 if before is None else len(before.every(MemoryPass)) for each, before in left.items()}
        for index in range(PAIR):
            due = [each for each in there_and_back(settings, index) if done[each] == index]
            with progress.step(f"measuring memory, pass {index + 1}") if due else nullcontext():
                for each in due:
                    stop.raise_if_requested("while memory was measured")
                    try:
                        line = self._window(each, largest_requests(measured[each.key]), index)
                    except (SettingError, SampleError) as error:
                        release_cached_memory(self.bench.model.device)
                        LOGGER.warning("memory of %s alone: %s", each.key, error)
                    else:
                        journals[each.key].append(line)
                        done[each] += 1

    def _window(self, setting: Setting, sample_ids: Sequence[int], index: int) -> MemoryPass:
        model, limit = self.bench.model, self.bench.max_new_tokens
        if isinstance(model, Switchable):
            model.release_prepared()
            # What refers to itself would stay in peaks until some later collection.
            gc.collect()
            release_cached_memory(model.device)
        model.apply(setting)
        taken: Taken = {}
        ready = [self._batch(setting, sample_id, taken) for sample_id in sample_ids]
        taken.clear()
        with library_faults_named(f"memory of {setting.key}"), out_of_memory_named():
            for batch in ready:
                run_batch(model, batch, limit)
            with self.window(*devices_of(model)) as window:
                for batch in ready:
                    # What is prepared for the longest request serves all.
                    warm_up_batch(model, batch, limit)
                    run_batch(model, batch, limit)
                reading = window.read()
        return MemoryPass(self.experiment_id, self.rank, index, tuple(sample_ids), reading)


@dataclass(kw_only=True)
class EnergyPasses(_Passes):
    """Measures the energy of settings on one process's device."""

    #: meters, the goal of a window's length and of the interval over passes, the most windows of a setting (rounded up
    #: to pairs), and how long idle power is measured before each pass and after the last, 0 for not
    how: StageMeasurement
    num_samples: int = ENERGY_SAMPLES
    limit_s: float = LIMIT_S
    #: what all windows may take, with counters that are not calibrated yet; None for as long as the goals need
    budget: EnergyBudget | None = None
    _plan: WindowPlan | None = field(default=None, init=False)  #: of the windows in a budget
    _ends_s: float = field(default=0.0, init=False)  #: when the budget is used up, by the meters' clock
    _warm: set[tuple[str, object]] = field(default_factory=set, init=False)

    def measure_energy(
        self,
        settings: Sequence[Setting],
        sample_ids: Sequence[int],
        journals: Mapping[str, Journal],
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Measure all settings, and write each window into the setting's journal once it is closed.

        What an earlier run left in the journals is not measured again. A setting that cannot be measured is left out of
        later passes, and its end says why.

        Args:
            settings: in the order of even passes.
            sample_ids: samples that were timed at every setting; at most `num_samples` of them are taken, the first in
                a random order that depends on the ids and the seed only.
            journals: the open one of each setting, by key.

        Raises:
            Stopped: a stop was requested; every window that was closed is in the journals.
            ResultsNotSaved: the disk does not take a line.
        """
        found = [_SettingPasses.of(setting, journals[setting.key]) for setting in settings]
        due = [each for each in found if not each.is_ended]
        try:
            self.how.using.require_any_or_estimate()
            if due and self.budget is not None:
                self._divide(self.budget, len(due), len(sample_ids))
        except MeterUnavailable as error:
            for each in due:
                each.reason = str(error)
        chosen = choose_latency_ids(sample_ids, self.num_samples, self.how.seed)
        ids = tuple(each for each in sample_ids if each in chosen)
        for index in itertools.count():
            left = [each for each in due if each.reason is None]
            ended_by = self._ended_by(index, [each.passes for each in left])
            if not left or ended_by is not None:
                break
            with progress.step(f"measuring energy, pass {index + 1}"):
                self._measure_pass(index, left, ids, stop)
        self._end(due, ended_by)

    def _divide(self, budget: EnergyBudget, num_settings: int, num_samples: int) -> None:
        """Calibrate the counters, and divide what is left of a budget among windows; raises MeterUnavailable."""
        clock = self.how.using.clock
        self._ends_s, self.limit_s = clock.now_s() + budget.seconds, budget.seconds / num_settings
        using = self.how.using.calibrated(BUDGET_TICKS)
        if unread := [each.reason for each in using.ticks.values() if each.longest_tick_s is None]:
            raise MeterUnavailable(str(unread[0]))
        read_s = sum(each.read_cost_s or 0.0 for each in using.ticks.values())
        ticks = CounterTicks(max(using.longest_ticks_s.values()), read_s, poll_error_s(using))
        most_passes = -(-self.how.repeats // PAIR) * PAIR
        left_s = self._ends_s - clock.now_s()
        self.how = replace(self.how, using=using, repeats=most_passes)
        self._plan = budget.plan(left_s, num_settings, min(num_samples, self.num_samples), most_passes, ticks)
        if self._plan is None:
            raise MeterUnavailable(
                f"a fifth of the run's time, {budget.seconds:.2g} s, is too short for "
                f"{counted(num_settings, 'setting')} by a counter that advances every {1e3 * ticks.tick_s:.2g} ms; "
                "give more samples, or --energy optional"
            )
        self.num_samples = self._plan.num_samples

    def _measure_pass(
        self, index: int, left: Sequence["_SettingPasses"], sample_ids: Sequence[int], stop: StopRequest
    ) -> None:
        """A window of each setting, of those that an earlier run, which stopped inside the pass, did not measure."""
        wanted = [each for each in there_and_back(left, index) if len(each.passes) <= index]
        if isinstance(self.bench.model, ModelsInTurn):
            # No window shares a load with one of another pass.
            self.bench.model.drop()
            self._warm.clear()
        idle = self._idle_power() if wanted else ()
        for place, each in enumerate(wanted, len(left) - len(wanted)):
            passes_left = 1 if self._plan is None else self._plan.num_passes - index
            try:
                window = self._window(
                    each.setting, each.sample_ids or sample_ids, stop, passes_left * len(left) - place
                )
            except (SettingError, SampleError) as error:
                release_cached_memory(self.bench.model.device)
                each.reason = str(error)
            else:
                each.add(replace(window, pass_index=index, place=place, idle=idle))

    def _end(self, due: Sequence["_SettingPasses"], ended_by: PassesEnd | None) -> None:
        is_measured = any(each.reason is None for each in due)
        end = EnergyPassesEnd(
            experiment_id=self.experiment_id,
            rank=self.rank,
            num_settings=len(due),
            ended_by=ended_by,
            error_goal=self.how.goal.relative_error if self.budget is None else None,
            limit_s=self.limit_s,
            idle=self._idle_power() if is_measured else (),
            missing=dict(self.how.using.missing),
            reason=None,
        )
        for each in due:
            failed = replace(end, ended_by=None, reason=each.reason)
            each.journal.append(end if each.reason is None else failed)

    def _ended_by(self, index: int, found: Sequence[Sequence[EnergyPass]]) -> PassesEnd | None:
        """Why there is no pass of this index; None where there is one."""
        if index % PAIR or index < PAIR:
            return None
        if self._plan is not None and index < self.how.repeats:
            is_over = index >= self._plan.num_passes or self.how.using.clock.now_s() >= self._ends_s
            return "time limit" if is_over else None
        windows = ([each.windows for each in passes] for passes in found)
        if self._plan is None and index >= LEAST_PASSES and are_narrow(windows, self.how.goal.relative_error):
            return "error goal"
        taken_s = sum(each.windows[0].window_s or 0.0 for passes in found for each in passes)
        if taken_s >= self.limit_s * len(found):
            return "time limit"
        return "number of passes" if index >= self.how.repeats else None

    def _idle_power(self) -> tuple[IdlePower, ...]:
        return tuple(idle_power(self.how.using, self.how.idle_s)) if self.how.idle_s > 0 else ()

    def _window(self, setting: Setting, sample_ids: Sequence[int], stop: StopRequest, windows_left: int) -> EnergyPass:
        """One window of a setting; its place among the others is not in it yet.

        Args:
            windows_left: with this one; they share what is left of a budget.

        Raises:
            SampleError: no timed sample can be read.
            SettingError: the setting cannot be run.
        """
        clock, how, plan = self.how.using.clock, self.how, self._plan
        ends_s = clock.now_s() + (self._ends_s - clock.now_s()) / windows_left
        self.bench.model.apply(setting)
        ready = self._warm_requests(setting, sample_ids, stop)
        if not ready:
            raise SampleError("no timed sample can be read")
        if plan is not None:
            how = replace(how, goal=plan.goal(ends_s - clock.now_s()))
        tokens: dict[int, int] = {}
        size = batch_size_of(setting)

        def run(sample_id: int, batch: Sequence[Inputs]) -> None:
            stop.raise_if_requested(_STOPPED)
            tokens[sample_id] = run_batch(self.bench.model, batch, self.bench.max_new_tokens).all_output_tokens

        with library_faults_named(f"energy of {setting.key}"), out_of_memory_named():
            requests = [partial(run, *each) for each in ready.items()]
            windows, allocated = energy_of_pass(requests, how, plan is not None and plan.is_between_ticks, size)
        return EnergyPass(
            experiment_id=self.experiment_id,
            rank=self.rank,
            pass_index=0,
            place=0,
            sample_ids=tuple(ready),
            # Of one request of each batch, as its joules.
            output_tokens=round(sum(tokens.values()) / size),
            windows=windows,
            allocated=allocated,
            idle=(),
        )

    def _warm_requests(
        self, setting: Setting, sample_ids: Sequence[int], stop: StopRequest
    ) -> dict[int, tuple[Inputs, ...]]:
        """The batches of the samples that can be read, on the device; each layout has run at this setting before."""
        ready: dict[int, tuple[Inputs, ...]] = {}
        taken: Taken = {}
        for sample_id in sample_ids:
            stop.raise_if_requested(_STOPPED)
            try:
                batch = self._batch(setting, sample_id, taken)
                layout = taken[sample_id][0].shape.layout
                if (setting.key, layout) not in self._warm:
                    with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                        run_batch(self.bench.model, batch, self.bench.max_new_tokens)
                    self._warm.add((setting.key, layout))
            except SampleError:  # not counted: the window says which samples it is of
                continue
            ready[sample_id] = batch
        return ready

    def measure_stages(
        self,
        settings: Sequence[Setting],
        measured: Measured,
        journals: Mapping[str, Journal],
        stop: StopRequest,
        progress: Progress,
    ) -> None:
        """Measure the stages of one request of each setting, a round of them in each pass, and write what they come to
        into its journal; not where an earlier run did.

        It is the request of the setting whose size is nearest to the mean, see `nearest_the_mean`.

        Args:
            settings: in the order of even passes.
            measured: the samples that ran at each setting, by key.

        Raises:
            Stopped: a stop was requested.
            ResultsNotSaved: the disk does not take a line.
        """
        before = {each: journals[each.key].before for each in settings}
        how = replace(self.how, stop=stop)
        found = [
            _SettingStages(each, StageRounds(how), nearest_the_mean(measured[each.key]))
            for each, content in before.items()
            if content is None or content.energy is None
        ]
        if not found:
            return
        idle: list[tuple[IdlePower, ...]] = []
        try:
            how.using.require_any_or_estimate()
            idle.append(self._idle_power())
        except MeterUnavailable as error:
            for each in found:
                each.reason = str(error)
        for index in itertools.count():
            left = [each for each in found if each.reason is None]
            if not left or self._has_stages(index, left):
                break
            with progress.step(f"measuring energy of stages, pass {index + 1}"):
                for each in there_and_back(left, index):
                    self._measure_round(each, index)
        if idle:
            idle.append(self._idle_power())
        for each in found:
            stages = each.rounds.energies(tuple(zip(*idle, strict=True))) if each.reason is None else None
            line = SettingEnergy(
                self.experiment_id, self.rank, each.sample_id, stages, dict(how.using.missing), each.reason,
                each.flops_over_mean,
            )  # fmt: skip
            journals[each.setting.key].append(line)

    def _has_stages(self, index: int, found: Sequence["_SettingStages"]) -> bool:
        """Whether there is no pass of this index: passes come in pairs, and an estimate needs one."""
        if not index or index % PAIR:
            return False
        windows = (each for one in found for each in one.rounds.windows.values())
        is_narrow = index >= self.how.least_repeats and are_narrow(windows, self.how.goal.relative_error)
        return is_narrow or index >= self.how.repeats or self.how.using.is_estimated

    def _measure_round(self, each: "_SettingStages", index: int) -> None:
        model = self.bench.model
        try:
            model.apply(each.setting)
            if batch_size_of(each.setting) > 1:
                raise SettingError("the stages of a batch are not repeated one by one; its passes have its energy")
            inputs = self._nearest_inputs(each)
            if not isinstance(model, Stepwise):
                raise SettingError("the model does not run its stages one by one")
            if isinstance(model, ModelsSideBySide):
                inputs = model.sent(inputs)
            limit = answer_limit_at(each.setting, self.bench.max_new_tokens)
            with out_of_memory_named():
                each.rounds.measure(StagedRequest(model, inputs, limit, model.rewind), index)
        except (MeterUnavailable, SettingError, SampleError) as error:
            release_cached_memory(model.device)
            each.reason = str(error)

    def _nearest_inputs(self, each: "_SettingStages") -> Inputs:
        """Inputs of the request of a setting, which is the same in every pass."""
        while each.candidates:
            each.sample_id, each.flops_over_mean = each.candidates[0]
            try:
                return self._take(each.setting, each.sample_id)[1]
            except SampleError:  # not counted: the record says which sample was taken
                each.candidates.pop(0)
        each.sample_id = each.flops_over_mean = None
        raise SampleError("no sample can be read")


@dataclass
class _SettingStages:
    """A setting, the windows of the stages of one request, and whose that may be."""

    setting: Setting
    rounds: StageRounds
    candidates: list[tuple[int, float | None]]  #: ids, and FLOPs / mean FLOPs; the first that can be read is taken
    sample_id: int | None = None
    flops_over_mean: float | None = None
    reason: str | None = None  #: why they cannot be measured


def largest_requests(samples: Sequence[MeasuredSample]) -> tuple[int, ...]:
    """Ids of the samples with the most tokens and with the most picture features, of those that were timed."""
    timed = [sample for sample in samples if sample.runs]
    if not timed:
        raise SampleError("no sample was timed")
    longest = max(timed, key=lambda each: (each.shape.known_prompt_tokens or 0) + each.output_tokens)
    widest = max(timed, key=lambda each: 0 if each.shape.actual is None else each.shape.actual.pooled_features or 0)
    return tuple(dict.fromkeys((longest.sample_id, widest.sample_id)))


def nearest_the_mean(samples: Sequence[MeasuredSample]) -> list[tuple[int, float | None]]:
    """Ids of the samples, those of a size near the mean first, each with its FLOPs / mean FLOPs; None where not known.

    A request's size is its FLOPs; where they are not known, its tokens.
    """
    flops = [sample.flops.total(sample.output_tokens) for sample in samples if sample.flops is not None]
    is_known = len(flops) == len(samples)
    tokens = [float((each.shape.known_prompt_tokens or 0) + each.output_tokens) for each in samples]
    sizes = flops if is_known else tokens
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    order = sorted(range(len(samples)), key=lambda place: abs(sizes[place] - mean))
    return [(samples[place].sample_id, sizes[place] / mean if is_known and mean else None) for place in order]


def energy_of_pass(
    requests: Sequence[Callable[[], object]],
    how: StageMeasurement,
    is_between_ticks: bool = False,
    batch_size: int = 1,
) -> tuple[tuple[ActEnergy, ...], tuple[AllocatedJoules, ...]]:
    """One window in which all requests run back to back, as often as the goal needs; an act is each of them once.

    Args:
        requests: at least one; each runs one, warm and prepared, and begins and ends synchronised.
        is_between_ticks: whether all of them may take less than a tick, and the window is to lie between two then.
        batch_size: requests that each runs together, one of which has an equal part of the joules.

    Returns:
        The energy of an act by every source and device, and the part of it that each request has.

    Raises:
        MeterUnavailable: there is nothing to measure with.
    """
    clock = how.using.clock
    spans: list[list[tuple[float, float]]] = [[] for _ in requests]

    def run_all() -> None:
        for request, own in zip(requests, spans, strict=True):
            started_s = clock.now_s()
            request()
            own.append((started_s, clock.now_s()))

    with how.using.power_beside() as traces:
        if is_between_ticks:
            windows = tuple(energy_of_act(run_all, how.using, how.goal, WARM_AGAIN_S))
        else:
            windows = tuple(energy_of_whole_acts(run_all, how.using, how.goal))
    windows = divided_acts(windows, batch_size)
    return windows, allocated_to_runs(preferred_act(windows), traces, spans)
