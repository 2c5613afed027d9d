"""Kernels on tensors, in Triton on GPUs and in torch's operations elsewhere. None of them knows the configuration."""
