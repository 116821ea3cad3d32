"""Names of tasks and metrics: known ones open, unknown ones say what there is."""

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import Answer, Score
from experiment_core_utils.tasks.registry import (
    get_metric,
    get_metric_for_dataset,
    list_metrics,
    list_tasks,
    load_task,
    register_metric,
    score_name,
    task_entry,
)
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric


def test_every_task_has_a_metric_and_opens() -> None:
    assert "reference_vqa" in list_tasks()
    task = load_task("reference_vqa", "validation", cache_dir=None)
    assert (task.name, task.split, len(task)) == ("reference_vqa", "validation", 2000)
    for name in list_tasks():
        assert get_metric(get_metric_for_dataset(name)).name == get_metric_for_dataset(name)


def test_task_and_registry_name_the_same_metric() -> None:
    assert load_task("reference_vqa", "train").metric == get_metric_for_dataset("reference_vqa")


def test_the_published_place_of_the_metrics_names_gives_the_registrys() -> None:
    from experiments.base_experiment import get_metric_for_dataset as published

    assert (published("text_vqa"), published("doc_qa")) == ("vqa_score", "ansl_em")
    with pytest.raises(ConfigurationError, match="unknown task 'imagenet'"):
        published("imagenet")


def test_a_split_that_is_not_named_is_the_tasks_own() -> None:
    assert load_task("reference_counting").split == "validation"
    with pytest.raises(ConfigurationError, match="tally_qa test cannot|tally_qa: there is no folder nowhere"):
        load_task("tally_qa", data_dir="nowhere")
    default_splits = {name: task_entry(name).default_split for name in list_tasks()}
    assert {name: split for name, split in default_splits.items() if split != "validation"} == {"tally_qa": "test"}


def test_metrics_are_known_by_their_names() -> None:
    assert list_metrics() == sorted(
        "vqa_score vqa_score_molmo mc mc_molmo em em_lenient relaxed ansl_em anls cider_score mmmu_score mixed "
        "in_sentence vqa_v2 chartqa_relaxed docvqa_anls mmmu gsm8k_boxed gsm8k_flexible acc acc_norm acc_bytes "
        "perplexity".split()
    )
    assert [get_metric(name).name for name in list_metrics()] == list_metrics()


@pytest.mark.parametrize("name", ["../up", "two words", "red\x1b[31m", "", ".", "a" * 101, "a/b"])
def test_a_metrics_name_is_part_of_a_folders_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^metric '.*is part of folder names; use letters, digits, _, -"):
        register_metric(AnswerMetric(name, lambda answer: Score(1.0)))
    assert name not in list_metrics()


def test_a_metric_has_a_highest_score() -> None:
    for best in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=f"metric none_best: best is {best}; give the highest score"):
            register_metric(AnswerMetric("none_best", lambda answer: Score(1.0), best=best))


def test_scores_are_an_accuracy_where_the_best_is_1_else_have_the_metrics_own_name() -> None:
    """A metric that is not known here, since its module is not loaded, is called as it is named."""
    assert score_name(("vqa_score", 1.0), ("acc_norm", 1.0)) == "accuracy" == score_name(("theirs", 1.0))
    assert score_name(("perplexity", 100.0)) == "100 / byte perplexity"
    assert (score_name(("cider_score", 10.0)), score_name(("theirs", 4.0))) == ("cider_score", "theirs")
    assert score_name(("mc", 1.0), ("perplexity", 100.0)) == "score"


def test_metric_scores() -> None:
    answer = Answer("cat", ("cat",) * 2 + ("dog",) * 8)
    assert get_metric("vqa_score").score([answer]).overall == pytest.approx(0.6)
    assert get_metric("vqa_score_molmo").score([answer]).overall == pytest.approx(2 / 3)


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown task 'vqa3'.*reference_vqa.*use one of"):
        load_task("vqa3", "validation")
    with pytest.raises(ConfigurationError, match=r"unknown task 'vqa3'.*reference_vqa"):
        get_metric_for_dataset("vqa3")
    with pytest.raises(ConfigurationError, match=r"unknown metric 'bleu'.*vqa_score.*use one of"):
        get_metric("bleu")
    with pytest.raises(ConfigurationError, match="no split 'test'"):
        load_task("reference_vqa", "test")
