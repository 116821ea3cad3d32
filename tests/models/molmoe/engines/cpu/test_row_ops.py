"""The kernels of rows against numbers by hand and torch's own operations."""

import pytest
import torch
from torch.nn import functional as F

from experiment_core_utils.models.molmoe.engines.cpu.row_ops import RowKernels, refuse_other_places, row_kernels
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.molmoe.cpu_compiler import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def kernels() -> RowKernels:
    return row_kernels()


def test_a_row_is_divided_by_its_root_mean_square(kernels: RowKernels) -> None:
    """3, 4: the mean square is 12.5; with 12.5 more as epsilon the root is 5. Weights 1 and 10."""
    out = torch.empty(1, 2)
    kernels.normalise(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 12.5, out)
    torch.testing.assert_close(out, torch.tensor([[0.6, 8.0]]))
    rows, weight = torch.randn(7, 37), torch.randn(37)
    found = kernels.normalise(rows, weight, 1e-5, torch.empty_like(rows))
    torch.testing.assert_close(found, F.rms_norm(rows, (37,), weight, 1e-5))


def test_heads_are_normed_turned_and_put_where_they_are_kept(kernels: RowKernels) -> None:
    """One token, 2 query heads and 1 of keys and values, 2 wide, at a quarter turn: (a, b) -> (-b, a).

    Queries 3, 4, 0, 0 have the root mean square 2.5, keys 3, 4 that of 12.5, 5 / sqrt(2); values stay.
    """
    joint = torch.tensor([[3.0, 4.0, 0.0, 0.0, 3.0, 4.0, 7.0, 8.0]])
    norms = torch.ones(4), torch.tensor([1.0, 0.5])
    cos_sin = torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
    kv_cache = torch.full((2, 1, 3, 2), 9.0)
    queries = torch.empty(2, 1, 2)
    kernels.place(joint, norms, cos_sin, 0.0, (queries, kv_cache[0, :, :1], kv_cache[1, :, :1]))
    torch.testing.assert_close(queries[:, 0], torch.tensor([[-1.6, 1.2], [0.0, 0.0]]))
    torch.testing.assert_close(kv_cache[0, 0, 0], torch.tensor([-2.0, 3.0]) * 2**0.5 / 5)
    assert kv_cache[1, 0, 0].tolist() == [7.0, 8.0]
    assert bool((kv_cache[:, :, 1:] == 9.0).all())


def test_a_store_whose_slots_are_apart_is_refused(kernels: RowKernels) -> None:
    apart = torch.zeros(1, 4, 2)[:, ::2]
    ones, cos_sin = torch.ones(2), torch.zeros(2, 1, 2)
    with pytest.raises(ValueError, match="neighbours"):
        kernels.place(torch.zeros(2, 6), (ones, ones), (cos_sin, cos_sin), 0.0, (torch.zeros(1, 2, 2), apart, apart))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("keys", (1, 1, 2)), ("values", (1, 3, 2)), ("cosines", (1, 1, 2)), ("sines", (3, 1, 2)), ("joint rows", (2, 8))],
)
def test_what_does_not_fit_the_tokens_is_refused_before_anything_is_written(
    kernels: RowKernels, name: str, shape: tuple[int, ...]
) -> None:
    """Two tokens, a head each 2 wide: joint rows of 6; one tensor has another shape."""
    sizes = {"joint rows": (2, 6), "cosines": (2, 1, 2), "sines": (2, 1, 2), "keys": (1, 2, 2), "values": (1, 2, 2)}
    given = {each: torch.ones(size) for each, size in {**sizes, name: shape}.items()}
    queries, norm = torch.full((1, 2, 2), 9.0), torch.ones(2)
    with pytest.raises(ValueError, match=rf"^{name} of 2 tokens have to be .*, not \[{shape[0]}, "):
        kernels.place(
            given["joint rows"],
            (norm, norm),
            (given["cosines"], given["sines"]),
            0.0,
            (queries, given["keys"], given["values"]),
        )
    assert bool((queries == 9.0).all()) and bool((given["keys"] == 1.0).all())


def test_keys_and_values_in_unlike_stores_are_refused(kernels: RowKernels) -> None:
    keys, ones, cos_sin = torch.zeros(2, 4, 2)[:, :2], torch.ones(4), torch.zeros(2, 1, 2)
    for values in (torch.zeros(2, 5, 2)[:, :2], keys.double()):
        with pytest.raises(ValueError, match="keys and values"):
            kernels.place(
                torch.zeros(2, 12), (ones, ones), (cos_sin, cos_sin), 0.0, (torch.zeros(2, 2, 2), keys, values)
            )


def test_gates_open_as_silu_does(kernels: RowKernels) -> None:
    """silu(0) = 0; silu(100) = 100 and silu(-100) = 0 but for rounding."""
    found = kernels.gate(torch.tensor([[0.0, 100.0, -100.0, 5.0, 2.0, 5.0]]), torch.empty(1, 3))
    torch.testing.assert_close(found, torch.tensor([[0.0, 200.0, 0.0]]))
    hidden = torch.randn(11, 2 * 19) * 5
    gate, up = hidden.chunk(2, dim=1)
    torch.testing.assert_close(kernels.gate(hidden, torch.empty(11, 19)), F.silu(gate) * up)


def test_the_bias_comes_before_the_quick_gelu(kernels: RowKernels) -> None:
    """1 - 1 gives 0, 50 + 50 gives 100 and -50 - 50 gives 0, but for rounding."""
    rows = torch.tensor([[1.0, 50.0, -50.0]])
    assert kernels.quick_gelu(rows, torch.tensor([-1.0, 50.0, -50.0])) is rows
    torch.testing.assert_close(rows, torch.tensor([[0.0, 100.0, 0.0]]))
    rows, bias = torch.randn(9, 35) * 4, torch.randn(35)
    expected = (rows + bias) * torch.sigmoid(1.702 * (rows + bias))
    torch.testing.assert_close(kernels.quick_gelu(rows.clone(), bias), expected)


def test_weighted_rows_are_added_to_the_states(kernels: RowKernels) -> None:
    """Token 0: 1 + 2 * 10 + 3 * 30; token 1: 1 + 4 * 20 + 5 * 10."""
    mixed = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    places, weights = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    states = torch.ones(2, 1)
    assert kernels.add_weighted(mixed, places, weights, states) is states
    assert states.tolist() == [[111.0], [131.0]]


def test_what_would_be_read_wrongly_is_refused(kernels: RowKernels) -> None:
    rows = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.gate(rows.double(), torch.empty(2, 2))
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.gate(rows.t(), torch.empty(4, 1))
    with pytest.raises(ValueError, match="int64"):
        kernels.add_weighted(rows, torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1), rows)
    with pytest.raises(ConfigurationError, match="float32 on the CPU"):
        refuse_other_places(torch.device("cpu"), torch.bfloat16)
