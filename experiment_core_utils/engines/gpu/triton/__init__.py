"""Triton kernels of the prefill, decode step and vision stage."""
