"""The FP8 tensor that a kernel writes beside what it computes: its codes, their transpose, its scale and its amax."""

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
