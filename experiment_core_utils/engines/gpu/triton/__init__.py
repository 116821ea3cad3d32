"""Triton kernels of MolmoE's prefill, decode step and vision stage."""
