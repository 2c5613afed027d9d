"""A norm's gradient and that of the residual stream beside it, summed by Transformer Engine's kernel of RMSNorm.

A layer's input goes to a norm and, past it, to the sum behind attention or MLP. Backward, autograd adds the two
gradients in a kernel of its own, which reads both and writes a third. Here the sum's gradient waits until the norm's
kernel runs for the same input, and that adds it in fp32, before the one rounding.

A gradient cannot get lost unseen: the next one that has to wait finds it.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

_waiting: list[tuple[int, torch.Tensor]] = []
"""At most one: where the norm's input is, and the gradient to add."""


def let_wait(residual: torch.Tensor) -> torch.Tensor:
    """A residual stream that Transformer Engine's RMSNorm has read, for the sum behind; its gradient waits."""
    if not torch.is_grad_enabled() or not residual.requires_grad:
        return residual
    return _Wait.apply(residual)  # type: ignore[no-any-return, no-untyped-call]


class _Wait(torch.autograd.Function):
    """A residual stream as it is; its gradient waits for the norm's.

    Of nodes that are ready autograd runs the one that was made last. This one is made after all between norm and sum,
    so the norm's backward pass comes later.
    """

    @staticmethod
    def forward(ctx: Any, residual: torch.Tensor) -> torch.Tensor:
        _expect_nothing()
        ctx.place = residual.data_ptr()
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        _expect_nothing()
        _waiting.append((ctx.place, gradient))


def _expect_nothing() -> None:
    if _waiting:
        _waiting.clear()
        raise RuntimeError(
            "the gradient of a residual stream was not added, because the norm beside it read another tensor; "
            "use model.residual_gradient_fusion=false"
        )


def adding_what_waits(norm_backward: Callable[..., Any], add_backward: Callable[..., Any]) -> Callable[..., Any]:
    """`rmsnorm_bwd` of Transformer Engine, which calls its `rmsnorm_bwd_add` if a gradient waits for the same input."""

    @wraps(norm_backward)
    def call(gradient: torch.Tensor, inputs: torch.Tensor, *others: Any) -> Any:
        if not _waiting or _waiting[0][0] != inputs.data_ptr():
            return norm_backward(gradient, inputs, *others)
        _, beside = _waiting.pop()
        return add_backward(gradient, inputs, beside.contiguous().view_as(inputs), *others)

    return call


@cache
def wrapped_norm_backward() -> Callable[..., Any]:
    """The replacement of Transformer Engine's `rmsnorm_bwd`; one object, however often it is asked for."""
    import transformer_engine_torch

    return adding_what_waits(transformer_engine_torch.rmsnorm_bwd, transformer_engine_torch.rmsnorm_bwd_add)
