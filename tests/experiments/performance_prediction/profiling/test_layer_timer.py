"""The layer pass on the CPU: which layers, how often, and that nothing of it stays."""

import pytest
import torch
from torch import nn

from experiments.performance_prediction.profiler import CUDALayerTimer, launch_bound_layers, seconds_of_layers

CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Twice(nn.Module):
    """Calls one layer, then another, then the first again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.a(self.b(self.a(given)))
        return output


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=ON_GPU)])
def test_each_layer_has_a_time_for_each_inference_within_that_of_the_inference(device: torch.device) -> None:
    model = Twice().to(device)
    calls = []

    def inference() -> None:
        calls.append(model(torch.zeros(1, 2, 8, 8, device=device)))

    found = CUDALayerTimer({"a": model.a, "b": model.b}, device).time(inference, 3)
    assert len(calls) == 1 + 3
    assert list(found.layers_s) == ["a", "b"]
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.layers_s.values())
    if device == CPU:
        # The host computes itself, and waits for nobody.
        assert found.is_launch_bound is None and found.launch_bound is None
    for place, total_s in enumerate(found.inferences_s):
        assert sum(seconds[place] for seconds in found.layers_s.values()) < total_s


def test_what_lies_between_the_layers_is_in_none_of_them() -> None:
    # before 100, a 1, up to b 200, b 2, up to a 300, a 4, behind 400
    assert seconds_of_layers(["a", "b", "a"], [100, 1, 200, 2, 300, 4, 400]) == {"a": 5, "b": 2}


def test_the_hooks_are_gone_after_an_inference_that_breaks_off() -> None:
    model = Twice()
    with pytest.raises(ZeroDivisionError):
        CUDALayerTimer({"a": model.a}, CPU).time(lambda: 1 / 0, 1)
    assert not model.a._forward_hooks and not model.a._forward_pre_hooks


def test_a_layer_is_launch_bound_if_the_device_began_one_of_its_calls_too_early() -> None:
    # before, a, up to b, b, up to a, a, behind: the second call of a, and the gap before b, which is no layer's.
    caught_up = [False, False, True, False, False, True, False]
    assert launch_bound_layers(["a", "b", "a"], caught_up) == {"a"}
    assert launch_bound_layers(["a", "b", "a"], [True, False, True, False, True, False, True]) == set()
