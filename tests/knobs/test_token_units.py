import pytest

from experiment_core_utils.knobs.token_units import MOLMOE_TOKENS, TokenUnit, tokens_of_crops
from experiment_core_utils.primitives.errors import ConfigurationError

LLAVA_NEXT, INTERNVL, ARIA, QWEN = (
    TokenUnit(576), TokenUnit(256, "beside several"), TokenUnit(128, "never"), TokenUnit(None),
)  # fmt: skip


def test_crops_give_144_tokens_each_and_the_overview_as_many() -> None:
    assert tokens_of_crops(6) == 1008
    assert tokens_of_crops(6, 81) == 567
    assert tokens_of_crops(6, 81, has_overview=False) == 486


@pytest.mark.parametrize(
    ("unit", "tokens", "crops"),
    [
        *((MOLMOE_TOKENS, *each) for each in [(288, 1), (431, 1), (432, 2), (73872, 512), (73999, 512)]),
        *((LLAVA_NEXT, *each) for each in [(1152, 1), (1727, 1), (2880, 4)]),
        # One tile has no overview beside it, so that two of them take as much as three.
        *((INTERNVL, *each) for each in [(256, 1), (512, 1), (768, 2), (3328, 12)]),
        *((ARIA, *each) for each in [(128, 1), (256, 2), (300, 2)]),
        *((QWEN, tokens, None) for tokens in (1, 256, 73872)),
    ],
)
def test_tokens_take_as_many_crops_as_they_suffice_for(unit: TokenUnit, tokens: int, crops: int | None) -> None:
    assert unit.crops_of(tokens) == crops


@pytest.mark.parametrize(
    ("unit", "tokens", "line"),
    [
        (MOLMOE_TOKENS, 287, "287 .*too few: the overview crop and one more crop take 288; give at least that"),
        (MOLMOE_TOKENS, 74016, "74016 vision tokens are too many: they take 513 crops; give at most 73872"),
        (LLAVA_NEXT, 1151, "too few: the overview crop and one more crop take 1152; give at least that"),
        (INTERNVL, 255, "too few: one crop takes 256; give at least that"),
        (ARIA, 65665, "too many: they take 513 crops; give at most 65536"),
        (QWEN, 0, "0 vision tokens are too few: a picture takes at least 1; give at least that"),
        (QWEN, 73873, "73873 vision tokens are too many; give at most 73872"),
    ],
)
def test_too_few_and_too_many_tokens_are_refused_in_the_models_unit(unit: TokenUnit, tokens: int, line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        unit.crops_of(tokens)
