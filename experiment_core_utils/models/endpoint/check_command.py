"""What a server does, found in ten seconds: whether it streams, counts, caches, limits and repeats itself.

knobprof endpoint check http://localhost:8000/v1
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.served import ServedModel, served_models
from experiment_core_utils.models.endpoint.caches import WARM_RATIO, new_salt, warm_ratio
from experiment_core_utils.models.endpoint.client import Address, Bounds, Patience, Watch, body_reader
from experiment_core_utils.models.endpoint.floor import floor_line
from experiment_core_utils.models.endpoint.model import API_KEY, Connection
from experiment_core_utils.models.endpoint.stream import PieceIds
from experiment_core_utils.primitives.device import HostMarks
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import counted, hide, printable, shown
from experiment_core_utils.records.requests import TimedTokens

# In all, and of one request.
_WITHIN_S, _LIMIT_S = 10.0, 5.0
_TOKENS = 12
_QUESTION = "Count from one to ten in words."
# Several hundred tokens, of which a cache saves a time that can be seen.
_LONG = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
_ADVICE = "correct the address, which usually ends in /v1, or give --model NAME"


def models_of(address: Address, where: str) -> list[str]:
    """What a server calls its models, by its list of them; none where it has no list."""
    watch = Watch(where, Patience(_LIMIT_S), Bounds(_TOKENS))
    try:
        connection = address.connected(watch)
        connection.request("GET", address.path.replace("/chat/completions", "/models"), headers=address.headers)
        with connection.getresponse() as response:
            content = json.loads(b"".join(iter(body_reader(response, watch), b"")))
        return [each["id"] for each in content["data"] if isinstance(each["id"], str)]
    except (OSError, ValueError, LookupError, TypeError):
        return []


class Check:
    """Questions to one server until the time is up."""

    def __init__(self, served: ServedModel) -> None:
        self._ids, self._began_s = PieceIds(), time.monotonic()
        self.connection = Connection(served, Address(served.url, os.environ.get(API_KEY)), Patience(_LIMIT_S))
        self.connection.may_wait = False  # a limit of its rate is to be seen

    def asked(self, question: str, tokens: int = _TOKENS) -> tuple[TimedTokens, str, float]:
        """An answer, its text, and seconds to its first token.

        Raises:
            SampleError: there is none, or the time is up.
        """
        if time.monotonic() - self._began_s > _WITHIN_S:
            raise SampleError(f"not known within {_WITHIN_S:g} s")
        messages = [{"role": "user", "content": question}]
        found = self.connection.answer(messages, tokens, {}, marks := HostMarks(), self._ids)
        return found, self._ids.text(found.token_ids), marks.seconds()[0]

    def lines(self) -> Iterator[str]:
        """What is found, a line each; of what cannot be found the reason."""
        found, text, _ = self.asked(_QUESTION)
        notes = found.served
        assert notes is not None
        pieces = "one token a piece" if found.is_by_token else "several tokens or parts of one in a piece"
        yield f"streams: yes, {pieces}"
        counts = f"yes, {counted(len(found.token_ids), 'token')}, {found.prompt_tokens} of the prompt"
        yield f"counts: {counts if notes.is_counted else 'no usage that can be'}"
        is_kept = len(found.token_ids) <= _TOKENS + 1
        yield f"limits: {'keeps' if is_kept else 'does not keep'} {self.connection.limit_name} {_TOKENS}"
        yield f"calls itself: {notes.answered_by or self.connection.served.model}"
        yield self._line("repeats itself at temperature 0", lambda: self._repeats(text))
        yield self._line("caches", self._caches)
        yield self._line("limits its rate", self._limits)

    @staticmethod
    def _line(name: str, find: Callable[[], str]) -> str:
        try:
            return f"{name}: {find()}"
        except SampleError as error:
            return f"{name}: not known ({error})"

    def _repeats(self, text: str) -> str:
        same = [self.asked(_QUESTION)[1] == text for _ in range(2)]
        return "yes, 3 of 3 answers" if all(same) else f"no, {1 + sum(same)} of 3 answers"

    def _caches(self) -> str:
        ratio = warm_ratio(lambda salt: self.asked(f"{salt}{_LONG}", 1)[2])
        seen = f"a prompt that it has seen takes {ratio:.0%} of the time to the first token"
        return f"yes, {seen}; timed requests of a run are salted" if ratio < WARM_RATIO else "no prefix cache seen"

    def _limits(self) -> str:
        for number in range(8):
            try:
                self.asked(f"{new_salt()}Hi", 1)
            except SampleError as error:
                if "HTTP 429" in str(error):
                    return f"yes, after {counted(number, 'request')} at once: {error}"
                raise
        return "no, 8 requests one after another"


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Exit code: 0 answered, 2 there is no server that answers."""
    parser: argparse.ArgumentParser = OneLineParser(
        prog="python -m experiment_core_utils.models.endpoint.check_command",
        description="Find in ten seconds what a server of OpenAI's protocol does.",
        examples=("knobprof endpoint check http://localhost:8000/v1",),
    )
    parser.add_argument("url", metavar="URL", help="base of the server's paths, as for --endpoint")
    parser.add_argument("--model", metavar="NAME", help="what the server calls the model (default: its first one)")
    given = parser.parse_args(argv)
    (served,) = served_models([given.url], [given.model or "model"])
    hide(os.environ.get(API_KEY))
    names = models_of(Address(served.url, os.environ.get(API_KEY)), served.host)
    if given.model is None and names:
        served = ServedModel(served.name, served.url, names[0])
    check = Check(served)
    print(printable(f"models: {', '.join(map(shown, names[:5])) or 'no list of them'}"))
    try:
        check.connection.probe()
        for line in check.lines():
            print(printable(line), flush=True)
    except SampleError as error:
        raise ConfigurationError(f"{error}; {_ADVICE}") from error
    print(floor_line())


if __name__ == "__main__":
    sys.exit(run_command(main))
