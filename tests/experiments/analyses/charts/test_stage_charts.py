"""Charts of stages: names of settings, and groups left out, which are counted."""

from experiments.analyses.charts.stage_charts import settings_chart, some_groups
from experiments.analyses.stages.fractions import Regime, StageFraction


def test_some_of_many_values_are_drawn_and_the_footnote_says_so() -> None:
    assert some_groups([("signs", "low"), ("signs", "low"), ("signs", "high")]) == (
        [("signs", "low"), ("signs", "high")],
        "",
    )
    kept, footnote = some_groups(("signs", f"{each} tokens") for each in range(23))
    assert kept == [("signs", f"{each} tokens") for each in range(0, 23, 2)]
    assert footnote == "12 of 23 values of vision drawn"


def regime(setting: str, vision_ms: float) -> Regime:
    times = {"vision": vision_ms, "prefill": 10.0, "decode": 5.0}
    stages = {stage: StageFraction(time, time / (vision_ms + 15.0), None, 1.0) for stage, time in times.items()}
    return Regime("signs", "low", setting, None, 4, 4, 0, vision_ms + 15.0, stages, "vision")


def test_settings_have_their_names_where_there_is_room() -> None:
    (panel,) = settings_chart([regime("slow", 30.0), regime("fast", 20.0)], {"signs": "slow"}).panels
    assert panel.y.ticks == {0: "fast · 35 ms", 1: "slow, reference · 45 ms"} and panel.y.is_reversed
    many = settings_chart([regime(f"setting {each}", each) for each in range(100)], {})
    assert len(many.panels[0].y.ticks or ()) == 90
    assert many.footnote == "10 of 100 settings are drawn without their names"
