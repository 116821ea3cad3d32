"""What runs tiny models of a few families, each for another reason, and the table that a GPU made of all of them."""

import csv

import pytest
import torch

from experiment_core_utils.primitives.files import REPOSITORY
from tests.models.causal_executions import execution_of

TABLE = REPOSITORY / "docs/evidence/causal_families.csv"


@pytest.mark.parametrize(
    ("family", "way", "reason"),
    [
        ("llama", "described", ""),
        ("mamba2", "captured", ""),
        # Their steps need a mask, and positions that the vendor's code counts on the host.
        ("bart", "captured", ""),
        ("falcon", "captured", ""),
        # It keeps none, and those positions count all rows of a cache of fixed size.
        ("openai-gpt", "captured", "a graph for each length, because ConfigurationError: the prefill filled 0 layers"),
        ("gpt_neo", "captured", "a graph for each length, because ConfigurationError: a graph gives other tokens"),
        ("blt", "not built", "AttributeError"),
    ],
)
def test_a_family_is_tried(family: str, way: str, reason: str) -> None:
    found = execution_of(family, torch.device("cpu"))
    assert found.way == way and reason in found.reason, found
    assert (found.settings > 0) == (way in ("described", "captured"))


def test_the_page_counts_the_table() -> None:
    with TABLE.open() as file:
        ways = [row["way"] for row in csv.DictReader(file)]
    captured, built = sum(way in ("described", "captured") for way in ways), sum(way != "not built" for way in ways)
    page = (TABLE.parent / "execution.md").read_text()
    assert f"{captured} of {built} families" in page
