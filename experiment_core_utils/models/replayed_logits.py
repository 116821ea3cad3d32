"""In: logits of what is replayed and of what it stands for; out: an error where they are not the same."""

from collections.abc import Mapping, Sequence

import torch

from experiment_core_utils.primitives.errors import KnobDidNotAct

# Share of the logits' norm by which a replay may differ, in float32 and in lower precision.
MOST_DIFFERENCE, MOST_ROUNDED_DIFFERENCE = 1e-3, 0.2


def refuse_other_logits(
    found: Mapping[str, torch.Tensor], expected: Sequence[torch.Tensor], source: str, dtype: torch.dtype
) -> None:
    """Each of `found` against its place in `expected`, as the norm of their difference.

    Args:
        found: by what is replayed, for the message.
        source: what gave the logits that are expected.
        dtype: in which both were computed.

    Raises:
        KnobDidNotAct: they differ by more than rounding does.
    """
    most = MOST_DIFFERENCE if dtype == torch.float32 else MOST_ROUNDED_DIFFERENCE
    for (replayed, mine), theirs in zip(found.items(), expected, strict=True):
        difference = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        # Not-a-number is no agreement either.
        if not difference <= most:
            raise KnobDidNotAct(f"the {replayed} differs by {difference:.1%} from {source}")
