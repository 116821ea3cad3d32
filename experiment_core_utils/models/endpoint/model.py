"""A model behind servers that speak OpenAI's protocol, as the measuring loop needs it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException, HTTPResponse
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import torch

from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.knobs.answer_limit import ANSWER_LIMIT, answer_limit_at
from experiment_core_utils.knobs.interface import KnobLimits
from experiment_core_utils.knobs.picture_side import PICTURE_SIDE
from experiment_core_utils.knobs.placebo import PLACEBO
from experiment_core_utils.knobs.registry import knob_named
from experiment_core_utils.knobs.request_knobs import RequestField, merged
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.variant import VARIANT
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.endpoint.address import listening_pids
from experiment_core_utils.models.endpoint.caches import CacheFinding, new_salt, warm_ratio
from experiment_core_utils.models.endpoint.chunks import first_bytes, read_chunk, reason_in
from experiment_core_utils.models.endpoint.client import (
    Address,
    AnswerIsOver,
    Bounds,
    Patience,
    Watch,
    asked_wait_s,
    body_reader,
    events,
)
from experiment_core_utils.models.endpoint.pictures import data_url, png_tensor
from experiment_core_utils.models.endpoint.stream import ArrivingAnswer, PieceIds, ServedEnds
from experiment_core_utils.models.hf.several_pictures import placed
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import HostMarks, Marks, NoMarks
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    KnobDidNotAct,
    ProfilerError,
    SampleError,
    SampleTimedOut,
    described,
    first_line,
)
from experiment_core_utils.primitives.texts import counted, hide, shown, without_secrets
from experiment_core_utils.records.caveats import Caveat
from experiment_core_utils.records.provenance import Model
from experiment_core_utils.records.requests import KnobProof, PreparedRequest, RequestShape, StageFlops, TimedTokens
from experiment_core_utils.records.stages import SERVER
from experiment_core_utils.tasks.interface import PromptFamily, Sample

API_KEY = "OPENAI_API_KEY"
_NOTHING_SEEN = KnobLimits(None, None, None)
# Knobs that more than a field of a request follows, and the control that nothing does.
_CARRIED = frozenset(knob.name for knob in (ANSWER_LIMIT, PICTURE_SIDE, VARIANT, PLACEBO))
_OK, _UNAUTHORISED, _NOT_FOUND, _SERVER_ERROR = 200, 401, 404, 500
_BUSY = (429, 503)
# A request that a server understands and does not take, by its standard or by that of FastAPI.
_NOT_AS_ASKED = (400, 422)
# How long a request waits in all where its server asks for it.
_LONGEST_WAIT_S, _LEAST_WAIT_S = 60.0, 0.1
_NO_HTTP = "gave no answer in HTTP"
# Of the body of an error.
_MOST_OF_AN_ERROR = 1 << 16
_PROBE = "Hi"
# The first request, and what a server may refuse of it.
_MOST_PROBES = 5
# Of what comes, where it turns out to be no stream.
_PIECES_SHOWN = 4
# What a server may refuse of a request that is the same without it.
_USAGE = {"stream_options": {"include_usage": True}}
# Of an answer that shows whether a field is followed, where nothing was warmed up.
_TOKENS_OF_A_PROOF = 16
# How servers call the limit of an answer; the second is the name for models that think.
_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"


class _Refused(SampleError):
    """A server answered with a status that is no answer."""

    def __init__(self, line: str, status: int, location: str | None = None, wait_s: float | None = None) -> None:
        super().__init__(line)
        self.status, self.location, self.wait_s = status, location, wait_s


@dataclass
class Connection:
    """One server with its model, and what its first answer showed."""

    served: ServedModel
    address: Address
    patience: Patience = field(default_factory=Patience)
    options: Mapping[str, Any] = field(default_factory=lambda: dict(_USAGE))  #: of every request beside its own
    limit_name: str = _LIMIT
    #: whether a request may wait before it is timed: for its connection, and where the server asks for it
    may_wait: bool = True

    @property
    def where(self) -> str:
        """The server, as messages name it."""
        return f"{self.served.model} at {self.served.host}:{self.served.port}"

    def body(self, messages: Sequence[Mapping[str, Any]], limit: int, more: Mapping[str, Any]) -> dict[str, Any]:
        """A request for the likeliest answer (temperature 0), streamed.

        Args:
            more: what the request has beside messages and limit.
        """
        own = {"model": self.served.model, "messages": messages, "temperature": 0, "stream": True}
        return {**own, self.limit_name: limit, **self.options, **more}

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        more: Mapping[str, Any],
        marks: Marks,
        ids: PieceIds,
    ) -> TimedTokens:
        """The answer to a request of `body`; where it may wait, its connection is open at the first mark, and a wait
        that the server asks for (HTTP 429 or 503 with Retry-After) is before it.

        Raises:
            SampleTimedOut: the server's time is up.
            SampleError: it cannot be reached, answers with an error or with what is no answer, or breaks off.
        """
        sent = json.dumps(self.body(messages, limit, more), ensure_ascii=False).encode("utf-8", "replace")
        has_pictures = any(not isinstance(each["content"], str) for each in messages)
        left_s = _LONGEST_WAIT_S if self.may_wait else 0.0
        while True:
            try:
                return self._answered(sent, limit, has_pictures, marks, ids)
            except _Refused as refused:
                wait_s = refused.wait_s
                if wait_s is None or refused.status not in _BUSY:
                    raise SampleError(str(refused)) from refused
                if wait_s > left_s:
                    most = f"at most {_LONGEST_WAIT_S:g} s are waited" if self.may_wait else "none waits at a rate"
                    raise SampleError(f"{refused}; it asks to wait {wait_s:g} s, and {most}") from refused
            marks.unmark()
            # A request that is answered so at once costs its server something, too.
            self.patience.wait(max(wait_s, _LEAST_WAIT_S), f"{self.where} asks to wait {wait_s:g} s, and is waited for")
            left_s -= max(wait_s, _LEAST_WAIT_S)

    def _answered(self, sent: bytes, limit: int, has_pictures: bool, marks: Marks, ids: PieceIds) -> TimedTokens:
        """The answer to one request; errors as of `answer`."""
        bounds = Bounds(limit)
        fault, hint = "cannot be reached", ""
        try:
            if not self.may_wait:
                marks.mark()
            watch = Watch(self.where, self.patience, bounds)
            with closing(self.address.connected(watch)) as connection:
                if self.may_wait:
                    marks.mark()
                fault = _NO_HTTP
                connection.request("POST", self.address.path, sent, self.address.headers)
                with closing(connection.getresponse()) as response:
                    fault, hint = "broke off its answer", self._hint(has_pictures)
                    read = body_reader(response, watch)
                    if response.status != _OK:
                        raise self._refusal(response, read, hint)
                    return self._read(read, watch, ArrivingAnswer(self.where, marks, bounds), ids, hint)
        except ProfilerError:
            raise
        except TimeoutError as error:
            raise SampleTimedOut(f"{self.where} {fault} in time ({first_line(error)}){hint}") from error
        except Exception as error:
            # Of the system, of `http.client`, which raises errors of many classes for odd bytes, or of unpacking.
            raise SampleError(f"{self.where} {fault} ({shown(described(error))}){hint}") from error

    def _read(
        self, read: Callable[[], bytes], watch: Watch, arriving: ArrivingAnswer, ids: PieceIds, hint: str
    ) -> TimedTokens:
        seen: list[bytes] = []

        def noted() -> bytes:
            piece = read()
            if len(seen) < _PIECES_SHOWN:
                seen.append(piece)
            return piece

        num_events = 0
        try:
            for name, data in events(noted, watch):
                num_events += 1
                if data.strip() == b"[DONE]":
                    break
                arriving.take(read_chunk(name, data, self.where))
                if arriving.finish_reason is not None and not watch.is_answered:
                    watch.close()
        except (AnswerIsOver, OSError, HTTPException):
            # What comes behind the end, or breaks off there, is no part of the answer.
            if arriving.finish_reason is None:
                raise
        if arriving.finish_reason is None:
            if not num_events and (found := b"".join(seen).strip()):
                raise SampleError(f"{self.where} {_no_stream(found)}")
            raise SampleError(f"{self.where} broke off its answer after {counted(len(arriving.pieces), 'piece')}{hint}")
        return arriving.timed_tokens(ids, self.served.model)

    def _refusal(self, response: HTTPResponse, read: Callable[[], bytes], hint: str) -> _Refused:
        """What a response says whose status is none of an answer."""
        body = b""
        while len(body) < _MOST_OF_AN_ERROR and (piece := read()):
            body += piece
        status, location = response.status, response.getheader("Location")
        line = f"{self.where} answered with HTTP {status}"
        if location is not None and status // 100 == 3:
            return _Refused(
                f"{line}, a redirect to {shown(without_secrets(location))} that is not followed", status, location
            )
        is_page = body.lstrip()[:1] == b"<"
        said = f", with a page of HTML: {first_bytes(body)}" if is_page else f": {reason_in(body)}"
        end = hint if status >= _SERVER_ERROR and status not in _BUSY else ""
        return _Refused(
            f"{line}{said if reason_in(body) else ' without a reason'}{end}", status, wait_s=asked_wait_s(response)
        )

    def _hint(self, has_pictures: bool) -> str:
        """What to look at where the server itself fails."""
        dropped = "; a server may drop a request when the next one comes (llama.cpp's Python server does)"
        return (
            f"; see the server's log{', and whether the model takes pictures' if has_pictures else ''}"
            f"{'' if self.may_wait else dropped}"
        )

    def probe(self) -> None:
        """Ask for one token; leave out or rename what the server refuses, and follow it to another path of its own.

        Raises:
            ConfigurationError: it does not answer, or not as the protocol says.
        """
        left = _MOST_PROBES
        while True:
            left -= 1
            try:
                self.answer([{"role": "user", "content": _PROBE}], 1, {}, NoMarks(), PieceIds())
                return
            except SampleError as error:
                if not left or not self._adapted(error):
                    raise ConfigurationError(f"{error}{self._advice(error)}") from error

    def _adapted(self, error: SampleError) -> bool:
        """Whether another form of the request may be what the server wants."""
        cause = error.__cause__
        location = cause.location if isinstance(cause, _Refused) else None
        path = None if location is None else self.address.redirected(location)
        if path is not None:
            self.address.path = path
        elif "stream_options" in str(error) and self.options:
            self.options = {}
        elif _NEW_LIMIT in str(error) and self.limit_name != _NEW_LIMIT:
            self.limit_name = _NEW_LIMIT
        else:
            return False
        return True

    def _advice(self, error: SampleError) -> str:
        """What to do where the first request failed; empty where the error says it itself."""
        cause = error.__cause__
        if isinstance(cause, OSError | HTTPException) and "cannot be reached" in str(error):
            return "; start the server, or correct --endpoint and --model"
        if isinstance(cause, OSError | HTTPException) and _NO_HTTP in str(error):
            return "; correct --endpoint, its port or http and https, or see the server's log"
        if not isinstance(cause, _Refused) or cause.status >= _SERVER_ERROR or cause.status in _BUSY:
            return ""
        if cause.location is not None:
            return "; give the address that it names as --endpoint"
        if cause.status == _UNAUTHORISED:
            return f"; correct --endpoint, --model and the key in {API_KEY}"
        if cause.status == _NOT_FOUND and not urlsplit(self.served.url).path.rstrip("/").endswith("/v1"):
            return "; correct --endpoint, whose address usually ends in /v1, or --model"
        return "; correct --endpoint and --model"


def _no_stream(body: bytes) -> str:
    """What a body is that has no event, and what to do."""
    if body[:1] == b"<":
        return (
            f"answered with a page of HTML and no stream: {first_bytes(body)}; "
            "correct --endpoint, whose address usually ends in /v1, or sign in"
        )
    if body[:1] != b"{":
        return f"sent no stream of events: {first_bytes(body)}; correct --endpoint, or see the server's log"
    if b'"choices"' not in body and b'"error"' in body:
        return f"answered with an error: {reason_in(body)}; see the server's log"
    first, _, more = body.partition(b"\n")
    if b'"message"' in body and not (more.strip() and _is_json(first)):
        return (
            f"answered with JSON in one piece though a stream was asked for: {first_bytes(body)}; times of tokens are "
            "not known: let it stream, or give another server"
        )
    return f"sent lines of JSON and no stream of events: {first_bytes(body)}; let it speak OpenAI's protocol"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Seen:
    """What shows of an answer."""

    prompt_tokens: int | None  #: by the server's count; None without one
    output_tokens: int
    hidden_tokens: int
    text: str


@dataclass
class EndpointModel:
    """Requests to servers, one or several at a time: a `Runnable`, and nothing of the model's inside."""

    name: str
    connections: Mapping[str, Connection]  #: by the name of the variant
    patience: Patience  #: of all requests
    system_prompt: str | None = None
    concurrency: int = 1  #: see `Concurrent`
    request_rate: float | None = None  #: see `Concurrent`
    prompt_family: PromptFamily = "chat"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._ids = PieceIds()
        self.ends: AnswerEnds = ServedEnds(text_of=self._ids.text)
        self._setting = Setting({})
        self._caches: dict[str, CacheFinding] = {}
        self._proof_tokens = _TOKENS_OF_A_PROOF

    @classmethod
    def unasked(
        cls,
        name: str,
        served: Sequence[ServedModel],
        system_prompt: str | None,
        concurrency: int = 1,
        request_rate: float | None = None,
        limit_s: float | None = None,
    ) -> "EndpointModel":
        """The model before its servers are asked anything.

        Args:
            limit_s: of the time of each request, the first ones among them; None takes that of `Patience`.
        """
        key, patience = os.environ.get(API_KEY), Patience(limit_s)
        hide(key)
        # At a rate a request that comes late would be another load.
        may_wait = request_rate is None
        connections = {
            each.name: Connection(each, Address(each.url, key), patience, may_wait=may_wait) for each in served
        }
        return cls(name, connections, patience, system_prompt, concurrency, request_rate)

    def probed(self) -> "EndpointModel":
        """This model, once each of its servers has answered; raises ConfigurationError where one does not."""
        for each in self.connections.values():
            each.probe()
        return self

    @property
    def server_pids(self) -> tuple[int, ...]:
        return tuple(sorted(set(chain(*listening_pids([each.served for each in self.connections.values()])))))

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        """Pictures are PNG files, and what they become in the prompt the server alone knows."""
        clock = HostClock()
        started_s = clock.now_s()
        pictures = {f"picture_{number}": png_tensor(each) for number, each in enumerate(sample.images)}
        parts = None if pictures else 0
        shape = RequestShape(None, None, parts, parts, None, clock.now_s() - started_s)
        return PreparedRequest({"prompt": prompt, **pictures}, shape, prompt)

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        """A knob acts by the request alone, so one of which that has nothing is refused."""
        for name, value in setting.values.items():
            knob = knob_named(name)
            if name not in _CARRIED and value != knob.own(_NOTHING_SEEN) and not knob.request_fields(value):
                raise ConfigurationError(
                    f"{knob.title} {knob.listed(value)} cannot be set at a server: a request has nothing of it "
                    "(`Knob.request_fields` says what it has); drop the knob, or give a model of this process"
                )
        self._setting = setting
        return nullcontext()

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Nothing is to be prepared; a proof asks for as many tokens."""
        self._proof_tokens = max_new_tokens

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        """What goes wrong at the server raises SampleError or SampleTimedOut."""
        return self._answer(inputs, max_new_tokens, marks, new_salt() if self.is_salted else "")

    def _answer(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks, salt: str = "") -> TimedTokens:
        connection, limit = self._connection, answer_limit_at(self._setting, max_new_tokens)
        answer = connection.answer(self._messages(inputs, salt), limit, self._more(), marks, self._ids)
        if self.ends.are_ignored and answer.token_ids[-1] % 2:
            raise SampleError(f"{connection.where} ended its answer, and does not follow --ignore_eos; drop it")
        return answer

    @property
    def is_salted(self) -> bool:
        found = self._caches.get(self._connection.served.name)
        return found is not None and found.is_there

    @property
    def caveats(self) -> list[Caveat]:
        return [caveat for found in self._caches.values() for caveat in found.caveats]

    def find_caches(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> Sequence[str]:
        lines = list[str]()
        for name in self.connections:
            # Of several servers each is a variant; one alone has no name.
            self.apply(Setting({VARIANT.name: name} if len(self.connections) > 1 else {}))
            try:
                self._caches[name] = self._cache(inputs_list, max_new_tokens)
                lines.append(self._caches[name].line(self.connections[name].where))
            except SampleError as error:
                lines.append(f"cache: not known, since {error}")
        return lines

    def _cache(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> CacheFinding:
        first, counts = inputs_list[0], list[int | None]()

        def first_token_s(salt: str) -> float:
            found = self._answer(first, 1, marks := HostMarks(), salt)
            counts.append(found.prompt_tokens)
            return marks.seconds()[0]

        found = CacheFinding(warm_ratio(first_token_s))
        if not found.is_there:
            return found
        answers = [
            [self._answer(inputs, max_new_tokens, NoMarks(), salt) for salt in ("", new_salt())]
            for inputs in inputs_list
        ]
        unsalted = answers[0][0].prompt_tokens
        tokens = {each - unsalted for each in counts if each is not None and unsalted is not None}
        changed = sum(self.decode_text(one.token_ids) != self.decode_text(other.token_ids) for one, other in answers)
        return replace(found, num_changed=changed, num_asked=len(answers), salt_tokens=tuple(sorted(tokens)))

    def request(self, inputs: Mapping[str, Any], max_new_tokens: int) -> str:
        """What is sent at the setting in force, and the name of the server."""
        connection, limit = self._connection, answer_limit_at(self._setting, max_new_tokens)
        return json.dumps([connection.served.name, connection.body(self._messages(inputs), limit, self._more())])

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        """See `Runnable.answer_batch`; all of them at a time, each a request of its own.

        Raises:
            SampleError: one of them fails; those on their way are waited for, so that the next request is alone.
            SampleTimedOut: one of them, or all together, took too long; the others are not waited for.
        """

        def answer(inputs: Mapping[str, Any]) -> tuple[int, ...]:
            return self._answer(inputs, max_new_tokens, NoMarks()).token_ids

        if len(inputs_list) == 1:
            return [answer(inputs_list[0])]
        pool, is_waiting = ThreadPoolExecutor(len(inputs_list)), False
        try:
            return list(pool.map(answer, inputs_list))
        except SampleError as error:
            is_waiting = not isinstance(error, SampleTimedOut)
            raise
        finally:
            pool.shutdown(wait=is_waiting, cancel_futures=True)

    def decode_text(self, token_ids: tuple[int, ...]) -> str:
        return self.ends.text(token_ids)

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """Nothing inside the server is counted: the request is asked with each field that it may not follow, and
        without.

        Raises:
            KnobDidNotAct: the server refuses the request because of the fields.
        """
        fields = [name for name in setting.values if isinstance(knob_named(name), RequestField)]
        if not fields:
            return KnobProof(None, None, None, None)
        try:
            answer = self._seen_at(setting, inputs)
        except SampleError as error:
            if not isinstance(error.__cause__, _Refused) or error.__cause__.status not in _NOT_AS_ASKED:
                raise
            self._seen_at(setting.replaced(**dict.fromkeys(fields)), inputs)
            raise KnobDidNotAct(f"{error}; without {', '.join(fields)} it answers; drop the value") from error
        counted = {name: self._difference(setting, name, inputs, answer) for name in fields}
        return KnobProof(None, None, None, None, counted=counted)

    def _difference(self, setting: Setting, name: str, inputs: Mapping[str, Any], answer: _Seen) -> dict[str, Any]:
        """What an answer shows of a field, as `RequestField.prove` reads it."""
        bare = setting.replaced(**{name: None})
        without, reason = self._seen_at(bare, inputs), "the server's counts and answer are the same without it"
        differs = answer != without
        # Where a prompt has other tokens, chance has no part in it.
        if differs and answer.prompt_tokens == without.prompt_tokens:
            differs = (self._seen_at(setting, inputs), self._seen_at(bare, inputs)) == (answer, without)
            reason = "the server's answers differ by themselves, too"
        names = ("prompt_tokens", "output_tokens", "hidden_tokens")
        counts = {count: [getattr(answer, count), getattr(without, count)] for count in names}
        return {**counts, "differs": differs, **({} if differs else {"reason": reason})}

    def _seen_at(self, setting: Setting, inputs: Mapping[str, Any]) -> _Seen:
        with self._at(setting):
            answer = self._answer(inputs, self._proof_tokens, NoMarks())
        text = self.decode_text(answer.token_ids)
        return _Seen(answer.prompt_tokens, len(answer.token_ids), answer.hidden_tokens, text)

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        return None

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        """Requests carry both."""
        self.ends = replace(self.ends, stop=tuple(stop), are_ignored=ignore_eos)

    def while_waiting(self, look: Callable[[float, str], None]) -> None:
        self.patience.look = look

    def describe(self) -> Mapping[str, Any]:
        """The key `endpoints` has the servers, and everything about weights is None."""
        unseen = dict.fromkeys(name for name in Model.model_fields if name not in ("name", "revision"))
        return {
            **unseen,
            "model_class": type(self).__name__,
            "execution_stages": {"vision": SERVER, "prefill": SERVER, "decode": SERVER},
            "decoding": {"stop": list(self.ends.stop), "ignore_eos": self.ends.are_ignored, "kept": {}, "left_out": {}},
            "endpoints": [
                {
                    "variant": name,
                    "host": each.served.host,
                    "port": each.served.port,
                    "model": each.served.model,
                    "asks_for_usage": bool(each.options),
                }
                for name, each in self.connections.items()
            ],
        }

    @contextmanager
    def _at(self, setting: Setting) -> Iterator[None]:
        """A context in which another setting is in force."""
        before = self._setting
        self.apply(setting)
        try:
            yield
        finally:
            self._setting = before

    @property
    def _connection(self) -> Connection:
        name = self._setting.values.get(VARIANT.name)
        return next(iter(self.connections.values())) if name is None else self.connections[name]

    def _more(self) -> dict[str, Any]:
        more = merged(*(knob_named(name).request_fields(value) for name, value in self._setting.values.items()))
        if self.ends.stop and not self.ends.are_ignored:
            more["stop"] = list(self.ends.stop)
        return more | ({"ignore_eos": True} if self.ends.are_ignored else {})

    def _messages(self, inputs: Mapping[str, Any], salt: str = "") -> list[dict[str, Any]]:
        side = self._setting.value(PICTURE_SIDE.name)
        pictures = [each for name, each in inputs.items() if name.startswith("picture_")]
        urls = [data_url(each, side if isinstance(side, int) else None) for each in pictures]
        parts = [
            {"type": "text", "text": each}
            if isinstance(each, str)
            else {"type": "image_url", "image_url": {"url": urls[each]}}
            for each in placed(inputs["prompt"], len(urls))
        ]
        if self.system_prompt is not None:
            system = {"role": "system", "content": f"{salt}{self.system_prompt}"}
            return [system, {"role": "user", "content": parts if urls else inputs["prompt"]}]
        salted = [{"type": "text", "text": salt}, *parts] if salt else parts
        return [{"role": "user", "content": salted if urls else f"{salt}{inputs['prompt']}"}]
