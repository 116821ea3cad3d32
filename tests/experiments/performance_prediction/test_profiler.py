"""One input size: the passes, their order, and what each of them finds."""

from math import prod

import pytest
import torch

from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused
from experiments.performance_prediction.algorithms.engines import Placement
from experiments.performance_prediction.profiler import PowerMonitor, UnifiedProfiler, whole_times
from tests.experiments.performance_prediction.small_networks import OnePlain, TwoConvolutions, profiler_of, settings_of
from tests.scripted.simulated_energy import device_in_real_time, instruments_of

CPU = torch.device("cpu")


def test_nothing_is_hooked_in_the_whole_model_pass() -> None:
    model = TwoConvolutions()
    profile = profiler_of(model, warmup=3, measure=4).profile(16)
    # The layers' pass has one inference that is not timed; errors are looked at in one more.
    whole = profile.whole.num_warmup + 4
    assert model.hooks_seen == [0] * whole + [1] * (1 + 4) + [1]
    assert len(profile.whole.inferences_s) == 4 and len(profile.layers.inferences_s) == 4
    assert profile.whole.memory.peak_memory_bytes is None and profile.whole.memory.reason is not None
    assert list(profile.layers.layers_s) == ["strided", "plain"]
    assert profile.kernels is None and profile.energy.joules is None


def test_each_layer_is_as_near_to_float64_as_its_numbers_allow() -> None:
    errors = profiler_of(TwoConvolutions(), algorithm="gemm").profile(16).errors
    assert all(error.relative is not None and 0 < error.relative < 1e-6 for error in errors.values())
    exact = profiler_of(TwoConvolutions(), placement=Placement(CPU, torch.float64)).profile(16)
    # Both are computed in float64; sums of up to 72 products may still be in another order: 72 roundings of 1.1e-16.
    assert all(error.relative is not None and error.relative < 1e-14 for error in exact.errors.values())


def test_an_output_of_zeros_or_without_bounds_has_no_error_but_a_reason() -> None:
    model = TwoConvolutions()
    torch.nn.init.zeros_(model.plain.weight)
    torch.nn.init.constant_(model.strided.weight, 3e38)
    errors = profiler_of(model).profile(16).errors
    assert errors["strided"].relative is None and errors["strided"].reason == "the output is not finite"
    assert errors["plain"].relative is None and errors["plain"].reason is not None


def test_what_falls_back_is_recorded_and_the_network_is_put_back() -> None:
    model = TwoConvolutions()
    profile = profiler_of(model, algorithm="winograd", on_unsupported="fallback").profile(16)
    strided, plain = profile.report.layers
    assert (strided.runs, strided.fell_back) == ("torch", True) and "stride 1" in str(strided.reason)
    assert (plain.runs, plain.fell_back) == ("winograd", False)
    assert type(model.plain) is torch.nn.Conv2d


def test_without_fallback_nothing_is_run() -> None:
    model = TwoConvolutions()
    with pytest.raises(AlgorithmRefused, match="does not cover 1 of 2 convolutions of small"):
        profiler_of(model, algorithm="winograd").profile(16)
    assert model.hooks_seen == [] and type(model.strided) is torch.nn.Conv2d


def test_memory_that_runs_out_is_named_and_the_network_is_put_back() -> None:
    model = OnePlain(largest=16)
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        profiler_of(model, algorithm="gemm").profile(17)
    assert type(model.conv) is torch.nn.Conv2d


def test_an_input_that_the_network_does_not_take_is_refused() -> None:
    class Deep(TwoConvolutions):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.max_pool2d(images, 4))

    with pytest.raises(ConfigurationError, match="take a larger one"):
        profiler_of(Deep()).support(2)


def test_energy_is_that_of_whole_inferences() -> None:
    device = device_in_real_time(watts=100.0)
    monitor = PowerMonitor(instruments_of(device, sample_every_s=0.01))
    energy = UnifiedProfiler(OnePlain(), settings_of(), monitor).profile(16).energy
    assert energy.power_w == pytest.approx(100.0, rel=0.05) and energy.source == "simulated"


def test_the_batch_is_in_every_layer() -> None:
    report = profiler_of(TwoConvolutions(), batch_size=3).support(16)
    assert [layer.shape.input_shape for layer in report.layers] == [(3, 3, 16, 16), (3, 8, 8, 8)]
    # 3 images, 8 channels of 8x8, each of 3x3x3 products.
    assert report.layers[0].shape.flops == 2 * prod((3, 8, 8, 8)) * 27


def test_a_warm_up_continues_until_it_is_stable_but_ends() -> None:
    calls = []
    found = whole_times(lambda: calls.append(1), CPU, 0, 2)
    assert len(calls) == 2 and (found.num_warmup, found.is_stable) == (0, None)
    calls.clear()
    found = whole_times(lambda: calls.append(1), CPU, 4, 2)
    assert 4 <= found.num_warmup <= 4 + 30 and len(calls) == found.num_warmup + 2
