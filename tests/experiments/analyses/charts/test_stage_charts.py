"""Charts of stages: groups left out are counted."""

from experiments.analyses.charts.stage_charts import some_groups


def test_some_of_many_values_are_drawn_and_the_footnote_says_so() -> None:
    assert some_groups([("signs", "low"), ("signs", "low"), ("signs", "high")]) == (
        [("signs", "low"), ("signs", "high")],
        "",
    )
    kept, footnote = some_groups(("signs", f"{each} tokens") for each in range(23))
    assert kept == [("signs", f"{each} tokens") for each in range(0, 23, 2)]
    assert footnote == "12 of 23 values of vision drawn"
