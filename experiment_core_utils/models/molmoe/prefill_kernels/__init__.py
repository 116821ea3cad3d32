"""In: plain tensors on a GPU; out: a whole prompt's or picture's pass through MolmoE, in Triton and torch's products.

Importing these modules needs Triton; `captured_prefill` and `captured_vision` import them where a GPU is in use.
"""
