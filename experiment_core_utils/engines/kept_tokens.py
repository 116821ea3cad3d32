"""Which image tokens of a picture are kept, by the rules of the knob `visual_token_keep`."""

import math
import zlib
from array import array
from collections.abc import Callable, Sequence

import torch

from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.primitives.errors import SettingError
from experiment_core_utils.primitives.triton_build import built, kernels_unsupported_reason


def kept_places(value: KeptTokens, features: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    """The places [K] of the kept ones among features [N, H], ascending, on their device, which is not waited for.

    Args:
        value: of the knob, with its rule and seed.
        token_ids: of the prompt from its first image token on, on the host; `random` draws by them and the seed, so
            that a request has the same places in every run and batch.
    """
    total, device = features.shape[0], features.device
    kept = value.count(total)
    if value.rule == "uniform":
        steps = torch.arange(kept, device=device)
        return (2 * steps + 1) * total // (2 * kept)
    if value.rule == "random":
        seed = zlib.crc32(array("q", (value.seed, *token_ids)).tobytes())
        drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:kept]
        return drawn.sort().values.to(device, non_blocking=True)
    if value.rule == "norm":
        return features.float().norm(dim=-1).topk(kept).indices.sort().values
    return _most_diverse(features.float(), kept).sort().values


def _most_diverse(features: torch.Tensor, kept: int) -> torch.Tensor:
    """Places of the features whose smallest cosine distance to each other is large, chosen one after the other.

    The greedy solution of the max-min diversity problem, as DivPrune takes it (Alvar, Singh, Akbari, Zhang: "DivPrune:
    Diversity-based Visual Token Pruning for Large Multimodal Models", CVPR 2025, arXiv 2503.02175): first the feature
    whose nearest other is farthest, then always the one whose nearest chosen one is farthest.
    """
    directions = torch.nn.functional.normalize(features.detach(), dim=-1)
    distances = 1 - directions @ directions.T
    chosen = torch.empty(kept, dtype=torch.long, device=features.device)
    chosen[:1] = distances.fill_diagonal_(math.inf).amin(dim=1).argmax(keepdim=True)
    # None that is chosen is the farthest from then on.
    distances.fill_diagonal_(-math.inf)
    if kernels_unsupported_reason(features.device, _kernel) is None:
        with built("the choice of diverse image tokens", SettingError):
            _kernel()(distances, chosen)
    else:
        choose_one_by_one(distances, chosen)
    return chosen


def _kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What chooses on a GPU; raises ImportError where Triton is missing."""
    from experiment_core_utils.engines.gpu.triton.most_diverse import choose_most_diverse

    return choose_most_diverse


def choose_one_by_one(distances: torch.Tensor, chosen: torch.Tensor) -> None:
    """The choice of `gpu.triton.most_diverse.choose_most_diverse` in plain torch."""
    nearest = torch.full_like(distances[0], math.inf)
    for step in range(1, len(chosen)):
        torch.minimum(nearest, distances.index_select(0, chosen[step - 1 : step])[0], out=nearest)
        torch.argmax(nearest, dim=0, keepdim=True, out=chosen[step : step + 1])
