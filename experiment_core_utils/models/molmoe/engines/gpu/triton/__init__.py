"""In: a packed decoder and its KV cache on a GPU; out: one decode step as a short chain of Triton kernels."""
