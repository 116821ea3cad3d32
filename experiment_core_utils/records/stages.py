"""Names in results: stages of a request, what runs a stage, and parts of a decoder."""

from typing import Literal, get_args

STAGES = ("vision", "prefill", "decode")

# What runs a stage: the model's modules, plain torch on fused weights, C++ for whole blocks, one C++ call a decode
# step, a CUDA graph, one of own kernels in place of a transformers decoder, one of modules that Inductor compiled, and
# a server behind an address.
MODULES, REFERENCE, CPU_BLOCKS, CPU_STEP, CUDA_GRAPH, KERNEL_GRAPH, INDUCTOR_GRAPH, SERVER = (
    "modules",
    "reference",
    "cpu blocks",
    "cpu step",
    "cuda graph",
    "kernel graph",
    "inductor graph",
    "server",
)

# The ways that need no proof against the reference, and that are no faster than the modules by design.
PLAIN = frozenset({MODULES, REFERENCE})

# `ffn` is the whole feed-forward part of a block; `routing` and `experts` lie inside it where it is a mixture.
# `attention` has its projections in it, `norm` the norms between the parts, `head` the product with the vocabulary.
Component = Literal["attention", "ffn", "routing", "experts", "norm", "head"]
COMPONENTS: tuple[Component, ...] = get_args(Component)
