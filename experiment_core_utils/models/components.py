"""The components of a decoder, as profiles name them."""

from typing import Literal, get_args

Component = Literal["attention", "ffn", "routing", "experts", "norm", "head"]


"""`ffn` is the whole feed-forward part of a block; `routing` and `experts` lie inside it where it is a mixture.

`attention` has its projections in it, `norm` the norms between the parts, `head` the product with the vocabulary.
"""


COMPONENTS: tuple[Component, ...] = get_args(Component)


STAGES = ("vision", "prefill", "decode")
