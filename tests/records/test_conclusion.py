"""Sentences of a conclusion, from records by hand."""

from dataclasses import replace

import pytest

from experiment_core_utils.records.conclusion import Comparison, Conclusion, KnobChange, TypeChange
from experiment_core_utils.records.price_list import OVERALL, Price, PriceList, TypePrices

NEAREST = Comparison("low", 354.0, 0.98, "yes", 0.541, (0.521, 0.562), "yes", -0.004, (-0.015, 0.007))
TAKEN = Conclusion(
    "signs", word="yes", setting="low", against="own", is_reference=True, against_time_ms=654.3, against_accuracy=0.984,
    nearest=NEAREST, accuracy_margin=0.02, num_samples=500, num_pictures=400, num_rounds=1500,
)  # fmt: skip


def test_a_setting_to_take() -> None:
    assert TAKEN.sentence == (
        "take low instead of own (the reference, which is the model as it is: 654 ms a request, accuracy 0.984): "
        "faster: yes (354 ms, 0.54 times as long [0.52, 0.56]); not worse by 0.02: yes (0.980, -0.004 [-0.015, "
        "+0.007]; 500 samples)"
    )
    assert replace(TAKEN, as_fast=("a", "b")).sentence == f"{TAKEN.sentence}; perhaps as fast: a, b"
    beside = replace(TAKEN, is_reference=False)
    assert "instead of own (the most accurate setting: 654 ms" in beside.sentence


def test_what_is_not_known_is_said_with_the_samples_that_would_decide() -> None:
    nearest = replace(NEAREST, not_worse="likely")
    open_one = replace(TAKEN, setting="own", word=nearest.word, nearest=nearest, samples_needed=900)
    assert open_one.sentence.startswith("keep own (the reference, which is the model as it is: 654 ms a request, accur")
    assert "0.984) until more is known: the nearest is low: faster: yes (354 ms, " in open_one.sentence
    assert open_one.sentence.endswith(" 500 samples); about 900 samples would decide")
    assert replace(open_one, samples_needed=None).sentence.endswith(" 500 samples)")
    blocked = replace(open_one, samples_needed=None, num_rounds=None)
    assert blocked.sentence.endswith("since settings were measured one after another: measure in rounds")


def test_a_no_is_not_more_than_it_says() -> None:
    refuted = replace(TAKEN, setting="own", word="no", nearest=replace(NEAREST, not_worse="no"))
    assert refuted.sentence.endswith("0.984): no other setting is faster and not worse by 0.02 (500 samples)")


def test_one_to_keep_is_behind_what_is_surely_saved_at_five_points() -> None:
    """`small` is sure at 20 and at 5 points for charts; over all it is sure at 20 alone, and for texts at none."""

    def prices(name: str, words: tuple[str, ...]) -> TypePrices:
        rows = (
            Price(loss, word, "small", False, 0.314, None, None, None, -0.01, None, None)  # type: ignore[arg-type]
            for loss, word in zip((0.2, 0.05, 0.02), words, strict=True)
        )
        return TypePrices(name, 160, 654.3, 0.99, 0.04, tuple(rows))

    charts, texts = prices("charts", ("yes", "yes", "likely")), prices("texts", ("no", "no", "no"))
    overall = prices(OVERALL, ("yes", "can't tell", "no"))
    kept = replace(TAKEN, setting="own", word="no", nearest=replace(NEAREST, not_worse="no"))
    priced = replace(kept, prices=PriceList("signs", "own", None, (charts, texts, overall)))
    saved = "at a loss surely below 5 points take small for charts (31 % of the time)"
    assert priced.sentence == f"{saved}; else {kept.sentence}"
    both = replace(overall, prices=charts.prices)
    assert replace(priced, prices=PriceList("signs", "own", None, (charts, both))).sentence.startswith(
        f"{saved}, small over all (31 % of the time); else keep own"
    )
    # One that is surely not worse by less needs no larger loss, and without prices nothing is added.
    assert replace(TAKEN, prices=priced.prices).sentence == TAKEN.sentence
    unsure = PriceList("signs", "own", None, (texts,))
    assert replace(kept, prices=unsure).sentence == kept.sentence


@pytest.mark.parametrize(
    ("faster", "not_worse", "word"),
    [("yes", "likely", "likely"), ("no", "yes", "no"), ("can't tell", "likely", "can't tell"), ("yes", "yes", "yes")],
)
def test_a_word_of_two_is_the_weaker(faster: str, not_worse: str, word: str) -> None:
    assert replace(NEAREST, faster=faster, not_worse=not_worse).word == word  # type: ignore[arg-type]


def test_nothing_concluded_names_the_reason_and_an_invalid_run_is_called_so() -> None:
    assert Conclusion("signs", "one setting").lines == ["conclusion: no setting is named: one setting"]
    assert str(Conclusion("signs", "throttled: heat", ("throttled",))) == "conclusion: INVALID: throttled: heat"


def test_knobs_have_a_word_where_they_are_not_sure() -> None:
    sure = KnobChange("vision", "low", "high", 397.0, "yes", 0.156, "likely")
    none = KnobChange("top-k", "4", "8", -2.72, "can't tell", -0.00001, "can't tell")
    line = replace(TAKEN, changes=(sure, none)).lines[1]
    assert line == (
        "knobs: vision low → high: +397 ms, accuracy +15.6 points (likely); top-k 4 → 8: -2.7 ms (can't tell), "
        "accuracy +0.0 points (can't tell)"
    )
    # Of a score that is no fraction, and without accuracy.
    assert replace(TAKEN, changes=(sure,), metric_best=10.0).lines[1].endswith("accuracy +0.156 (likely)")
    timed = replace(sure, accuracy=None, accuracy_word=None)
    assert replace(TAKEN, changes=(timed,)).lines[1] == "knobs: vision low → high: +397 ms"


def test_a_knob_names_the_type_in_which_it_surely_matters_most() -> None:
    reading = TypeChange("reading", 40, 0.301, (0.2, 0.402), "yes")
    counting = replace(reading, question_type="counting", accuracy=-0.05, accuracy_ci95=(-0.06, -0.04))
    larger = replace(reading, question_type="choice", accuracy=0.5, accuracy_word="likely")
    change = KnobChange("vision", "low", "high", 397.0, "yes", 0.156, "yes", (counting, reading, larger))
    assert change.most_in == reading
    line = replace(TAKEN, changes=(change,)).lines[1]
    assert line.endswith("accuracy +15.6 points, surely in reading (+30.1 points [+20.0, +40.2])")
    likely = replace(TAKEN, changes=(replace(change, by_type=(larger,)),)).lines[1]
    assert likely.endswith("accuracy +15.6 points, likely in choice")
    unknown = replace(larger, accuracy_word="can't tell")
    none = replace(TAKEN, changes=(replace(change, by_type=(unknown,)),)).lines[1]
    assert none.endswith("accuracy +15.6 points, by type can't tell")
    # Of a score that is no fraction.
    raw = replace(TAKEN, changes=(change,), metric_best=10.0).lines[1]
    assert raw.endswith("accuracy +0.156, surely in reading (+0.301 [+0.200, +0.402])")
