"""What can be written as UTF-8, what stands in a message of one line, and the short digest of a text."""

import pytest

from experiment_core_utils.primitives import texts
from experiment_core_utils.primitives.texts import (
    all_of,
    and_more,
    counted,
    did_you_mean,
    first_of,
    is_text,
    printable,
    short_digest,
    shown,
    without_hidden,
    without_secrets,
)


@pytest.mark.parametrize(
    ("value", "expected"), [("", True), ("naïve 中 \0", True), ("half \ud800", False), (b"x", False), (None, False)]
)
def test_what_is_a_text(value: object, expected: bool) -> None:
    assert is_text(value) is expected


def test_what_a_message_shows() -> None:
    assert shown("a\nb\0\ud800é") == "a\\nb\\x00\\ud800é"
    assert shown(["a"]) == "['a']"
    assert shown("x" * 5000) == f"{'x' * 100} ... {'x' * 100} (5000 characters)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://me:secret@host/v1", "https://host/v1"),
        ("q4=http://me:se@cret@[::1]:9/v1?key=secret#secret", "q4=http://[::1]:9/v1"),
        ("http://host:1/v1/a@b", "http://host:1/v1/a@b"),
        # Not to be read as addresses.
        ("http://me:sec/ret?secret@host/v1", "http://host/v1"),
        ("me:secret@host", "host"),
        ("localhost:8000", "localhost:8000"),
    ],
)
def test_a_password_is_not_shown(given: str, expected: str) -> None:
    assert without_secrets(given) == expected


def test_control_characters_are_escapes_on_a_terminal() -> None:
    assert printable("a\x1b[31mb\r\nc\x07\x9bé中") == "a\\x1b[31mb\\r\\nc\\x07\\x9bé中"
    assert printable("a\x1b[31m\tb\r\n\x1b[A|", is_stream=True) == "a\\x1b[31m\tb\r\n\x1b[A|"


def test_a_secret_is_in_no_text_that_leaves_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_SECRETS", {})
    for each in ("sk-a/b\"c9", "model", "abc", None):
        texts.hide(each)
    # As it is, in an address, in JSON, in HTML and in a header.
    for written in ('sk-a/b"c9', "sk-a%2Fb%22c9", r"sk-a/b\"c9", "sk-a/b&quot;c9", "c2stYS9iImM5"):
        assert without_hidden(f"\\n{written}x") == "\\n***x"
    # A word is hidden where it is no part of another and no key of JSON; three letters are not.
    assert without_hidden('{"model": "model", "models": "abc"}') == '{"model": "***", "models": "abc"}'
    assert shown("a model") == printable("a model") == "a ***"
    assert without_secrets("http://u:p@h:1/model/v1?q=1") == "http://h:1/***/v1"


def test_a_short_digest_is_the_front_of_the_sha256() -> None:
    # sha256sum of "abc", as in the standard (FIPS 180-2).
    assert short_digest("abc") == short_digest(b"abc") == "ba7816bf8f01cfea"


def test_the_nearest_name_is_offered_where_one_is_near() -> None:
    assert did_you_mean("--num_sampels", ["--num_samples", "--num_runs"]) == " (did you mean --num_samples?)"
    assert did_you_mean("textvqa", ["okvqa", "text_vqa"]) == " (did you mean text_vqa?)"
    # Equal dashes make no flag near.
    assert did_you_mean("--zzz", ["--abc", "--def"]) == ""


def test_the_first_names_and_how_many_more_there_are() -> None:
    assert first_of(["a", "b"], 2) == "a, b" and first_of([], 2) == ""
    assert first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert and_more(0) == and_more(-3) == "" and and_more(12) == " and 12 more"


def test_one_thing_has_no_plural() -> None:
    assert [counted(number, "setting") for number in (0, 1, 2)] == ["0 settings", "1 setting", "2 settings"]
    assert [counted(number, "process") for number in (1, 2)] == ["1 process", "2 processes"]
    assert [all_of(number, "setting") for number in (1, 3)] == ["the only setting", "all 3 settings"]
