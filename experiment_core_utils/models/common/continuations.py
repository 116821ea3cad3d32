"""The tokens of what is scored: continuations of a prompt, and the windows of a text that is longer than a context.

Both as lm-eval's runner of transformers models (`HFLM`, 0.4.13) has them, so that scores can be compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedConfig

from experiment_core_utils.engines.likelihood import continuation_tensors
from experiment_core_utils.models.common.text_generation import context_length
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.records.requests import PreparedRequest, RequestShape

Encode = Callable[[str], Sequence[int]]
# lm-eval's, of a model whose config names none.
_DEFAULT_CONTEXT = 2048


def split_context(text: str) -> tuple[str, str]:
    """A prompt without the white space at its end, and that white space, which its continuations begin with."""
    context = text.rstrip()
    return context, text[len(context) :]


def continuation_ids(encode: Encode, text: str, continuations: Sequence[str]) -> list[list[int]]:
    """The ids of each continuation of a prompt (`HFLM._encode_pair`): both are encoded together, and what follows as
    many ids as the prompt has alone is the continuation's.

    Args:
        text: with the white space at its end.

    Raises:
        SampleError: a continuation has no id of its own.
    """
    context, space = split_context(text)
    length = len(encode(context))
    rows = [list(encode(context + space + continuation))[length:] for continuation in continuations]
    if [] in rows:
        raise SampleError(f"{continuations[rows.index([])]!r} has no token of its own behind the prompt")
    return rows


def rolling_windows(ids: Sequence[int], prefix: int, most: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """A text as disjoint continuations with the ids before each (lm-eval's `get_rolling_token_windows` with a context
    of 1, and `make_disjoint_window`): no window is longer than `most` positions, and the last one is as long as the
    others, so that it sees as much as fits.

    Args:
        prefix: the id that the first one follows.
    """
    first = min(most, len(ids))
    yield (prefix,), ids[:first]
    for start in range(first, len(ids), most):
        end = min(start + most, len(ids))
        yield ids[end - most - 1 : start], ids[start:end]


def whole_text_request(
    encode: Encode, text: str, prefix: int | None, config: PreTrainedConfig, started_s: float
) -> PreparedRequest:
    """The request of a text that is scored as a whole; its prompt is the token before it.

    Args:
        prefix: the token for the beginning of a text, else for its end (`HFLM.prefix_token_id`); None without either.
        started_s: when its preparation began.

    Raises:
        SampleError: the text has no token, or there is none to begin it with.
    """
    ids, most = list(encode(text)), context_length(config) or _DEFAULT_CONTEXT
    if not ids or prefix is None:
        raise SampleError("it has no token" if not ids else "the tokenizer has no token to begin a text with")
    contexts, continuations = zip(*rolling_windows(ids, prefix, most), strict=True)
    return _behind_prefix(prefix, continuation_tensors(continuations, contexts), text, started_s)


def unprompted_request(
    encode: Encode, continuations: Sequence[str], prefix: int | None, started_s: float
) -> PreparedRequest:
    """The request of continuations without a prompt: each follows the token before a text (`TemplateLM.loglikelihood`).

    Args:
        encode: adds no token.
        prefix, started_s: as of `whole_text_request`.

    Raises:
        SampleError: a continuation has no token, or there is none to begin it with.
    """
    rows = [list(encode(each)) for each in continuations]
    if [] in rows or prefix is None:
        fault = "the tokenizer has no token to begin a text with"
        raise SampleError(f"{continuations[rows.index([])]!r} has no token" if [] in rows else fault)
    return _behind_prefix(prefix, continuation_tensors(rows), "", started_s)


def _behind_prefix(prefix: int, given: Mapping[str, torch.Tensor], text: str, started_s: float) -> PreparedRequest:
    prompt = torch.tensor([[prefix]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **given}
    return PreparedRequest(inputs, RequestShape(None, None, 0, 0, 1, HostClock().now_s() - started_s), text)
