"""The tokeniser against recorded tokens of the Java one; a listed difference must go on differing to stay listed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.tasks.scoring.ptb_tokenizer import ptb_tokenize
from tests.tasks.scoring.vectors import DATA, VECTORS, vectors

RECORDED: list[dict[str, str]] = json.loads((DATA / "ptb_tokens.json").read_text(encoding="utf-8"))
# Text -> why its tokens differ from the Java tokeniser's.
NOT_MET = {
    "3.5 m 1,000 1,000,000 1.000 12:30 12:30pm 3pm 3-4 1990s '90s 1st 2nd 10x10 5'10\" 6ft.": "feet and inches",
    ":) :-) ;) :D <3 ^_^ =) (:": "rare emoticons",
    "-5 +5 -5.5 #5 5-6-7 555-1234 (555) 123-4567 1/2/2014 10/10 3:45p.m. 10:30am": "telephone numbers",
    "the cat`s cat´s cat′s it`s don`t": "a backtick for an apostrophe",
    "_ __ ___ ____ _a_ a__b": "underscores around words",
    "== => -> <- <= >= << >> < > a<b a>b": "angle brackets taken for a tag",
    "\"it's\" 's' ''s'' '' ''' ' ' \" \"": "a lone s in two apostrophes",
    "&quot;hi&quot; &lt;a&gt; &#39;x&#39; &nbsp;": "escaped tags and numbered entities",
    "东京都 кот αβ กา का": "vowel signs of Indic scripts",
    "stop t.v.... \"o'clock\" ,1950's 1/2.": "a comma before a number",
    ",2 two (riding) U.S. 'people' $5 frisbee #1 A!": "a comma before a number",
}


@pytest.mark.parametrize("row", vectors("ptb_tokenize"))
def test_vector(row: dict[str, Any]) -> None:
    assert " ".join(ptb_tokenize(row["prediction"])) == row["expected"]


@pytest.mark.parametrize("row", vectors("cider_score"))
def test_captions_of_the_cider_vectors(row: dict[str, Any]) -> None:
    assert {name: " ".join(ptb_tokenize(text)) for name, text in row["prediction"].items()} == row[
        "tokenized_prediction"
    ]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["text"][:40])
def test_recorded_tokens_or_a_listed_difference(row: dict[str, str]) -> None:
    same = " ".join(ptb_tokenize(row["text"])) == row["tokens"]
    assert same == (row["text"] not in NOT_MET)


def test_every_listed_difference_is_recorded() -> None:
    assert {row["text"] for row in RECORDED} >= NOT_MET.keys()
    assert len(VECTORS) == 145 and len(RECORDED) == 564


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("A man riding a wave.", "a man riding a wave"),
        ("The dog's ball isn't here, they've said.", "the dog 's ball is n't here they 've said"),
        ("(left) half-eaten", "-lrb- left -rrb- half-eaten"),
        ("two\r\nlines\x0band\x0cmore\u2028still", "two lines and more still"),
        ("Mr. Smith at 5 p.m.", "mr. smith at 5 p.m."),
        ("cannot, gonna!", "can not gon na"),
        ("a 🏄 surfer", "a surfer"),
        ("what?!", "what ?!"),
    ],
)
def test_by_hand(text: str, tokens: str) -> None:
    assert ptb_tokenize(text) == tokens.split()


def test_nothing_but_punctuation_has_no_token() -> None:
    assert ptb_tokenize("") == ptb_tokenize(" \n\t") == ptb_tokenize("... - -- ; : , . '' \" `") == []


@given(st.text())
def test_wild_texts_give_clean_tokens(text: str) -> None:
    tokens = ptb_tokenize(text)
    assert all(token and token.split() == [token] and token == token.lower() for token in tokens)
    assert ptb_tokenize("  " + "\n".join(text.split()) + "\n") == tokens


@given(st.lists(st.text("abcdefghij", min_size=2, max_size=8), min_size=1, max_size=12))
def test_plain_words_are_their_own_tokens(words: list[str]) -> None:
    assert ptb_tokenize(" ".join(words).capitalize() + " ..") == words
