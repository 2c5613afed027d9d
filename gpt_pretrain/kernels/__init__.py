"""Kernels on tensors, in Triton on GPUs and in torch's operations elsewhere; none knows the configuration.

Modules named *_triton are imported inside functions: Triton is not installed everywhere.
"""

# Values that share one scale in optimizer states of FP16 and FP8 (`kernels.adam`).
SCALED_BLOCK = 256
