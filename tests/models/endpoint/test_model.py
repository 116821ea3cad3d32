"""Requests to a server, and what becomes of its faults, over real sockets."""

import base64
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import psutil
import pytest
from PIL import Image

from experiment_core_utils.config.served import ServedModel, served_models
from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.knobs.registry import all_knobs, unregister_knob
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.measuring.sample_runs import check_proof
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.endpoint.model import EndpointModel
from experiment_core_utils.models.interface import Concurrent, Inspectable, Served, Stepwise, Switchable
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.errors import ConfigurationError, KnobDidNotAct, SampleError, SampleTimedOut
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.tasks.interface import Sample
from tests.processes.openai_server import OpenAIServer, Reply, serving

WIDE, TALL = Image.new("RGB", (60, 20), "red"), Image.new("RGB", (9, 30), "blue")


def sample(*pictures: Image.Image) -> Sample:
    first, further = (pictures[0], pictures[1:]) if pictures else (None, ())
    return Sample(1, "p", "what?", ("red",), first, "colour", further_images=further)


def model_at(*servers: OpenAIServer, system_prompt: str | None = None) -> EndpointModel:
    served = served_models([f"s{number}={each.url}" for number, each in enumerate(servers)], ["m"])
    return EndpointModel.unasked("m", served, system_prompt).probed()


@contextmanager
def answering(*replies: Reply) -> Iterator[tuple[EndpointModel, OpenAIServer]]:
    """A model whose server gives these replies, the probe not counted, the last one again and again."""
    left = [Reply(), *replies]
    with serving(lambda request: left.pop(0) if len(left) > 1 else left[0]) as server:
        yield model_at(server), server


def asked(model: EndpointModel, *pictures: Image.Image, prompt: str = "what?") -> None:
    run_staged(model, model.prepare(sample(*pictures), prompt, None).inputs, 5)


def sizes_of(request: dict[str, Any]) -> list[tuple[int, int]]:
    urls = [each["image_url"]["url"] for each in request["messages"][-1]["content"] if each["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size for url in urls]


def test_a_request_carries_what_the_setting_says() -> None:
    with answering(Reply()) as (model, server):
        asked(model)
        assert server.requests[-1] == {
            "model": "m",
            "messages": [{"role": "user", "content": "what?"}],
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        model.end_answers_at(["\n\n"], ignore_eos=False)
        with model.apply(Setting.of(picture_side=30, answer_limit=3, reasoning_effort="low")):
            asked(model, WIDE, TALL, prompt="is <image 2> or <image 1> red?")
        sent = server.requests[-1]
        assert (sent["max_tokens"], sent["reasoning_effort"], sent["stop"]) == (3, "low", ["\n\n"])
        parts = sent["messages"][0]["content"]
        assert [each.get("text", each["type"]) for each in parts] == ["is ", "image_url", " or ", "image_url", " red?"]
        # 60 x 20 becomes 30 x 10; the tall one is no longer than 30.
        assert sizes_of(sent) == [(9, 30), (30, 10)]


@pytest.fixture
def own_fields() -> Iterator[None]:
    """No field of a request that a test names stays a knob."""
    yield
    for knob in all_knobs():
        if knob.name.startswith("request."):
            unregister_knob(knob.name)


SETTING = {"request.a.top_k": 5, "request.a.min_p": 0.5}


def following(request: dict[str, Any]) -> Reply:
    """A server whose prompts are longer by `top_k`, and that does not know `min_p`."""
    return Reply(prompt_tokens=11 + request.get("a", {}).get("top_k", 0))


@pytest.mark.usefixtures("own_fields")
def test_a_field_acted_where_the_servers_counts_or_answers_differ() -> None:
    with serving(following) as server:
        model = model_at(server)
        inputs = model.prepare(sample(), "what?", None).inputs
        setting = Setting(SETTING)
        model.apply(setting)
        proof = model.prove(setting, inputs)
        asked = [each.get("a") for each in server.requests[1:]]
        # With both, then without each of them, in the order of their names.
        assert asked == [{"min_p": 0.5, "top_k": 5}, {"top_k": 5}, {"min_p": 0.5}]
        assert proof.counted["request.a.top_k"] == {
            "prompt_tokens": [16, 11], "output_tokens": [3, 3], "hidden_tokens": [0, 0], "differs": True
        }  # fmt: skip
        assert check_proof(proof, setting, model) == {
            "request.a.min_p": "the server's counts and answer are the same without it"
        }
        assert model.request(inputs, 5).count('"top_k": 5') == 1
        assert model.prove(Setting({}), inputs).counted == {}


@pytest.mark.usefixtures("own_fields")
@pytest.mark.parametrize(("seed", "reason"), [(0, None), (1, "the server's answers differ by themselves, too")])
def test_answers_that_differ_by_themselves_show_nothing(seed: int, reason: str | None) -> None:
    def reply(request: dict[str, Any]) -> Reply:
        by_chance = len(server.requests) * seed
        return Reply(pieces=("fif", "teen", str(by_chance)) if "x" in request else ("four", "teen", str(by_chance)))

    with serving(reply) as server:
        model, setting = model_at(server), Setting({"request.x": "on"})
        proof = model.prove(setting, model.prepare(sample(), "what?", None).inputs)
        assert len(server.requests) == 5
        assert check_proof(proof, setting, model) == ({} if reason is None else {"request.x": reason})


@pytest.mark.usefixtures("own_fields")
def test_a_field_that_the_server_refuses_is_a_fault_of_the_setting() -> None:
    def reply(request: dict[str, Any]) -> Reply:
        is_known = "x" not in request and request["messages"][0]["content"] != "none"
        return Reply() if is_known else Reply(status=400, message="unknown field x")

    with serving(reply) as server:
        model, setting = model_at(server), Setting({"request.x": 3})
        reason = "answered with HTTP 400: unknown field x; without request.x it answers; drop the value$"
        with pytest.raises(KnobDidNotAct, match=reason):
            model.prove(setting, model.prepare(sample(), "what?", None).inputs)
        # A request that is refused without it, too, is one of its sample.
        with pytest.raises(SampleError, match="HTTP 400: unknown field x$"):
            model.prove(setting, model.prepare(sample(), "none", None).inputs)
        assert '"x"' not in model.request({"prompt": "what?"}, 5)


def test_a_system_prompt_comes_first() -> None:
    with serving() as server:
        asked(model_at(server, system_prompt="Be brief."))
    assert server.requests[-1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_the_connection_is_open_before_a_request_is_timed() -> None:
    class Marks(HostMarks):
        found: ClassVar[list[int]] = []

        def mark(self) -> None:
            super().mark()
            connections = psutil.Process().net_connections("tcp")
            self.found.append(sum(bool(each.raddr) and each.raddr.port == server.port for each in connections))

    with serving() as server:
        model = model_at(server)
        inputs = model.prepare(sample(), "what?", None).inputs
        for _ in range(3):
            run_staged(model, inputs, 5, marks := Marks())
            assert marks.found[0] == 1
            marks.found.clear()
    assert (len(server.requests), server.num_others) == (4, 0)


def test_each_variant_asks_its_own_server() -> None:
    with serving() as one, serving(lambda request: Reply(pieces=("six",))) as other:
        model = model_at(one, other)
        texts = []
        for name in ("s0", "s1"):
            model.apply(Setting.of(variant=name))
            run = run_staged(model, model.prepare(sample(), "what?", None).inputs, 5)
            texts.append(model.decode_text(run.token_ids))
        assert texts == ["fourteen", "six"] and len(one.requests) == len(other.requests) == 2


def test_prompt_tokens_are_the_servers_and_their_parts_are_not_known_with_a_picture() -> None:
    with answering(Reply()) as (model, _):
        alone, seen = (model.prepare(sample(*pictures), "what?", None) for pictures in ((), (WIDE,)))
        run = run_staged(model, alone.inputs, 5)
        assert run.prompt_tokens == 11
        counted, whole = (each.shape.counted_by_server(11) for each in (alone, seen))
        assert (counted.text_tokens, counted.vision_tokens, counted.known_prompt_tokens) == (11, 0, 11)
        assert (whole.text_tokens, whole.vision_tokens, whole.known_prompt_tokens) == (None, None, 11)
        assert seen.shape.known_prompt_tokens is None


@pytest.mark.parametrize(
    ("pieces", "expected"), [(("f", "ourteen"), True), (("four", "te", "en"), False), (("fif", "teen"), False)]
)
def test_outputs_are_identical_by_text_and_length_however_their_pieces_are_cut(
    pieces: tuple[str, ...], expected: bool
) -> None:
    with answering(Reply(), Reply(pieces=pieces)) as (model, _):
        request = model.prepare(sample(), "what?", None)
        runs = tuple(run_staged(model, request.inputs, 5) for _ in range(2))
        assert len({run.token_ids for run in runs}) == 2
        record = sample_record(model, Setting({}), sample(), request, runs, 0.25)
    assert (record.outputs_identical, record.prediction) == (expected, "fourteen")


def test_what_a_server_does_not_show_is_not_offered() -> None:
    with answering(Reply()) as (model, _):
        assert isinstance(model, Served) and isinstance(model, Concurrent)
        assert not isinstance(model, Stepwise | Inspectable | Switchable)
        # The server runs in this very process, whose time is its own anyway.
        assert model.server_pids == ()
        assert set(model.describe()["execution_stages"].values()) == {"server"}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=500, message="no memory\nat 7"), "answered with HTTP 500: no memory; see the server's log$"),
        (Reply(status=500, message=""), "answered with HTTP 500 without a reason; see the server's log$"),
        (Reply(status=500, body="Internal Server Error"), "answered with HTTP 500: Internal Server Error; see the"),
        (Reply(status=422, body={"detail": [{"loc": ["stop"]}]}), r"answered with HTTP 422: \[{'loc': \['stop'\]}\]$"),
        (Reply(status=429, message="slow down"), "answered with HTTP 429: slow down$"),
        (Reply(is_cut_off=True), "broke off its answer after 2 pieces; see the server's log$"),
        (Reply(finish_reason=None, pieces=("four",)), "broke off its answer after 1 piece; see the server's log$"),
    ],
)
def test_a_fault_of_the_server_is_one_of_the_sample_and_the_next_is_asked(reply: Reply, reason: str) -> None:
    with answering(reply, Reply()) as (model, server):
        with pytest.raises(SampleError, match=f"m at 127.0.0.1:{server.port} {reason}"):
            asked(model)
        asked(model)


@pytest.mark.parametrize("reply", [Reply(status=500, message=""), Reply(finish_reason=None, pieces=())])
def test_the_fault_of_a_request_with_a_picture_asks_whether_the_model_takes_pictures(reply: Reply) -> None:
    reason = "; see the server's log, and whether the model takes pictures$"
    with answering(reply) as (model, _), pytest.raises(SampleError, match=reason):
        asked(model, WIDE)


def test_at_a_rate_a_server_may_drop_a_request_for_the_next() -> None:
    left = [Reply(), Reply(finish_reason=None)]
    with serving(lambda request: left.pop(0)) as server:
        model = EndpointModel.unasked("m", served_models([f"s={server.url}"], ["m"]), None, request_rate=2.0).probed()
        with pytest.raises(SampleError, match="a server may drop a request when the next one comes"):
            asked(model)


def test_a_time_limit_ends_the_wait_for_a_server() -> None:
    """The client catches whatever interrupts it; the limit is named all the same."""
    closing = threading.Event()
    with answering(Reply(wait=closing), Reply()) as (model, _):
        with pytest.raises(SampleTimedOut, match=r"not done after 0\.3 s"), time_limit(0.3):
            asked(model)
        closing.set()
        asked(model)


def test_an_answer_that_ends_in_spite_of_ignore_eos_is_refused() -> None:
    with answering(Reply(finish_reason="length"), Reply()) as (model, server):
        model.end_answers_at([], ignore_eos=True)
        asked(model)
        assert server.requests[-1]["ignore_eos"] is True
        with pytest.raises(SampleError, match="does not follow --ignore_eos; drop it"):
            asked(model)


def test_options_that_a_server_refuses_are_left_out_or_renamed() -> None:
    def reply(request: dict[str, Any]) -> Reply:
        if "stream_options" in request:
            return Reply(status=422, message="unknown field stream_options")
        if "max_tokens" in request:
            return Reply(status=400, message="use max_completion_tokens instead")
        return Reply()

    with serving(reply) as server:
        model = model_at(server)
        asked(model)
    assert server.requests[-1]["max_completion_tokens"] == 5
    assert [each["asks_for_usage"] for each in model.describe()["endpoints"]] == [False]


def test_a_model_that_the_server_does_not_have_is_a_fault_of_the_flags() -> None:
    reason = "HTTP 404: no such model; correct --endpoint and --model$"
    lacking = Reply(status=404, message="no such model")
    with serving(lambda request: lacking) as server, pytest.raises(ConfigurationError, match=reason):
        model_at(server)


def test_an_address_without_v1_is_found_by_its_404() -> None:
    lacking = Reply(status=404, body={"detail": "Not Found"})
    reason = "HTTP 404: Not Found; correct --endpoint, whose address usually ends in /v1, or --model$"
    with serving(lambda request: lacking) as server, pytest.raises(ConfigurationError, match=reason):
        EndpointModel.unasked("m", served_models([server.url.removesuffix("/v1")], ["m"]), None).probed()


def test_a_running_server_that_fails_is_not_to_be_started() -> None:
    failing = Reply(status=500, body="Internal Server Error")
    reason = "HTTP 500: Internal Server Error; see the server's log$"
    with serving(lambda request: failing) as server, pytest.raises(ConfigurationError, match=reason):
        model_at(server)


def test_a_server_that_is_not_there_is_to_be_started() -> None:
    with serving() as server:
        served = served_models([server.url], ["m"])
    with pytest.raises(ConfigurationError, match="cannot be reached .*; start the server, or correct --endpoint and"):
        EndpointModel.unasked("m", served, None).probed()


def test_a_key_that_the_server_does_not_know_is_named() -> None:
    refusal = Reply(status=401, message="bad key")
    reason = "HTTP 401: bad key; correct --endpoint, --model and the key in OPENAI_API_KEY$"
    with serving(lambda request: refusal) as server, pytest.raises(ConfigurationError, match=reason):
        model_at(server)


def test_at_a_rate_nothing_comes_but_the_requests_and_silence_ends_them() -> None:
    closing = threading.Event()
    served = served_models
    with serving(lambda request: Reply(wait=closing if len(server.requests) > 2 else None)) as server:
        model = EndpointModel.unasked("m", served([f"s={server.url}"], ["m"]), None, request_rate=2.0).probed()
        asked(model)
        assert (server.num_others, len(server.requests)) == (0, 2)
        model.patience.limit_s = 0.3
        with pytest.raises(SampleTimedOut, match="has not answered in time"):
            asked(model)
        closing.set()


def test_requests_beside_a_failed_one_are_waited_for() -> None:
    going = threading.Event()
    replies = {"slow": Reply(wait=going), "bad": Reply(status=500)}
    with serving(lambda request: replies.get(request["messages"][0]["content"], Reply())) as server:
        model = model_at(server)
        both = [model.prepare(sample(), prompt, None).inputs for prompt in ("bad", "slow")]
        timer = threading.Timer(0.5, going.set)
        timer.start()
        with pytest.raises(SampleError, match="HTTP 500"):
            model.answer_batch(both, 5)
        assert going.is_set()
        going.clear()
        # After a time-out they are not: this one would never come.
        with pytest.raises(SampleTimedOut, match=r"not done after 0\.3 s"), time_limit(0.3):
            model.answer_batch(both, 5)
        going.set()


_LISTENER = (
    "import socket; found = socket.socket(); found.bind(('127.0.0.1', 0)); found.listen(); "
    "print(found.getsockname()[1], flush=True); input()"
)


def test_the_processes_of_a_server_on_this_machine_are_found() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with serving() as server, subprocess.Popen([sys.executable, "-c", _LISTENER], **pipes) as listener:
        assert listener.stdout is not None
        url = f"http://127.0.0.1:{int(listener.stdout.readline())}/v1"
        model = model_at(server)
        model.connections["s0"].served = ServedModel("s0", url, "m")
        found = model.server_pids
        listener.communicate("\n")
    assert found == (listener.pid,)
