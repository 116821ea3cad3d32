"""What says yes, what says no, and what says neither."""

import pytest

from experiment_core_utils.tasks.scoring.polarity import polarity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes, it is.", "yes"),
        ("Correct.", "yes"),
        ("The answer is **no**.", "no"),
        ("Probably not.", "no"),
        ("I think not.", "no"),
        ("This is not true.", "no"),
        ("He says no.", "no"),
        ("There is a no parking sign.", None),
        ("Not only that.", None),
        ("Yes and no.", None),
        ("yes/no", None),
        ("Paris", None),
        ("", None),
    ],
)
def test_the_polarity_of_a_text(text: str, expected: str | None) -> None:
    assert polarity(text) == expected
