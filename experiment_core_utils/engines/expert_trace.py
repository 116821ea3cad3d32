"""A record of the experts that each block used, in memory that the kernels of a stage write to.

`count_experts` says whether they are as many as a setting requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.errors import KnobDidNotAct
from experiment_core_utils.records.requests import StageName

# An id that no kernel wrote.
NOT_WRITTEN = -1


@dataclass(frozen=True)
class ExpertRecord:
    """Memory of fixed address for one run at a time; a run of T tokens and k experts fills a block's first T * k ids.

    Token after token; blocks that do not run leave theirs as they are.
    """

    ids: torch.Tensor  # [blocks of the whole model, most of T * k] int32

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, decoder: DecoderWeights, most: int) -> "ExpertRecord":
        """An empty record, allocated beside the decoder's weights."""
        shape = (len(decoder.blocks), most)
        return cls(torch.full(shape, NOT_WRITTEN, dtype=torch.int32, device=decoder.device))

    def forget(self) -> None:
        """Mark all ids as not written."""
        self.ids.fill_(NOT_WRITTEN)

    def of_tokens(self, tokens: int, alone: int | None = None) -> dict[int, torch.Tensor]:
        """The expert ids that a run of T tokens wrote since `forget`: [T, k] int64 on the host, of each block that
        wrote any.

        T is 1 in the block `alone`, where there is such a one. k is the smallest that includes the last id written,
        with NOT_WRITTEN where an earlier one was left out.
        """
        found = {}
        for block, ids in enumerate(self.ids.cpu().long()):
            written = (ids != NOT_WRITTEN).nonzero()
            if len(written):
                rows = 1 if block == alone else tokens
                per_token = -(-(int(written[-1]) + 1) // rows)
                found[block] = ids[: rows * per_token].view(rows, per_token)
        return found


def count_experts(
    stage: StageName, used: Mapping[int, torch.Tensor], decoder: DecoderWeights, knobs: EngineKnobs
) -> tuple[int | None, ...]:
    """Experts per token of each block in `used`, None for a dense one, counted from ids [T, k]; only experts that exist
    count, each once.

    Raises:
        KnobDidNotAct: a token had more or fewer than the setting requests.
    """
    counted: list[int | None] = []
    for block, ids in used.items():
        if block not in decoder.routed_blocks:
            counted.append(None)
            continue
        wanted = decoder.experts_of(block, knobs.top_k)
        found = _used_mask(ids, decoder.num_experts).sum(dim=1)
        wrong = found[found != wanted].tolist()
        if wrong:
            raise KnobDidNotAct(
                f"block {block} used {wrong[0]} experts, not {wanted}, for {len(wrong)} of {len(found)} tokens in "
                f"the {stage}"
            )
        counted.append(wanted)
    return tuple(counted)


def _used_mask(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """A mask [T, E] (bool, on the host) of ids [T, k]; ids that are no expert's are ignored."""
    ids = ids.cpu().long()
    # One column more, for what is not an expert.
    mask = torch.zeros(len(ids), experts + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where((ids >= 0) & (ids < experts), ids, experts), True)
    return mask[:, :experts]
