"""Causal attention written out in fp64, beside `kernels.flash_attention`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of what attends, and is attended to."""

    length: int
    batch: int
    heads: int
    groups: int
    width: int


SHAPES = {
    "as many keys as queries": Shape(length=70, batch=3, heads=4, groups=4, width=64),
    "four queries to a key": Shape(length=300, batch=2, heads=8, groups=2, width=128),
    "one sequence": Shape(length=257, batch=1, heads=4, groups=2, width=64),
}
# Not 1/√width.
SCALE = 0.11


def make_inputs(shape: Shape, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Queries [s, b, heads, width], keys and values [s, b, groups, width], and a gradient [s, b, heads · width]."""
    generator = torch.Generator().manual_seed(3)
    heads = shape.heads, shape.groups, shape.groups
    sizes = [(shape.length, shape.batch, each, shape.width) for each in heads]
    sizes.append((shape.length, shape.batch, shape.heads * shape.width))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def attention_in_fp64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """What `causal_attention` computes, sequence by sequence and head by head."""
    length, batch, heads, _ = query.shape
    of_group = heads // key.size(2)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    out = [
        torch.softmax((scale * query[:, b, h] @ key[:, b, h // of_group].T).masked_fill(later, -math.inf), dim=-1)
        @ value[:, b, h // of_group]
        for b in range(batch)
        for h in range(heads)
    ]
    return torch.stack(out, dim=1).view(length, batch, -1)


def check_against_fp64(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
    device: str,
    dtype: torch.dtype,
    error: float,
) -> None:
    """Output and gradients of all shapes.

    Args:
        attend: The attention.
        device: Where to compute.
        dtype: Of its inputs.
        error: By how much it may be off, in the 2-norm, relative.
    """
    for name, shape in SHAPES.items():
        *inputs, gradient = make_inputs(shape, dtype, device)
        ours, exact = ([each.detach().to(kind).requires_grad_() for each in inputs] for kind in (dtype, torch.float64))
        out, expected = attend(*ours, SCALE), attention_in_fp64(*exact, SCALE)
        assert out.shape == expected.shape
        found = [out, *torch.autograd.grad(out, ours, gradient)]
        wanted = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
        for what, mine, exactly in zip(("output", "of queries", "of keys", "of values"), found, wanted, strict=True):
            assert mine.dtype is dtype
            off = torch.linalg.vector_norm(mine.double() - exactly) / torch.linalg.vector_norm(exactly)
            assert off < error, f"{name}, {what}: {off:.2e}"
