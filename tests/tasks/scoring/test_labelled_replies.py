"""Replies of models and what a person reads in them; tests/data/replies/README.md says how they were made."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from experiment_core_utils.tasks.answers import answer_in
from experiment_core_utils.tasks.interface import Answer, Score
from experiment_core_utils.tasks.scoring.mc import select_mc_option
from experiment_core_utils.tasks.scoring.metrics import AGREED_REPLIES, LABELLED_REPLIES, METRICS, RELAXED
from experiment_core_utils.tasks.scoring.relaxed import relaxed

FOLDER = Path(__file__).parents[2] / "data" / "replies"
METRIC = next(metric for metric in METRICS if metric.name == RELAXED)
# The rules were written on the first half, so that it shows only that they still do what they did: 498 of 508 agree.
# The other half is what they are judged by: at least 93 %.
LEAST = {"writing_half": 0.975, "test_half": 0.93}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def score_of(row: dict[str, Any]) -> Score:
    options = tuple(row["choices"] or ())
    right = next((at for at, option in enumerate(options) if option in row["references"]), None)
    return METRIC.score([Answer(answer_in(row["reply"]), tuple(row["references"]), options, right)]).scores[0]


@pytest.mark.parametrize("half", LEAST)
def test_scores_agree_with_labels(half: str) -> None:
    rows = rows_of(half)
    agreed, unreadable = defaultdict[str, list[bool]](list), 0
    for row in rows:
        score = score_of(row)
        unreadable += not score.parsed
        for kind in (row["kind"], "all"):
            agreed[kind].append((score.value == 1.0) == (row["label"] is True))
    for kind, hits in agreed.items():
        low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
        print(f"{half} {kind}: {sum(hits)} of {len(hits)} agree, {sum(hits) / len(hits):.3f} [{low:.3f}, {high:.3f}]")
    print(f"{half}: {unreadable / len(rows):.3f} are unreadable")
    assert len(rows) > 300 and sum(agreed["all"]) / len(rows) >= LEAST[half]
    if half == "test_half":
        assert (sum(agreed["all"]), len(rows)) == (AGREED_REPLIES[RELAXED], LABELLED_REPLIES)


def test_of_replies_without_an_answer_most_are_unreadable_and_none_is_right() -> None:
    rows = rows_of("writing_half")
    scores = [score_of(row) for row in rows if row["label"] == "unreadable"]
    print(sum(not score.parsed for score in scores), len(scores), sum(score.value or 0 for score in scores))
    assert sum(not score.parsed for score in scores) >= 0.5 * len(scores)


def reply_of(row: dict[str, Any]) -> str:
    return str(row["reply"])


@pytest.mark.parametrize("row", rows_of("choice_forms"), ids=reply_of)
def test_a_reply_chooses_what_a_person_reads(row: dict[str, Any]) -> None:
    index, _ = select_mc_option(row["reply"], tuple(row["choices"]))
    assert ("" if index is None else "ABCDEFGHIJ"[index]) == row["letter"]


@pytest.mark.parametrize("row", rows_of("open_forms"), ids=reply_of)
def test_a_reply_is_right_where_a_person_takes_it_so(row: dict[str, Any]) -> None:
    assert relaxed(row["reply"], row["references"]) == float(row["label"])
