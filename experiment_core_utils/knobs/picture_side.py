"""The knob of a picture's longest side in the request to a server."""

from typing import Annotated

from pydantic import Field

from experiment_core_utils.knobs.request_knobs import ServerKnob
from experiment_core_utils.primitives.flag_fields import Count, Listed, Metavar, Part


class PictureSideFlags(Part):
    """The flags of a picture's longest side."""

    picture_side_list: Annotated[Listed[Count], Metavar("PIXELS")] | None = Field(
        default=None,
        description="with --endpoint: longest sides of the pictures sent, larger ones are scaled down "
        "(default: pictures as they are)",
    )


class PictureSide(ServerKnob):
    """The longest side of the pictures that are sent, in pixels; smaller pictures stay as they are."""

    meaning = "longest side in pixels of the pictures sent to a server"
    changes_tokens = True
    name, title, plural, flags = "picture_side", "picture side", "picture sides", PictureSideFlags
    flag, prefix, at_rest = "picture_side_list", "side", "whole"


PICTURE_SIDE = PictureSide()
