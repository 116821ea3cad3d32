"""The logits of both stages on a GPU, each by one launch of a CUDA graph.

The inputs of a stage are written where the device fetches them, the stage's graph is launched, and the graph copies its
logits back: the host waits once. Importing this module does not need Triton; computing the logits does.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from experiment_core_utils.models.common.cuda_graphs import CudaGraphs, GraphCapturer
from experiment_core_utils.models.common.triton_build import built
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.networks.on_host import CACHED_BUDGETS, HostNetworks, Logits
from experiments.controller.networks.two_stage import FREQUENCIES, TwoStageNetworks


class DeviceQuestion:
    """A CUDA graph of the same work on other numbers each time, with its inputs and outputs.

    They are in memory of the host that a GPU reads and writes itself: a copy there and back would take longer than the
    work does.

    Args:
        size: integers of a question.
        answers: numbers of an answer.
        work: reads the question, int32 [size], and writes the answer, float32 [answers]; by kernels of this project
            alone, since torch takes neither for a tensor of the device. It refers to whatever else it reads.
        graph_capturer: makes the replay.

    Raises:
        ConfigurationError, OutOfMemory: see `GraphCapturer.capture`.
    """

    def __init__(
        self,
        size: int,
        answers: int,
        work: Callable[[torch.Tensor, torch.Tensor], None],
        device: torch.device,
        graph_capturer: GraphCapturer,
    ) -> None:
        is_cuda = device.type == "cuda"
        inputs = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        answered = torch.zeros(answers, pin_memory=is_cuda)
        self.inputs: np.ndarray = inputs.numpy()  #: int32 [size], to be written before `answer`
        self._answered = answered.numpy()
        # A graph has addresses alone.
        self._held = work
        self._replay = graph_capturer.capture(lambda: work(inputs, answered))
        self._done = torch.cuda.Event() if is_cuda else None

    def answer(self) -> list[float]:
        """The result of the work for `inputs`; the host waits for it."""
        self._replay()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        answer: list[float] = self._answered.tolist()
        return answer


# A question's number of ids and the features of its budget come before the ids.
BEFORE_IDS = 1 + 2 * FREQUENCIES
# Ids of a prompt's text for which there is room at first.
USUAL_IDS = 256


class DeviceActionLogits:
    """`ActionLogits` by Triton's kernels in CUDA graphs; networks as they were when this was made, in float32.

    Args:
        embeddings: of tokens, [V, H] on the device.
        graph_capturer: makes the replays; None for CUDA graphs.

    Raises:
        ConfigurationError: Triton is missing, or the kernels cannot be built or captured.
    """

    reason: None = None  #: always None

    def __init__(
        self, networks: TwoStageNetworks, embeddings: torch.Tensor, graph_capturer: GraphCapturer | None = None
    ) -> None:
        self._kernels = _kernels()
        self._host = HostNetworks(networks)
        self._features = lru_cache(CACHED_BUDGETS)(lambda budget_s: self._host.features(budget_s).view(np.int32))
        self._pauses = len(networks.space.pauses)
        self._embeddings = embeddings
        self._device = embeddings.device
        self._graph_capturer = CudaGraphs(self._device) if graph_capturer is None else graph_capturer
        hidden, width = networks.hidden_size, len(networks.prompt_in.bias)
        self._prompt, self._states, self._inner = self._zeros(1, hidden), self._zeros(2, hidden), self._zeros(width)
        self._token, self._known = self._zeros(1, 1, hidden), self._zeros(1, width)
        self._known_row = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._budget_layers = self._layers_of_budget(networks)
        self._first_layers = self._layers(networks.prompt_in, self._known, networks.first_out)
        chosen = torch.from_numpy(self._host.chosen).flatten(0, 1).to(self._device)
        self._second_layers = self._layers(networks.states_in, chosen, networks.second_out)
        self._first = self._stage_of_prompt(USUAL_IDS)
        self._second = self._stage_of_states()

    def warm_up(self, most_ids: int) -> None:
        """See `ActionLogits.warm_up`; a longer prompt is captured when it comes."""
        if most_ids > len(self._first.inputs) - BEFORE_IDS:
            self._first = self._stage_of_prompt(2 * most_ids)

    def first(self, ids: torch.Tensor, budget_s: float) -> Logits:
        """See `ActionLogits.first`."""
        self.warm_up(len(ids))
        inputs = self._first.inputs
        inputs[0] = len(ids)
        inputs[1:BEFORE_IDS] = self._features(budget_s)
        inputs[BEFORE_IDS : BEFORE_IDS + len(ids)] = ids.numpy()
        return self._host.split_first(self._first.answer())

    def token(self) -> torch.Tensor:
        """See `ActionLogits.token`; the next call of `first` overwrites it."""
        return self._token

    def rehearse(self) -> None:
        """See `ActionLogits.rehearse`; the host computes next to nothing."""

    def second(self, states: torch.Tensor, tier: int, pause: int) -> Logits:
        """See `ActionLogits.second`."""
        self._states.copy_(states)
        self._second.inputs[0] = tier * self._pauses + pause
        return self._host.split_second(self._second.answer(), pause)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ActionLogits.seen`."""
        return self._prompt[0].cpu(), self._states.cpu()

    def _stage_of_prompt(self, ids: int) -> DeviceQuestion:
        """The inputs of the first stage: a number of ids, a budget's features by their bits, and ids."""

        def work(inputs: torch.Tensor, logits: torch.Tensor) -> None:
            features = inputs[1:BEFORE_IDS].view(torch.float32)
            self._kernels.launch_budget(self._budget_layers, features, self._known, self._token)
            self._kernels.launch_mean_row(inputs[BEFORE_IDS:], inputs[:1], self._embeddings, self._prompt[0])
            self._kernels.launch_logits(self._first_layers, self._prompt, self._known_row, self._inner, logits)

        return self._question(BEFORE_IDS + ids, len(self._first_layers.out_bias), work)

    def _stage_of_states(self) -> DeviceQuestion:
        """The inputs of the second stage: the position of stage 1's choice; the states are on the device."""

        def work(inputs: torch.Tensor, logits: torch.Tensor) -> None:
            self._kernels.launch_logits(self._second_layers, self._states, inputs, self._inner, logits)

        return self._question(1, len(self._second_layers.out_bias), work)

    def _question(self, size: int, answers: int, work: Callable[[torch.Tensor, torch.Tensor], None]) -> DeviceQuestion:
        with built("the kernels of the controller", ConfigurationError):
            return DeviceQuestion(size, answers, work, self._device, self._graph_capturer)

    def _layers_of_budget(self, networks: TwoStageNetworks) -> Any:
        budget = networks.budget
        embed, bias = (each.detach().double().cpu() for each in (budget.embed.weight, budget.embed.bias))
        longer = torch.cat([embed, bias[:, None]], dim=1)
        return self._kernels.BudgetLayers(
            encode=self._copied(budget.encode.weight),
            encode_bias=self._copied(budget.encode.bias),
            code_in=self._copied(networks.code_in.weight),
            known_bias=self._copied(networks.prompt_in.bias),
            embed=self._copied(budget.embed.weight),
            embed_bias=self._copied(budget.embed.bias),
            squares=self._copied(longer.T @ longer),
            embedding_rms=float(budget.embedding_rms),
        )

    def _layers(self, into: nn.Linear, known: torch.Tensor, out: nn.Linear) -> Any:
        """The weights of both layers as they are now; `known` includes the first one's bias."""
        weight = self._copied(into.weight).unflatten(1, (-1, self._prompt.shape[1]))
        return self._kernels.LogitsLayers(weight, known, self._copied(out.weight), self._copied(out.bias))

    def _copied(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to(self._device, torch.float32, copy=True).contiguous()

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self._device)


def _kernels() -> Any:
    try:
        from experiments.controller.networks import kernels as logits_kernels
    except ImportError as error:
        raise ConfigurationError(f"the controller's kernels need Triton: {error}") from error
    return logits_kernels
