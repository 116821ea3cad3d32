"""In: a packed decoder and a store of several requests on a GPU; out: one decode step of all, as Triton kernels."""
