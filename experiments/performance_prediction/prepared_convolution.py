"""In: –; out: the record of one convolution that is ready to run by one algorithm, whichever engine runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from experiments.performance_prediction.convolution import AlgorithmName, ConvShape

# Whose code runs: plain torch operations, cuDNN called directly, the project's Triton kernel, torch's own choice, ai3.
Engine = Literal["operations", "cudnn", "triton", "torch", "ai3"]


def nothing_to_close() -> None:
    """The close function of engines that keep no resource."""


@dataclass(frozen=True)
class PreparedConvolution:
    """A convolution that its engine has granted.

    Attributes:
        shape: of the only call that it covers.
        asked: the algorithm that was requested.
        runs: the one that runs; another than `requested` only for `guess`, which stands for its choice.
        engine: whose code runs.
        workspace_bytes: beside input, weight and output, while it runs; None where the engine does not tell.
        run: input [N,C,H,W] and weight [K,C/groups,R,S], both contiguous, to output [N,K,Ho,Wo]; no bias.
        close: gives back what the engine holds for it; `run` must not be called after.
    """

    shape: ConvShape
    asked: AlgorithmName
    runs: AlgorithmName
    engine: Engine
    workspace_bytes: int | None
    run: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None] = nothing_to_close
