"""CUDA graphs of a transformers model's decode steps, one for each length, for families without one for all lengths.

Some count the tokens so far on the host, attend to every row of their cache, or keep none. At one length such a step is
the same each time, so that each length has a graph of its own, of what the modules do on their own kind of cache, whose
rows stay where they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.engines.engine_proof import RouterTrace
from experiment_core_utils.models.hf.generate import GenerationState, cache_argument, is_filled
from experiment_core_utils.models.hf.static_cache_decode import taken_states
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, SettingError, described
from experiment_core_utils.primitives.finite_logits import checked_tokens
from experiment_core_utils.primitives.private_apis import carried_kwargs, flattened, set_window_tokens, unflattened

_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class _Rows:
    """Keys and values of a layer of a growing cache in memory of fixed size, [1, KV, max_seq_len, D] each.

    Args:
        layer: has no rows yet; it is given views of the memory from now on.
        filled: the same layer of a prefill's cache.
    """

    def __init__(self, layer: Any, filled: Any, max_seq_len: int) -> None:
        if type(layer) not in _KINDS:
            raise ConfigurationError(f"its cache has layers of another kind ({type(layer).__name__})")
        self.layer = layer
        layer.lazy_initialization(filled.keys, filled.values)
        self.rows = tuple(
            rows.new_zeros(*rows.shape[:2], max_seq_len, rows.shape[-1]) for rows in (filled.keys, filled.values)
        )
        self._tokens = 0
        layer.update = self._update

    @property
    def _first(self) -> int:
        window = self.layer.sliding_window if self.layer.is_sliding else None
        return 0 if window is None else max(self._tokens - window + 1, 0)

    def take(self, filled: Any, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy what a layer of a prefill's cache remembers of `tokens`; one with a window has the last ones only.

        Gives recurrent states and what they come from.
        """
        for rows, source in zip(self.rows, (filled.keys, filled.values), strict=True):
            rows[:, :, tokens - source.shape[-2] : tokens].copy_(source)
        return list(taken_states(self.layer, filled))

    def put_at(self, tokens: int) -> None:
        """Have so many tokens in the layer."""
        self._tokens = tokens
        self.layer.keys, self.layer.values = (rows[:, :, self._first : tokens] for rows in self.rows)
        if self.layer.is_sliding:
            set_window_tokens(self.layer, tokens)

    def _update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        first, tokens = self._first, self._tokens + keys.shape[-2]
        for rows, source in zip(self.rows, (keys, values), strict=True):
            rows[:, :, self._tokens : tokens].copy_(source)
        self.put_at(tokens)
        return tuple(rows[:, :, first:tokens] for rows in self.rows)


class LengthDecode:
    """The decode steps of a model at the setting in force when this was made; see `FixedDecode`.

    Args:
        max_seq_len: tokens that fit into the cache, prompt and answer together.
        graph_capturer: makes the replays.
        num_experts: that routers choose from; None without experts.

    Attributes:
        compile_s: None; nothing is compiled.
        mask_reason: None; each length has the masks that the modules make.
    """

    compile_s: float | None = None
    mask_reason: str | None = None

    def __init__(
        self, model: PreTrainedModel, max_seq_len: int, graph_capturer: GraphCapturer, num_experts: int | None = None
    ) -> None:
        self._model: Any = model
        self._graph_capturer = graph_capturer
        self.max_seq_len = max_seq_len
        self._num_experts = num_experts
        self._cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._layers: list[_Rows] = []
        self._replays: dict[int, tuple[Any, RouterTrace]] = {}
        #: what `generate()` carries on with at each length beside the cache; its whole numbers depend on that alone
        self._carried: dict[int, dict[str, Any]] = {}
        #: the others, recurrent states
        self._states: list[torch.Tensor] = []
        #: these and those of layers, and what they were after the prompt
        self._at_prompt: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._prefix: int | None = None  #: rows of the cache beside those of the text, as of a learnt prefix
        self._length = self._prompt_length = 0
        self.chosen_experts: tuple[torch.Tensor, ...] = ()
        self._ids = self._logits = self.checked_token = torch.empty(0)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def cached(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each block that attends to all tokens, each [KV, tokens so far, D]."""
        pairs = [layer.rows for layer in self._layers if not layer.layer.is_sliding]
        tokens = self._length + (self._prefix or 0)
        return [(keys[0, :, :tokens], values[0, :, :tokens]) for keys, values in pairs]

    @property
    def token(self) -> torch.Tensor:
        """The last token [1, 1]."""
        return self._ids[:, self._length : self._length + 1]

    def put_token(self, token: torch.Tensor) -> None:
        """Replace the last token [1, 1], which is the likeliest one otherwise."""
        self.token.copy_(token)

    def prepare(self, state: GenerationState, logits: torch.Tensor, steps: int) -> int:
        """Take over a request, with a graph for each of so many steps, which are captured where there is none; gives
        the tokens, prompt and answer together, up to which requests with such a prompt are ready.

        Raises:
            ConfigurationError: a step cannot be captured; the message is the reason.
        """
        self.begin(state, logits)
        for length in range(self._prompt_length, min(self._prompt_length + steps, self.max_seq_len)):
            if length not in self._replays:
                self._capture(length)
            elif self._missing(length):
                self._run(length, RouterTrace(self._num_experts))
            self._length = length + 1
        self.begin(state, logits)
        return self._prompt_length + steps

    def begin(self, state: GenerationState, logits: torch.Tensor) -> None:
        """Take over a request after its prefill.

        Args:
            logits: [1, V] of the prompt's last position.
        """
        ids, kwargs = state.steps[-1]
        tokens = ids.shape[-1]
        if tokens >= self.max_seq_len:
            raise ConfigurationError(f"the cache has {self.max_seq_len} slots and the prompt {tokens} tokens")
        carried = {name: value for name, value in kwargs.items() if value is not state.cache}
        if not self._ids.numel():
            self._allocate(state.cache, ids, logits, carried)
        self._carried.setdefault(tokens, carried)
        filled = [layer for layer in state.cache.layers if is_filled(layer)] if state.cache is not None else []
        prefixes = {layer.get_seq_length() - tokens for layer in filled} or {0}
        if len(prefixes) > 1 or len(filled) != len(self._layers) or self._prefix not in (None, *prefixes):
            raise ConfigurationError("its cache does not have the tokens of the text in each of its layers")
        (self._prefix,) = prefixes
        of_layers = [rows.take(layer, tokens + self._prefix) for rows, layer in zip(self._layers, filled, strict=True)]
        of_text = zip(self._states, map(torch.clone, _states(carried)), strict=True)
        self._at_prompt = [*of_text, *(pair for pairs in of_layers for pair in pairs)]
        self._restore()
        self._ids[:, :tokens].copy_(ids)
        self._length = self._prompt_length = tokens
        token = logits.argmax(dim=-1, keepdim=True)
        self.token.copy_(token)
        self.checked_token.copy_(checked_tokens(token, logits))

    def step(self) -> torch.Tensor:
        """Logits [1, V] after the last token, which the next step overwrites; the likeliest becomes the last token."""
        step = self._replays.get(self._length)
        if step is None:
            raise ConfigurationError(f"no decode step was made ready for {self._length} tokens: make it ready for more")
        replay, trace = step
        replay()
        self.chosen_experts = tuple(trace.chosen)
        self._length += 1
        return self._logits

    def rewind(self, steps: int) -> None:
        """Forget the last so many tokens of the cache; the caller must put the last token.

        Raises:
            SettingError: a recurrence, which is known at the prompt's end only, would have to be elsewhere.
        """
        if steps and self._at_prompt:
            if self._length - steps != self._prompt_length:
                raise SettingError("a recurrent state can be taken back to the prompt's end only; repeat all its steps")
            self._restore()
        self._length -= steps

    def _restore(self) -> None:
        for state, source in self._at_prompt:
            state.copy_(source)

    def _allocate(self, filled: Any, ids: torch.Tensor, logits: torch.Tensor, carried: Mapping[str, Any]) -> None:
        self._ids = ids.new_zeros(1, self.max_seq_len + 1)
        self.checked_token = ids.new_zeros(1, 1)
        self._logits = torch.zeros_like(logits)
        self._states = list(map(torch.clone, _states(carried)))
        layers = [] if filled is None else list(filled.layers)
        if any(map(is_filled, layers[len(self._cache.layers) :])):
            raise ConfigurationError("its cache has more layers than its config says")
        self._layers = [
            _Rows(layer, filled_layer, self.max_seq_len + filled_layer.get_seq_length() - ids.shape[-1])
            for layer, filled_layer in zip(self._cache.layers, layers, strict=False)
            if is_filled(filled_layer)
        ]

    def _missing(self, length: int) -> bool:
        return length + 1 not in self._carried

    def _capture(self, length: int) -> None:
        trace = RouterTrace(self._num_experts)
        constants = [leaf for leaf in flattened(self._carried[length])[0] if _is_whole(leaf)]
        try:
            with out_of_memory_named():
                self._replays[length] = self._graph_capturer.capture(lambda: self._run(length, trace), constants), trace
        except LIBRARY_ERRORS as error:
            raise ConfigurationError(f"its step of {length} tokens cannot run alone ({described(error)})") from error

    def _run(self, length: int, trace: RouterTrace) -> None:
        for layer in self._layers:
            layer.put_at(length + (self._prefix or 0))
        leaves, layout = flattened(self._carried[length])
        states = iter(self._states)
        kwargs = unflattened([next(states) if _is_state(leaf) else leaf for leaf in leaves], layout)
        kwargs[cache_argument(self._model)] = self._cache
        ids = self._ids[:, : length + 1]
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        with trace.of_pass():
            outputs = self._model(**prepared, return_dict=True)
        self._logits.copy_(outputs.logits[:, -1])
        token = self._logits.argmax(dim=-1, keepdim=True)
        self._ids[:, length + 1 : length + 2].copy_(token)
        self.checked_token.copy_(checked_tokens(token, self._logits))
        if self._states or self._missing(length):
            carried = carried_kwargs(self._model, outputs, kwargs)
            following = {name: value for name, value in carried.items() if value is not self._cache}
            # The first run of a step is no capture.
            self._carried.setdefault(length + 1, following)
            for state, source in zip(self._states, _states(following), strict=True):
                state.copy_(source)


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()


def _states(carried: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in flattened(dict(carried))[0] if _is_state(leaf)]
