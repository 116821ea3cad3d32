"""What becomes of what odd and hostile servers send: the right answer, or one line that says what was wrong."""

import gzip
import json
import time
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import pytest

from experiment_core_utils.config.served import served_models
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.endpoint.model import EndpointModel
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, Stopped
from experiment_core_utils.records.requests import ServedNotes, StagedRun
from tests.processes.byte_server import DONE, GOOD, STREAM, Part, event, piece, serving_bytes, status, usage

LIMIT_S = 0.7


def outcome_of(*parts: Part | Iterable[Part], limit: int = 5) -> tuple[StagedRun, str]:
    """Run and text of the second request; the first, which opens, is answered well."""

    def reply(body: Any) -> Iterator[Part]:
        if body["messages"][-1]["content"] == "Hi":
            yield GOOD
            return
        for part in parts:
            yield from (part,) if isinstance(part, bytes | None) else part

    with serving_bytes(reply) as server:
        served = served_models([f"s={server.url}"], ["m"])
        model = EndpointModel.unasked("m", served, None, limit_s=LIMIT_S).probed()
        run = run_staged(model, {"prompt": "what?"}, limit)
        return run, model.decode_text(run.token_ids)


def chunked(*parts: bytes) -> bytes:
    head = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in parts) + b"0\r\n\r\n"


def chunked_as(body: bytes, encoding: str) -> bytes:
    """A packed body in chunks of seven bytes, of which none is a member of its own."""
    head = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked\r\nContent-Encoding: " + encoding.encode())
    parts = [body[place : place + 7] for place in range(0, len(body), 7)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in parts) + b"0\r\n\r\n"


def sized(body: bytes, *headers: str) -> bytes:
    return status("200 OK", body, *headers, kind="text/event-stream")


END = piece(None, "stop") + usage(2) + DONE
TWO = piece("two") + END
ACCENT = piece("é").replace(rb"\u00e9", "é".encode())
OTHER = {"index": 1, "delta": {"content": "no"}, "finish_reason": "stop"}
FIRST = {"index": 0, "delta": {"content": "two"}, "finish_reason": None}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "1 + 1"}]}

ANSWERS = {
    "as the protocol says": (STREAM + TWO, "two"),
    "chunked": (chunked(*[bytes([each]) for each in TWO]), "two"),
    "with a length": (sized(TWO), "two"),
    "packed": (sized(gzip.compress(TWO), "Content-Encoding: gzip"), "two"),
    "packed in several members": (
        chunked_as(b"".join(gzip.compress(each) for each in (TWO[:9], TWO[9:40], TWO[40:])), "gzip"), "two"
    ),
    "carriage returns": (STREAM + TWO.replace(b"\n", b"\r\n"), "two"),
    "carriage returns alone": (STREAM + TWO.replace(b"\n", b"\r"), "two"),
    "no space behind data:": (STREAM + TWO.replace(b"data: ", b"data:"), "two"),
    "comments and other fields": (STREAM + b": ping\n\n" + TWO.replace(b"data", b"id: 1\nretry: 9\n:x\ndata"), "two"),
    "a chunk over several lines": (STREAM + TWO.replace(b'"choices": [', b'"choices":\ndata: ['), "two"),
    "a letter cut in two": (chunked(*[bytes([each]) for each in ACCENT], END), "é"),
    "no end of the stream": (STREAM + piece("two") + piece(None, "stop") + usage(2), "two"),
    "no last empty line": (STREAM + piece("two") + piece(None, "stop").rstrip(), "two"),
    "silence behind the end": ([STREAM + piece("two") + piece(None, "stop"), None], "two"),
    "broken off behind the end": (chunked(piece("two"), piece(None, "stop"))[:-5] + b"ZZ", "two"),
    "nulls": (STREAM + event(choices=None) + event(choices=[{"delta": None, "finish_reason": None}]) + TWO, "two"),
    "no index": (STREAM + TWO.replace(b'"index": 0, ', b""), "two"),
    "two choices": (STREAM + event(choices=[OTHER, FIRST]) + END, "two"),
    "an empty end before the end": (STREAM + TWO.replace(b": null}]", b': ""}]'), "two"),
    "parts": (STREAM + piece([{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}]) + END, "two"),
    "thinking in parts": (STREAM + piece([THOUGHT]) + piece("two") + END, "<think>1 + 1</think>two"),
    "thinking and text in one piece": (STREAM + piece("two", reasoning="1 + 1") + END, "<think>1 + 1</think>two"),
    "something behind the stream": (STREAM + TWO + piece("late", "error"), "two"),
    "usage in each chunk": (STREAM + TWO.replace(b'null}]}', b'null}], "usage": {"completion_tokens": 1}}'), "two"),
    "an empty answer": (STREAM + piece(None, "stop") + usage(1) + DONE, ""),
    "fields of a provider's own that say nothing bad": (
        STREAM + event(
            choices=[FIRST | {
                "stop_reason": 151645, "native_finish_reason": "STOP", "matched_stop": "</s>",
                "content_filter_results": {"hate": {"filtered": False, "severity": "safe"}},
            }],
            base_resp={"status_code": 0, "status_msg": ""}, status="in_progress", system_fingerprint="fp_error_free",
        ) + END, "two",
    ),
    "a flood of counts behind the end": (
        [STREAM + piece("two") + piece(None, "stop") + usage(2), repeat(usage(2), 3000)], "two"
    ),
    "a flood of comments behind the end": (
        [STREAM + piece("two") + piece(None, "stop") + usage(2), repeat(b": " + b"x" * 9999 + b"\n\n", 900)], "two"
    ),
    "the limit": (STREAM + piece("two") + piece(None, "length") + usage(2) + DONE, "two"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_protocol_allows_is_the_answer(name: str) -> None:
    reply, text = ANSWERS[name]
    run, found = outcome_of(*(reply if isinstance(reply, list) else [reply]))
    assert (found, run.ended) == (text, name != "the limit")


COUNTS = {
    "none": (b"", 1, ServedNotes(is_counted=False)),
    "nulls": (usage(None, None), 1, ServedNotes(is_counted=False)),
    "texts": (usage("2", "5"), 1, ServedNotes(is_counted=False, are_counts_possible=False)),
    "negative": (usage(-2, -5), 1, ServedNotes(is_counted=False, are_counts_possible=False)),
    "nothing": (usage(0, 0), 1, ServedNotes(is_counted=False, are_counts_possible=False)),
    "more than was asked for": (usage(90), 1, ServedNotes(is_counted=False, are_counts_possible=False)),
    "a truth value": (usage(True), 1, ServedNotes(is_counted=False, are_counts_possible=False)),
    "not an object": (event(usage=[7]), 1, ServedNotes(is_counted=False)),
    "more thinking than tokens": (
        usage(2, completion_tokens_details={"reasoning_tokens": 999}), 2, ServedNotes(are_counts_possible=False)
    ),
    "a prompt of a sextillion": (usage(2, 10**21), 2, ServedNotes(are_counts_possible=False)),
    "a prompt beyond floats": (usage(2, 10**400), 2, ServedNotes(are_counts_possible=False)),
    "a cache beyond floats": (
        usage(2, prompt_tokens_details={"cached_tokens": 10**400}), 2, ServedNotes(are_counts_possible=False)
    ),
    "a cache": (usage(2, prompt_tokens_details={"cached_tokens": 4}), 2, ServedNotes(cached_tokens=4)),
    "another model": (usage(2) + event(model="cheaper"), 2, ServedNotes(answered_by="cheaper")),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_cannot_be_are_left_out(name: str) -> None:
    counts, tokens, notes = COUNTS[name]
    run, text = outcome_of(STREAM + piece("two") + piece(None, "stop") + counts + DONE)
    assert (text, len(run.token_ids), run.served) == ("two", tokens, notes)


@pytest.mark.parametrize(("tokens", "decode_is_known"), [(1, False), (2, True)])
def test_more_pieces_than_tokens_divide_by_nothing(tokens: int, decode_is_known: bool) -> None:
    run, text = outcome_of(STREAM + piece("f") + piece("our") + piece("teen", "stop") + usage(tokens) + DONE)
    assert (text, len(run.token_ids), run.inter_token_s) == ("fourteen", tokens, ())
    assert run.served is not None and run.served.is_recut
    assert (run.tpot_s is not None, run.decode_s is not None) == (decode_is_known, decode_is_known)


@pytest.mark.parametrize(("limit", "is_too_long"), [(2, True), (3, False)])
def test_an_answer_of_more_tokens_than_were_asked_for_is_noted(limit: int, is_too_long: bool) -> None:
    whole = STREAM + piece("a") + piece(" b") + piece(" c", "stop") + usage(3) + DONE
    run, text = outcome_of(whole, limit=limit)
    assert (text, run.served) == ("a b c", ServedNotes(is_too_long=is_too_long))


def choice(**fields: Any) -> bytes:
    return STREAM + event(choices=[{"index": 0, **fields}]) + END


FAULTS = {
    "an error as the end": (STREAM + piece("t") + piece("", "error"), "ended its answer with an error$"),
    "a filter": (STREAM + piece("t") + piece(None, "content_filter"), "because its content filter took it$"),
    "a tool": (STREAM + piece(None, tool_calls=[{"index": 0}]) + piece(None, "stop"), "with the call of a tool$"),
    "the end of a tool": (STREAM + piece("t", "tool_calls"), "with the call of a tool$"),
    "an unknown end": (STREAM + piece("t", "abort"), r"not known as an end of an answer \(abort\)$"),
    "an end of another type": (STREAM + piece("t", 7), "a piece that cannot be read .*finish_reason.*valid string"),
    "a refusal": (STREAM + piece(None, refusal="I cannot") + END, "refused to answer: I cannot$"),
    "a refusal as a part": (STREAM + piece([{"type": "refusal", "refusal": "No"}]), "refused to answer: No$"),
    "an unknown part": (STREAM + piece([{"type": "image_url"}]) + END, "cannot be read .*'image_url'"),
    "a number as text": (STREAM + piece(5) + END, "a piece that cannot be read .*content"),
    "no JSON": (STREAM + b'data: {"choices":[\n\n' + DONE, "a piece that cannot be read .*JSON"),
    "a list": (STREAM + b"data: [1]\n\n", "a piece that cannot be read .*object"),
    "deep JSON": (STREAM + b"data: " + b"[" * 100_000 + b"\n\n", "a piece that cannot be read"),
    "no letters": (STREAM + TWO.replace(b"two", b"\xff\xfe"), "a piece that cannot be read"),
    "half a letter": (STREAM + TWO.replace(b"two", rb"\ud800"), "a piece that cannot be read"),
    "an error in the stream": (STREAM + piece("t") + event(error={"message": "out of\nmemory"}), ": out of$"),
    "an error of a choice": (choice(error={"code": 502, "message": "upstream"}), "broke off its answer: upstream$"),
    "an event named error": (STREAM + b'event: error\ndata: {"message": "boom"}\n\n', "its answer: boom$"),
    "an older error": (STREAM + b'error: {"message": "slot"}\n\n', "broke off its answer: slot$"),
    "an object that is an error": (STREAM + event(object="error", message="no"), "broke off its answer: no$"),
    "a whole answer in an event": (choice(message={"content": "two"}, finish_reason="stop"), "a whole answer in one"),
    "a provider's own end": (choice(native_finish_reason="SAFETY", finish_reason="stop"), "failed: native.*: SAFETY$"),
    "a provider's filter": (
        choice(content_filter_results={"hate": {"filtered": True}}, finish_reason="stop"), "failed: filtered: True$"
    ),
    "a provider's status": (
        STREAM + event(base_resp={"status_code": 1002, "status_msg": "rate"}) + END, "failed: status_code: 1002$"
    ),
    "a failed status": (STREAM + piece("t") + event(choices=[], status="failed") + END, "failed: status: failed$"),
    "a tool behind the end": (STREAM + piece("t", "stop") + piece(None, tool_calls=[{"index": 0}]), "call of a tool$"),
    "a second end": (STREAM + piece("t", "length") + piece(None, "content_filter"), "because its content filter took"),
    "two ends": (STREAM + piece("t", "length") + piece(None, "stop"), "ended its answer twice, by length and stop$"),
    "a reason without choices": (STREAM + piece("t") + event(detail="worker died"), "broke off .*: worker died$"),
    "another role": (STREAM + event(choices=[{"index": 0, "delta": {"role": "tool", "content": "x"}}]), "role tool"),
    "another choice alone": (STREAM + event(choices=[OTHER]) + DONE, "after 0 pieces; see the server's log$"),
    "text behind the end": (STREAM + piece("two", "stop") + piece("!") + DONE, "more text behind the end"),
    "no end": (STREAM + piece("two") + DONE, "broke off its answer after 1 piece; see the server's log$"),
    "nothing": (STREAM, "broke off its answer after 0 pieces; see the server's log$"),
    "a page": (status("200 OK", b"<html>login</html>"), "a page of HTML and no stream: '<html>login</html>'; correct"),
    "a page said to be a stream": (STREAM + b"<!doctype html>\n<p>hi", "a page of HTML and no stream"),
    "no stream": (
        status("200 OK", json.dumps({"choices": [{"message": {"content": "two"}}]}).encode()),
        "JSON in one piece though a stream was asked for: '{.*let it stream",
    ),
    "lines of JSON": (STREAM + b'{"response": "two"}\n{"done": true}\n', "lines of JSON and no stream of events"),
    "two lines of messages": (
        STREAM + b'{"message": {"content": "two"}}\n{"message": {"content": ""}, "done": true}\n',
        "lines of JSON and no stream of events",
    ),
    "JSON over several lines": (
        status("200 OK", json.dumps({"choices": [{"message": {"content": "two"}}]}, indent=1).encode()),
        "JSON in one piece though a stream was asked for",
    ),
    "an error with status 200": (status("200 OK", b'{"error": {"message": "no memory"}}'), "an error: no memory; see"),
    "text": (status("200 OK", b"it works"), "sent no stream of events: 'it works'"),
    "a key": (status("401 No", b'{"error": {"message": "bad key: x\\u001b[2J"}}'), r"HTTP 401: bad key: x\\x1b\[2J$"),
    "a page of another path": (status("404 No", b"<html>nope"), "HTTP 404, with a page of HTML: '<html>nope'$"),
    "a large error": (status("500 No", b"E" * 200_000), "HTTP 500: EEE.*characters.; see the server's log$"),
    "another host": (status("307 T", b"", "Location: http://x.invalid/v1?k=9"), "to http://x.invalid/v1 that is not"),
    "a wait that is too long": (
        status("429 No", b'{"error": "slow down"}', "Retry-After: 100000"),
        "HTTP 429: slow down; it asks to wait 100000 s, and at most 60 s are waited$",
    ),
    "no wait": (status("503 No", b"busy", "Retry-After: soon"), "HTTP 503: busy$"),
    "noise": (b"\x00\xff\x80noise\r\n\r\n", r"gave no answer in HTTP \(BadStatusLine"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", r"gave no answer in HTTP \(BadStatusLine: SSH-2.0"),
    "nothing at all": (b"", r"gave no answer in HTTP \(RemoteDisconnected"),
    "a head without end": ([b"HTTP/1.1 200 OK\r\nX: ", repeat(b"a" * 65536, 99)], "gave no answer in HTTP"),
    "broken chunks": (chunked(b"").replace(b"0\r\n", b"ZZ\r\n"), "broke off its answer"),
    "an unknown packing": (sized(TWO, "Content-Encoding: br"), "packed its answer as 'br'"),
    "a broken packing": (sized(TWO, "Content-Encoding: gzip"), "broke off its answer .*incorrect header"),
    "a packed flood": (
        sized(gzip.compress((b": " + b"x" * 9997 + b"\n") * 2000), "Content-Encoding: gzip"), "more than 5 MB"
    ),
    "a flood": ([STREAM, repeat(piece("two "))], "1065 pieces where at most 5 tokens were asked for"),
    "a flood of nothing": ([STREAM, repeat(event(choices=[]))], "1065 pieces where at most 5 tokens"),
    "a flood of comments": ([STREAM, repeat(b": " + b"x" * 9999 + b"\n\n")], "more than 5 MB where at most 5 tokens"),
    "a line without end": ([STREAM + b"data: ", repeat(b"x" * 65536, 99)], "a line of more than 1 MB"),
    "one huge piece": (STREAM + piece("z" * 200_000) + END, "more text where at most 5 tokens were asked for"),
    "a count of a milliard": (STREAM + piece("two", "stop") + usage(10**9) + DONE, "counts 1000000000 tokens .* 5"),
    "silence": ([None], "has not answered in time"),
    "silence in the head": ([STREAM[:20], None], "has not answered in time"),
    "silence in the answer": ([STREAM + piece("two"), None], "has not answered in time"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_answer_is_one_line(name: str) -> None:
    reply, reason = FAULTS[name]
    with pytest.raises(SampleError, match=reason) as caught:
        outcome_of(*(reply if isinstance(reply, list) else [reply]))
    line = str(caught.value)
    assert line.startswith("m at 127.0.0.1:") and "\n" not in line and len(line) < 600 and "Error(" not in line


def dripping(part: bytes) -> Iterator[bytes]:
    yield STREAM
    while True:
        time.sleep(0.05)
        yield part


@pytest.mark.parametrize(("part", "reason"), [(b": ping\n\n", r"s without a word\)$"), (piece("a "), r"\(0\.\d+ s\)$")])
def test_neither_signs_of_life_nor_pieces_without_an_end_are_an_answer(part: bytes, reason: str) -> None:
    with pytest.raises(SampleError, match=f"has not answered in time .*{reason}"):
        outcome_of(dripping(part))


def opened(*replies: Part | list[Part], limit_s: float = LIMIT_S) -> EndpointModel:
    """The model where the first requests are answered so, and later ones well."""
    left = [each if isinstance(each, list) else [each] for each in replies]
    with serving_bytes(lambda body: left.pop(0) if left else [GOOD]) as server:
        return EndpointModel.unasked("m", served_models([f"s={server.url}"], ["m"]), None, limit_s=limit_s).probed()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ([None], "has not answered in time"),
        (
            b"SSH-2.0-OpenSSH_9.6\r\n",
            "gave no answer in HTTP .*; correct --endpoint, its port or http and https, or see",
        ),
        (status("404 No", b"<html>"), "with a page of HTML: '<html>'; correct --endpoint and --model$"),
        (status("302 T", b"", "Location: http://localhost:1/v1"), "redirect to .*; give the address that it names as"),
        (status("302 T", b"", "Location: file:///etc/passwd"), "file:///etc/passwd that is not followed; give the"),
    ],
)
def test_the_first_request_is_bounded_as_all_are(reply: Part | list[Part], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        opened(reply)


def test_another_path_of_the_same_server_is_taken_once_and_for_all() -> None:
    assert opened(status("308 T", b"", "Location: /v2/chat?x=1")).connections["s"].address.path == "/v2/chat?x=1"
    again = status("308 T", b"", "Location: /v1/chat/completions")
    with pytest.raises(ConfigurationError, match="a redirect to /v1/chat/completions that is not followed; give"):
        opened(*[again] * 9)


@pytest.mark.parametrize("line", ["429 Too Many Requests", "503 Busy"])
def test_a_wait_that_the_server_asks_for_is_not_timed(line: str) -> None:
    """Of 0.2 s in two waits nothing is in the run, whose marks are its own."""
    left = [status(line, b"{}", "Retry-After: 0.1"), status(line, b"{}", "Retry-After: 0")]
    looks = list[str]()
    with serving_bytes(lambda body: [left.pop(0) if left and len(server.requests) > 1 else GOOD]) as server:
        model = EndpointModel.unasked("m", served_models([f"s={server.url}"], ["m"]), None).probed()
        model.while_waiting(lambda waited_s, what: looks.append(what))
        run = run_staged(model, {"prompt": "what?"}, 5)
        assert run.total_s < 0.15 and len(server.requests) == 4
        assert "asks to wait 0.1 s, and is waited for" in looks[0]
        # At a rate it would come when nothing is due.
        left.append(status(line, b"{}", "Retry-After: 1"))
        model.connections["s"].may_wait = False
        with pytest.raises(SampleError, match="it asks to wait 1 s, and none waits at a rate"):
            run_staged(model, {"prompt": "what?"}, 5)


def test_whoever_looks_at_a_wait_can_end_it() -> None:
    def look(waited_s: float, what: str) -> None:
        raise Stopped(f"stopped after {waited_s:.0f} s of {what}")

    with serving_bytes(lambda body: [GOOD if body["messages"][0]["content"] == "Hi" else None]) as server:
        model = EndpointModel.unasked("m", served_models([f"s={server.url}"], ["m"]), None).probed()
        model.while_waiting(look)
        with pytest.raises(Stopped, match="stopped after 0 s of m at 127.0.0.1:"):
            run_staged(model, {"prompt": "what?"}, 5)
