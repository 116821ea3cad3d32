"""In: a few numbers, and work on a device that reads them; out: the numbers that it gives, by one launch."""

from collections.abc import Callable

import numpy as np
import torch

from experiment_core_utils.models.common.cuda_graphs import GraphCapturer


class DeviceQuestion:
    """Always the same work on other numbers.

    They lie in memory of the host that a GPU reads and writes itself: a copy there and back would take longer than the
    work does.

    Args:
        room: integers of a question.
        answers: numbers of an answer.
        work: reads the question, int32 [room], and writes the answer, float32 [answers]; by kernels of this project
            alone, since torch takes neither for a tensor of the device. It holds whatever else it reads.
        graph_capturer: makes the replay.

    Attributes:
        asked: int32 [room], to be written before `answer`.

    Raises:
        ConfigurationError, OutOfMemory: see `GraphCapturer.record`.
    """

    def __init__(
        self,
        room: int,
        answers: int,
        work: Callable[[torch.Tensor, torch.Tensor], None],
        device: torch.device,
        graph_capturer: GraphCapturer,
    ) -> None:
        is_cuda = device.type == "cuda"
        asked = torch.zeros(room, dtype=torch.int32, pin_memory=is_cuda)
        answered = torch.zeros(answers, pin_memory=is_cuda)
        self.asked: np.ndarray = asked.numpy()
        self._answered = answered.numpy()
        # A graph has addresses alone.
        self._held = work
        self._replay = graph_capturer.record(lambda: work(asked, answered))
        self._done = torch.cuda.Event() if is_cuda else None

    def answer(self) -> list[float]:
        """What the work gives for `asked`; the host waits for it."""
        self._replay()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        answer: list[float] = self._answered.tolist()
        return answer
