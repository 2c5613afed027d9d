"""Queries, keys and values split out of one projection and rotated, in one kernel; their gradients in another.

megatron-core splits the projection of grouped heads, copies the queries into a tensor of their own and rotates them,
then the keys; the attention copies keys or values where their layout does not suit it. Backward, gradients are rotated
back one by one and then concatenated. All of it is bound by memory, and each element is read and written up to three
times each way. Here it is once (`qkv_rope_triton`). `model.fused_single_qkv_rope`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import attention


def split_and_rotate(
    mixed: torch.Tensor, query_angles: torch.Tensor, key_angles: torch.Tensor, widths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stands for Transformer Engine's `apply_fused_qkv_rotary_pos_emb`, as megatron-core calls it.

    Args:
        mixed: [s, b, groups, (heads of a group + 2) · width]: of each group its queries, its key and its value.
        query_angles: Of each position, fp32 [≥ s, 1, 1, turned], the second half as the first, as megatron-core's
            `RotaryEmbedding` has them. Elements of a head beyond `turned` stay as they are.
        key_angles: The same tensor.
        widths: Elements of a group's queries, of its key, of its value.

    Returns:
        Queries [s, b, heads, width], keys and values [s, b, groups, width], each contiguous: what Transformer Engine's
        attention takes as it is. Rotated in fp32 and rounded once.
    """
    assert query_angles is key_angles, "queries and keys are rotated alike"
    assert query_angles.dtype is torch.float32, "angles in BF16 would be off by whole turns"
    assert query_angles.size(0) >= mixed.size(0), "each position has its angles"
    assert query_angles.is_contiguous(), "read as they lie"
    assert mixed.is_contiguous(), "read as it lies"
    return _SplitAndRotate.apply(mixed, query_angles, widths[-1])  # type: ignore[no-any-return, no-untyped-call]


class _SplitAndRotate(torch.autograd.Function):
    """Queries, keys and values of a projection."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, angles: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_rope

        length, batch, groups, of_group = mixed.shape
        shapes = [(length, batch, heads, width) for heads in (groups * (of_group // width - 2), groups, groups)]
        parts = tuple(mixed.new_empty(shape) for shape in shapes)
        launch_qkv_rope(mixed, parts, angles, joins=False)
        ctx.save_for_backward(angles)
        ctx.shape = mixed.shape
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_rope

        (angles,) = ctx.saved_tensors
        # Attention may give them as parts of one tensor, which are read where they are.
        parts = [each if each.stride(-1) == 1 else each.contiguous() for each in gradients]
        mixed = parts[0].new_empty(ctx.shape)
        launch_qkv_rope(mixed, parts, angles, joins=True)
        return mixed, None, None


def install_rotation() -> None:
    """Has attention split and rotate here where `TransformerConfig.fused_single_qkv_rope` says so; twice is as once."""
    attention.apply_fused_qkv_rotary_pos_emb = split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True
