"""What is added to the convolutions of a network: fits that find round laws again, by hand."""

from dataclasses import replace

import pytest

from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.prediction.measurements import MeasuredInference, MeasuredLayer
from experiments.performance_prediction.prediction.operations import NetworkOperations
from experiments.performance_prediction.prediction.whole import HostModel, RestModel, fit_host, fit_rest, run_as

SHAPE = ConvShape(1, 3, 8, 8, 4, (3, 3))
LAYER = MeasuredLayer("conv", SHAPE, "fft", "fft", False, None, 0.010)
REFUSED = replace(LAYER, runs="implicit gemm", fell_back=True, refusal="too large", latency_s=0.020)


def operations(others: int, other_bytes: int = 0, product_bytes: int = 0) -> NetworkOperations:
    return NetworkOperations({"conv": SHAPE}, others, other_bytes, product_bytes)


def inference(device_s: float, whole_s: float, *layers: MeasuredLayer, size: int = 64) -> MeasuredInference:
    return MeasuredInference("H200", "fma", "alexnet", "fft", size, 1, layers, device_s, whole_s, None, None)


def test_a_rest_is_so_much_an_operation_and_a_byte() -> None:
    # 10 operations, 200 bytes and 3000 bytes of products: 10 * 2 + 200 * 0.5 + 3000 * 0.1 = 420.
    assert RestModel(2.0, 0.5, 0.1).seconds(operations(10, 200, 3000)) == pytest.approx(420.0)


def test_host_time_is_fitted_by_algorithm_and_is_0_where_nothing_waited() -> None:
    # Two FFTs at 3, one unknown at 0, 10 other operations at 2.
    host = HostModel({"fft": 3.0}, 2.0)
    assert host.seconds(["fft", "winograd", "fft"], operations(10)) == pytest.approx(26.0)


def test_the_rest_is_the_device_less_its_layers_the_median_of_each_size() -> None:
    # Size 64: rests of 0.02, 0.04 and 0.30 s, the median 0.04; size 128: 0.08. 10 and 20 operations: 4 ms each.
    first = [inference(0.01 + rest, 1.0, LAYER) for rest in (0.02, 0.30, 0.04)]
    second = inference(0.03 + 0.08, 1.0, LAYER, REFUSED, size=128)
    found = fit_rest([*first, second], [operations(10)] * 3 + [operations(20)])
    assert found.per_operation_s == pytest.approx(0.004)
    assert (found.per_byte_s, found.per_product_byte_s) == (0.0, 0.0)


def test_without_any_rest_nothing_is_added() -> None:
    # The layers alone are as long as the device pass.
    assert fit_rest([inference(0.01, 1.0, LAYER)], [operations(10)]) == RestModel(0.0, 0.0, 0.0)


def test_the_host_is_fitted_to_what_waited_for_it_alone() -> None:
    # By the host's law, 0.02 s for an FFT and 0.001 s for another operation: 1 and 10 take 0.03, 2 and 10 take 0.05,
    # 1 and 20 take 0.04. The last inference took 1.15 times its device time at most: it did not wait.
    waited = [
        inference(0.01, 0.03, LAYER),
        inference(0.01, 0.05, LAYER, LAYER),
        inference(0.01, 0.04, LAYER),
    ]
    not_waited = inference(1.0, 1.15, LAYER)
    found = fit_host([*waited, not_waited], [operations(10), operations(10), operations(20), operations(10)])
    assert found is not None
    assert found.per_convolution_s == {"fft": pytest.approx(0.02)}
    assert found.per_operation_s == pytest.approx(0.001)
    assert fit_host([not_waited], [operations(10)]) is None


def test_a_refused_layer_is_issued_as_guess() -> None:
    assert run_as(inference(0.03, 0.03, LAYER, REFUSED)) == ["fft", "guess"]
