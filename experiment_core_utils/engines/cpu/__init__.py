"""The cpu engines: stages of MolmoE by C++ kernels, compiled on first use."""
