"""The kernel behind `fp8_codes.count_codes` on GPUs."""

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(4096)
_BLOCKS_PER_PROGRAM = tl.constexpr(16)


# Triton reads annotations and accepts its own only.
@triton.jit
def _count(codes, counts, size, largest):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    first = tl.program_id(0).to(tl.int64) * _BLOCK * _BLOCKS_PER_PROGRAM
    zero = tl.zeros([_BLOCK], dtype=tl.int32)
    full = tl.zeros([_BLOCK], dtype=tl.int32)
    highest = tl.zeros([_BLOCK], dtype=tl.int32)
    for index in range(_BLOCKS_PER_PROGRAM):
        offsets = first + index * _BLOCK + tl.arange(0, _BLOCK)
        inside = offsets < size
        magnitudes = tl.load(codes + offsets, mask=inside, other=0).to(tl.int32) & 0x7F
        zero += (inside & (magnitudes == 0)).to(tl.int32)
        full += (magnitudes == largest).to(tl.int32)
        highest = tl.maximum(highest, magnitudes)
    tl.atomic_add(counts, tl.sum(zero, axis=0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(full, axis=0).to(tl.int64))
    tl.atomic_max(counts + 2, tl.max(highest, axis=0).to(tl.int64))


def count_bytes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """`count_codes` for codes as bytes.

    Args:
        codes: uint8, any shape, contiguous.
        largest: As there.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=codes.device)
    programs = triton.cdiv(codes.numel(), _BLOCK.value * _BLOCKS_PER_PROGRAM.value)
    if programs:
        _count[(programs,)](codes, counts, codes.numel(), largest)
    return counts
