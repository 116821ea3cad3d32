"""What the check of a server finds."""

import time
from typing import Any

import pytest

from experiment_core_utils.models.endpoint.check_command import main
from tests.processes.byte_server import GOOD, STREAM, piece, serving_bytes, status
from tests.processes.openai_server import Reply, serving


def test_a_server_with_a_cache_and_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A long prompt that it has not seen takes 20 ms; one request in three gets one piece of two tokens."""
    seen = set[str]()

    def reply(request: dict[str, Any]) -> Reply:
        question = request["messages"][0]["content"]
        time.sleep(0.0 if question in seen or len(question) < 99 else 0.02)
        seen.add(question)
        return Reply(pieces=("one",) if len(server.requests) % 3 else ("o", "ne"))

    with serving(reply) as server:
        server.counts_salted_apart = False
        assert main([server.url]) == 0
        lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["models"] == "no list of them" and lines["calls itself"] == "m"
    assert lines["streams"] == "yes, one token a piece" and lines["counts"] == "yes, 2 tokens, 11 of the prompt"
    assert lines["limits"] == "keeps max_tokens 12" and lines["repeats itself at temperature 0"].startswith("yes, 3 of")
    assert lines["caches"].startswith("yes, a prompt that it has seen takes ")
    assert lines["limits its rate"] == "no, 8 requests one after another"


def test_a_server_that_counts_nothing_and_limits_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    limited = status("429 No", b'{"error": "slow down"}', "Retry-After: 1")

    def reply(body: Any) -> list[bytes]:
        if body is None:
            return [status("200 OK", b'{"data": [{"id": "a/b"}, {"id": "c"}]}')]
        is_early = len(server.requests) < 25
        return [STREAM + piece(f"{len(server.requests)}") + piece(None, "stop") if is_early else limited]

    with serving_bytes(reply) as server:
        assert main([server.url]) == 0
        lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["models"] == "a/b, c" and lines["calls itself"] == "a/b" and lines["counts"] == "no usage that can be"
    assert server.requests[1]["model"] == "a/b" and lines["caches"] == "no prefix cache seen"
    assert lines["repeats itself at temperature 0"] == "no, 1 of 3 answers"
    assert lines["limits its rate"].startswith("yes, after ")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status("404 No", b"<html>"), "HTTP 404, with a page of HTML: '<html>'; correct --endpoint and --model"),
        (status("200 OK", b"<html>hi"), "a page of HTML and no stream: '<html>hi'"),
    ],
)
def test_what_is_no_server_is_an_error(answer: bytes, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_bytes(lambda body: [answer]) as server:
        assert main([server.url]) == 2
    assert reason in capsys.readouterr().err
    with serving_bytes(lambda body: [GOOD]) as server:
        assert main([server.url, "--model", "m"]) == 0
