"""Relaxed match of an open answer: 0 or 1."""

from collections.abc import Sequence

from experiment_core_utils.tasks.interface import in_either_order, require_references
from experiment_core_utils.tasks.scoring.em import em_lenient, normalize_leniently


@in_either_order
def relaxed(prediction: str, references: Sequence[str]) -> float:
    """1 if the output contains a reference as whole words, else 0."""
    require_references("relaxed", references)
    words = f" {normalize_leniently(prediction)} "
    found = any(f" {normalize_leniently(reference)} " in words for reference in references)
    return max(float(found), em_lenient(prediction, references))
