"""Passes of energy and memory on a simulated device whose clock stands still: order, figures by hand, resuming."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment_core_utils.finishing.pooling import part_of, with_pooled_energy
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, tier_target
from experiment_core_utils.measuring.batches import Bench
from experiment_core_utils.measuring.energy_budget import EnergyBudget
from experiment_core_utils.measuring.passes import EnergyPasses, MemoryPasses, nearest_the_mean
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.meters.instruments import Instruments
from experiment_core_utils.meters.setting_energy import energy_of, passes_energy
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.errors import SampleError, Stopped
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.records.caveats import sentences
from experiment_core_utils.records.energy import EnergyPass, PassesEnergy
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, JournalContent, journal_path, read_journal
from experiment_core_utils.records.requests import MemoryReading, PreparedRequest, RequestShape, StageFlops
from experiment_core_utils.records.settings import FinishedSample, JournalHeader, MeasuredSample, MemoryPass
from experiment_core_utils.saved_results.result_caveats import energy_caveats
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import get_metric, load_task
from tests.hand_made_records import measured_sample, staged_run
from tests.scripted.scripted_model import EOS, ScriptedModel
from tests.scripted.simulated_energy import instruments_of, scripted_device
from tests.scripted.simulated_meters import SimulatedDevice

TASK = load_task("reference_vqa", "validation")
IDS = (10, 20, 30)


def setting_of(experts: int) -> Setting:
    return Setting.of(vision=tier_target("low"), top_k=experts, num_active_blocks=RunningBlocks.of((0, 1)))


ONE, TWO, THREE = setting_of(1), setting_of(2), setting_of(3)


@dataclass
class SizedModel(ScriptedModel):
    """Sample 10 * n has a prefill of n * 0.1 s at 300 W, times the experts in force; nothing else takes time."""

    gpu: SimulatedDevice = field(default_factory=scripted_device)
    script: tuple[int, ...] = (1, 2, EOS)
    unreadable: tuple[int, ...] = ()
    too_large: int = 0  #: experts with which memory does not suffice
    more_each_s: float = 0.0  #: by how much the power rises, as a fraction a second
    unit_s: float = 0.1  #: time of the smallest sample

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        self.calls.append("prepare")
        if sample.sample_id in self.unreadable:
            raise SampleError("its picture is gone")
        inputs = {"input_ids": torch.zeros(1, sample.sample_id // 10, dtype=torch.long)}
        return PreparedRequest(inputs, RequestShape(None, None, 0, 0, 4, 0.0))

    def prefill(self, inputs: Mapping[str, Any], features: str | None) -> tuple[torch.Tensor, list[int]]:
        experts = self.active_setting[0]
        if experts == self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        watts = 300.0 * experts * (1 + self.more_each_s * self.gpu.clock.now_s())
        self.gpu.run(self.unit_s * inputs["input_ids"].shape[1], watts)
        return super().prefill(inputs, features)


def passes_of(model: SizedModel, using: Instruments | None = None, **how: Any) -> EnergyPasses:
    requests = RequestSource(TASK, model, IDS, 0, 0, None, keep_pictures=False)
    bench = Bench(model, requests, 4, get_metric(TASK.metric), frozenset(IDS))
    own = {name: how.pop(name) for name in ("num_samples", "limit_s", "budget") if name in how}
    measurement = StageMeasurement(using or instruments_of(model.gpu), **{"goal": WindowGoal(0.02), "repeats": 2} | how)
    return EnergyPasses(bench=bench, how=measurement, experiment_id="0001", rank=0, **own)


def in_budget(model: SizedModel, budget: EnergyBudget) -> EnergyPasses:
    return passes_of(model, instruments_of(model.gpu).counters_alone(), budget=budget, repeats=5, idle_s=0.0)


def measure(
    passes: EnergyPasses, folder: Path, settings: Sequence[Setting], stop: StopRequest | None = None
) -> dict[str, JournalContent]:
    """The settings' journals after the call, which may have been stopped."""
    with ExitStack() as stack:
        journals = {
            each.key: stack.enter_context(
                Journal(folder, JournalHeader(JOURNAL_VERSION, each.key, "f", 0, 1, "0001", IDS))
            )
            for each in settings
        }
        progress = stack.enter_context(Progress(1, 1, shown=False))
        passes.measure_energy(settings, IDS, journals, stop or StopRequest(), progress)
    return journals_in(folder, settings)


def journals_in(folder: Path, settings: Sequence[Setting]) -> dict[str, JournalContent]:
    found = {each.key: read_journal(journal_path(folder, each.key, 0)) for each in settings}
    return {key: content for key, content in found.items() if content is not None}


def lines(content: JournalContent) -> list[EnergyPass]:
    return list(content.every(EnergyPass))


def figures(content: JournalContent) -> PassesEnergy:
    return passes_energy(lines(content), content.energy_end)


def test_settings_are_measured_there_and_back_each_in_windows_of_whole_passes(tmp_path: Path) -> None:
    model = SizedModel()
    found = measure(passes_of(model), tmp_path, (ONE, TWO))
    assert [each for each in model.calls if each.startswith("apply")] == [
        f"apply {each.key}" for each in (ONE, TWO, TWO, ONE)
    ]
    assert [(each.pass_index, each.place) for each in lines(found[ONE.key])] == [(0, 0), (1, 1)]
    assert [(each.pass_index, each.place) for each in lines(found[TWO.key])] == [(0, 1), (1, 0)]
    # (0.1 + 0.2 + 0.3) s at 300 W are 180 J for three requests; windows are exact to 2 %.
    one, two = figures(found[ONE.key]), figures(found[TWO.key])
    assert (one.j_per_request, two.j_per_request) == (pytest.approx(60.0, rel=0.02), pytest.approx(120.0, rel=0.02))
    assert one.j_per_request_by_pass == pytest.approx([60.0, 60.0], rel=0.02)
    assert (one.basis, one.num_passes, one.sample_ids, one.num_settings) == ("counter", 2, [*IDS], 2)
    # 5 s and more of whole passes of 0.6 s.
    assert one.num_requests is not None and one.num_requests % 6 == 0 and one.num_requests >= 2 * 3 * 9
    assert one.window_s == pytest.approx(one.num_requests * 0.2, rel=1e-3)
    # Three tokens each.
    assert (one.output_tokens_per_request, one.j_per_output_token) == (3.0, pytest.approx(20.0, rel=0.02))
    # Idle at 70 W for 0.2 s.
    assert one.net_j_per_request == pytest.approx(60.0 - 14.0, rel=0.02)
    assert one.idle_w == pytest.approx(70.0, rel=0.01)


def test_only_requests_run_between_the_ends_of_a_window(tmp_path: Path) -> None:
    model = SizedModel()
    measure(passes_of(model), tmp_path, (ONE,))
    windows = "\n".join(model.calls).split(f"apply {ONE.key}\n")[1:]
    assert len(windows) == 2
    for window in windows:
        calls = window.splitlines()
        # Every sample is prepared, and what the model keeps for it made, before the first pass of three requests.
        ready = len(calls) - calls[::-1].index("warm_up for 4")
        assert calls[:ready].count("prepare") == 3
        assert {each.split()[0] for each in calls[ready:]} == {"encode_image", "prefill", "decode_step"}


def test_a_samples_energy_is_its_part_and_their_mean_that_of_a_request(tmp_path: Path) -> None:
    # 2 % more power each second: no window is like the other.
    content = measure(passes_of(SizedModel(more_each_s=0.02)), tmp_path, (ONE,))[ONE.key]
    samples = with_pooled_energy([measured_sample(each, staged_run()) for each in IDS], lines(content), None)
    joules = [each.energy_j for each in samples]
    assert mean_of(joules) == pytest.approx(figures(content).j_per_request, rel=1e-12)
    first = joules[0]
    assert first is not None
    assert joules[1:] == [pytest.approx(2 * first, rel=0.03), pytest.approx(3 * first, rel=0.03)]
    assert samples[0].energy is not None and samples[0].energy.method == "apportioned"


def test_a_machine_that_draws_more_and_more_does_so_for_all_settings_alike(tmp_path: Path) -> None:
    """Twice as many experts take twice the joules at any moment; half a percent more each second."""
    settings = (ONE, TWO, THREE)
    found = measure(passes_of(SizedModel(more_each_s=0.005)), tmp_path, settings)
    whole = [figures(found[each.key]).j_per_request or 0.0 for each in settings]
    assert [each / whole[0] for each in whole[1:]] == [pytest.approx(2.0, rel=0.005), pytest.approx(3.0, rel=0.005)]
    # In the first pass alone the third setting comes some 16 s after the first.
    first = [passes_energy(lines(found[each.key])[:1], None).j_per_request or 0.0 for each in settings]
    assert first[2] / first[0] > 3.0 * 1.05


@pytest.mark.parametrize(
    ("how", "model", "ended_by", "number"),
    [
        ({"repeats": 6}, {}, "error goal", 4),
        ({"repeats": 5, "limit_s": 60.0}, {"more_each_s": 0.01}, "number of passes", 6),
        # A window of some 5.4 s: 2 x 10.8 s are not 25 s yet, 4 windows are 21.6 s, 6 are 32.4 s.
        ({"repeats": 99, "limit_s": 25.0}, {"more_each_s": 0.01}, "time limit", 6),
    ],
)
def test_passes_end_by_the_goal_the_time_or_their_number(
    tmp_path: Path, how: dict[str, Any], model: dict[str, Any], ended_by: str, number: int
) -> None:
    content = measure(passes_of(SizedModel(**model), **how), tmp_path, (ONE,))[ONE.key]
    found = figures(content)
    assert (found.ended_by, found.num_passes, len(lines(content))) == (ended_by, number, number)
    assert (found.error_goal, found.limit_s) == (0.02, how.get("limit_s", 20.0))
    assert found.j_per_request_ci95_high is not None and found.j_per_request is not None
    is_narrow = found.j_per_request_ci95_high - found.j_per_request <= 0.02 * found.j_per_request
    assert is_narrow == (ended_by == "error goal")


def test_windows_of_a_budget_share_its_seconds(tmp_path: Path) -> None:
    """40 s for two settings, whose three requests take 0.6 s and a window of a counter of 0.1 s as long as it may."""
    model = SizedModel()
    passes = in_budget(model, EnergyBudget(40.0, 0.2, 0.0))
    began_s = model.gpu.clock.now_s()
    found = measure(passes, tmp_path, (ONE, TWO))
    # The last windows end with a whole pass over the samples and a tick.
    assert 38.0 < model.gpu.clock.now_s() - began_s < 40.0 + 0.6 + 0.2
    one, two = figures(found[ONE.key]), figures(found[TWO.key])
    # Six passes would be of 3.3 s, which is not 2 % of a tick; calibration takes 0.6 s, and 39.4 / 8 are 4.9 s.
    assert (one.num_passes, one.ended_by, one.limit_s, one.error_goal) == (4, "time limit", 20.0, None)
    lengths = [each.windows[0].window_s or 0.0 for content in found.values() for each in lines(content)]
    assert len(lengths) == 8 and min(lengths) > 3.5 and max(lengths) < 5.5
    assert (one.j_per_request, two.j_per_request) == (pytest.approx(60.0, rel=0.02), pytest.approx(120.0, rel=0.02))
    # No idle power was measured, and no power read.
    assert (one.idle_w, one.net_j_per_request, [each.basis for each in one.figures]) == (None, None, ["counter"])
    assert sentences(energy_caveats(energy_of(None, lines(found[ONE.key]), found[ONE.key].energy_end))) == []


def test_short_requests_of_a_budget_run_between_two_ticks(tmp_path: Path) -> None:
    """1, 2 and 3 ms at 300 W are 0.6 J a request: 0.2 s would be open of a window of whole passes, 6 ms are."""
    model = SizedModel(unit_s=0.001)
    passes = in_budget(model, EnergyBudget(2.0, 0.002, 0.0))
    began_s = model.gpu.clock.now_s()
    found = measure(passes, tmp_path, (ONE, TWO))
    assert model.gpu.clock.now_s() - began_s < 2.0 + 0.2
    windows = [each.windows[0] for content in found.values() for each in lines(content)]
    assert [each.alignment for each in windows] == ["ticks"] * 4
    joules = [figures(found[each.key]).j_per_request for each in (ONE, TWO)]
    assert joules == [pytest.approx(0.6, rel=0.03), pytest.approx(1.2, rel=0.03)]


def test_a_budget_that_is_too_short_leaves_no_figure_and_one_reason(tmp_path: Path) -> None:
    model = SizedModel()
    found = measure(in_budget(model, EnergyBudget(2.0, 0.2, 0.0)), tmp_path, (ONE, TWO))
    assert model.calls == [] and [lines(each) for each in found.values()] == [[], []]
    ends = [each.energy_end for each in found.values()]
    assert {each.reason for each in ends if each is not None} == {
        "a fifth of the run's time, 2 s, is too short for 2 settings by a counter that advances every 1e+02 ms; give "
        "more samples, or --energy optional"
    }
    still = SizedModel(gpu=scripted_device(tick_s=99.0))
    (tmp_path / "still").mkdir()
    (content,) = measure(in_budget(still, EnergyBudget(9.0, 0.2, 0.0)), tmp_path / "still", (ONE,)).values()
    assert content.energy_end is not None and "did not advance for 2 s" in str(content.energy_end.reason)


def test_what_is_in_the_journals_is_not_measured_again(tmp_path: Path) -> None:
    model, stop = SizedModel(), StopRequest()
    prefill, count = model.prefill, 0

    def prefill_and_stop(*given: Any) -> Any:
        nonlocal count
        count += 1
        # In the third window, of which each has 9 passes or more of 3 requests.
        if count == 65:
            stop.note(2, None)
        return prefill(*given)

    model.prefill = prefill_and_stop  # type: ignore[method-assign]
    with pytest.raises(Stopped, match="while energy was measured"):
        measure(passes_of(model), tmp_path, (ONE, TWO), stop)
    before = journals_in(tmp_path, (ONE, TWO))
    assert [len(lines(each)) for each in before.values()] == [1, 1]
    assert all(each.energy_end is None for each in before.values())
    again = SizedModel(gpu=model.gpu)
    after = measure(passes_of(again, num_samples=1), tmp_path, (ONE, TWO))
    assert [each for each in again.calls if each.startswith("apply")] == [f"apply {each.key}" for each in (TWO, ONE)]
    for key, content in after.items():
        assert lines(content)[0] == lines(before[key])[0]
        # Over the samples of the first pass, whatever is requested now.
        assert [(each.pass_index, each.sample_ids) for each in lines(content)] == [(0, IDS), (1, IDS)]
        assert content.energy_end is not None
    third = passes_of(SizedModel(gpu=model.gpu))
    readings = model.gpu.num_readings
    measure(third, tmp_path, (ONE, TWO))
    assert third.bench.model.calls == [] and model.gpu.num_readings == readings  # type: ignore[attr-defined]


def test_a_setting_that_cannot_run_is_left_out_and_says_why(tmp_path: Path) -> None:
    model = SizedModel(too_large=2)
    found = measure(passes_of(model), tmp_path, (ONE, TWO, THREE))
    assert [len(lines(each)) for each in found.values()] == [2, 0, 2]
    end = found[TWO.key].energy_end
    assert end is not None and end.ended_by is None and "out of memory" in str(end.reason)
    # It is tried once.
    assert model.calls.count(f"apply {TWO.key}") == 1
    energy = energy_of(None, lines(found[TWO.key]), end)
    assert energy is not None and energy.passes is None and energy.reason == end.reason


def test_samples_that_cannot_be_read_are_in_no_window(tmp_path: Path) -> None:
    found = measure(passes_of(SizedModel(unreadable=(20,))), tmp_path, (ONE,))
    assert [each.sample_ids for each in lines(found[ONE.key])] == [(10, 30), (10, 30)]
    (tmp_path / "none").mkdir()
    (content,) = measure(passes_of(SizedModel(unreadable=IDS)), tmp_path / "none", (ONE,)).values()
    assert lines(content) == [] and content.energy_end is not None
    assert content.energy_end.reason == "no timed sample can be read"


def test_at_most_so_many_samples_are_taken_in_their_order(tmp_path: Path) -> None:
    (content,) = measure(passes_of(SizedModel(), num_samples=2), tmp_path, (ONE,)).values()
    taken = lines(content)[0].sample_ids
    assert len(taken) == 2 and list(taken) == sorted(taken) and set(taken) < set(IDS)


def test_where_nothing_measures_the_end_says_so_and_nothing_runs(tmp_path: Path) -> None:
    model = SizedModel()
    nothing = Instruments(model.gpu.clock, (), (), missing={"GPU energy": "torch sees no GPU"})
    (content,) = measure(passes_of(model, nothing), tmp_path, (ONE,)).values()
    assert model.calls == [] and content.energy_end is not None
    assert "nothing on this machine measures energy" in str(content.energy_end.reason)
    assert content.energy_end.missing == {"GPU energy": "torch sees no GPU"}
    (sample,) = with_pooled_energy([measured_sample(10, staged_run())], [], content.energy_end)
    assert sample.energy_j is None and sample.energy is not None and "GPU" in str(sample.energy.reason)


def test_the_request_of_the_stages_is_the_one_nearest_to_the_mean() -> None:
    # Three tokens, of which the last two are decode steps: 10 + 100 + 2 * 5 = 120, 220 and 260 FLOPs, 200 in the mean.
    samples = [
        replace(measured_sample(at, staged_run()), flops=StageFlops(10, flops, 5.0))
        for at, flops in ((1, 100), (2, 200), (3, 240))
    ]
    assert nearest_the_mean(samples) == [(2, 1.1), (3, 1.3), (1, 0.6)]
    assert nearest_the_mean([]) == []
    # Of an unknown architecture the tokens decide.
    unknown = [replace(each, flops=None, shape=replace(each.shape, text_tokens=tokens)) for each, tokens in zip(
        samples, (10, 100, 40), strict=True
    )]  # fmt: skip
    assert nearest_the_mean(unknown) == [(3, None), (1, None), (2, None)]


@dataclass
class StagedModel(SizedModel):
    """Decode steps take 5 ms at 200 W."""

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        self.gpu.run(0.005, 200.0)
        return super().decode_step(token, state)


def timed(*ids: int) -> list[MeasuredSample]:
    return [measured_sample(each, staged_run(), has_picture=False) for each in ids]


def open_journals(stack: ExitStack, folder: Path, settings: Sequence[Setting]) -> dict[str, Journal]:
    headers = [JournalHeader(JOURNAL_VERSION, each.key, "f", 0, 1, "0001", IDS) for each in settings]
    return {each.key: stack.enter_context(Journal(folder, each)) for each in headers}


def stages_of(model: SizedModel, folder: Path, settings: Sequence[Setting], using: Instruments | None = None) -> Any:
    """The energies of the stages of requests of sample 10, by setting."""
    passes = passes_of(model, using, goal=WindowGoal(0.05, least_s=0.5), idle_s=1.0)
    with ExitStack() as stack:
        journals, progress = open_journals(stack, folder, settings), stack.enter_context(Progress(1, 1, shown=False))
        passes.measure_stages(settings, {each.key: timed(10) for each in settings}, journals, StopRequest(), progress)
    found = journals_in(folder, settings)
    return [found[each.key].energy for each in settings]


def test_every_setting_has_the_energy_of_its_stages(tmp_path: Path) -> None:
    model = StagedModel()
    one, two = stages_of(model, tmp_path, (ONE, TWO))
    assert [each for each in model.calls if each.startswith("apply")] == [
        f"apply {each.key}" for each in (ONE, TWO, TWO, ONE)
    ]
    assert (one.sample_id, one.reason, one.stages.output_tokens) == (10, None, 3)
    joules = {name: [each.stages.figures[name][0].gross_j for each in (one, two)] for name in one.stages.figures}
    # 100 ms at 300 W times the experts; two steps of 5 ms at 200 W.
    assert [each.mean for each in joules["prefill"]] == [pytest.approx(30.0, rel=0.06), pytest.approx(60.0, rel=0.06)]
    assert [each.mean for each in joules["decode"]] == [pytest.approx(2.0, rel=0.06)] * 2
    assert {each.n for both in joules.values() for each in both} == {2}
    # What is there is not measured again.
    again = StagedModel(gpu=model.gpu)
    assert stages_of(again, tmp_path, (ONE, TWO)) == [one, two] and again.calls == []


def test_stages_that_cannot_be_measured_say_why(tmp_path: Path) -> None:
    large = StagedModel(too_large=2)
    one, two = stages_of(large, tmp_path, (ONE, TWO))
    assert one.reason is None and two.stages is None and "out of memory" in two.reason
    for name, model, reason in (
        ("gone", StagedModel(unreadable=IDS), "no sample can be read"),
        ("blind", StagedModel(), "nothing on this machine"),
    ):
        (tmp_path / name).mkdir()
        nothing = Instruments(model.gpu.clock, (), (), missing={"GPU energy": "torch sees no GPU"})
        (found,) = stages_of(model, tmp_path / name, (ONE,), nothing if name == "blind" else None)
        assert found.stages is None and found.reason.startswith(reason)


def test_memory_is_that_of_a_setting_alone_and_the_highest_of_its_passes(tmp_path: Path) -> None:
    """1000 bytes for each setting that something is prepared for; 10 for each place of the prompt; the first pass 5."""
    model, held, passes_begun = SizedModel(), dict[int, "Prepared"](), list[int]()
    prepared = weakref.WeakSet["Prepared"]()

    class Prepared:
        """As long as nobody collects it, it keeps itself."""

        def __init__(self) -> None:
            self.itself = self

    def released() -> None:
        held.clear()
        passes_begun.append(1)

    class Window:
        def __init__(self, *devices: torch.device) -> None:
            self.most = 0

        def __enter__(self) -> "Window":
            watched.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            watched.clear()

        def read(self) -> MemoryReading:
            return MemoryReading(self.most, 2 * self.most, 7, None)

    watched: list[Window] = []
    prefill = model.prefill

    def counted(inputs: Mapping[str, Any], features: str | None) -> Any:
        prepared.add(held.setdefault(model.active_setting[0] or 0, Prepared()))
        for each in watched:
            first = 5 if len(passes_begun) <= 2 else 0
            each.most = max(each.most, 1000 * len(prepared) + 10 * inputs["input_ids"].shape[1] + first)
        return prefill(inputs, features)

    model.prefill, model.release_prepared = counted, released  # type: ignore[method-assign]
    passes = MemoryPasses(bench=passes_of(model).bench, experiment_id="0001", rank=0, window=Window)
    long = replace(timed(30)[0], shape=replace(timed(30)[0].shape, text_tokens=99))
    for _ in range(2):
        with ExitStack() as stack:
            journals = open_journals(stack, tmp_path, (ONE, TWO))
            progress = stack.enter_context(Progress(1, 1, shown=False))
            measured = {each.key: [*timed(10, 20), long] for each in (ONE, TWO)}
            passes.measure_memory((ONE, TWO), measured, journals, StopRequest(), progress)
    # Two windows each, none again: there and back.
    assert [each for each in model.calls if each.startswith("apply")] == [
        f"apply {each.key}" for each in (ONE, TWO, TWO, ONE)
    ]
    content = journals_in(tmp_path, (ONE,))[ONE.key]
    lines = content.every(MemoryPass)
    assert [(each.pass_index, each.sample_ids, each.memory.peak_memory_bytes) for each in lines] == [
        (0, (30, 10), 1035), (1, (30, 10), 1030),
    ]  # fmt: skip
    done = FinishedSample(timed(10)[0], None, MemoryReading(9000, 9900, 50, None))
    memory = part_of(replace(content, lines=(*content.lines, done)), 0, 1, "0001").memory
    assert memory == MemoryReading(1035, 2070, 50, None, 2)
