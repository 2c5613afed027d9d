"""`adam.update` as one Triton kernel, which reads and writes every value once. Imported on a GPU only."""

import torch
import triton
import triton.language as tl

from gpt_pretrain.kernels import SCALED_BLOCK
from gpt_pretrain.kernels.adam import SCALED, SMALLEST_EXPONENT, AdamState, AdamStep, Moment

_BLOCK = tl.constexpr(SCALED_BLOCK)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST_EXPONENT)
# Blocks per program, so that each warp has several in flight.
_ROWS = tl.constexpr(8)


@triton.jit
def _read_moment(values, scales, offsets, inside, rows, inside_rows, SCALED: tl.constexpr):
    read = tl.load(values + offsets, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        read *= tl.load(scales + rows, mask=inside_rows, other=0.0)[:, None]
    return read


@triton.jit
def _write_moment(
    moment, values, scales, offsets, inside, rows, inside_rows,
    SCALED: tl.constexpr, MANTISSA_BITS: tl.constexpr, HEADROOM: tl.constexpr, SMALLEST: tl.constexpr,
    KEEPS_POSITIVE: tl.constexpr,
):  # fmt: skip
    if SCALED:
        largest = tl.max(tl.abs(moment), axis=1).to(tl.int32, bitcast=True)
        exponents = ((largest + (1 << (22 - MANTISSA_BITS))) >> 23) - HEADROOM
        exponents = tl.maximum(exponents, _SMALLEST_EXPONENT)
        tl.store(scales + rows, (exponents << 23).to(tl.float32, bitcast=True), mask=inside_rows)
        # The inverse of a power of two is exact.
        divided = moment * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
        if KEEPS_POSITIVE:
            divided = tl.where(moment > 0, tl.maximum(divided, SMALLEST), divided)
        moment = divided
    tl.store(values + offsets, moment.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _rounded_to_fp16(values, offsets, number):
    # `adam.rounded_to_fp16`; unsigned 32-bit products keep their lower half.
    mixed = offsets.to(tl.uint32) * 0x9E3779B9 + number.to(tl.uint32) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    chance = ((mixed ^ (mixed >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08
    exponents = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 113)
    spacing = ((exponents - 10) << 23).to(tl.float32, bitcast=True)
    return values + (chance - 0.5) * spacing


@triton.jit
def _adam_update(
    gradient, master, weight, exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales, device_values,
    lr, beta1, beta2, eps, weight_decay, size,
    HAS_WEIGHT: tl.constexpr, REMAINDERS: tl.constexpr,
    SCALED1: tl.constexpr, MANTISSA_BITS1: tl.constexpr, HEADROOM1: tl.constexpr, SMALLEST1: tl.constexpr,
    SCALED2: tl.constexpr, MANTISSA_BITS2: tl.constexpr, HEADROOM2: tl.constexpr, SMALLEST2: tl.constexpr,
):  # fmt: skip
    if tl.load(device_values) != 0:
        return
    scale = tl.load(device_values + 1)
    correction1 = tl.load(device_values + 2)
    correction2 = tl.load(device_values + 3)
    rows = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    offsets = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = offsets < size
    inside_rows = rows * _BLOCK < size

    grad = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    moment1 = _read_moment(exp_avg, exp_avg_scales, offsets, inside, rows, inside_rows, SCALED1)
    moment1 = moment1 * beta1 + grad * (1 - beta1)
    moment2 = _read_moment(exp_avg_sq, exp_avg_sq_scales, offsets, inside, rows, inside_rows, SCALED2)
    moment2 = moment2 * beta2 + grad * grad * (1 - beta2)
    kept = tl.load(master + offsets, mask=inside, other=0)
    if REMAINDERS:
        high = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        value = (high + kept.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        value = kept.to(tl.float32)

    direction = (moment1 / correction1) / (tl.sqrt_rn(moment2 / correction2) + eps)
    value -= lr * (direction + weight_decay * value)
    if REMAINDERS:
        bits = value.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(master + offsets, (bits - (high << 16)).to(tl.int16), mask=inside)
        tl.store(weight + offsets, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        if master.dtype.element_ty == tl.float16:
            value = _rounded_to_fp16(value, offsets, tl.load(device_values + 4))
        rounded = value.to(master.dtype.element_ty)
        tl.store(master + offsets, rounded, mask=inside)
        if HAS_WEIGHT:
            tl.store(weight + offsets, rounded.to(tl.float32).to(tl.bfloat16), mask=inside)
    _write_moment(
        moment1, exp_avg, exp_avg_scales, offsets, inside, rows, inside_rows,
        SCALED1, MANTISSA_BITS1, HEADROOM1, SMALLEST1, False,
    )  # fmt: skip
    _write_moment(
        moment2, exp_avg_sq, exp_avg_sq_scales, offsets, inside, rows, inside_rows,
        SCALED2, MANTISSA_BITS2, HEADROOM2, SMALLEST2, True,
    )  # fmt: skip


def _format(moment: Moment) -> tuple[bool, int, int, float]:
    scaled = SCALED.get(moment.values.dtype)
    return (False, 0, 0, 0.0) if scaled is None else (True, scaled.mantissa_bits, scaled.headroom, scaled.smallest)


def update_on_gpu(gradient: torch.Tensor, state: AdamState, step: AdamStep) -> None:
    """`adam.update` in one kernel; the gradient is contiguous."""
    master, first, second = state.master, state.exp_avg, state.exp_avg_sq
    programs = triton.cdiv(gradient.numel(), _BLOCK.value * _ROWS.value)
    _adam_update[(programs,)](
        gradient,
        master.values,
        # Unused arguments must be tensors all the same.
        master.values if master.weight is None else master.weight,
        first.values,
        step.device_values if first.scales is None else first.scales,
        second.values,
        step.device_values if second.scales is None else second.scales,
        step.device_values,
        step.lr, *step.betas, step.eps, step.weight_decay, gradient.numel(),
        master.weight is not None, master.values.dtype is torch.int16, *_format(first), *_format(second),
    )  # fmt: skip
