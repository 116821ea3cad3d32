"""What becomes of a quantity that is declared once: its key, its spread and its column, with and without a value."""

from dataclasses import replace
from typing import Annotated

import pytest

from experiment_core_utils.finishing.setting_content import aggregate_stats
from experiment_core_utils.finishing.setting_summary import distributions
from experiment_core_utils.records.json_record import Delay, Record
from experiment_core_utils.records.quantities.latency import SampleTimes, StageTimes
from experiment_core_utils.records.quantities.quantity import Quantity, quantities_of
from experiment_core_utils.records.quantities.readings import published_figures
from experiment_core_utils.records.sample_result import QUANTITIES
from tests.hand_made_records import measured_sample


class OfText(Record):
    """A record with a quantity of its own."""

    T_detokenise: Annotated[Delay | None, Quantity("detokenise_s", "ms", is_everywhere=False)] = None
    remark: str = ""


def test_quantities_are_the_declared_fields_in_their_order() -> None:
    assert list(quantities_of(OfText, StageTimes)) == [
        "T_detokenise", "T_vision_total", "T_LLM_prefill", "T_LLM_decode", "T_total", "T_decode_per_token"
    ]  # fmt: skip
    assert quantities_of(SampleTimes)["T_transfer"].name == "transfer_s"


def test_only_a_part_of_others_counts_as_nothing_where_it_is_absent() -> None:
    part, whole = Quantity("decode_s", "ms", is_part=True), Quantity("e2e_s", "ms")
    assert part.with_absent_parts([None, 2.0]) == [0.0, 2.0]
    assert part.with_absent_parts([None, None]) == whole.with_absent_parts([None, None]) == [None, None]
    assert whole.with_absent_parts([None, 2.0]) == [None, 2.0]
    assert (part.may_be_zero, whole.may_be_zero) == (True, False)


def test_a_declared_host_time_that_was_measured_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 ms where it was measured; a sample from before it has no such key."""
    monkeypatch.setitem(QUANTITIES, "T_detokenise", quantities_of(OfText)["T_detokenise"])  # type: ignore[arg-type]
    before = measured_sample(0)
    sample = replace(before, host_s={"transfer_s": 0.001, "detokenise_s": 0.003})
    assert published_figures(sample)["T_detokenise"] == 3.0
    assert "T_detokenise" not in published_figures(before) and published_figures(before)["T_transfer"] == 1.0
    found = distributions([before, sample])
    assert (found["detokenise_s"].mean, found["detokenise_s"].n) == (0.003, 1)
    assert "detokenise_s" not in distributions([before])
    assert aggregate_stats({"transfer_s": found["transfer_s"]})["T_transfer_mean"] == pytest.approx(1.0)
