"""Kernels on tensors, in Triton on GPUs and in torch's operations elsewhere. None of them knows the configuration."""

# Values that share one scale in optimizer states of FP16 and FP8 (`kernels.adam`).
SCALED_BLOCK = 256
