"""The energy of settings over many samples: windows of whole passes, settings in the order A B C ... C B A.

A window is one setting's: its samples run back to back, all of them once or several times. A pass is a window of every
setting; every second pass goes through them in the reverse order, so that a machine that slowly draws more or less does
so for all settings alike. Energy has windows of its own, because a timed run takes less time than a counter's tick.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from experiment_core_utils.c_prompt_processing import choose_latency_ids
from experiment_core_utils.d_energy_tracking import energy_of_pass, energy_of_setting
from experiment_core_utils.e_inference import run_staged
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.meters.stages import StageMeasurement, are_narrow
from experiment_core_utils.meters.windows import idle_power
from experiment_core_utils.primitives.device import out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import (
    MeterUnavailable,
    SampleError,
    SettingError,
    library_faults_named,
)
from experiment_core_utils.primitives.interruption import StopRequest, time_limit
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.primitives.replication import PASSES_THAT_DECIDE
from experiment_core_utils.records.energy import EnergyPass, EnergyPassesEnd, IdlePower, PassesEnd
from experiment_core_utils.records.journal import Journal
from experiment_core_utils.records.requests import PreparedRequest
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.sweep.batches import Bench

# Samples whose energy is measured, of those that are timed.
ENERGY_SAMPLES = 32
# Passes come in pairs, there and back.
PAIR = 2
# The goal ends them after as many: two that agree by chance would leave an interval that is too narrow.
LEAST_PASSES = PASSES_THAT_DECIDE
# No further pair is begun after windows of so many seconds for each setting.
LIMIT_S = 20.0
_STOPPED = "while energy was measured"
Inputs = Mapping[str, Any]


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


@dataclass
class EnergyPasses:
    """Measures the energy of settings on one process's device, after their samples were timed."""

    bench: Bench
    #: meters, the goal of a window's length and of the interval over passes, the most windows of a setting (rounded up
    #: to pairs), and how long idle power is measured before each pass and after the last
    how: StageMeasurement
    #: experiment_id, rank: of the run and this process
    experiment_id: str
    rank: int
    sample_timeout_s: float | None = None  #: limit for the preparation of each sample
    num_samples: int = ENERGY_SAMPLES
    limit_s: float = LIMIT_S
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
        chosen = choose_latency_ids(sample_ids, self.num_samples, self.how.seed)
        ids = tuple(each for each in sample_ids if each in chosen)
        try:
            self.how.using.require_any_or_estimate()
        except MeterUnavailable as error:
            for each in due:
                each.reason = str(error)
        for index in itertools.count():
            left = [each for each in due if each.reason is None]
            ended_by = self._ended_by(index, [each.passes for each in left])
            if not left or ended_by is not None:
                break
            with progress.step(f"measuring energy, pass {index + 1}"):
                self._measure_pass(index, left, ids, stop)
        self._end(due, ended_by)

    def _measure_pass(
        self, index: int, left: Sequence["_SettingPasses"], sample_ids: Sequence[int], stop: StopRequest
    ) -> None:
        """A window of each setting, of those that an earlier run, which stopped inside the pass, did not measure."""
        wanted = [each for each in left[:: -1 if index % 2 else 1] if len(each.passes) <= index]
        idle = self._idle_power() if wanted else ()
        for place, each in enumerate(wanted, len(left) - len(wanted)):
            try:
                window = self._window(each.setting, each.sample_ids or sample_ids, stop)
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
            error_goal=self.how.goal.relative_error,
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
        windows = ([each.windows for each in passes] for passes in found)
        if index >= LEAST_PASSES and are_narrow(windows, self.how.goal.relative_error):
            return "error goal"
        taken_s = sum(each.windows[0].window_s or 0.0 for passes in found for each in passes)
        if taken_s >= self.limit_s * len(found):
            return "time limit"
        return "number of passes" if index >= self.how.repeats else None

    def _idle_power(self) -> tuple[IdlePower, ...]:
        return tuple(idle_power(self.how.using, self.how.idle_s))

    def _window(self, setting: Setting, sample_ids: Sequence[int], stop: StopRequest) -> EnergyPass:
        """One window of a setting; its place among the others is not in it yet.

        Raises:
            SampleError: no timed sample can be read.
            SettingError: the setting cannot be run.
        """
        self.bench.model.apply(setting)
        ready = self._warm_requests(setting, sample_ids, stop)
        if not ready:
            raise SampleError("no timed sample can be read")
        tokens: dict[int, int] = {}

        def run(sample_id: int, inputs: Inputs) -> None:
            stop.raise_if_requested(_STOPPED)
            tokens[sample_id] = len(run_staged(self.bench.model, inputs, self.bench.max_new_tokens).token_ids)

        with library_faults_named(f"energy of {setting.key}"), out_of_memory_named():
            windows, allocated = energy_of_pass([partial(run, *each) for each in ready.items()], self.how)
        return EnergyPass(
            experiment_id=self.experiment_id,
            rank=self.rank,
            pass_index=0,
            place=0,
            sample_ids=tuple(ready),
            output_tokens=sum(tokens.values()),
            windows=windows,
            allocated=allocated,
            idle=(),
        )

    def _warm_requests(self, setting: Setting, sample_ids: Sequence[int], stop: StopRequest) -> dict[int, Inputs]:
        """Inputs of the samples that can be read, on the device; each layout has run at this setting before."""
        ready: dict[int, Inputs] = {}
        for sample_id in sample_ids:
            stop.raise_if_requested(_STOPPED)
            try:
                request, inputs = self._take(setting, sample_id)
                if (setting.key, request.shape.layout) not in self._warm:
                    with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                        run_staged(self.bench.model, inputs, self.bench.max_new_tokens)
                    self._warm.add((setting.key, request.shape.layout))
            except SampleError:  # not counted: the window says which samples it is of
                continue
            ready[sample_id] = inputs
        return ready

    def _take(self, setting: Setting, sample_id: int) -> tuple[PreparedRequest, Inputs]:
        """A sample's request, and its inputs on the device with what the model keeps for their shape."""
        with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
            with time_limit(self.sample_timeout_s):
                request = self.bench.requests.take(sample_id, vision_of(setting).bounds)[1]
            inputs = self.bench.model.to_device(request.inputs)
            self.bench.model.warm_up(inputs, self.bench.max_new_tokens)
        return request, inputs

    def measure_stages(
        self, setting: Setting, samples: Sequence[MeasuredSample], journal: Journal, stop: StopRequest
    ) -> None:
        """Measure the stages of one request, and write them into the journal; not where an earlier run did.

        It is the request of the setting whose size is nearest to the mean, see `nearest_the_mean`.

        Args:
            samples: those that ran at the setting.

        Raises:
            Stopped: a stop was requested.
            ResultsNotSaved: the disk does not take the line.
        """
        if journal.before is not None and journal.before.energy is not None:
            return
        self.bench.model.apply(setting)
        request, ratio = None, None
        for sample_id, flops_over_mean in nearest_the_mean(samples):
            try:
                request, ratio = (sample_id, self._take(setting, sample_id)[1]), flops_over_mean
                break
            except SampleError:  # not counted: the record says which sample was taken
                continue
        how, limit = replace(self.how, stop=stop), self.bench.max_new_tokens
        journal.append(energy_of_setting(self.bench.model, request, limit, how, self.experiment_id, self.rank, ratio))


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
