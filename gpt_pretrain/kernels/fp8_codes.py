"""FP8 codes: where a kernel writes them, and how many are zero or saturated.

The statistics count the codes of every tensor. On a GPU `fp8_codes_triton` does so in one pass; torch's own operations
take ten, and made the watched step twice as long.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class CastInto:
    """Where a kernel writes an FP8 tensor, and with which scale."""

    codes: torch.Tensor
    """[rows, columns], float8_e4m3fn or float8_e5m2."""
    transposed: torch.Tensor | None
    """[columns, rows], the same codes; None where no weight gradient reads them."""
    scale: torch.Tensor
    """[1], fp32: the factor of the values, unless `scale_from_amax`."""
    inverse_scale: torch.Tensor
    """[1], fp32: receives the inverse of the scale."""
    amax: torch.Tensor
    """[1], fp32: raised to the largest magnitude."""
    scale_from_amax: bool
    """The scale maps the largest magnitude to the largest code."""
    amax_epsilon: float
    """The smallest amax that a scale is computed from."""


def count_codes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """Counts codes regardless of their sign; does not wait for the device.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape, contiguous.
        largest: The code of the format's largest finite magnitude.

    Returns:
        int64 [3]: how many codes are zero, how many are `largest`, and the code of the largest magnitude, which exceeds
        `largest` for NaN and infinity.
    """
    magnitudes_and_signs = codes.detach().view(torch.uint8)
    if codes.is_cuda:
        from gpt_pretrain.kernels.fp8_codes_triton import count_bytes

        return count_bytes(magnitudes_and_signs, largest)
    magnitudes = magnitudes_and_signs & 0x7F
    zero, full = (magnitudes == 0).sum(), (magnitudes == largest).sum()
    return torch.stack([zero, full, magnitudes.max().long()])
