"""Kernels that megatron-core would take from a library that is not there, from torch instead.

**Gradient norm and clipping.** megatron-core 0.19 computes them on the device only with a Transformer Engine that has
`multi_tensor_scale_tensor`, which 2.12 has not. Otherwise it reads the norm of every single gradient back to the host:
148 waits in each step of GPT-2 small. torch's foreach kernels compute the same on any device without a wait.

**Queries, keys and values.** Their gradients come from the attention as parts of one tensor, which Transformer Engine's
split takes as it is. megatron-core 0.19 looks for that split under a name that TE 2.12 no longer has, and falls back to
torch's, which copies the three together: 14 ms of 312 in a step of GPT-2 small on an H200.
"""

from collections.abc import Sequence

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import attention


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """L2 norm over all tensors of the one list, [1] in fp32; the arguments are those of apex's multi_tensor_l2norm."""
    norms = torch._foreach_norm(list(tensors[0]), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale_by_tensor(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: torch.Tensor
) -> None:
    """Multiplies the first list's tensors by a factor that lives on the device; both lists are the same tensors."""
    torch._foreach_mul_(list(tensors[0]), factor.squeeze())


def install_gradient_norm() -> None:
    """Gives megatron-core the two kernels, unless Transformer Engine brought its own. A second call does nothing."""
    if clip_grads.multi_tensor_scale_tensor_impl is None:
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_tensor_impl = _scale_by_tensor


def install_split() -> None:
    """Gives megatron-core Transformer Engine's split of queries, keys and values. A second call does nothing."""
    if attention.SplitAlongDim is None:
        from transformer_engine.pytorch.utils import SplitAlongDim

        attention.SplitAlongDim = SplitAlongDim.apply
