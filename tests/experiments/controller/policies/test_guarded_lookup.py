"""What the guardrail admits for a request, with an estimator of a known law."""

from dataclasses import replace

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.features import RequestSetting, requests_of
from experiments.controller.knob_choices import choice_of
from experiments.controller.lookup import build
from experiments.controller.policies.guarded_lookup import GuardedLookup
from tests.experiments.analyses.latency.synthetic_samples import working_estimator
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request


def policy(margin: float = 0.0) -> GuardedLookup:
    """The middle choice is the more accurate one of the two faster ones."""
    made = grid()
    scores = made.scores.copy()
    scores[0, 3] = 0.0
    return GuardedLookup(build(replace(made, scores=scores)), working_estimator(), margin)


def milliseconds(crops: int, tokens: int, top_k: int, blocks: int, steps: int) -> float:
    """Vision 2 + (crops + 1) ms; prefill 3 + 0.001 blocks x tokens + 0.0005 (blocks - 1) top-k x tokens ms; a token
    0.2 + 0.5 blocks ms."""
    prefill = 3.0 + 0.001 * blocks * tokens + 0.0005 * (blocks - 1) * top_k * tokens
    return 3.0 + crops + prefill + steps * (0.2 + 0.5 * blocks)


# At 11 output tokens, ten steps: fast 5 + 16.94 + 62, middle 9 + 30.54 + 62, slow 15 + 125.36 + 82 ms.
FAST_MS = milliseconds(2, 410, 4, 12, 10)
MIDDLE_MS = milliseconds(6, 810, 4, 12, 10)
SLOW_MS = milliseconds(12, 1610, 8, 16, 10)


def test_a_model_without_experts_is_predicted_as_one_of_one_expert():
    made = grid()
    choices = tuple(choice.replaced(top_k=None) for choice in made.choices)
    guarded = GuardedLookup(build(replace(made, choices=choices)), working_estimator())
    features = request(output_tokens=11)
    assert requests_of(guarded.request_settings(features)).top_k.tolist() == [1.0, 1.0, 1.0]
    # The estimator has not seen so few experts: none is admitted, and the one predicted fastest is taken.
    assert guarded.choose(features, 100.0) == choices[0]


def test_the_law_by_hand():
    assert pytest.approx(5 + 3 + 4.92 + 9.02 + 62) == FAST_MS
    assert pytest.approx(15 + 3 + 25.76 + 96.6 + 82) == SLOW_MS


@pytest.mark.parametrize(
    ("budget_ms", "expected"),
    [
        (1.02 * FAST_MS, FAST),
        (0.98 * MIDDLE_MS, FAST),
        (1.02 * MIDDLE_MS, MIDDLE),
        (0.98 * SLOW_MS, MIDDLE),
        (1.02 * SLOW_MS, SLOW),
        # None is admitted: the one predicted fastest.
        (1.0, FAST),
    ],
)
def test_the_most_accurate_setting_that_is_predicted_to_fit(budget_ms, expected):
    assert policy().choose(request(output_tokens=11), budget_ms / 1000) == expected


def test_the_margin_is_kept_free():
    # 1.02 of the middle one's time is not enough with a tenth to spare.
    assert policy(0.1).choose(request(output_tokens=11), 1.02 * MIDDLE_MS / 1000) == FAST
    assert policy(0.1).choose(request(output_tokens=11), 1.12 * MIDDLE_MS / 1000) == MIDDLE


def test_a_margin_below_0_lets_predictions_over_the_budget_pass():
    # 0.98 of the middle one's time is enough where 0.95 of the prediction has to fit.
    assert policy(-0.05).choose(request(output_tokens=11), 0.98 * MIDDLE_MS / 1000) == MIDDLE


@pytest.mark.parametrize("margin", [-1.0, -2.0, float("nan"), float("inf")])
def test_a_margin_that_admits_everything_or_nothing_is_refused(margin):
    with pytest.raises(ConfigurationError, match=f"--margin {margin:g} is not possible; give a finite number above -1"):
        policy(margin)


def test_a_longer_answer_leaves_less_for_the_knobs():
    # Fifty more steps of 6.2 ms.
    assert policy().choose(request(output_tokens=11), 1.02 * MIDDLE_MS / 1000) == MIDDLE
    assert policy().choose(request(output_tokens=61), 1.02 * MIDDLE_MS / 1000) == FAST


def test_without_a_length_the_task_s_expected_one_is_taken():
    # 9, 10, 11, 12 tokens of each setting's four samples: 10.5 on average.
    assert working_estimator().fitted.expected_output == {"signs": 10.5}
    request_settings = policy().request_settings(request())
    assert {each.output_tokens for each in request_settings} == {10.5}
    assert {each.output_tokens for each in policy().request_settings(request(output_tokens=3))} == {3}
    with pytest.raises(ConfigurationError, match="no answer length for captions"):
        policy().choose(request(task="captions"), 1.0)


def test_the_estimator_predicts_each_choice_at_its_own_tier():
    request_settings = policy().request_settings(request(output_tokens=3))
    assert [(each.crops, each.vision_tokens, each.knobs) for each in request_settings] == [
        (2, 400, {"vision": "low", "top_k": 4, "num_active_blocks": 12}),
        (6, 800, {"vision": "medium", "top_k": 4, "num_active_blocks": 12}),
        (12, 1600, {"vision": "high", "top_k": 8, "num_active_blocks": 16}),
    ]


def test_the_estimator_gets_all_blocks_and_the_later_top_k():
    found = policy().request_settings(request(output_tokens=3))[0]
    knobs = {"vision": "low", "top_k": 4, "num_active_blocks": 12}
    assert found == RequestSetting(vision_tokens=400, crops=2, text_tokens=10, knobs=knobs, output_tokens=3)


def test_a_knob_that_the_estimator_has_not_seen_is_not_admitted():
    made = grid()
    unseen = replace(made, choices=(FAST, MIDDLE, choice_of("high", 9, 16)))
    assert GuardedLookup(build(unseen), working_estimator()).choose(request(output_tokens=11), 10.0) == FAST


def test_a_tier_of_unknown_shape_is_refused():
    bare = replace(request(), shapes={})
    with pytest.raises(ConfigurationError, match="at the vision setting low is not known"):
        policy().choose(bare, 1.0)
