"""In: tensors on the CPU; out: what kernels make of them that are compiled here when they are first wanted."""
