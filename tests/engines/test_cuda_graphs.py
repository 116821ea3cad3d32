"""What is replayed, and that a broken capture leaves nothing behind; without a GPU captures are skipped."""

import gc

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import CudaGraphs, Reruns
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def doubled(values: torch.Tensor) -> torch.Tensor:
    """In place; the sum is new."""
    values.mul_(2)
    return values.sum()


def test_runs_again_give_what_the_work_gives() -> None:
    values = torch.tensor([1.0, 2.0])
    replay = Reruns().capture(lambda: doubled(values))
    assert values.tolist() == [2, 4]
    assert float(replay()) == 4 + 8
    values.copy_(torch.tensor([5.0, 5.0]))
    assert float(replay()) == 10 + 10


@needs_gpu
@pytest.mark.parametrize("warm_ups", [1, 2])
def test_a_graph_gives_what_the_work_gives(warm_ups: int) -> None:
    values = torch.ones(2, device="cuda")
    replay = CudaGraphs(torch.device("cuda"), warm_ups).capture(lambda: doubled(values))
    # What is captured does not run.
    assert values.tolist() == [2**warm_ups] * 2
    values.fill_(3)
    assert float(replay()) == 6 + 6
    assert float(replay()) == 12 + 12


@needs_gpu
def test_graphs_of_one_object_share_memory() -> None:
    graphs, like = CudaGraphs(torch.device("cuda")), torch.ones(1 << 20, device="cuda")
    replays = [graphs.capture(lambda: (like * 2 * 3 * 4).sum()) for _ in range(2)]
    taken = torch.cuda.memory_reserved()
    replays += [graphs.capture(lambda: (like * 2 * 3 * 4).sum()) for _ in range(8)]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= taken
    assert {float(replay()) for replay in replays} == {24 * 2.0**20}


@needs_gpu
def test_a_graph_outlives_the_working_memory_of_libraries() -> None:
    """Few outputs of long rows: cuBLAS adds them up in its working memory, which Inductor clears at each capture."""
    left = torch.ones(8, 1 << 16, device="cuda", dtype=torch.bfloat16)
    right = torch.ones(1 << 16, 8, device="cuda", dtype=torch.bfloat16)
    replay = CudaGraphs(torch.device("cuda")).capture(lambda: left @ right)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
    assert float(replay().float().sum()) == 64 * 2.0**16
    assert all(bool((other == 7).all()) for other in others)


@needs_gpu
def test_after_work_that_cannot_be_captured_others_are() -> None:
    graphs, values = CudaGraphs(torch.device("cuda")), torch.ones(2, device="cuda")
    before, stream = graphs.capture(lambda: doubled(values)), torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="it cannot be captured"):
            graphs.capture(lambda: values.sum().item())
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
    after = graphs.capture(lambda: doubled(values))
    values.fill_(1)
    assert (float(before()), float(after())) == (2 + 2, 4 + 4)


@needs_gpu
@pytest.mark.parametrize("inside", [False, True])
def test_memory_that_runs_out_is_named_and_given_back(inside: bool) -> None:
    graphs, values = CudaGraphs(torch.device("cuda")), torch.ones(2, device="cuda")

    def greedy() -> torch.Tensor:
        first = torch.empty(1 << 26, device="cuda")
        if torch.cuda.is_current_stream_capturing() == inside:
            first = torch.empty(1 << 50, device="cuda")
        return first

    torch.cuda.empty_cache()
    free = torch.cuda.memory_reserved()
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        graphs.capture(greedy)
    # The error's traceback held what the work had made.
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == free
    replay = graphs.capture(lambda: doubled(values))
    values.fill_(1)
    assert float(replay()) == 2 + 2
