"""Accuracy and distributions of a setting, by hand."""

import math
from dataclasses import replace

import pytest

from experiment_core_utils.finishing.setting_summary import (
    accuracy_by_type,
    distributions,
    summarise,
    summarise_accuracy,
    typical_distributions,
)
from experiment_core_utils.records.energy import AllocatedJoules
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.setting_result import TypeScores
from experiment_core_utils.saved_results.result_caveats import answer_caveats
from experiment_core_utils.tasks.interface import answer_of
from experiment_core_utils.tasks.registry import get_metric
from tests.hand_made_records import ReadOff, answered_sample, measured_sample, scores_of, staged_run, summary_of


def test_spread_of_the_stage_times() -> None:
    # Prefill 0.1, 0.2, 0.3, 0.4, 1.0: mean 2.0 / 5, median 0.3, p95 = 0.4 + 0.8 * 0.6, p99 = 0.4 + 0.96 * 0.6.
    samples = [measured_sample(i, staged_run(prefill_s=s)) for i, s in enumerate((0.1, 0.2, 0.3, 0.4, 1.0))]
    prefill = distributions(samples)["prefill_s"]
    assert prefill.n == 5
    assert prefill.mean == pytest.approx(0.4)
    assert (prefill.min, prefill.p50, prefill.max) == (0.1, 0.3, 1.0)
    assert prefill.p95 == pytest.approx(0.88)
    assert prefill.p99 == pytest.approx(0.976)
    # Squares of the deviations: 0.09 + 0.04 + 0.01 + 0 + 0.36 = 0.5, over n - 1 = 4.
    assert prefill.std == pytest.approx(math.sqrt(0.125))


def test_intervals_of_times_are_over_the_pictures_of_the_samples_that_have_them() -> None:
    """Totals of 1 s, 1 s and 2 s; only the first two have a time per token, both of one picture."""
    runs = [staged_run(), staged_run(), staged_run(vision_s=1.75, inter_token_s=())]
    samples = [measured_sample(i, run, image_id="aab"[i]) for i, run in enumerate(runs)]
    found = distributions(samples)
    total, token = found["e2e_s"], found["tpot_s"]
    # Sums 2 and 2 of pictures with 2 and 1: mean 4 / 3; 2 / 1 * ((2 - 8 / 3)^2 + (2 - 4 / 3)^2) / 3^2 = 16 / 81.
    times = math.exp(12.706205 * 4 / 9 / (4 / 3))
    assert total.ci_low == pytest.approx(4 / 3 / times)
    assert total.ci_high == pytest.approx(4 / 3 * times)
    assert (token.n, token.std, token.ci_low, token.ci_high) == (2, 0.0, None, None)


def test_every_quantity_of_one_sample() -> None:
    flops = StageFlops(vision_flops=700, prefill_flops=300, decode_flops_per_token=20.5)
    found = {name: spread.mean for name, spread in distributions([measured_sample(0, flops=flops)]).items()}
    assert found == {
        "vision_s": 0.5,
        "prefill_s": 0.25,
        "decode_s": 0.25,  # two steps of 0.125
        "e2e_s": 1.0,
        "tpot_s": 0.125,
        "ttft_s": 0.75,
        "preprocess_s": 0.002,
        "transfer_s": 0.001,
        "vision_tokens": 384,
        "vision_tokens_diff": 432 - 384,
        "pooled_image_features": 432,
        "prompt_tokens": 384 + 28 + 10,
        "output_tokens": 3,
        "vision_flops": 700,
        "prefill_flops": 300,
        "decode_flops_per_token": 20.5,
    }


def test_a_sample_without_a_quantity_does_not_enter_it() -> None:
    one_token = measured_sample(1, staged_run(vision_s=None, inter_token_s=()), has_picture=False)
    found = distributions([measured_sample(0), one_token])
    assert (found["tpot_s"].n, found["vision_tokens_diff"].n, found["e2e_s"].n) == (1, 1, 2)
    assert found["e2e_s"].mean == (1.0 + 0.25) / 2
    assert found["vision_tokens"].mean == 384 / 2  # no picture is truly no vision token
    assert "vision_flops" not in found
    assert one_token.shape.vision_tokens_difference is None


def test_a_sample_without_a_stage_spends_nothing_on_it_so_that_stages_add_up() -> None:
    """0.5 + 0.25 + 0.25 s, one token without a picture in 0.75 s, and two runs of one and of three tokens."""
    flops = StageFlops(vision_flops=700, prefill_flops=300, decode_flops_per_token=20.5)
    of_text = staged_run(vision_s=None, prefill_s=0.75, inter_token_s=())
    samples = [
        measured_sample(0, flops=flops),
        measured_sample(1, of_text, has_picture=False, flops=replace(flops, vision_flops=None)),
        measured_sample(2, staged_run(inter_token_s=()), staged_run(), flops=flops),
    ]
    found = distributions(samples)
    assert (found["vision_s"].mean, found["vision_s"].min) == (pytest.approx(1 / 3), 0.0)
    assert (found["decode_s"].mean, found["decode_s"].n) == (pytest.approx((0.25 + 0.0 + 0.125) / 3), 4)
    for own in (found, typical_distributions(samples)):
        assert sum(own[name].mean for name in ("vision_s", "prefill_s", "decode_s")) == pytest.approx(own["e2e_s"].mean)
    # As the time, so that the quotient is a speed.
    assert found["vision_flops"].mean == pytest.approx(1400 / 3)
    # What no sample has is no 0.
    assert not {"vision_s", "decode_s", "vision_flops"} & distributions([samples[1]]).keys()


def test_typical_times_are_those_of_the_run_with_the_median_total() -> None:
    stages = ((0.25, 8.0), (0.75, 1.0), (4.0, 2.0))
    runs = [staged_run(prefill_s=prefill, vision_s=vision) for prefill, vision in stages]
    sample = measured_sample(0, *runs)  # totals 8.5, 2.0, 6.25
    found = typical_distributions([sample])
    assert (found["vision_s"].mean, found["prefill_s"].mean, found["e2e_s"].mean) == (2.0, 4.0, 6.25)
    for even in (runs[:2], [*runs[:2], staged_run(prefill_s=9.0), staged_run(prefill_s=0.0, vision_s=0.0)]):
        # Of 8.5 and 2.0, and of these two between 9.75 and 0.25.
        (of_even,) = {each.mean for each in [typical_distributions([measured_sample(0, *even)])["e2e_s"]]}
        assert of_even == (8.5 + 2.0) / 2
    assert "output_tokens" not in found and typical_distributions([answered_sample(1)]) == {}


def test_slow_runs_are_in_the_percentiles_and_not_in_the_typical_ones() -> None:
    """20 samples x 3 runs of 1 s, of which 6 of the 60 take 2 s, each in another sample: a tenth of the requests."""
    usual, slow = staged_run(), staged_run(vision_s=1.5)
    samples = [measured_sample(at, usual, slow if at < 6 else usual, usual) for at in range(20)]
    found, typical = distributions(samples)["e2e_s"], typical_distributions(samples)["e2e_s"]
    assert (found.n, found.p50, found.p95, found.p99, found.max) == (60, 1.0, 2.0, 2.0, 2.0)
    assert found.mean == pytest.approx((54 * 1 + 6 * 2) / 60)
    assert (typical.n, typical.p95, typical.p99, typical.max, typical.mean) == (20, 1.0, 1.0, 1.0, 1.0)


def test_five_percent_of_slow_runs_are_seen_by_the_95th_percentile() -> None:
    """5 of 100 runs take 2 s: rank 0.95 * 99 = 94.05 of runs from 0, of which those up to 94 take 1 s."""
    usual, slow = staged_run(), staged_run(vision_s=1.5)
    samples = [measured_sample(at, usual, slow if at < 5 else usual) for at in range(50)]
    found, typical = distributions(samples)["e2e_s"], typical_distributions(samples)["e2e_s"]
    assert (found.p95, found.p99) == (pytest.approx(1.05), 2.0)
    # The median of two is their mean.
    assert (typical.p95, typical.p99, typical.mean) == (1.5, 1.5, found.mean)


def test_a_sample_with_more_runs_weighs_as_much_as_one_with_one() -> None:
    """Runs of 1 s and 3 s of one picture, which weigh 1/2 each, and one of 4 s of another."""
    one, three, four = (staged_run(vision_s=s) for s in (0.5, 2.5, 3.5))
    samples = [measured_sample(0, one, three, image_id="a"), measured_sample(1, four, image_id="b")]
    found = distributions(samples)["e2e_s"]
    assert (found.n, found.min, found.max) == (3, 1.0, 4.0)
    assert found.mean == pytest.approx((2.0 + 4.0) / 2)
    # Steps between the sorted runs are (1/2 + 1/2) / 2 and (1/2 + 1) / 2: 3 s is at 0.5 / 1.25 = 40 %.
    assert found.p50 == pytest.approx(3 + (0.5 - 0.4) / 0.6)
    # Squares 4 * 1/2 + 0 + 1 over the weights' sum, 2; times 3 / 2.
    assert found.std == pytest.approx(math.sqrt((2 + 0 + 1) / 2 * 3 / 2))
    # Clusters with sums 2 and 4 of one sample each: 2 / 1 * (1 + 1) / 2^2 = 1.
    times = math.exp(12.706205 / 3)
    assert (found.ci_low, found.ci_high) == (pytest.approx(3 / times), pytest.approx(3 * times))


def test_means_of_stages_add_up_to_that_of_the_total() -> None:
    runs = [staged_run(vision_s=0.1 * at, prefill_s=0.3 / at, inter_token_s=(0.05 * at,)) for at in (1, 2, 3, 4, 5)]
    samples = [measured_sample(0, *runs[:2]), measured_sample(1, *runs[2:])]
    for found in (distributions(samples), typical_distributions(samples)):
        stages = sum(found[name].mean for name in ("vision_s", "prefill_s", "decode_s"))
        assert stages == pytest.approx(found["e2e_s"].mean)
        assert found["ttft_s"].mean == pytest.approx(found["vision_s"].mean + found["prefill_s"].mean)


def test_energy_is_of_samples_that_have_one() -> None:
    """Of passes, so that it is not a run's: 2 J and 6 J, and nothing of the third sample."""
    read = [AllocatedJoules(joules, 0.1, "apportioned", None, None) for joules in (2.0, 6.0)]
    samples = [replace(measured_sample(at), energy=each) for at, each in enumerate(read)]
    unread = replace(measured_sample(2), energy=AllocatedJoules(None, None, None, None, "no power reading"))
    assert distributions([*samples, unread])["energy_j"].mean == 4.0
    assert "energy_j" not in typical_distributions([*samples, unread])


def test_accuracy_of_each_type_in_alphabetical_order() -> None:
    scored = [
        ("reading", "1"),
        ("count", "0.5"),
        ("reading", "0"),
        ("count", "1"),
        ("reading", "0.5"),
        ("time", "none"),
    ]
    samples = [measured_sample(i, question_type=kind, prediction=score) for i, (kind, score) in enumerate(scored)]
    found = accuracy_by_type([answer_of(sample) for sample in samples], scores_of(samples))
    assert list(found.items()) == [
        ("count", TypeScores(accuracy=0.75, num_samples=2)),
        ("reading", TypeScores(accuracy=0.5, num_samples=3)),
        ("time", TypeScores(accuracy=None, num_samples=1)),
    ]


def test_empty_answers_and_those_of_one_token_are_fractions() -> None:
    """Of six: two empty; one word where the reference is one word, one where it is two, the same cut, a full one."""
    one_token = staged_run(inter_token_s=(), ended=False)
    several = ("a stop sign", "red light")
    samples = [
        measured_sample(0, prediction=" \n"),
        measured_sample(1, prediction=""),
        measured_sample(2, one_token, prediction="1"),
        replace(measured_sample(3, one_token, prediction="0"), references=several),
        replace(measured_sample(4, staged_run(inter_token_s=(0.1,)), prediction="0"), references=several),
        replace(measured_sample(5, prediction="1"), references=several),
    ]
    answers = [answer_of(sample) for sample in samples]
    metric = get_metric("em_lenient")
    accuracy = summarise_accuracy(answers, metric.score(answers), metric)
    counts = summarise(samples, accuracy, 0).counts
    assert (accuracy.share_empty, accuracy.share_unparsed) == (1 / 3, 1 / 3)
    assert counts.share_one_token == 1 / 3
    found = answer_caveats(accuracy, len(answers), counts.share_one_token)
    # The empty ones cannot be read either, and are named once.
    assert [each.kind for each in found] == ["answers_empty", "answers_one_token"]
    assert found[0].sentence.startswith("answers: 33% have no text; see the final prompt in --dry_run")
    for references, wanted in ((("a stop sign", "red light", "no"), 1.0), (("red light", "no"), 0.0), (("no",), 0.0)):
        cut = [replace(measured_sample(0, one_token), references=references)]
        assert summarise(cut, accuracy, 0).counts.share_one_token == wanted
    choices = [replace(sample, options=("a", "b"), answer_index=0) for sample in samples]
    assert summarise(choices, accuracy, 0).counts.share_one_token == 0


def test_thinking_is_a_quantity_of_models_that_think() -> None:
    plain, thinking = measured_sample(0), replace(measured_sample(1), thinking_tokens=3)
    assert not any(name.startswith("thinking") for name in distributions([plain]))
    found = distributions([plain, thinking])
    # Of three tokens two are decode steps, of 125 ms each.
    assert (found["thinking_tokens"].mean, found["thinking_s"].mean, found["thinking_s"].n) == (1.5, 0.125, 2)


def test_discarded_runs_are_a_fraction_of_all() -> None:
    """2 discarded beside 3 and 1 that are kept."""
    samples = [replace(measured_sample(0, *[staged_run()] * 3), num_discarded_runs=2), measured_sample(1)]
    counts = summary_of(samples).counts
    assert (counts.num_discarded_runs, counts.share_discarded_runs) == (2, pytest.approx(2 / 6))
    assert summary_of([answered_sample(1)]).counts.share_discarded_runs is None


def test_accuracy_and_its_spread() -> None:
    summary = summary_of([measured_sample(i, prediction=score) for i, score in enumerate(("1", "1", "0", "0.5"))])
    accuracy = summary.accuracy
    assert (accuracy.metric, accuracy.metric_best, accuracy.accuracy) == ("read_off", 1.0, 0.625)
    # Deviations 0.375, 0.375, -0.625, -0.125: squares add up to 0.6875, over 3.
    assert accuracy.accuracy_std == pytest.approx(math.sqrt(0.6875 / 3))
    assert accuracy.accuracy_ci95 is not None
    assert 0.0 <= accuracy.accuracy_ci95[0] < 0.625 < accuracy.accuracy_ci95[1] <= 1.0
    assert accuracy.metric_details == {"answers": 4}


def test_zeros_and_ones_get_the_exact_interval() -> None:
    accuracy = summary_of([measured_sample(i) for i in range(4)]).accuracy
    assert accuracy.accuracy == 1.0
    # All four right: p^4 = 0.025.
    assert accuracy.accuracy_ci95 == pytest.approx((0.025**0.25, 1.0))


def test_questions_about_one_picture_count_as_one_picture() -> None:
    """Four right answers about two pictures say as much as two right answers: p^2 = 0.025."""
    accuracy = summary_of([measured_sample(i, image_id="ab"[i % 2]) for i in range(4)]).accuracy
    assert accuracy.accuracy_ci95 == pytest.approx((0.025**0.5, 1.0))


def test_the_interval_is_in_the_metrics_own_unit() -> None:
    samples = [measured_sample(i, prediction="10") for i in range(4)]
    accuracy = summary_of(samples, metric=ReadOff(best=10.0)).accuracy
    assert accuracy.accuracy_ci95 == pytest.approx((10 * 0.025**0.25, 10.0))


def test_an_answer_that_cannot_be_read_scores_0_and_is_counted() -> None:
    accuracy = summary_of([measured_sample(i, prediction=text) for i, text in enumerate(("1", "?", "1", "?"))]).accuracy
    assert (accuracy.accuracy, accuracy.num_unparsed, accuracy.share_unparsed) == (0.5, 2, 0.5)


def test_an_answer_without_a_score_enters_no_mean_and_is_no_zero() -> None:
    accuracy = summary_of([measured_sample(i, prediction=text) for i, text in enumerate(("1", "none", "0"))]).accuracy
    assert (accuracy.accuracy, accuracy.num_unparsed) == (0.5, 0)
    none = summary_of([measured_sample(0, prediction="none")]).accuracy
    assert (none.accuracy, none.accuracy_std, none.accuracy_ci95, none.share_unparsed) == (None, None, None, 0.0)


def test_answers_that_reached_the_limit_and_samples_that_failed_are_fractions() -> None:
    samples = [measured_sample(i, staged_run(ended=ended)) for i, ended in enumerate((True, False, False, True, True))]
    summary = summary_of(samples, num_failed=3)
    assert (summary.counts.share_truncated, summary.counts.share_failed) == (0.4, 3 / 8)


def test_no_samples_have_no_figures() -> None:
    summary = summary_of([])
    accuracy = summary.accuracy
    assert (accuracy.accuracy, accuracy.accuracy_std, accuracy.accuracy_ci95) == (None, None, None)
    assert accuracy.share_unparsed is None
    assert (accuracy.accuracy_by_type, summary.distributions) == ({}, {})
    assert (summary.counts.share_truncated, summary.counts.share_failed) == (None, None)


def test_samples_answered_in_batches_enter_accuracy_and_tokens_but_no_time() -> None:
    """Two measured (0.5 s and 1.0 s in all, 3 tokens each) and two answered (4 and 8 tokens, one cut)."""
    quick = measured_sample(0, staged_run(vision_s=0.125, prefill_s=0.125), prediction="1.0")
    slow = measured_sample(1, staged_run(vision_s=0.5, prefill_s=0.25), prediction="0.0")
    answered = [answered_sample(2, tokens=4, prediction="0.0"), answered_sample(3, 8, ended=False, prediction="0.0")]
    summary = summary_of([quick, slow, *answered])
    assert summary.accuracy.accuracy == 0.25
    assert summary.counts.share_truncated == 0.25
    for name in ("vision_s", "prefill_s", "decode_s", "e2e_s", "tpot_s", "ttft_s", "transfer_s"):
        assert summary.distributions[name].n == 2
    assert summary.distributions["e2e_s"].mean == 0.75
    assert summary.distributions["e2e_s"].min == 0.5
    assert summary.distributions["output_tokens"].n == 4
    assert summary.distributions["output_tokens"].mean == (3 + 3 + 4 + 8) / 4
    assert summary.distributions["preprocess_s"].n == 4
    assert "e2e_s" not in summary_of(answered).distributions
