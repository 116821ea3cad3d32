"""In: a packed decoder and its key-value store on a GPU; out: one decode step as a short chain of Triton kernels."""
