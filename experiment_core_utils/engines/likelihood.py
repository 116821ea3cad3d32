"""Log-probabilities of given continuations of a prompt, by a model's stages.

The prompt runs once for all of its continuations, which share its KV cache. A continuation of one token needs no
further step: the prompt's last logits have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from experiment_core_utils.engines.greedy import timed_vision
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import GenerationFailed, SettingError
from experiment_core_utils.records.requests import ScoredContinuation, TimedTokens

# Names of a scored request's tensors that no model takes: ids [N, L], filled with `_ABSENT`. Where there are contexts,
# continuation n follows its own, and otherwise the prompt.
CONTINUATIONS, CONTEXTS = "continuations", "contexts"
_ABSENT = -1
# Given tokens whose logits are computed in one pass.
MOST_GIVEN = 256


@dataclass(frozen=True)
class Window:
    """A prompt, and the continuations of it that are scored."""

    inputs: Mapping[str, Any]  #: the prompt's tensors on the device
    continuations: tuple[tuple[int, ...], ...]  #: ids, at least one each


class ScoredRequest(dict[str, Any]):
    """The tensors of a prompt on the device, whose continuations are scored in place of an answer.

    Attributes:
        host: the continuations, and their contexts, as they were prepared.
        windows: what runs, in order.
    """

    def __init__(self, sent: Mapping[str, Any], host: Mapping[str, torch.Tensor], along: Sequence[str] = ()) -> None:
        super().__init__(sent)
        self.host = dict(host)
        continuations = _rows(host[CONTINUATIONS])
        self.windows: tuple[Window, ...] = (Window(sent, tuple(continuations)),)
        if CONTEXTS in host:
            prompts = [_with_ids(sent, context, along) for context in _rows(host[CONTEXTS])]
            self.windows = tuple(Window(*each) for each in zip(prompts, ((row,) for row in continuations), strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(len(row) for window in self.windows for row in window.continuations)


def _with_ids(sent: Mapping[str, Any], ids: Sequence[int], along: Sequence[str]) -> dict[str, Any]:
    """The tensors of a prompt of text with other ids.

    Args:
        along: names of the tensors that have a value for each token, the same for all of a text.
    """
    given = torch.tensor([ids], device=sent["input_ids"].device)
    return {name: value[:, :1].expand(1, len(ids)) for name, value in sent.items() if name in along} | {
        "input_ids": given
    }


def split_request(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """The tensors on the host that a model takes, and those of continuations; the latter are {} where an answer is to
    be generated.
    """
    own = {name: inputs[name] for name in (CONTINUATIONS, CONTEXTS) if name in inputs}
    return ({name: value for name, value in inputs.items() if name not in own} if own else inputs), own


def continuation_tensors(
    continuations: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]] = ()
) -> dict[str, torch.Tensor]:
    """The tensors of continuations, and of their contexts where they have some, for a request on the host."""
    named = {CONTINUATIONS: continuations} | ({CONTEXTS: contexts} if contexts else {})
    return {name: _filled(rows) for name, rows in named.items()}


def _filled(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[_ABSENT] * (longest - len(row))] for row in rows])


def _rows(filled: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(token for token in row if token != _ABSENT) for row in filled.tolist()]


def scored_lengths(inputs: Mapping[str, Any]) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt of a scored request on the host, and of its different continuations; [] for any other."""
    if CONTINUATIONS not in inputs:
        return []
    continuations = _rows(inputs[CONTINUATIONS])
    if CONTEXTS in inputs:
        return [(len(c), [len(row)]) for c, row in zip(_rows(inputs[CONTEXTS]), continuations, strict=True)]
    return [(inputs["input_ids"].shape[1], [len(row) for row in dict.fromkeys(continuations)])]


@runtime_checkable
class ScoringStages(Protocol):
    """The stages of a model that a scored request needs."""

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """As of `GreedyStages`."""

    def prefill(self, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, Any]:
        """As of `GreedyStages`."""

    def follow_tokens(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        """Logits [k, V] after each of the next tokens [1, k], which are given; `rewind` takes back all k of them."""

    def rewind(self, state: Any, steps: int) -> None:
        """As of `Stepwise`."""


@torch.inference_mode()
def score_timed(model: ScoringStages, request: ScoredRequest, marks: Marks) -> TimedTokens:
    """The scores of a request's continuations, with a mark where a stage ends.

    Its prefill is that of the prompt with all continuations, up to their scores on the host; it has no decode.

    Raises:
        GenerationFailed: logits are not finite.
    """
    features, spans = timed_vision(model.encode_image, request, marks)
    scores = score_encoded(model, request, features)
    marks.mark()
    return TimedTokens((), (*spans, "prefill"), scores=scores)


@torch.inference_mode()
def score_encoded(model: ScoringStages, request: ScoredRequest, features: Any) -> tuple[ScoredContinuation, ...]:
    """The scores of a request whose picture is encoded already; errors as of `score_timed`."""
    return tuple(score for window in request.windows for score in _scores(model, window, features))


def _scores(model: ScoringStages, window: Window, features: Any) -> Iterator[ScoredContinuation]:
    """The scores of a window's continuations, in their order; those that are the same are computed once."""
    first, state = model.prefill(window.inputs, features)
    # What a stage leaves may be written over by the next one.
    first, found = first.clone(), dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]()
    given = 0
    for row in dict.fromkeys(window.continuations):
        if len(row) > 1 and given:
            state, given = _rewound(model, window, features, state, given), 0
        tokens = torch.tensor([row], device=first.device)
        parts = [_judged(first, tokens[:, :1])]
        for start in range(0, len(row) - 1, MOST_GIVEN):
            part = tokens[:, start : min(start + MOST_GIVEN, len(row) - 1)]
            given += part.shape[1]
            parts.append(_judged(model.follow_tokens(part, state), tokens[:, start + 1 : start + 1 + part.shape[1]]))
        logprobs, greedy = (torch.cat(each) for each in zip(*parts, strict=True))
        found[row] = logprobs.double().sum(), greedy.all()
    # Only here the host waits for the device.
    by_row = {row: (float(logprob), bool(greedy)) for row, (logprob, greedy) in found.items()}
    for row in window.continuations:
        logprob, is_greedy = by_row[row]
        if logprob - logprob != 0:
            raise GenerationFailed(f"the log-probability of a given continuation is {logprob}")
        yield ScoredContinuation(logprob, len(row), is_greedy)


def _rewound(model: ScoringStages, window: Window, features: Any, state: Any, given: int) -> Any:
    """The state after the prompt: the same one taken back, or of another prefill where its cache cannot be."""
    try:
        model.rewind(state, given)
    except SettingError:  # not lost: the prompt runs again, in the time of the request
        return model.prefill(window.inputs, features)[1]
    return state


def _judged(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural log-probabilities [k] of given tokens [1, k] by logits [k, V], and whether each is the likeliest."""
    logprobs = logits.float().log_softmax(dim=-1).gather(1, tokens.view(-1, 1)).flatten()
    return logprobs, logits.argmax(dim=-1) == tokens.flatten()


def follow_by_steps(step: Any, tokens: torch.Tensor) -> torch.Tensor:
    """As `ScoringStages.follow_tokens`, by decode steps; `step` takes a token [1, 1] and gives logits [1, V]."""
    return torch.cat([step(token).clone() for token in tokens.split(1, dim=1)])
