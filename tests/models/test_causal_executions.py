"""What runs tiny models of a few families, each for another reason, and the table that a GPU made of all of them."""

from pathlib import Path

import pytest
import torch

from experiment_core_utils.primitives.files import REPOSITORY
from tests.models.causal_executions import execution_of
from tests.models.family_knobs import knobs_of_causal, knobs_of_image_text
from tests.models.family_table import put_row, read_rows

EVIDENCE = REPOSITORY / "docs/evidence"


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


@pytest.mark.parametrize(("table", "words"), [("causal_families", " families"), ("image_text_families", " are")])
def test_the_page_counts_the_table(table: str, words: str) -> None:
    ways = [row["way"] for row in read_rows(EVIDENCE / f"{table}.csv")]
    captured, built = sum(way in ("described", "captured") for way in ways), sum(way != "not built" for way in ways)
    assert f"{captured} of {built}{words}" in (EVIDENCE / "execution.md").read_text()


def test_knobs_of_a_family_are_tried() -> None:
    cpu = torch.device("cpu")
    mixtral = knobs_of_causal("mixtral", cpu)
    assert (mixtral.vision, mixtral.top_k, mixtral.expert_mass, mixtral.blocks) == ("", "yes", "yes", "yes")
    prophet = knobs_of_causal("prophetnet", cpu)
    assert prophet.top_k == "the model is dense" and "NotImplementedError" in prophet.blocks
    llava = knobs_of_image_text("llava", cpu)
    assert (llava.kept, llava.top_k) == ("yes", "yes") and "of the checkpoint nor the size" in llava.vision


def test_a_row_takes_the_place_of_that_of_the_same_family(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    for family, reason in (("zaya", "a, b"), ("afmoe", "|"), ("zaya", "c")):
        put_row(table, {"family": family, "reason": reason})
    put_row(table, {"family": "mpt", "reason": "", "made_with": "torch"})
    assert read_rows(table) == [
        {"family": "afmoe", "reason": "|", "made_with": ""},
        {"family": "mpt", "reason": "", "made_with": "torch"},
        {"family": "zaya", "reason": "c", "made_with": ""},
    ]
