"""In: a model of transformers and a request; out: what its own `generate()` gives, with marks set inside that one run.

    request handed over | encoder begins | features ready | first token on the host | second | ... | last

Neighbouring marks bound a stage, so that the stages add up to the whole by construction. What lies before the encoder
and between it and the first token is prefill: `generate()`'s own preparation, the cache, the decoder. Some versions and
families encode pictures before the prefill, others inside it; the marks are the same.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.records.requests import StageName, TimedTokens


def greedy_config(model: PreTrainedModel) -> GenerationConfig:
    """Greedy decoding and nothing else: of the checkpoint's preferences only the special tokens are kept."""
    own = model.generation_config
    eos = own.eos_token_id if own is not None else None
    pad = own.pad_token_id if own is not None else None
    first_eos = eos[0] if isinstance(eos, list) else eos
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        bos_token_id=own.bos_token_id if own is not None else None,
        eos_token_id=eos,
        pad_token_id=pad if pad is not None else first_eos if first_eos is not None else 0,
    )


class _StageMarks:
    """Sets marks and names what lies between them."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.spans: list[StageName] = []

    def begin(self) -> None:
        self._marks.mark()

    def end(self, stage: StageName) -> None:
        self._marks.mark()
        self.spans.append(stage)


class _TokenMarks(BaseStreamer):
    """A mark for each token that reaches the host; `generate()` gives the prompt first."""

    def __init__(self, stages: _StageMarks) -> None:
        self._stages = stages
        self._has_prompt = False
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._stages.end("decode" if self.token_ids else "prefill")
        self.token_ids.append(int(value))

    def end(self) -> None:
        return None


@torch.inference_mode()
def generate_timed(model: PreTrainedModel, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
    """Greedy answer of at most `max_new_tokens` tokens, end-of-sequence included where it came.

    The model's generation config must be one of `greedy_config`.

    Args:
        inputs: tensors of one request, as `generate()` takes them.
    """
    stages = _StageMarks(marks)
    tokens = _TokenMarks(stages)
    with _vision_marked(model, stages):
        stages.begin()
        model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=tokens)
    return TimedTokens(tuple(tokens.token_ids), tuple(stages.spans))


def vision_entry(model: PreTrainedModel) -> nn.Module | str | None:
    """Where pictures are encoded: the name of the base model's method, else the encoder; None in a text model."""
    if hasattr(model.base_model, "get_image_features"):
        return "get_image_features"
    encoder = model.get_encoder(modality="image")
    return None if encoder is model or encoder is model.base_model else encoder


@contextmanager
def _vision_marked(model: PreTrainedModel, stages: _StageMarks) -> Iterator[None]:
    """Marks around every call of the vision entry; put back afterwards."""
    entry = vision_entry(model)
    with ExitStack() as stack:
        if isinstance(entry, nn.Module):
            begin = entry.register_forward_pre_hook(lambda *_: stages.end("prefill"))
            stack.callback(begin.remove)
            done = entry.register_forward_hook(lambda *_: stages.end("vision"))
            stack.callback(done.remove)
        elif entry is not None:
            plain = getattr(model.base_model, entry)

            # `generate()` reads which arguments it takes.
            @functools.wraps(plain)
            def marked(*args: Any, **kwargs: Any) -> Any:
                stages.end("prefill")
                features = plain(*args, **kwargs)
                stages.end("vision")
                return features

            stack.enter_context(replaced_method(model.base_model, entry, marked))
        yield


@contextmanager
def replaced_method(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """`function` in the place of a method of this one object."""
    before = vars(module).get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before
