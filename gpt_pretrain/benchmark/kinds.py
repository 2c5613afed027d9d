"""What a GPU's kernel does, told by its name: the parts of a step."""

import re

IDLE = "idle"
OTHER = "norms, activations, loss"

# Kind to the pattern of its kernels; the first that matches counts. Names of cuBLAS (`nvjet_sm90_`, a letter for each
# type: q and r are E4M3 and E5M2, t is BF16), CUTLASS, cuDNN, flash-attn, Transformer Engine, PyTorch and NCCL.
_PATTERNS = {
    "communication": r"nccl|userbuffers",
    "attention": r"sdpa|flash|fmha|fused_attn",
    "FP8 products": r"nvjet_sm\d+_[qr]|(gemm|cutlass|wgmma).*(e4m3|e5m2)|(e4m3|e5m2).*(gemm|wgmma)",
    "BF16 products": r"nvjet|gemm|cutlass|cublas",
    "FP8 casts": r"amax|cast_transpose|transpose_optimized_kernel|quantize|(unary|cast).*__nv_fp8|fp8_.*_kernel",
    "optimizer": r"multi_tensor|adam",
}
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
KINDS = (*_PATTERNS, OTHER, IDLE)


def kernel_kind(name: str) -> str:
    """One of `KINDS`; what no pattern knows is elementwise work or a reduction: norms, activations, the loss."""
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), OTHER)
