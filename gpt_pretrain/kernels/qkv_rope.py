"""Queries, keys and values split out of their projection and rotated by one kernel; another joins their gradients.

megatron-core splits, copies grouped queries into a tensor of their own, and rotates queries and keys one after the
other; attention may copy keys or values again. Backward, it rotates each gradient back and concatenates them. An
element is read and written up to three times each way. Norms of queries and keys read and write once more, and add
copies: here they are part of the same kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of queries and of keys, before it is rotated."""

    width: int
    """Of a head."""
    query_weight: torch.Tensor
    """[width], as the next."""
    key_weight: torch.Tensor
    epsilon: float
    """Added to the mean square of a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CastBack:
    """What it takes to join gradients as FP8."""

    shape: tuple[int, ...]
    """[s, b, groups, (heads per group + 2) · width]."""
    width: int
    """Of a head."""
    projection: Any
    """Transformer Engine's layer whose output's gradient they are."""


def split_and_rotate(
    mixed: torch.Tensor,
    query_angles: torch.Tensor,
    key_angles: torch.Tensor,
    widths: Sequence[int] | HeadNorms | CastBack,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces Transformer Engine's `apply_fused_qkv_rotary_pos_emb`, as megatron-core calls it.

    Args:
        mixed: [s, b, groups, (heads per group + 2) · width]: the queries, the key and the value of each group. With
            `CastBack` [s · b, groups · (heads per group + 2) · width].
        query_angles: fp32 [≥ s, 1, 1, turned], as from megatron-core's `RotaryEmbedding`: the second half equals the
            first. Elements of a head beyond `turned` are not rotated.
        key_angles: The same tensor.
        widths: Elements of a group's queries, of its key, of its value; or the norms of queries and keys; or how to
            cast the gradient.

    Returns:
        Queries [s, b, heads, width], keys and values [s, b, groups, width], normalized and rotated in fp32 and rounded
        once. They are contiguous, so that Transformer Engine's attention does not copy them.
    """
    assert query_angles is key_angles, "queries and keys share their angles"
    assert query_angles.dtype is torch.float32, "BF16 angles would be off by whole turns"
    length = widths.shape[0] if isinstance(widths, CastBack) else mixed.size(0)
    assert query_angles.size(0) >= length, "each position has its angles"
    assert query_angles.is_contiguous(), "the kernel reads angles row by row"
    assert mixed.is_contiguous(), "the kernel reads the projection row by row"
    if isinstance(widths, HeadNorms):
        weights = widths.query_weight, widths.key_weight
        return _NormalizeAndRotate.apply(mixed, query_angles, widths, *weights)  # type: ignore[no-any-return, no-untyped-call]
    if isinstance(widths, CastBack):
        return _RotateAndCastBack.apply(mixed, query_angles, widths)  # type: ignore[no-any-return, no-untyped-call]
    return _SplitAndRotate.apply(mixed, query_angles, widths[-1])  # type: ignore[no-any-return, no-untyped-call]


def _empty_parts(mixed: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values to write."""
    length, batch, groups, of_group = mixed.shape
    counts = groups * (of_group // width - 2), groups, groups
    return tuple(mixed.new_empty(length, batch, heads, width) for heads in counts)


def _readable(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of one tensor, which attention may return, are read in place."""
    return [each if each.stride(-1) == 1 else each.contiguous() for each in gradients]


class _SplitAndRotate(torch.autograd.Function):
    """Splits and rotates; backward rotates gradients back and joins them."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, angles: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_rope

        parts = _empty_parts(mixed, width)
        launch_qkv_rope(mixed, parts, angles, joins=False)
        ctx.save_for_backward(angles)
        ctx.shape = mixed.shape
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_rope

        (angles,) = ctx.saved_tensors
        parts = _readable(gradients)
        mixed = parts[0].new_empty(ctx.shape)
        launch_qkv_rope(mixed, parts, angles, joins=True)
        return mixed, None, None


class _RotateAndCastBack(torch.autograd.Function):
    """Splits and rotates; the gradient is a Transformer Engine tensor, as the projection's products read it.

    The projection's output is two-dimensional: Transformer Engine drops the transpose of a tensor that it reshapes.
    """

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, angles: torch.Tensor, back: CastBack) -> tuple[torch.Tensor, ...]:
        from transformer_engine_torch import FP8BwdTensors

        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_rope

        joined = mixed.view(back.shape)
        parts = _empty_parts(joined, back.width)
        launch_qkv_rope(joined, parts, angles, joins=False)
        ctx.save_for_backward(angles)
        ctx.shape, ctx.rows = back.shape, mixed.shape
        if ctx.needs_input_grad[0]:
            ctx.quantizer = back.projection.quantizers["scaling_bwd"][FP8BwdTensors.GRAD_OUTPUT1]
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, None, None]:
        from gpt_pretrain.kernels.activation_cast import allocate
        from gpt_pretrain.kernels.qkv_cast_triton import launch_rope_cast

        (angles,) = ctx.saved_tensors
        parts = _readable(gradients)
        gradient, into = allocate(ctx.quantizer, ctx.rows, parts[0])
        launch_rope_cast(parts, angles, into, batch=ctx.shape[1], num_groups=ctx.shape[2])
        return gradient, None, None


class _NormalizeAndRotate(torch.autograd.Function):
    """The same with norms of queries and keys. Backward computes their statistics anew from the kept projection."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, angles: torch.Tensor, norms: HeadNorms, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_norm_rope

        parts = _empty_parts(mixed, norms.width)
        launch_qkv_norm_rope(mixed, parts, angles, weights, norms.epsilon)
        ctx.save_for_backward(mixed, angles, *weights)
        ctx.epsilon = norms.epsilon
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from gpt_pretrain.kernels.qkv_rope_triton import launch_qkv_norm_rope_back

        mixed, angles, *weights = ctx.saved_tensors
        gradient = torch.empty_like(mixed)
        sums = launch_qkv_norm_rope_back(mixed, gradient, _readable(gradients), angles, weights, ctx.epsilon)
        of_weights = [each.to(weight.dtype) for each, weight in zip(sums, weights, strict=True)]
        return gradient, None, None, *of_weights
