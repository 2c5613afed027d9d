"""FP8 codes: where a kernel writes them, and how many are zero or saturated.

The statistics count the codes of every tensor. On a GPU `fp8_codes_triton` does so in one pass; torch's own operations
take ten, and made the watched step twice as long.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class CastInto:
    """Where an FP8 tensor is written, and with which scale."""

    codes: torch.Tensor
    """[rows, columns], float8_e4m3fn or float8_e5m2."""
    transposed: torch.Tensor | None
    """[columns, rows], the same codes; None where no weight gradient will read them."""
    scale: torch.Tensor
    """[1], fp32: what values are multiplied by, unless `scale_from_amax`."""
    inverse_scale: torch.Tensor
    """[1], fp32: receives the inverse."""
    amax: torch.Tensor
    """[1], fp32: receives the largest magnitude if that is larger."""
    scale_from_amax: bool
    """The scale takes the largest magnitude to the largest code."""
    amax_epsilon: float
    """The smallest amax that a scale comes from."""


def count_codes(codes: torch.Tensor, largest: int) -> torch.Tensor:
    """Counts codes without regard to their sign; does not wait for the device.

    Args:
        codes: float8_e4m3fn or float8_e5m2, any shape, contiguous.
        largest: The code of the format's largest finite magnitude.

    Returns:
        int64 [3]: how many are zero, how many are `largest`, and the code of the largest magnitude that there is, which
        is beyond `largest` for NaN and infinity.
    """
    magnitudes_and_signs = codes.detach().view(torch.uint8)
    if codes.is_cuda:
        from gpt_pretrain.kernels.fp8_codes_triton import count_bytes

        return count_bytes(magnitudes_and_signs, largest)
    magnitudes = magnitudes_and_signs & 0x7F
    zero, full = (magnitudes == 0).sum(), (magnitudes == largest).sum()
    return torch.stack([zero, full, magnitudes.max().long()])
