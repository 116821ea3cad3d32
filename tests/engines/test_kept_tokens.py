"""Which image tokens each rule keeps, worked by hand."""

import pytest
import torch

from experiment_core_utils.engines.kept_tokens import kept_places
from experiment_core_utils.knobs.visual_token_keep import KeptTokens, Rule


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        # The middles of 3 equal parts of 7 places.
        ("uniform", [1, 3, 5]),
        # Lengths are 1, 2, 5, 3, 1, 1, 4.
        ("norm", [2, 3, 6]),
        # Directions 0, 0, 0, 90, 0, 180, 45 degrees: the nearest other of 180 is farthest (1 off 90), then 0 is 2 off
        # it (the first of them), and 90 is 1 off both.
        ("divprune", [0, 3, 5]),
    ],
)
def test_each_rule_keeps_its_own_in_their_order(rule: Rule, places: list[int]) -> None:
    features = torch.tensor([[1, 0], [2, 0], [5, 0], [0, 3], [1, 0], [-1, 0], [2.83, 2.83]])
    assert kept_places(KeptTokens(0.43, rule), features, [1, 2]).tolist() == places


def test_random_places_depend_on_the_seed_and_the_prompt_alone() -> None:
    features = torch.zeros(40, 2)
    first = kept_places(KeptTokens(0.5, "random", 1), features, [5, 6]).tolist()
    assert first == kept_places(KeptTokens(0.5, "random", 1), features + 1, [5, 6]).tolist() == sorted(set(first))
    assert len(first) == 20
    assert first != kept_places(KeptTokens(0.5, "random", 2), features, [5, 6]).tolist()
    assert first != kept_places(KeptTokens(0.5, "random", 1), features, [5, 7]).tolist()
