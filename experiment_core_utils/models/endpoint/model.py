"""A model behind servers that speak OpenAI's protocol, as the measuring loop needs it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import torch

from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.knobs.answer_limit import answer_limit_at
from experiment_core_utils.knobs.picture_side import PICTURE_SIDE
from experiment_core_utils.knobs.reasoning_effort import REASONING_EFFORT
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.variant import VARIANT
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.answer_ends import AnswerEnds
from experiment_core_utils.models.endpoint.address import listening_pids
from experiment_core_utils.models.endpoint.pictures import data_url, png_tensor
from experiment_core_utils.models.endpoint.stream import PieceIds, ServedEnds, received
from experiment_core_utils.models.hf.several_pictures import placed
from experiment_core_utils.models.interface import SERVER
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import Marks, NoMarks
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    ProfilerError,
    SampleError,
    SampleTimedOut,
    first_line,
    package_of_extra,
)
from experiment_core_utils.records.provenance import Model
from experiment_core_utils.records.requests import KnobProof, PreparedRequest, RequestShape, StageFlops, TimedTokens
from experiment_core_utils.tasks.interface import PromptFamily, Sample

# Servers without a key take any.
_API_KEY = "OPENAI_API_KEY"
_UNAUTHORISED, _NOT_FOUND, _SERVER_ERROR = 401, 404, 500
_PROBE = "Hi"
# What a server may refuse of a request that is the same without it.
_USAGE = {"stream_options": {"include_usage": True}}
# How servers call the limit of an answer; the second is the name for models that think.
_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"


@dataclass
class Connection:
    """One server with its model, and what its first answer showed."""

    served: ServedModel
    client: Any  #: an `openai.OpenAI`
    options: Mapping[str, Any] = field(default_factory=lambda: dict(_USAGE))  #: of every request beside its own
    limit_name: str = _LIMIT
    opens_before: bool = True  #: whether the connection is opened before a request, by one for nothing

    @property
    def where(self) -> str:
        """The server, as messages name it."""
        return f"{self.served.model} at {self.served.host}:{self.served.port}"

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        more: Mapping[str, Any],
        marks: Marks,
        ids: PieceIds,
    ) -> TimedTokens:
        """The likeliest answer (temperature 0), streamed; errors as of `faults_named`.

        Where it is opened before, it is open at the first mark: whatever the server answers to a request for nothing,
        it keeps it, while the client closes that of each stream.

        Args:
            more: what the request has beside messages and limit.
        """
        import openai

        options = {self.limit_name: limit, **self.options, **more}
        with faults_named(self.where, hint := self._hint(messages)):
            if self.opens_before:
                with suppress(openai.APIStatusError):
                    self.client.get("/", cast_to=object)
            marks.mark()
            asked = self.client.chat.completions.create(
                model=self.served.model, messages=messages, temperature=0, stream=True, **options
            )
            # A stream that is not read to its end is closed, so that the server goes on to what comes next.
            with asked as stream:
                return received(stream, marks, ids, self.where, hint)

    def _hint(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What to look at where the server itself fails."""
        parts = [part for each in messages if not isinstance(each["content"], str) for part in each["content"]]
        has_picture = any(part["type"] == "image_url" for part in parts)
        dropped = "; a server may drop a request when the next one comes (llama.cpp's Python server does)"
        return (
            f"; see the server's log{', and whether the model takes pictures' if has_picture else ''}"
            f"{'' if self.opens_before else dropped}"
        )

    def probe(self) -> None:
        """Ask for one token, and leave out or rename what the server refuses.

        Raises:
            ConfigurationError: it does not answer, or not as the protocol says.
        """
        try:
            self._probe()
        except SampleError as error:
            raise ConfigurationError(f"{error}{self._advice(error.__cause__)}") from error

    def _advice(self, cause: BaseException | None) -> str:
        """What to do where the first request failed; empty where the error says it itself."""
        import openai

        if isinstance(cause, openai.APIConnectionError):
            return "; start the server, or correct --endpoint and --model"
        if not isinstance(cause, openai.APIStatusError) or cause.status_code >= _SERVER_ERROR:
            return ""
        if cause.status_code == _UNAUTHORISED:
            return f"; correct --endpoint, --model and the key in {_API_KEY}"
        if cause.status_code == _NOT_FOUND and not urlsplit(self.served.url).path.rstrip("/").endswith("/v1"):
            return "; correct --endpoint, whose address usually ends in /v1, or --model"
        return "; correct --endpoint and --model"

    def _probe(self) -> None:
        try:
            self.answer([{"role": "user", "content": _PROBE}], 1, {}, NoMarks(), PieceIds())
        except SampleError as error:
            if "stream_options" in str(error) and self.options:
                self.options = {}
            elif _NEW_LIMIT in str(error) and self.limit_name != _NEW_LIMIT:
                self.limit_name = _NEW_LIMIT
            else:
                raise
            self._probe()


@contextmanager
def faults_named(where: str, hint: str = "") -> Iterator[None]:
    """A context in which what a server or its client raises is a SampleError that names the server.

    Args:
        hint: the end of the message where the server itself fails.

    Raises:
        SampleTimedOut: the server's time is up.
        SampleError: it cannot be reached, answers with an error, or breaks off.
    """
    import openai

    try:
        yield
    except openai.APITimeoutError as error:
        _raise_own_cause(error)
        raise SampleTimedOut(f"{where} has not answered in time") from error
    except openai.APIStatusError as error:
        status, reason = error.status_code, _reason_in(error.body)
        said = " without a reason" if reason is None else f": {reason}"
        end = hint if status >= _SERVER_ERROR else ""
        raise SampleError(f"{where} answered with HTTP {status}{said}{end}") from error
    except openai.APIConnectionError as error:
        _raise_own_cause(error)
        raise SampleError(f"{where} cannot be reached ({first_line(error.__cause__ or error)})") from error
    except openai.OpenAIError as error:
        _raise_own_cause(error)
        raise SampleError(f"{where} broke off its answer: {first_line(error)}{hint}") from error
    except ProfilerError:
        raise
    except Exception as error:
        # Of the client's transport, while the stream is read.
        _raise_own_cause(error)
        raise SampleError(f"{where} broke off its answer ({first_line(error)}){hint}") from error


def _reason_in(body: object) -> str | None:
    """The first line of what an error's body says, in OpenAI's or FastAPI's form or as plain text; None without one."""
    while isinstance(body, Mapping):
        body = next((body[name] for name in ("error", "message", "detail") if body.get(name)), None)
    lines = [] if body is None else str(body).strip().splitlines()
    return lines[0] if lines else None


def _raise_own_cause(error: BaseException) -> None:
    """Raises the project's error that a client's one hides: it catches whatever ends its waiting."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ProfilerError):
            raise cause
        cause = cause.__cause__ or cause.__context__


@dataclass
class EndpointModel:
    """Requests to servers, one or several at a time: a `Runnable`, and nothing of the model's inside."""

    name: str
    connections: Mapping[str, Connection]  #: by the name of the variant
    system_prompt: str | None = None
    concurrency: int = 1  #: see `Concurrent`
    request_rate: float | None = None  #: see `Concurrent`
    prompt_family: PromptFamily = "chat"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._ids = PieceIds()
        self.ends: AnswerEnds = ServedEnds(text_of=self._ids.text)
        self._setting = Setting({})
        self._timeout: dict[str, float] = {}

    @classmethod
    def connected(
        cls,
        name: str,
        served: Sequence[ServedModel],
        system_prompt: str | None,
        concurrency: int = 1,
        request_rate: float | None = None,
    ) -> "EndpointModel":
        """The model, once each of its servers has answered.

        Raises:
            ConfigurationError: the package openai is missing, or a server does not answer.
        """
        with package_of_extra("openai", "endpoint"):
            import openai
        key = os.environ.get(_API_KEY) or "none"
        connections = {
            each.name: Connection(
                each,
                openai.OpenAI(base_url=each.url, api_key=key, max_retries=0),
                # At a rate nothing comes but the requests.
                opens_before=request_rate is None,
            )
            for each in served
        }
        for each in connections.values():
            each.probe()
        return cls(name, connections, system_prompt, concurrency, request_rate)

    @property
    def server_pids(self) -> tuple[int, ...]:
        """See `Served`."""
        return tuple(sorted(set(chain(*listening_pids([each.served for each in self.connections.values()])))))

    def prepare(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        """See `Runnable.prepare`; pictures are PNG files, and what they become in the prompt the server alone knows."""
        clock = HostClock()
        started_s = clock.now_s()
        pictures = {f"picture_{number}": png_tensor(each) for number, each in enumerate(sample.images)}
        parts = None if pictures else 0
        shape = RequestShape(None, None, parts, parts, None, clock.now_s() - started_s)
        return PreparedRequest({"prompt": prompt, **pictures}, shape, prompt)

    def to_device(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Runnable.to_device`."""
        return inputs

    def apply(self, setting: Setting) -> AbstractContextManager[object]:
        """See `Runnable.apply`."""
        self._setting = setting
        return nullcontext()

    def warm_up(self, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """See `Runnable.warm_up`."""

    def generate_timed(self, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
        """See `Runnable.generate_timed`; raises SampleError or SampleTimedOut for what goes wrong at the server."""
        connection = self._connection
        limit = answer_limit_at(self._setting, max_new_tokens)
        answer = connection.answer(self._messages(inputs), limit, self._more(), marks, self._ids)
        if self.ends.are_ignored and answer.token_ids[-1] % 2:
            raise SampleError(f"{connection.where} ended its answer, and does not follow --ignore_eos; drop it")
        return answer

    def answer_batch(self, inputs_list: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[tuple[int, ...]]:
        """See `Runnable.answer_batch`; all of them at a time, each a request of its own.

        Raises:
            SampleError: one of them fails; those on their way are waited for, so that the next request is alone.
            SampleTimedOut: one of them, or all together, took too long; the others are not waited for.
        """

        def answer(inputs: Mapping[str, Any]) -> tuple[int, ...]:
            return self.generate_timed(inputs, max_new_tokens, NoMarks()).token_ids

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
        """See `Runnable.decode_text`; the pieces, joined."""
        return self.ends.text(token_ids)

    def prove(self, setting: Setting, inputs: Mapping[str, Any]) -> KnobProof:
        """See `Runnable.prove`; nothing inside the server is counted."""
        return KnobProof(None, None, None, None)

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        """See `Runnable.count_flops`; None."""
        return None

    def end_answers_at(self, stop: Sequence[str], ignore_eos: bool) -> None:
        """See `Runnable.end_answers_at`; requests carry both."""
        self.ends = replace(self.ends, stop=tuple(stop), are_ignored=ignore_eos)

    def limit_silence(self, seconds: float | None) -> None:
        """See `Concurrent.limit_silence`."""
        self._timeout = {} if seconds is None else {"timeout": seconds}

    def describe(self) -> Mapping[str, Any]:
        """See `Runnable.describe`; `endpoints` has the servers, and everything about weights is None."""
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

    @property
    def _connection(self) -> Connection:
        name = self._setting.value(VARIANT.name)
        return next(iter(self.connections.values())) if name is None else self.connections[name]

    def _more(self) -> dict[str, Any]:
        effort = self._setting.value(REASONING_EFFORT.name)
        more: dict[str, Any] = {} if effort == REASONING_EFFORT.at_rest else {"reasoning_effort": effort}
        if self.ends.stop and not self.ends.are_ignored:
            more["stop"] = list(self.ends.stop)
        return more | self._timeout | ({"extra_body": {"ignore_eos": True}} if self.ends.are_ignored else {})

    def _messages(self, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        side = self._setting.value(PICTURE_SIDE.name)
        pictures = [each for name, each in inputs.items() if name.startswith("picture_")]
        urls = [data_url(each, side if isinstance(side, int) else None) for each in pictures]
        parts = [
            {"type": "text", "text": each}
            if isinstance(each, str)
            else {"type": "image_url", "image_url": {"url": urls[each]}}
            for each in placed(inputs["prompt"], len(urls))
        ]
        user = {"role": "user", "content": parts if urls else inputs["prompt"]}
        return [user] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}, user]
