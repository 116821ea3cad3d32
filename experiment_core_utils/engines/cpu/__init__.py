"""The cpu engines: stages by C++ kernels, compiled on first use."""
