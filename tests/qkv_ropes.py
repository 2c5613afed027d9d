"""`launch_qkv_rope` beside the rotation written out in fp64; interpreted on a CPU, compiled on a GPU."""

from dataclasses import dataclass
from unittest.mock import Mock, patch

import torch

from gpt_pretrain.kernels import layers_triton
from gpt_pretrain.kernels.layers_triton import launch_qkv_rope
from gpt_pretrain.kernels.qkv_rope import split_and_rotate
from tests import emulated_training


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a projection, and of its rotation."""

    length: int
    batch: int
    groups: int
    heads: int
    """Of queries, in a group."""
    width: int
    turned: int


SHAPES = {
    # No multiple of the tokens of a program, and an odd number of sequences.
    "grouped": Shape(length=11, batch=3, groups=3, heads=4, width=32, turned=32),
    # A part of each head, and halves that are no power of two.
    "partial": Shape(length=21, batch=1, groups=2, heads=2, width=32, turned=16),
    "narrow": Shape(length=5, batch=2, groups=3, heads=1, width=24, turned=20),
    # Keys and values of one head, as in multi-query attention.
    "one group": Shape(length=7, batch=2, groups=1, heads=7, width=16, turned=16),
}


def make_angles(length: int, turned: int, device: str) -> torch.Tensor:
    """[length, 1, 1, turned], as of position and frequency; fp32."""
    frequencies = 500_000.0 ** -(torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles, angles], dim=-1)[:, None, None].to(device)


def make_mixed(shape: Shape, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A projection at random."""
    sizes = shape.length, shape.batch, shape.groups, (shape.heads + 2) * shape.width
    return torch.randn(sizes, generator=torch.Generator().manual_seed(5)).to(device, dtype)


def make_gradients(shape: Shape, dtype: torch.dtype, device: str, kind: str) -> list[torch.Tensor]:
    """Of queries, keys and values.

    Args:
        shape: Of the projection.
        dtype: Of the gradients.
        device: Where they are.
        kind: "contiguous"; "joined": parts of one tensor; "different": queries such a part, keys with the batch first,
            values with the heads first; "spread": elements of a head apart from each other.
    """
    generator = torch.Generator().manual_seed(6)
    counts = [shape.groups * shape.heads, shape.groups, shape.groups]
    sizes = shape.length, shape.batch, sum(counts), shape.width
    together = torch.randn(sizes, generator=generator).to(device, dtype)
    parts = list(together.split(counts, dim=2))
    if kind == "contiguous":
        return [part.contiguous() for part in parts]
    if kind == "different":
        queries, keys, values = parts
        return [
            queries,
            *(each.transpose(0, dim).contiguous().transpose(0, dim) for each, dim in ((keys, 1), (values, 2))),
        ]
    if kind == "spread":
        return [part.transpose(2, 3).contiguous().transpose(2, 3) for part in parts]
    return parts


def split_and_rotate_in_fp64(mixed: torch.Tensor, angles: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """What `split_and_rotate` computes, from angles in fp32 on, by complex numbers."""
    length, batch, groups, of_group = mixed.shape
    half = angles.size(-1) // 2
    heads = mixed.double().view(length, batch, groups, of_group // width, width)
    turns = torch.polar(torch.ones((), dtype=torch.float64, device=mixed.device), angles.double()[:length, ..., :half])
    rotated = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turns[:, :, None]
    turned = torch.cat([rotated.real, rotated.imag, heads[..., 2 * half :]], dim=-1)
    return turned[..., :-2, :].flatten(2, 3), turned[..., -2, :], heads[..., -1, :]


def _assert_close(ours: torch.Tensor, exactly: torch.Tensor, rtol: float, of: str) -> None:
    torch.testing.assert_close(ours.double(), exactly, rtol=rtol, atol=1e-6, msg=lambda message: f"{of}: {message}")


def check_against_fp64(device: str, dtype: torch.dtype, rtol: float) -> None:
    """Queries, keys, values and the projection's gradient, of all shapes and kinds of gradients.

    Args:
        device: Where to compute.
        dtype: Of the projection.
        rtol: Its rounding.
    """
    for name, shape in SHAPES.items():
        # More positions than the sequences have.
        angles = make_angles(shape.length + 3, shape.turned, device)
        mixed = make_mixed(shape, dtype, device).requires_grad_()
        exact = mixed.detach().double().requires_grad_()
        parts = split_and_rotate(mixed, angles, angles, [shape.heads * shape.width, shape.width, shape.width])
        expected = split_and_rotate_in_fp64(exact, angles, shape.width)
        assert all(part.is_contiguous() and part.dtype is dtype for part in parts)
        for part, exactly in zip(parts, expected, strict=True):
            _assert_close(part, exactly, rtol, name)
        # Values are copied.
        assert torch.equal(parts[2].double(), expected[2])
        for kind in ("contiguous", "joined", "different", "spread"):
            gradients = make_gradients(shape, dtype, device, kind)
            (of_mixed,) = torch.autograd.grad(parts, mixed, gradients, retain_graph=True)
            (exactly,) = torch.autograd.grad(
                expected, exact, [gradient.double() for gradient in gradients], retain_graph=True
            )
            assert of_mixed.dtype is dtype
            _assert_close(of_mixed, exactly, rtol, f"{name}, {kind}")


def check_training(*overrides: str) -> None:
    """A tiny model in this process, on megatron-core's local layers: losses as with separate operations, in fp32.

    Args:
        *overrides: Of the configuration.
    """
    curves = {}
    for fused in (False, True):
        asked = f"model.fused_single_qkv_rope={str(fused).lower()}"
        with (
            patch.object(layers_triton, "launch_qkv_rope", Mock(wraps=launch_qkv_rope)) as launches,
            emulated_training.emulated_training("trainer.precision=fp32", asked, *overrides) as training,
        ):
            curves[fused] = [training.step() for _ in range(3)] + [training.validate()]
        # Each layer: three steps of two microbatches forward and back, and a validation of two.
        joins = [call.kwargs["joins"] for call in launches.call_args_list]
        layers = training.config.model.num_layers
        assert (joins.count(False), joins.count(True)) == ((8 * layers, 6 * layers) if fused else (0, 0))
    separate, ours = torch.tensor(curves[False]), torch.tensor(curves[True])
    assert separate[2] < separate[0] - 0.1
    torch.testing.assert_close(ours, separate, rtol=1e-5, atol=0)
