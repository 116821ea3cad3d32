"""The servers of `--endpoint` and the models of `--model`, as pairs with names."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from experiment_core_utils.knobs.variant import OWN, VARIANT_NAME
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import has_host, hide, without_secrets

T = TypeVar("T")
_GIVEN = re.compile(rf"(?:({VARIANT_NAME})=)?(https?://[^\s/].*)")


@dataclass(frozen=True)
class ServedModel:
    """A model at a server that speaks OpenAI's protocol."""

    name: str  #: of the two together, a value of the knob `variant`
    url: str  #: base of the server's paths, such as http://localhost:8000/v1
    model: str  #: what the server calls the model

    @property
    def host(self) -> str:
        """The server's address, without a password."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The server's port."""
        split = urlsplit(self.url)
        return split.port or (443 if split.scheme == "https" else 80)


def served_models(endpoints: Sequence[str], models: Sequence[str]) -> tuple[ServedModel, ...]:
    """The pairs of servers and models: one model at all servers, all models at one server, or each at its own.

    Args:
        endpoints: URLs, with NAME= in front where a name is given.

    Raises:
        ConfigurationError: no URL, other numbers of both, or two pairs of one name.
    """
    found = [_GIVEN.fullmatch(each) for each in endpoints]
    for given, match in zip(endpoints, found, strict=True):
        if match is None or not has_host(match[2]):
            raise ConfigurationError(
                f"--endpoint {without_secrets(given)} is not an address of a server; give one such as "
                "http://localhost:8000/v1 or NAME=http://localhost:8000/v1"
            )
    servers = [(match[1], match[2].rstrip("/")) for match in found if match is not None]
    if 1 not in (len(servers), len(models)) and len(servers) != len(models):
        raise ConfigurationError(
            f"{len(servers)} addresses of --endpoint and {len(models)} names of --model do not go together; give one "
            "of either, or as many of both"
        )
    count = max(len(servers), len(models))
    pairs = zip(_repeated(servers, count), _repeated(models, count), strict=True)
    for url, _ in servers:
        split = urlsplit(url)
        for secret in (split.password or split.username, *(value for _, value in parse_qsl(split.query))):
            hide(None if secret is None else unquote(secret))
        if split.password:
            hide(unquote(f"{split.username or ''}:{split.password}"))
    made = [
        ServedModel(name or _name_of(url, model, len(servers) > 1, len(models) > 1), url, model)
        for (name, url), model in pairs
    ]
    names = [each.name for each in made]
    if OWN in names:
        raise ConfigurationError(f"--endpoint {OWN}=: {OWN} is the model of --model_path; give the server another name")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"two servers or models would be called {twice}; name each by --endpoint NAME=URL")
    return tuple(made)


@dataclass(frozen=True)
class ServeCommand:
    """A server that a run starts: a value of each `--set`."""

    name: str  #: such as `q-fp8`, a folder of results
    words: tuple[str, ...]  #: the program and its arguments


def serve_commands(command: str, assignments: Sequence[str]) -> tuple[ServeCommand, ...]:
    """The servers of `--serve` and `--set`, for every combination of values.

    A word that is `{NAME}` alone becomes the words of the value, none of an empty one; inside a word it is replaced.

    Raises:
        ConfigurationError: not NAME=V1,V2, a NAME that the command lacks, quotes that do not end, or two servers of one
            name.
    """
    values: dict[str, list[str]] = {}
    for each in assignments:
        name, sign, texts = each.partition("=")
        if not sign or not name.isidentifier() or name in values or f"{{{name}}}" not in command:
            raise ConfigurationError(
                f"--set {each} is not possible; give each NAME=V1,V2 once, and {{NAME}} in --serve for it"
            )
        values[name] = texts.split(",")
    commands = []
    for chosen in product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        try:
            words = [word for part in shlex.split(command) for word in _replaced(part, settings)]
        except ValueError as error:
            raise ConfigurationError(f"--serve {command} cannot be read as a command ({error}); correct it") from error
        name = "_".join(f"{each}-{re.sub('[^A-Za-z0-9.]+', '-', text).strip('-') or 'empty'}" for each, text in
                        settings.items())  # fmt: skip
        commands.append(ServeCommand(name, tuple(words)))
    names = [each.name for each in commands]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"two servers of --set would be called {twice}; drop one of the values")
    return tuple(commands)


def _replaced(word: str, settings: Mapping[str, str]) -> list[str]:
    if word[1:-1] in settings and word == f"{{{word[1:-1]}}}":
        return shlex.split(settings[word[1:-1]])
    for name, text in settings.items():
        word = word.replace(f"{{{name}}}", text)
    return [word]


def _repeated(values: Sequence[T], count: int) -> list[T]:
    return list(values) * count if len(values) == 1 else list(values)


def _name_of(url: str, model: str, has_servers: bool, has_models: bool) -> str:
    """What differs between the pairs: address and port, the model's name, or both."""
    place, own = urlsplit(url).netloc.rpartition("@")[2], model.rstrip("/").rpartition("/")[2]
    parts = [*[place] * (has_servers or not has_models), *[own] * has_models]
    return re.sub("[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-.") or "model"
