"""Queries, keys and values split out of their projection and rotated by one kernel; another joins their gradients.

megatron-core splits, copies grouped queries into a tensor of their own, and rotates queries and keys one after the
other; attention may copy keys or values again. Backward, it rotates each gradient back and concatenates them. An
element is read and written up to three times each way.
"""

from collections.abc import Sequence
from typing import Any

import torch


def split_and_rotate(
    mixed: torch.Tensor, query_angles: torch.Tensor, key_angles: torch.Tensor, widths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces Transformer Engine's `apply_fused_qkv_rotary_pos_emb`, as megatron-core calls it.

    Args:
        mixed: [s, b, groups, (heads per group + 2) · width]: the queries, the key and the value of each group.
        query_angles: fp32 [≥ s, 1, 1, turned], as from megatron-core's `RotaryEmbedding`: the second half equals the
            first. Elements of a head beyond `turned` are not rotated.
        key_angles: The same tensor.
        widths: Elements of a group's queries, of its key, of its value.

    Returns:
        Queries [s, b, heads, width], keys and values [s, b, groups, width], rotated in fp32 and rounded once. They are
        contiguous, so that Transformer Engine's attention does not copy them.
    """
    assert query_angles is key_angles, "queries and keys share their angles"
    assert query_angles.dtype is torch.float32, "BF16 angles would be off by whole turns"
    assert query_angles.size(0) >= mixed.size(0), "each position has its angles"
    assert query_angles.is_contiguous(), "the kernel reads angles row by row"
    assert mixed.is_contiguous(), "the kernel reads the projection row by row"
    return _SplitAndRotate.apply(mixed, query_angles, widths[-1])  # type: ignore[no-any-return, no-untyped-call]


class _SplitAndRotate(torch.autograd.Function):
    """Splits and rotates; backward rotates gradients back and joins them."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, angles: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        from gpt_pretrain.kernels.layers_triton import launch_qkv_rope

        length, batch, groups, of_group = mixed.shape
        shapes = [(length, batch, heads, width) for heads in (groups * (of_group // width - 2), groups, groups)]
        parts = tuple(mixed.new_empty(shape) for shape in shapes)
        launch_qkv_rope(mixed, parts, angles, joins=False)
        ctx.save_for_backward(angles)
        ctx.shape = mixed.shape
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from gpt_pretrain.kernels.layers_triton import launch_qkv_rope

        (angles,) = ctx.saved_tensors
        # Parts of one tensor, which attention may return, are read in place.
        parts = [each if each.stride(-1) == 1 else each.contiguous() for each in gradients]
        mixed = parts[0].new_empty(ctx.shape)
        launch_qkv_rope(mixed, parts, angles, joins=True)
        return mixed, None, None
