"""The kernels of `split_and_rotate` beside norms and rotation in fp64; interpreted on a CPU, compiled on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import Mock, patch

import torch

from gpt_pretrain.kernels import qkv_cast_triton, qkv_rope_triton
from gpt_pretrain.kernels.qkv_rope import HeadNorms, split_and_rotate
from tests import emulated_training
from tests.activation_casts import destination, share_that_differs


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


EPSILON = 1e-5
# By whether queries and keys are normalized.
LAUNCHES = {False: ["launch_qkv_rope"], True: ["launch_qkv_norm_rope", "launch_qkv_norm_rope_back"]}
SHAPES = {
    # No multiple of the tokens of a program, and an odd number of sequences.
    "grouped": Shape(length=7, batch=3, groups=3, heads=4, width=32, turned=32),
    # A part of each head, and halves that are no power of two.
    "partial": Shape(length=13, batch=1, groups=2, heads=2, width=32, turned=16),
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


def make_norms(width: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Weights of queries and of keys, one of them zero and some negative."""
    weights = 0.5 + torch.randn(2, width, generator=torch.Generator().manual_seed(8))
    weights[:, 1] = 0.0
    return [weight.clone().requires_grad_() for weight in weights.to(device, dtype)]


def split_and_rotate_in_fp64(
    mixed: torch.Tensor, angles: torch.Tensor, width: int, norms: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, ...]:
    """What `split_and_rotate` computes, from angles in fp32 on, by complex numbers; of fp64 tensors."""
    length, batch, groups, of_group = mixed.shape
    half = angles.size(-1) // 2
    heads = mixed.view(length, batch, groups, of_group // width, width)
    if norms:
        weights = [norms[0]] * (of_group // width - 2) + [norms[1]]
        rotated = heads[..., :-1, :]
        normalized = rotated / (rotated.square().mean(-1, keepdim=True) + EPSILON).sqrt() * torch.stack(weights)
        heads = torch.cat([normalized, heads[..., -1:, :]], dim=-2)
    turns = torch.polar(torch.ones((), dtype=torch.float64, device=mixed.device), angles.double()[:length, ..., :half])
    rotated = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turns[:, :, None]
    turned = torch.cat([rotated.real, rotated.imag, heads[..., 2 * half :]], dim=-1)
    return turned[..., :-2, :].flatten(2, 3), turned[..., -2, :], heads[..., -1, :]


def _assert_close(ours: torch.Tensor, exactly: torch.Tensor, rtol: float, of: str, *, num_terms: int = 8) -> None:
    """Within the rounding of the result, and of fp32 in each of the terms that it sums, which are about one in size."""
    atol = num_terms * 2**-23
    torch.testing.assert_close(ours.double(), exactly, rtol=rtol, atol=atol, msg=lambda message: f"{of}: {message}")


def check_against_fp64(device: str, dtype: torch.dtype, rtol: float, *, normalizes: bool) -> None:
    """Queries, keys, values and all gradients, of all shapes and kinds of gradients.

    Args:
        device: Where to compute.
        dtype: Of the projection and of the norms' weights.
        rtol: Its rounding.
        normalizes: Queries and keys, before they are rotated.
    """
    for name, shape in SHAPES.items():
        # More positions than the sequences have.
        angles = make_angles(shape.length + 3, shape.turned, device)
        mixed = make_mixed(shape, dtype, device).requires_grad_()
        norms = make_norms(shape.width, dtype, device) if normalizes else []
        inputs = [mixed, *norms]
        exact = [each.detach().double().requires_grad_() for each in inputs]
        widths = head_norms(shape.width, *norms) if norms else [shape.heads * shape.width, shape.width, shape.width]
        parts = split_and_rotate(mixed, angles, angles, widths)
        expected = split_and_rotate_in_fp64(exact[0], angles, shape.width, exact[1:])
        assert all(part.is_contiguous() and part.dtype is dtype for part in parts)
        for part, exactly in zip(parts, expected, strict=True):
            _assert_close(part, exactly, rtol, name)
        # Values are copied.
        assert torch.equal(parts[2].double(), expected[2])
        for kind in ("contiguous", "joined", "different", "spread"):
            gradients = make_gradients(shape, dtype, device, kind)
            ours = torch.autograd.grad(parts, inputs, gradients, retain_graph=True)
            exactly = torch.autograd.grad(expected, exact, [each.double() for each in gradients], retain_graph=True)
            heads = shape.length * shape.batch * shape.groups * shape.heads
            for of_ours, of_exact, num_terms in zip(ours, exactly, [16, heads, heads][: len(ours)], strict=True):
                assert of_ours.dtype is dtype
                _assert_close(of_ours, of_exact, rtol, f"{name}, {kind}", num_terms=num_terms)


def head_norms(width: int, query_weight: torch.Tensor, key_weight: torch.Tensor) -> HeadNorms:
    """What layers hand to `split_and_rotate`."""
    return HeadNorms(width=width, query_weight=query_weight, key_weight=key_weight, epsilon=EPSILON)


def check_sums_of_programs() -> None:
    """Norms' gradients where each program takes several blocks of tokens: the same, but for the order of the sum."""
    shape = Shape(length=21, batch=3, groups=2, heads=2, width=16, turned=12)
    angles, norms = make_angles(shape.length, shape.turned, "cpu"), make_norms(shape.width, torch.float32, "cpu")
    mixed = make_mixed(shape, torch.float32, "cpu").requires_grad_()
    gradients = make_gradients(shape, torch.float32, "cpu", "joined")
    found = []
    for num_programs in (qkv_rope_triton._NORM_PROGRAMS, 6):
        with patch.object(qkv_rope_triton, "_NORM_PROGRAMS", num_programs):
            parts = split_and_rotate(mixed, angles, angles, head_norms(shape.width, *norms))
            found.append(torch.autograd.grad(parts, [mixed, *norms], gradients))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(*(each[1:] for each in found), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def check_training(*overrides: str, normalizes: bool) -> None:
    """A tiny model in this process, on megatron-core's local layers: losses as with separate operations, in fp32.

    Args:
        *overrides: Of the configuration.
        normalizes: Queries and keys.
    """
    curves, gradients, stored = {}, {}, {}
    for fused in (False, True):
        asked = f"model.fused_single_qkv_rope={str(fused).lower()}", f"model.qk_layernorm={str(normalizes).lower()}"
        with (
            counted_launches(normalizes=normalizes) as launches,
            emulated_training.emulated_training("trainer.precision=fp32", *asked, *overrides) as training,
        ):
            curves[fused] = [training.step() for _ in range(3)] + [training.validate()]
            calls = sum(launch.call_count for launch in launches)
            gradients[fused] = training.gradients()
            state = training.chunks[0].sharded_state_dict()
            stored[fused] = {name: (part.key, part.replica_id) for name, part in state.items()}
        # Each layer: three steps of two microbatches forward and back, and a validation of two.
        assert calls == (14 * training.config.model.num_layers if fused else 0)
    separate, ours = torch.tensor(curves[False]), torch.tensor(curves[True])
    assert separate[2] < separate[0] - 0.1
    torch.testing.assert_close(ours, separate, rtol=1e-5, atol=0)
    assert stored[True] == stored[False]
    assert gradients[True].keys() == gradients[False].keys()
    assert any("q_layernorm.weight" in name for name in gradients[True]) is normalizes
    for name, gradient in gradients[True].items():
        torch.testing.assert_close(gradient, gradients[False][name], rtol=1e-3, atol=1e-5)


@contextmanager
def counted_launches(*, normalizes: bool) -> Iterator[list[Mock]]:
    """Launches, which count their calls, of the kernels with or without norms."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(patch.object(qkv_rope_triton, name, Mock(wraps=getattr(qkv_rope_triton, name))))
            for name in LAUNCHES[normalizes]
        ]


# An odd number of sequences, and a last tile that is not full; heads of one group, and keys of one head.
CAST_SHAPES = (
    Shape(length=44, batch=3, groups=3, heads=4, width=32, turned=32),
    Shape(length=7, batch=2, groups=1, heads=7, width=16, turned=16),
)


def share_of_cast_codes_that_differ(
    device: str, dtype: torch.dtype, code_dtype: torch.dtype, shapes: Sequence[Shape], *, scale: float | None
) -> float:
    """Of gradients that are joined, rotated back and cast; what differs is rounded to the neighbour.

    Args:
        device: Where to compute.
        dtype: Of the gradients.
        code_dtype: Of the codes; float16 where FP8 is not rounded as GPUs round.
        shapes: Of the projections.
        scale: What values are multiplied by; None finds it from the largest.
    """
    shares = []
    for shape in shapes:
        angles = make_angles(shape.length, shape.turned, device)
        mixed = make_mixed(shape, torch.float64, device).requires_grad_()
        split = split_and_rotate_in_fp64(mixed, angles, shape.width)
        for kind in ("contiguous", "joined", "different"):
            gradients = make_gradients(shape, dtype, device, kind)
            (exactly,) = torch.autograd.grad(split, mixed, [each.double() for each in gradients], retain_graph=True)
            expected = exactly.to(dtype).flatten(2).flatten(0, 1)
            into = destination(tuple(expected.shape), code_dtype, device, scale)
            qkv_cast_triton.launch_rope_cast(gradients, angles, into, batch=shape.batch, num_groups=shape.groups)
            shares.append(share_that_differs(into, expected, scale))
    return max(shares)
