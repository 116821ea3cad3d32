"""The price list: questions as users ask them, each answered from one grid, and its words against known truths."""

from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.config.parts import QuestionConfig
from experiment_core_utils.primitives.replication import UNKNOWN
from experiment_core_utils.records.price_list import OVERALL, Price, PriceList, TypePrices
from experiments.analyses.knobs.grid import TaskGrid
from experiments.analyses.knobs.prices import NO_REFERENCE, ONE_SETTING, price_list
from tests.experiments.hand_made_grid import grid, point, reference

LOW, MIDDLE, OWN = point("low"), point("medium"), reference(in_grid=True)
SPREAD = np.linspace(0.9, 1.1, 30)


def two_types() -> TaskGrid:
    """30 charts and 60 texts, of which the model as it is has all and 54 right, in 100 ms and 2 J.

    `low` takes 40 ms and 1 J; of charts it gives the same answers, of texts it has 6 right. `medium` takes 80 ms, and
    all its answers are those of the model as it is, but for 6 texts, of which it has 3 more and 3 fewer right.
    """
    charts = np.ones((3, 30))
    texts = np.zeros((3, 60))
    texts[0, :6], texts[1, :51], texts[1, 57:], texts[2, :54] = 1, 1, 1, 1
    scores = np.hstack([charts, texts])
    spread = np.hstack([SPREAD, SPREAD, SPREAD])
    made = grid(
        [LOW, MIDDLE, OWN],
        scores,
        np.outer([40.0, 80.0, 100.0], spread),
        energy_j=np.outer([1.0, 1.6, 2.0], spread),
    )
    types = ("charts",) * 30 + ("texts",) * 60
    return replace(made, question_types=types, answers=scores.copy())


def of_type(found: PriceList, name: str) -> TypePrices:
    return next(each for each in found.types if each.question_type == name)


def at_loss(found: PriceList, name: str, loss: float) -> Price:
    return next(each for each in of_type(found, name).prices if each.loss == loss)


def test_the_cheapest_setting_depends_on_the_type_of_question() -> None:
    found = price_list(two_types())
    assert [each.question_type for each in found.types] == ["charts", "texts", OVERALL]
    charts, texts = at_loss(found, "charts", 0.2), at_loss(found, "texts", 0.2)
    assert (charts.setting, charts.word, charts.time_ratio) == (LOW.key, "yes", pytest.approx(0.4))
    assert (texts.setting, texts.word, texts.time_ratio) == (MIDDLE.key, "yes", pytest.approx(0.8))
    assert (charts.accuracy_difference, texts.accuracy_difference) == (0.0, pytest.approx(0.0))
    assert (charts.energy_ratio, texts.energy_ratio) == (pytest.approx(0.5), pytest.approx(0.8))


def test_no_loss_means_the_same_answers() -> None:
    """Of 30 charts `low` changes none, which excludes no small loss and is no loss on these; of texts it is none."""
    found = price_list(two_types())
    charts, texts = at_loss(found, "charts", 0.0), at_loss(found, "texts", 0.0)
    assert (charts.setting, charts.word, charts.is_identical) == (LOW.key, "yes", True)
    assert (texts.word, texts.is_identical) == ("can't tell", False)
    assert at_loss(found, "charts", 0.02).word != "yes"


def test_a_setting_that_is_surely_better_costs_no_accuracy() -> None:
    scores = np.vstack([np.ones(80), np.arange(80) % 2])
    made = grid([LOW, OWN], scores, np.outer([50.0, 100.0], np.linspace(0.9, 1.1, 80)))
    (overall,) = price_list(made).types
    assert {price.word for price in overall.prices} == {"yes"}
    assert "surely better: tier-low_topk1_blocks12, 50 %" in "\n".join(price_list(made).lines)


@pytest.mark.parametrize("number", [30, 60, 149])
def test_how_small_a_loss_so_many_questions_can_exclude(number: int) -> None:
    """Without a changed answer in n, a loss L has the mid-p value (1 - L)^n / 2, of which one side of 5 % is 0.025 and
    accuracies get nine tenths; random draws of the family's largest lead move its quantile by a few percent.
    """
    made = grid([LOW, OWN], np.ones((2, number)), np.outer([50.0, 100.0], np.linspace(0.9, 1.1, number)))
    (overall,) = price_list(made).types
    assert overall.least_loss == pytest.approx(1 - 0.045 ** (1 / number), rel=0.1)


def test_routing_by_type_uses_what_is_sure_in_each() -> None:
    """A third of the questions in 40 % and two thirds in 80 % of the time: 67 %, and no answer lost."""
    found = price_list(two_types(), QuestionConfig(accept_loss=0.2)).routing
    assert found is not None
    assert found.settings == {"charts": LOW.key, "texts": MIDDLE.key}
    assert found.time_ratio == pytest.approx((0.4 + 2 * 0.8) / 3)
    assert found.time_ratio_ci95[0] <= found.time_ratio <= found.time_ratio_ci95[1]
    assert found.accuracy == pytest.approx((30 + 54) / 90) and found.accuracy_difference == pytest.approx(0.0)


def test_what_is_nearest_says_how_many_questions_would_decide() -> None:
    price = at_loss(price_list(two_types()), "charts", 0.05)
    assert (price.setting, price.word) == (LOW.key, "can't tell")
    # 1 - 0.015^(1/n) = 0.05 at n = 82; the forecast is of a normal error and asks for power.
    assert price.samples_needed is not None and 60 <= price.samples_needed <= 300


def test_budgets_of_time_energy_and_accuracy() -> None:
    question = QuestionConfig(budget_ms=90.0, budget_p95_ms=120.0, budget_j=1.2, min_accuracy=0.5)
    ms, p95, joules, accuracy = of_type(price_list(two_types(), question), OVERALL).budgets
    assert (ms.setting, ms.word, ms.cost) == (MIDDLE.key, "yes", pytest.approx(80.0))
    # No time is above 110 ms; 90 samples of which none is late are 0.95^90 = 0.0099 of all cases, 2 x 3 x 3 tests.
    assert (p95.word, p95.statistic) == ("likely", "p95")
    assert (joules.setting, joules.word, joules.cost) == (LOW.key, "yes", pytest.approx(1.0))
    assert (accuracy.setting, accuracy.word) == (MIDDLE.key, "yes")


def test_a_budget_below_all_settings_is_refused_by_a_word() -> None:
    ms = of_type(price_list(two_types(), QuestionConfig(budget_ms=10.0)), OVERALL).budgets[0]
    assert (ms.setting, ms.word) == (LOW.key, "no")


def test_lines_name_what_is_sure_and_what_is_not() -> None:
    text = "\n".join(price_list(two_types()).lines)
    assert "identical answers to all of these: tier-low_topk1_blocks12, 40 % [" in text
    assert "routed by type (charts tier-low_topk1_blocks12, texts tier-medium_topk1_blocks12)" in text
    assert "surely not worse by 20 points or more in any type" in text
    assert "nan" not in text and "None" not in text


def test_without_a_reference_or_a_second_setting_there_is_no_price() -> None:
    alone = grid([OWN], np.ones((1, 30)), [SPREAD])
    assert price_list(alone).why == ONE_SETTING
    without = grid([LOW, MIDDLE], np.ones((2, 30)), [SPREAD, SPREAD])
    assert price_list(without).lines == [f"no prices: {NO_REFERENCE}"]


def test_settings_that_took_no_turns_have_no_price() -> None:
    why = price_list(replace(two_types(), times=UNKNOWN)).why
    assert why is not None and "one after another" in why


def test_small_types_are_pooled() -> None:
    """Of seven types of 20 questions and one of 3 the five largest are shown, and the rest together."""
    names = tuple(f"type-{at % 7}" for at in range(140)) + ("rare",) * 3
    made = grid([LOW, OWN], np.ones((2, 143)), np.outer([50.0, 100.0], np.linspace(0.9, 1.1, 143)))
    found = price_list(replace(made, question_types=names))
    assert [(each.question_type, each.num_samples) for each in found.types] == [
        *((f"type-{at}", 20) for at in range(5)),
        ("other", 43),
        (OVERALL, 143),
    ]


def test_words_are_wrong_in_few_runs() -> None:
    """Settings that lose 5 points, or nothing, in each of two types: in at most 5 % of runs any word is wrong.

    Of 100 runs 5 have a wrong word, and 11 or more have in 1 % of all cases.
    """
    generator, wrong, sure = np.random.default_rng(7), 0, 0
    points = [point("low"), point("medium"), point("high"), point("low", 2), OWN]
    losses = np.array([[0.05, 0.0], [0.0, 0.05], [0.02, 0.02], [0.0, 0.0], [0.0, 0.0]])
    types = np.repeat([0, 1], 120)
    for _ in range(100):
        own = generator.random(240) < 0.9
        # Each setting loses right answers, and gains as many as it loses more than it may.
        rows = []
        for loss in losses:
            lost = generator.random(240) < (loss[types] + 0.03) / 0.9
            won = generator.random(240) < 0.03 / 0.1
            rows.append(np.where(own, ~lost, won))
        rows[-1] = own
        times = np.exp(generator.normal(0.0, 0.1, (5, 240))) * np.array([[40.0], [50.0], [60.0], [70.0], [100.0]])
        made = grid(points, np.array(rows, dtype=float), times)
        found = price_list(replace(made, question_types=tuple(str(each) for each in types)))
        by_type = {"0": losses[:, 0], "1": losses[:, 1], OVERALL: losses.mean(axis=1)}
        keys = [each.key for each in points]
        claims = [
            (price.loss, by_type[each.question_type][keys.index(price.setting)])
            for each in found.types
            for price in each.prices
            if price.word == "yes" and price.setting is not None and not price.is_identical
        ]
        wrong += any(loss <= truth for loss, truth in claims)
        sure += any(loss <= 0.1 for loss, _ in claims)
    assert wrong <= 10
    assert sure > 20
