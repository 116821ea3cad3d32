"""The knob of how many requests run together: its names, and where it is refused."""

from types import SimpleNamespace

import pytest

from experiment_core_utils.finishing.setting_summary import of_batches
from experiment_core_utils.knobs.batch_size import BATCH_SIZE, batch_size_of
from experiment_core_utils.knobs.interface import KnobLimits, KnobRequest
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import Distribution


def request_for(*sizes: int, variants: tuple[str, ...] = ()) -> KnobRequest:
    flags, limits = SimpleNamespace(batch_size_list=sizes or None), KnobLimits(2, None, None, variants=variants)
    return KnobRequest(flags, limits, "model", None, False)


def test_it_is_in_the_key_and_one_request_alone_is_at_rest() -> None:
    setting = Setting.named("own_blocks2_batch16")
    assert batch_size_of(setting) == 16 and setting.levels["batch_size"] == 16
    assert batch_size_of(Setting.named("own_blocks2")) == 1
    assert BATCH_SIZE.requested(request_for()).values == (1,)
    assert BATCH_SIZE.requested(request_for(4, 1)).values == (4, 1)
    assert BATCH_SIZE.parsed("batch0") is None and BATCH_SIZE.parsed("batch2.5") is None


def test_a_server_puts_requests_together_itself() -> None:
    with pytest.raises(ConfigurationError, match="--batch_size_list 4 cannot be set in model: a server puts .*--concu"):
        BATCH_SIZE.requested(request_for(4, variants=("own",)))
    assert BATCH_SIZE.requested(request_for(1, variants=("own",))).values == (1,)


def test_the_interval_of_batches_is_as_wide_as_that_of_their_requests() -> None:
    """Of 4 requests twice as wide: 100 +- 5 % is 100 +- 10 %, of the logarithm."""
    spread = Distribution(9, 100.0, 3.0, 99.0, 110.0, 112.0, 90.0, 113.0, 100.0 / 1.05, 105.0)
    found = of_batches(spread, 4)
    assert (found.ci_low, found.ci_high) == (pytest.approx(100 / 1.05**2), pytest.approx(100 * 1.05**2))
    assert (found.mean, found.std) == (100.0, 3.0)
    assert of_batches(spread, 1) is spread
