"""Operations of a sample's request."""

from typing import Annotated

from experiment_core_utils.records.json_record import Flops, Positive, Record
from experiment_core_utils.records.quantities.quantity import Quantity


class SampleFlops(Record):
    """The operations of a sample's stages."""

    #: operations of the vision stage; None if no picture, or neither by formula nor counted
    vision_flops: Annotated[Flops | None, Quantity("vision_flops", "FLOPs", is_part=True)]
    #: operations of the prefill of this request, in a batch without its padding; None if neither by formula nor counted
    prefill_flops: Annotated[Flops | None, Quantity("prefill_flops", "FLOPs")]
    #: mean operations of a decode step, for the first run's number of output tokens; None if fewer than 2 output
    #: tokens, or neither by formula nor counted
    decode_flops_per_token: Annotated[Positive | None, Quantity("decode_flops_per_token", "FLOPs")]
