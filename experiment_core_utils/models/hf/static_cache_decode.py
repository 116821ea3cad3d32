"""A CUDA graph of a transformers model's decode step, on a KV cache of fixed size.

The prefill is that of `GenerateStages`; the keys and values in its growing cache are copied into a cache of fixed size.
A decode step, the choice of the next token included, reads and writes fixed tensors only, so that one CUDA graph can
contain all of it. Where Inductor compiles its functions, it does so for the modules as they are at the first call.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from experiment_core_utils.engines.cpu.build import private_folder
from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.engines.engine_proof import RouterTrace
from experiment_core_utils.models.hf.generate import GenerationState, cache_argument, is_filled
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, SettingError, described
from experiment_core_utils.primitives.finite_logits import checked_tokens
from experiment_core_utils.primitives.private_apis import set_cached_tokens
from experiment_core_utils.primitives.progress import announced

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# On a GPU a product of one row becomes a Triton reduction, fused with its neighbours and with measured tile sizes, only
# with this flag (`mm` and `bmm` in torch/_inductor/decomposition.py). After that a decode step of one request has no
# product left that `max_autotune` would measure templates for, so the time that this takes is saved.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "fx_graph_cache": True}
T = TypeVar("T")


class InductorFunction(Generic[T]):
    """A function that Inductor compiles whole at its first call, for inputs of one shape.

    What is compiled is kept on disk, in `TORCHINDUCTOR_CACHE_DIR`, else beside the compiled kernels of the CPU. Two of
    these never share it in memory, since the guards of compiled code may not see all that knobs replace in modules.

    Args:
        function: takes and returns tensors; it may not need a decision of the host.
        name: of the function, for messages.

    Attributes:
        compile_s: seconds of the first call; None before it.
    """

    def __init__(self, function: Callable[..., T], name: str) -> None:
        _choose_folder()
        self._name = name
        self.compile_s: float | None = None

        def whole(*args: Any) -> T:
            if not torch.compiler.is_compiling():
                raise ConfigurationError(f"{name} is not compiled: torch.compile is switched off in the environment")
            return function(*args)

        # Compiled code belongs to a code object, which all closures of one definition have in common.
        alone = FunctionType(whole.__code__.replace(), whole.__globals__, name, None, whole.__closure__)
        self._compiled = torch.compile(alone, fullgraph=True, dynamic=False, options=OPTIONS)

    def __call__(self, *args: Any) -> T:
        """The function's result.

        Raises:
            ConfigurationError: it cannot be compiled; the message is the reason.
            OutOfMemory: there is no memory left to compile or to run it.
        """
        if self.compile_s is not None:
            return self._compiled(*args)
        started_s = HostClock().now_s()
        with announced(f"compiling {self._name} by Inductor"):
            try:
                with out_of_memory_named():
                    result = self._compiled(*args)
            except LIBRARY_ERRORS as error:
                raise ConfigurationError(f"Inductor cannot compile {self._name} ({_reason(error)})") from error
        self.compile_s = HostClock().now_s() - started_s
        return result


def _choose_folder() -> None:
    """Have Inductor keep what it compiles in a folder that lasts, unless the user has named one."""
    given = Path(os.environ.get(CACHE, ""))
    # torch puts its own choice, among temporary files, into the environment while it is imported.
    is_torchs = given.parent == Path(tempfile.gettempdir()) and given.name.startswith("torchinductor_")
    if CACHE not in os.environ or is_torchs:
        os.environ[CACHE] = str(private_folder("inductor"))


def _reason(error: BaseException) -> str:
    """The innermost error that Inductor wraps, in one line."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return described(error)


@dataclass
class _Step:
    """The tensors that a decode step reads and writes."""

    token: torch.Tensor  #: [1, 1] ids, the last token; the step puts its choice there
    checked: torch.Tensor  #: [1, 1], that choice as `checked_tokens` gives it
    #: of that token, as the family takes them, its last axis of length 1; None where it takes none
    positions: torch.Tensor | None
    logits: torch.Tensor  #: [1, V] of the token after it
    mask: torch.Tensor | None = None  #: [1, max_seq_len], of ones


def cache_unsupported_reason(model: PreTrainedModel) -> str | None:
    """The reason why what requests of this family remember cannot be in fixed memory."""
    try:
        kinds = {type(layer) for layer in _empty_cache(model, 1).layers}
    except LIBRARY_ERRORS as error:
        return f"transformers makes no cache of fixed size for it ({described(error)})"
    others = sorted(kind.__name__ for kind in kinds if not getattr(kind, "is_compileable", False))
    return f"its cache has layers that count on the host ({', '.join(others)})" if others else None


def _empty_cache(model: PreTrainedModel, max_seq_len: int) -> Any:
    """A cache in which layers with a window keep all positions; what is out of the window is in the mask alone.

    The vendor's ring buffers count on the host whether they are full.
    """
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=max_seq_len)
    cache.layers = [_without_ring(layer, max_seq_len) for layer in cache.layers]
    return cache


def _without_ring(layer: Any, max_seq_len: int) -> Any:
    if not isinstance(layer, StaticSlidingWindowLayer):
        return layer
    if type(layer) is StaticSlidingWindowLayer:
        whole: Any = StaticLayer(max_cache_len=max_seq_len)
    else:
        # Only versions with such a layer have its counterpart.
        from transformers.cache_utils import LinearAttentionAndStaticFullAttentionLayer

        whole = LinearAttentionAndStaticFullAttentionLayer(max_seq_len, number_of_states=layer.number_of_states)
    # By it the vendor's masks find a layer with a window.
    whole.is_sliding = True
    return whole


def _last_logits(
    model: Any, cache: Mapping[str, Any], token: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Logits [1, V] after a token [1, 1], of which the cache, by its argument's name, is given what is remembered."""
    outputs = model(input_ids=token, **cache, use_cache=True, return_dict=True, **given)
    logits: torch.Tensor = outputs.logits[:, -1]
    return logits


class FixedCacheDecode:
    """The decode step of a model at the setting in force when this was made.

    Args:
        max_seq_len: tokens that fit into the cache, prompt and answer together.
        graph_capturer: makes the replay.
        num_experts: that routers choose from; None without experts.
        is_compiled: whether Inductor compiles the modules' work at the first request.

    Attributes:
        mask_reason: why its steps are given a mask of the whole cache; None where they are given none.

    Raises:
        ConfigurationError: the family's cache or step cannot use fixed memory; the message is the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_seq_len: int,
        graph_capturer: GraphCapturer,
        num_experts: int | None = None,
        is_compiled: bool = False,
    ) -> None:
        self._model: Any = model
        self._graph_capturer = graph_capturer
        self.max_seq_len = max_seq_len
        unsupported_reason = cache_unsupported_reason(model)
        if unsupported_reason is not None:
            raise ConfigurationError(unsupported_reason)
        self._cache = _empty_cache(model, max_seq_len)
        self._step: _Step | None = None
        self._replay: Any = None
        self.mask_reason: str | None = None
        self._length = self._prompt_length = 0
        #: recurrent states, and what they were after the prompt
        self._at_prompt: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._trace = RouterTrace(num_experts)
        work = partial(_last_logits, self._model, {cache_argument(model): self._cache})
        self._inductor = InductorFunction(work, "the decode step") if is_compiled else None
        self._work: Callable[..., torch.Tensor] = self._inductor or work

    @property
    def compile_s(self) -> float | None:
        """Seconds that Inductor took; None where it compiled nothing."""
        return None if self._inductor is None else self._inductor.compile_s

    @property
    def chosen_experts(self) -> tuple[torch.Tensor, ...]:
        """Ids [1, k] that each choice of the last step made, until the next replay of any graph."""
        return tuple(self._trace.chosen)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def cached(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each block that attends to all tokens, each [KV, tokens so far, D]."""
        return [
            (layer.keys[0, :, : self._length], layer.values[0, :, : self._length])
            for layer in self._cache.layers
            if isinstance(layer, StaticLayer) and not layer.is_sliding
        ]

    def prepare(self, state: GenerationState, logits: torch.Tensor, steps: int) -> int:
        """Take over a request; gives the tokens, prompt and answer together, up to which others are ready."""
        self.begin(state, logits)
        return self.max_seq_len

    def begin(self, state: GenerationState, logits: torch.Tensor) -> None:
        """Take over a request after its prefill; at the first one the step is captured.

        Args:
            logits: [1, V] of the prompt's last position.
        """
        ids, kwargs = state.steps[-1]
        self._take(state.cache, ids.shape[-1])
        token = logits.argmax(dim=-1, keepdim=True)
        prepared = self._model.prepare_inputs_for_generation(
            torch.cat([ids, token], dim=-1), next_sequence_length=1, **kwargs
        )
        positions = prepared.get("position_ids")
        if self._step is None:
            own = None if positions is None else positions.clone()
            self._step = _Step(token.clone(), token.clone(), own, torch.zeros_like(logits))
            try:
                with out_of_memory_named():
                    self._replay = self._graph_capturer.capture(self._run)
            except (ConfigurationError, *LIBRARY_ERRORS) as error:
                self._capture_with_mask(state.cache, ids, _refusal(error))
            self._take(state.cache, ids.shape[-1])
        self._step.token.copy_(token)
        self._step.checked.copy_(checked_tokens(token, logits))
        if self._step.positions is not None:
            self._step.positions.copy_(positions)

    def _capture_with_mask(self, grown: Cache, ids: torch.Tensor, refusal: ConfigurationError) -> None:
        """Families that are given no mask may make one of the tokens so far, which they ask the host for.

        Raises:
            ConfigurationError: the refusal of the step without a mask, where that with one cannot be captured either,
                or would be compiled once more.
        """
        step, self._step = self._step, None
        if step is None or self._inductor is not None:
            raise refusal
        self._take(grown, ids.shape[-1])
        step.mask = ids.new_ones(1, self.max_seq_len)
        self._step = step
        try:
            with out_of_memory_named():
                self._replay = self._graph_capturer.capture(self._run, (step.mask,))
        except (ConfigurationError, *LIBRARY_ERRORS):
            self._step = None
            raise refusal from None
        self.mask_reason = f"each step has a mask of the whole cache, without which {refusal}"

    def step(self) -> torch.Tensor:
        """Logits [1, V] after the last token, which the next step overwrites; the likeliest becomes the last token."""
        assert self._step is not None
        if self._length == self.max_seq_len:
            raise ConfigurationError(
                f"the cache has {self.max_seq_len} slots and all are in use: make it ready for more"
            )
        self._replay()
        self._length += 1
        return self._step.logits

    def put_token(self, token: torch.Tensor) -> None:
        """Replace the last token [1, 1], which is the likeliest one otherwise."""
        assert self._step is not None
        self._step.token.copy_(token)

    @property
    def token(self) -> torch.Tensor:
        """The last token [1, 1]."""
        assert self._step is not None
        return self._step.token

    @property
    def checked_token(self) -> torch.Tensor:
        """The last token that was chosen [1, 1], as `checked_tokens` gives it."""
        assert self._step is not None
        return self._step.checked

    def rewind(self, steps: int) -> None:
        """Forget the last so many tokens of the cache; the caller must put the last token.

        Raises:
            SettingError: a recurrence, which is known at the prompt's end only, would have to be elsewhere.
        """
        assert self._step is not None
        if steps and self._at_prompt:
            if self._length - steps != self._prompt_length:
                raise SettingError("a recurrent state can be taken back to the prompt's end only; repeat all its steps")
            for state, kept in self._at_prompt:
                state.copy_(kept)
        self._set_length(self._length - steps)
        if self._step.positions is not None:
            self._step.positions.sub_(steps)

    def _take(self, grown: Cache, prompt_tokens: int) -> None:
        """Copy what a growing cache remembers; positions after its keys and values are never read."""
        # Recurrent layers do not count tokens.
        attends = any(isinstance(layer, StaticLayer) for layer in self._cache.layers)
        tokens = int(grown.get_seq_length()) if attends else prompt_tokens
        if tokens >= self.max_seq_len:
            raise ConfigurationError(f"the cache has {self.max_seq_len} slots and the prompt {tokens} tokens")
        # A cache may have more layers than there are blocks that ran, or layers for blocks that remember nothing.
        filled = [layer for layer in grown.layers if is_filled(layer)]
        layers = list(grown.layers) if filled and len(grown.layers) == len(self._cache.layers) else filled
        if len(layers) != len(self._cache.layers):
            raise ConfigurationError(
                f"the prefill filled {len(filled)} layers of its cache, and the cache of fixed size has "
                f"{len(self._cache.layers)}"
            )
        states = [
            pair for fixed, own in zip(self._cache.layers, layers, strict=True) for pair in _taken(fixed, own, tokens)
        ]
        self._at_prompt, self._prompt_length = states, tokens
        self._set_length(tokens)

    def _set_length(self, tokens: int) -> None:
        self._length = tokens
        for layer in self._cache.layers:
            set_cached_tokens(layer, tokens)

    def _run(self) -> None:
        step = self._step
        assert step is not None
        given = {"position_ids": step.positions, "attention_mask": step.mask}
        with self._trace.of_pass():
            logits = self._work(step.token, {name: each for name, each in given.items() if each is not None})
        step.logits.copy_(logits)
        step.token.copy_(step.logits.argmax(dim=-1, keepdim=True))
        step.checked.copy_(checked_tokens(step.token, step.logits))
        if step.positions is not None:
            step.positions.add_(1)


def _refusal(error: BaseException) -> ConfigurationError:
    if isinstance(error, ConfigurationError):
        return error
    return ConfigurationError(f"its step does not run on a cache of fixed size ({described(error)})")


def _taken(fixed: Any, own: Any, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies what a layer of a growing cache remembers of `tokens`; gives recurrent states and what they come from."""
    if isinstance(fixed, StaticLayer) and own.is_initialized:
        if not fixed.is_initialized:
            fixed.lazy_initialization(own.keys, own.values)
        # A layer with a window has the last tokens only.
        rows = slice(tokens - own.keys.shape[-2], tokens)
        fixed.keys[:, :, rows].copy_(own.keys)
        fixed.values[:, :, rows].copy_(own.values)
    if (index := getattr(own, "indexer_keys", None)) is not None:
        if not fixed.is_indexer_initialized:
            fixed.lazy_initialization_indexer(index)
        fixed.indexer_keys[:, :tokens].copy_(index)
    yield from taken_states(fixed, own)


def taken_states(fixed: Any, own: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Copies the recurrent states of a layer of a growing cache, if it has any; gives them and what they come from."""
    for place in getattr(own, "conv_states", {}):
        convolved, recurrent = own.conv_states[place], own.recurrent_states[place]
        if convolved is not None and not fixed.is_conv_states_initialized[place]:
            fixed.lazy_initialization(conv_states=convolved, state_idx=place)
        if recurrent is not None and not fixed.is_recurrent_states_initialized[place]:
            fixed.lazy_initialization(recurrent_states=recurrent, state_idx=place)
        fixed.has_previous_state[place] = True
        for state, source in ((fixed.conv_states[place], convolved), (fixed.recurrent_states[place], recurrent)):
            if source is not None:
                state.copy_(source)
                yield state, source
