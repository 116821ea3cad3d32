"""Charts of stages: names of settings, and groups left out, which are counted."""

from experiments.analyses.charts.stage_charts import scaling_chart, settings_chart, some_groups
from experiments.analyses.stages.fractions import Generation, Regime, StageFraction
from experiments.analyses.stages.scaling import stage_lines


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


def generation(number: int, prompt_tokens: int, prefill_ms: float) -> Generation:
    levels = {"top_k": 2, "num_active_blocks": 4}
    return Generation(
        "signs", f"setting {number % 3}", "low", levels, f"picture {number}", 0, prompt_tokens, None, prefill_ms, (3.0,)
    )


def test_a_slope_is_read_without_exponents_and_only_of_a_span() -> None:
    def prefill_note(generations: list[Generation]) -> str:
        panels = scaling_chart(generations, stage_lines(generations)).panels
        return next(each.note for each in panels if each.title.startswith("Prefill"))

    # 772 ms a token by chance of two lengths; 2 s for 100 tokens of prompts of 40 to 400.
    near = [generation(number, 41 + number % 2, 5000 + 772.0 * (number % 2)) for number in range(12)]
    assert "no slope, x is 41 to 42, and a slope takes 1.5 times the smallest x" in prefill_note(near)
    far = [generation(number, 40 * number, 20.0 * 40 * number) for number in range(1, 11)]
    assert "2.00 s per 100 tokens [2.00 s to 2.00 s]" in prefill_note(far)
    assert "e+" not in prefill_note(near) + prefill_note(far) and "e-" not in prefill_note(near) + prefill_note(far)
