import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.vision_tokens import crops_of_tokens, tokens_of_crops


def test_crops_give_144_tokens_each_and_the_overview_as_many() -> None:
    assert tokens_of_crops(6) == 1008
    assert tokens_of_crops(6, 81) == 567
    assert tokens_of_crops(6, 81, has_overview=False) == 486


@pytest.mark.parametrize(("tokens", "crops"), [(288, 1), (431, 1), (432, 2), (73872, 512)])
def test_tokens_take_as_many_crops_as_they_suffice_for(tokens: int, crops: int) -> None:
    assert crops_of_tokens(tokens) == crops


def test_too_few_and_too_many_tokens_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"287 vision tokens are too few.*288"):
        crops_of_tokens(287)
    with pytest.raises(ConfigurationError, match=r"74016 vision tokens are too many: they take 513 .*73872"):
        crops_of_tokens(74016)
