"""The compiled attention against numbers by hand and a reference in double precision, and what stands in its way."""

import pytest
import torch

from experiment_core_utils.engines.cpu.attention import cpu_attention
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler
from tests.same_floats import assert_same_floats


def reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, window: int | None = None
) -> torch.Tensor:
    """[B, N, T, D] -> [B, T, N * D] by the definition, in double precision."""
    sharing = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(sharing, dim=1) for each in (keys, values))
    scores = queries.double() @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    if window is not None:
        scores = scores.masked_fill(torch.ones_like(scores).tril(-window).bool(), float("-inf"))
    return (scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2)


@needs_compiler
def test_a_query_of_zeros_takes_the_mean_of_what_it_sees() -> None:
    """Values 1, 3, 8: token 0 sees 1, token 1 the mean of 1 and 3, token 2 that of all; or each the mean of all, 4."""
    values = torch.tensor([1.0, 3.0, 8.0])[None, None, :, None].repeat(1, 1, 1, 32)
    queries, keys = torch.zeros(1, 1, 3, 32), torch.randn(1, 1, 3, 32)
    attention = cpu_attention(32)
    torch.testing.assert_close(attention(queries, keys, values, True)[0, :, 5], torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(attention(queries, keys, values, False)[0, :, 31], torch.tensor([4.0, 4.0, 4.0]))


@needs_compiler
def test_a_query_sees_a_window_of_the_keys_before_it() -> None:
    """Values 1, 3, 8 and a window of 2: token 2 sees the mean of 3 and 8."""
    values = torch.tensor([1.0, 3.0, 8.0])[None, None, :, None].repeat(1, 1, 1, 32)
    queries, keys = torch.zeros(1, 1, 3, 32), torch.randn(1, 1, 3, 32)
    attention = cpu_attention(32)
    torch.testing.assert_close(attention(queries, keys, values, True, 2)[0, :, 5], torch.tensor([1.0, 2.0, 5.5]))
    torch.testing.assert_close(attention(queries, keys, values, True, 1)[0, :, 5], torch.tensor([1.0, 3.0, 8.0]))


@needs_compiler
@pytest.mark.parametrize("window", [1, 7, 32, 33, 200, 401])
def test_windows_begin_anywhere_in_a_tile(window: int) -> None:
    """Scores reach about 10; what a row before the window left behind would show."""
    torch.manual_seed(window)
    queries, keys, values = (torch.randn(2, 401, 3, 4, 32) * 1.5).permute(2, 0, 3, 1, 4)
    found = cpu_attention(32)(queries, keys, values, True, window)
    torch.testing.assert_close(found.double(), reference(queries, keys, values, True, window), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_share_is_the_exponential_of_the_scaled_product() -> None:
    """Scores 0 and 64 * (8 ln 3 / 64) / sqrt(64) = ln 3: shares 1/4 and 3/4 of the values 0 and 4."""
    queries, keys, values = torch.ones(1, 1, 2, 64), torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64)
    keys[0, 0, 1] = torch.log(torch.tensor(3.0)) * 8 / 64
    values[0, 0, 1] = 4.0
    torch.testing.assert_close(cpu_attention(64)(queries, keys, values, False), torch.full((1, 2, 64), 3.0))


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 12, 13, 32, 33, 192, 193, 401])
def test_it_is_what_the_definition_says(tokens: int, causal: bool) -> None:
    """Queries, keys and values lie in one tensor, as a joint product leaves them, and scores reach about 10."""
    torch.manual_seed(tokens)
    queries, keys, values = (torch.randn(2, tokens, 3, 4, 32) * 1.5).permute(2, 0, 3, 1, 4)
    found = cpu_attention(32)(queries, keys, values, causal)
    torch.testing.assert_close(found.double(), reference(queries, keys, values, causal), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("width", [40, 48, 56, 72, 80])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_end_anywhere_in_a_vector(width: int, causal: bool) -> None:
    """What a head's last vector has behind it is the next head's; its neighbours keep their values."""
    torch.manual_seed(width)
    queries, keys, values = torch.randn(2, 45, 3, 3, width).permute(2, 0, 3, 1, 4)
    found = cpu_attention(width)(queries, keys, values, causal)
    torch.testing.assert_close(found.double(), reference(queries, keys, values, causal), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_heads_share_keys_and_threads_share_heads() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 6, 200, 64), torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = cpu_attention(64)(queries, keys, values, True)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), reference(queries, keys, values, True), rtol=1e-5, atol=1e-6)


@needs_compiler
def test_what_lies_far_below_the_maximum_counts_nothing() -> None:
    """A key that scores 200 less; its value is huge and would show in any share that float32 holds."""
    queries, keys, values = torch.ones(1, 1, 2, 32), torch.zeros(1, 1, 2, 32), torch.ones(1, 1, 2, 32)
    keys[0, 0, 1], values[0, 0, 1] = -200.0 / 32**0.5, 1e37
    assert_same_floats(cpu_attention(32)(queries, keys, values, False), torch.ones(1, 2, 32))


@needs_compiler
def test_it_refuses_what_it_would_read_wrongly() -> None:
    given = torch.zeros(1, 1, 4, 32)
    attention = cpu_attention(32)
    with pytest.raises(ValueError, match="float32"):
        attention(given.double(), given, given, False)
    with pytest.raises(ValueError, match="side by side"):
        attention(torch.zeros(1, 1, 32, 4).transpose(2, 3), given, given, False)
    with pytest.raises(ValueError, match="as many keys as queries"):
        attention(given[:, :, :1], given, given, False)
    for causal, window in ((False, 2), (True, 0)):
        with pytest.raises(ValueError, match=f"a window of {window} is not possible; give 1 or more, with causal"):
            attention(given, given, given, causal, window)


def test_why_it_cannot_be_had_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="heads in multiples of 8 from 32 on, not 24"):
        cpu_attention(24)
    with pytest.raises(ConfigurationError, match="heads in multiples of 8 from 32 on, not 36"):
        cpu_attention(36)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match="CXX=no-such-compiler names no program that can be run"):
        cpu_attention(96)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigurationError, match="refuses an empty file: exit code 1"):
        cpu_attention(96)
