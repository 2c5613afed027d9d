"""One update of Adam, on states that take fewer bytes than fp32.

`update` reads a chunk of gradient, master and moments, computes in fp32 and writes the chunk back, so no state is ever
copied whole. The arithmetic is that of Transformer Engine's FusedAdam, with decoupled weight decay (Loshchilov and
Hutter 2019). Everything here works on any device; `adam_triton` computes the same on a GPU in one kernel.

**Moments** are fp32, BF16, FP16 or E4M3. The range of FP16 and E4M3 is too small: squares of gradients lie below FP16's
smallest number. So every `SCALED_BLOCK` values share a scale, a power of two that puts the largest of them into the
type's upper range. A power of two adds no rounding error: a stored value that is dequantized, saved, loaded and
quantized again keeps every bit. (FusedAdam has one scale per tensor and quantizes in a separate pass. At the peak of a
step it holds all states of a group in fp32, 12 bytes per parameter.)

**Masters** are fp32, FP16, or 16-bit remainders beside a BF16 weight. A remainder is a signed number; added to the bits
of the weight it gives the fp32 master exactly. The weight is the master rounded to nearest. FP16 masters are rounded
stochastically, because most updates are smaller than half the distance between two FP16 numbers and rounding to nearest
would lose them all (Gupta et al. 2015).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpt_pretrain.kernels import SCALED_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledFormat:
    """A type whose blocks have scales."""

    mantissa_bits: int
    headroom: int
    """The largest value of a block, divided by the scale, is at least 2^headroom and below 2^(headroom + 1)."""
    smallest: float
    """The smallest positive number."""
    saved_as: torch.dtype
    """The smallest type that holds a value times a power of two exactly."""


SCALED = {
    torch.float16: ScaledFormat(mantissa_bits=10, headroom=14, smallest=2.0**-24, saved_as=torch.float32),
    torch.float8_e4m3fn: ScaledFormat(mantissa_bits=3, headroom=7, smallest=2.0**-9, saved_as=torch.bfloat16),
}
_HASH = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35)
_LOWER = 0xFFFFFFFF
# Biased fp32 exponent of 2^-14: smaller FP16 numbers have the same spacing.
_SMALLEST_NORMAL_FP16 = 113
# Biased exponent of the smallest scale; products with it are normal numbers of fp32 and BF16.
SMALLEST_EXPONENT = 32


def _scales(largest: torch.Tensor, scaled: ScaledFormat) -> torch.Tensor:
    """A power of two for each block, from its largest magnitude in fp32.

    The largest value is rounded first, so that quantizing it again gives the same scale.
    """
    rounded_up = largest.view(torch.int32) + (1 << (22 - scaled.mantissa_bits))
    exponents = ((rounded_up >> 23) - scaled.headroom).clamp(min=SMALLEST_EXPONENT)
    return (exponents << 23).view(torch.float32)


def rounded_to_fp16(values: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """Values, fp32 [n], moved at random so that rounding them to the nearest FP16 is right on average.

    The random number depends on the seed, which is the step's number, and on the value's index in this rank's part of
    the parameter (`start` for the first).
    """
    index = torch.arange(start, start + values.numel(), device=values.device)
    # fmix32 (Appleby's MurmurHash3) of index and seed, in the lower half of 64 bits.
    mixed = (index * _HASH[0] + seed * _HASH[1]) & _LOWER
    for shift, factor in ((16, _HASH[1]), (13, _HASH[2])):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _LOWER
    chance = ((mixed ^ (mixed >> 16)) >> 8).float() * 2.0**-24
    exponents = ((values.view(torch.int32) >> 23) & 0xFF).clamp(min=_SMALLEST_NORMAL_FP16)
    spacing = ((exponents - SCALED[torch.float16].mantissa_bits) << 23).view(torch.float32)
    return values + (chance - 0.5) * spacing


@dataclass(slots=True)
class Moment:
    """One of Adam's moments of one parameter."""

    values: torch.Tensor
    """[n], as stored."""
    scales: torch.Tensor | None
    """fp32 [blocks]; None for types without."""
    keeps_positive: bool
    """Positive values never become zero. The update divides by the root of the second moment."""

    @classmethod
    def zeros(cls, like: torch.Tensor, dtype: torch.dtype, *, keeps_positive: bool) -> "Moment":
        """The moment of a parameter before its first update."""
        values = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        blocks = -(-like.numel() // SCALED_BLOCK)
        return cls(values, torch.zeros(blocks, device=like.device) if dtype in SCALED else None, keeps_positive)

    @property
    def saved_as(self) -> torch.dtype:
        """A plain type that holds the values exactly."""
        dtype = self.values.dtype
        return SCALED[dtype].saved_as if dtype in SCALED else dtype

    def read(self, start: int, end: int) -> torch.Tensor:
        """Values in fp32, [end - start]."""
        values = self.values[start:end].float()
        if self.scales is None:
            return values
        first = start // SCALED_BLOCK
        each = self.scales[first : -(-end // SCALED_BLOCK)].repeat_interleave(SCALED_BLOCK)
        return values.mul_(each[start - first * SCALED_BLOCK :][: end - start])

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values, fp32 [n], from the start of a block on: whole blocks, or everything to the end."""
        target = self.values[start : start + values.numel()]
        if self.scales is None:
            target.copy_(values)
            return
        scaled = SCALED[self.values.dtype]
        blocks = torch.nn.functional.pad(values, (0, -values.numel() % SCALED_BLOCK)).view(-1, SCALED_BLOCK)
        scales = _scales(blocks.abs().amax(dim=1), scaled)
        self.scales[start // SCALED_BLOCK :][: scales.numel()] = scales
        divided = (blocks / scales[:, None]).view(-1)[: values.numel()]
        if self.keeps_positive:
            divided = torch.where(values > 0, divided.clamp(min=scaled.smallest), divided)
        target.copy_(divided)


@dataclass(slots=True)
class Master:
    """The master of one parameter."""

    values: torch.Tensor
    """[n]: fp32, fp16, or int16 for remainders of `weight`."""
    weight: torch.Tensor | None
    """BF16 [n], the parameter, written with its master; None if it is cast later or is the master itself."""

    @property
    def saved_as(self) -> torch.dtype:
        """A plain type that holds the values exactly."""
        return torch.float32 if self.values.dtype is torch.int16 else self.values.dtype

    def read(self, start: int, end: int) -> torch.Tensor:
        """Values in fp32, [end - start]."""
        values = self.values[start:end]
        if values.dtype is not torch.int16:
            return values.float()
        assert self.weight is not None
        high = self.weight[start:end].view(torch.int16).int() << 16
        return (high + values).view(torch.float32)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Stores values, fp32 [n], from `start` on, and the weights that follow from them."""
        place = slice(start, start + values.numel())
        if self.values.dtype is torch.int16:
            assert self.weight is not None
            bits = values.view(torch.int32)
            high = (bits + 0x8000) >> 16
            self.values[place] = (bits - (high << 16)).short()
            self.weight[place] = high.short().view(torch.bfloat16)
            return
        self.values[place] = values
        if self.weight is not None:
            # From the stored master, so that a checkpoint gives the same weight.
            self.weight[place] = self.values[place]


class Stored(Protocol):
    """What is stored in fewer bytes than it is saved in."""

    @property
    def values(self) -> torch.Tensor:
        """[n], as stored."""

    @property
    def saved_as(self) -> torch.dtype:
        """A plain type that holds the values exactly."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Values in fp32, [end - start]."""


class StoredValues(torch.Tensor):
    """A tensor without storage for saving a state; it can be viewed, and sliced if flat. `dequantize` reads values."""

    _state: Stored
    _start: int

    def __new__(cls, state: Stored, start: int = 0, shape: torch.Size | None = None) -> "StoredValues":
        """All values of a state, [n], or those of a shape from `start` on."""
        made: StoredValues = torch.Tensor._make_wrapper_subclass(
            cls, state.values.shape if shape is None else shape, dtype=state.saved_as, device=state.values.device
        )
        made._state, made._start = state, start
        return made

    def dequantize(self) -> torch.Tensor:
        """The values."""
        return self._state.read(self._start, self._start + self.numel()).to(self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as the function that turns it off
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views and slices, and the operations of a checkpoint's planner."""
        values, *rest = args
        state, first = values._state, values._start
        match func:
            case torch.ops.aten.is_pinned.default:
                return False
            case torch.ops.aten.detach.default | torch.ops.aten.alias.default:
                return cls(state, first, values.shape)
            case torch.ops.aten.view.default:
                return cls(state, first, torch.empty(values.shape, device="meta").view(rest[0]).shape)
            case torch.ops.aten.slice.Tensor if values.dim() == 1:
                start, end, _ = slice(*rest[1:]).indices(values.numel())
                return cls(state, first + start, torch.Size([end - start]))
        raise NotImplementedError(f"{func} on values that are being saved")


# Values updated at once, which bounds the memory of a step.
_CHUNK = 4096 * SCALED_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """What an update depends on besides the states."""

    device_values: torch.Tensor
    """fp32 [5], on the device: 1 to skip the update, else 0; the factor of the gradients; the two bias corrections
    1 - beta^step; the step's number."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamState:
    """All of Adam's states of one parameter."""

    master: Master
    exp_avg: Moment
    exp_avg_sq: Moment

    @property
    def by_name(self) -> Mapping[str, Master | Moment]:
        """The states by their names in a checkpoint."""
        return {"fp32_param": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def update(gradient: torch.Tensor, state: AdamState, step: AdamStep) -> None:
    """Updates one parameter, a chunk at a time; its gradient is [n] in fp32 or BF16."""
    skip, scale, correction1, correction2, number = step.device_values.tolist()
    if skip:
        return
    beta1, beta2 = step.betas
    for start in range(0, gradient.numel(), _CHUNK):
        end = min(start + _CHUNK, gradient.numel())
        grad = gradient[start:end].float() * scale
        exp_avg = state.exp_avg.read(start, end) * beta1 + grad * (1 - beta1)
        exp_avg_sq = state.exp_avg_sq.read(start, end) * beta2 + grad * grad * (1 - beta2)
        master = state.master.read(start, end)
        direction = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + step.eps)
        master -= step.lr * (direction + step.weight_decay * master)
        if state.master.values.dtype is torch.float16:
            master = rounded_to_fp16(master, start, int(number))
        state.master.write(start, master)
        state.exp_avg.write(start, exp_avg)
        state.exp_avg_sq.write(start, exp_avg_sq)
