"""What Hopper's tensor cores lose of FP8 products, simulated: sums of 14 bits, as measured on an H100."""

import torch


def _cut(values, largest):
    """Values without what lies below 2^-13 of the power of two of the largest, towards zero."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - 13)
    return torch.where(largest > 0, torch.trunc(values / unit) * unit, values)


def multiply(first, second, *, split):
    """first [n, k] times second [m, k], transposed, as `torch._scaled_mm` with `use_fast_accum` of not `split`.

    An instruction adds 32 products to the sum so far. Split sums move to fp32 after 128.
    """
    first, second = first.double(), second.double()
    total = torch.zeros(first.shape[0], second.shape[0], dtype=torch.float64)
    running = torch.zeros_like(total)
    for start in range(0, first.shape[1], 32):
        products = first[:, None, start : start + 32] * second[None, :, start : start + 32]
        largest = torch.maximum(products.abs().amax(-1), running.abs())
        running = _cut(products, largest[..., None]).sum(-1) + _cut(running, largest)
        if split and start % 128 == 96:
            total, running = (total + running).float().double(), torch.zeros_like(running)
    return total + running
