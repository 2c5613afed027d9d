"""FP8 weights compared with their masters, after the optimizer's step.

With the wrong fields set, megatron-core's optimizer skips FP8 weights: the loss falls a little, through norms and
embeddings, but the matrices never change. Each rank checks the part of each weight whose master it holds, which is up
to date whether the other parts have been gathered yet or not.

Local layers' weights must be the very codes of their masters, with a scale from the amax of all parts. Transformer
Engine rounds a master first, and may scale it by earlier amaxes: its codes must be within one step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.fp8.gemms import CODE_TYPES, QUOTIENT_ERROR, largest_magnitude, other_codes, spread_over_blocks
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.megatron.stored_weights import StoredWeight
from gpt_pretrain.spec.recipes import FORMAT_MAX

# Columns of the fingerprint: a change goes unnoticed only if it cancels in every one of these sums.
_COLUMNS = 256
# Rows and columns of the blocks of blockwise weights; mxfp8 has no FP8 weights here.
_BLOCK = 128
# E4M3: the spacing of neighbours relative to their value, and the absolute one below the smallest normal number.
_RELATIVE_STEP, _SMALLEST_STEP = 2.0**-3, 2.0**-9
# Values that are compared at once. A whole large weight would take five times its size in fp32 beside optimizer states
# that only just fit: 2 GiB for a matrix of 5,120 × 20,480.
_PIECE = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """A rank's part of an FP8 weight, and the fp32 or FP16 master of that part."""

    weight: Any
    master: torch.Tensor
    start: int

    @property
    def is_of_local_layer(self) -> bool:
        """Whether a local layer has the weight, not Transformer Engine's."""
        return isinstance(self.weight, StoredWeight)

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [n]."""
        if self.is_of_local_layer:
            data = self.weight.codes
        else:
            data = self.weight._data if hasattr(self.weight, "_data") else self.weight._rowwise_data
        part: torch.Tensor = data.view(-1)[self.start : self.start + self.master.numel()]
        return part

    @property
    def scale_inv(self) -> torch.Tensor:
        """The factor of Transformer Engine's codes, fp32: [1], or [n] where each 128×128 values have their own."""
        if hasattr(self.weight, "_scale_inv"):
            one: torch.Tensor = self.weight._scale_inv
            return one
        rows, columns = self.weight.shape
        blocks: torch.Tensor = self.weight._rowwise_scale_inv
        each = spread_over_blocks(blocks, (_BLOCK, _BLOCK), (rows, columns))
        return each.reshape(-1)[self.start : self.start + self.master.numel()]

    def count_off(self) -> int:
        """Number of values too far from their masters; waits for the device."""
        off = torch.zeros((), dtype=torch.int64, device=self.master.device)
        each_code, each_master = self.codes.split(_PIECE), self.master.view(-1).split(_PIECE)
        if self.is_of_local_layer:
            scale = self.weight.scale
            for codes, master in zip(each_code, each_master, strict=True):
                off += other_codes(codes, master, torch.zeros_like(scale), scale, "e4m3").sum()
            return int(off)
        each_scale_inv = self.scale_inv.expand(self.master.numel()).split(_PIECE)
        for codes, master, scale_inv in zip(each_code, each_master, each_scale_inv, strict=True):
            limit = FORMAT_MAX["e4m3"] * scale_inv
            # A delayed scale may be too large for the newest values, so that they saturate.
            aim = master.float().clamp(-limit, limit)
            step = torch.maximum(aim.abs() * _RELATIVE_STEP, _SMALLEST_STEP * scale_inv)
            values = codes.view(CODE_TYPES["e4m3"]).float() * scale_inv
            # A code that is no number is near nothing.
            off += (~((values - aim).abs() <= step)).sum()
        return int(off)


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    return [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]


def _shards(optimizer: MegatronOptimizer) -> Iterator[_Shard]:
    for part in _parts(optimizer):
        for weight, master, start in zip(*part._get_fp8_params_and_shard_fp32_from_fp8(), strict=True):
            if master is not None:
                yield _Shard(weight=weight, master=master, start=start)


def _scales(optimizer: MegatronOptimizer, least_amax: float) -> Iterator[tuple[StoredWeight, float, float]]:
    """Weights of local layers with the scale that their masters ask for, and their own; every rank calls it."""
    for part in _parts(optimizer):
        weights, masters, _ = part._get_fp8_params_and_shard_fp32_from_fp8()
        if not weights or not isinstance(weights[0], StoredWeight):
            continue
        amaxes = torch.zeros(len(weights), dtype=torch.float64, device=weights[0].device)
        for amax, master in zip(amaxes, masters, strict=True):
            if master is not None:
                amax.copy_(largest_magnitude(master).view(()))
        torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=part.data_parallel_group)
        planned = (FORMAT_MAX["e4m3"] / amaxes.clamp(min=least_amax)).tolist()
        found = torch.cat([weight.scale for weight in weights]).tolist()
        yield from zip(weights, planned, found, strict=True)


def _fingerprint(codes: torch.Tensor) -> torch.Tensor:
    """int64 [up to 256 + the rest]: column sums, which need no copy of the codes."""
    whole = codes.numel() // _COLUMNS * _COLUMNS
    return torch.cat([codes[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64), codes[whole:].long()])


class MasterCheck:
    """Compares the FP8 weights of this rank before and after an optimizer step, and with their masters.

    `names` maps the id of a weight to the name of its layer; `least_amax` takes the place of a smaller amax in a scale.
    """

    def __init__(self, optimizer: MegatronOptimizer, names: Mapping[int, str], least_amax: float = 0.0) -> None:
        self._optimizer = optimizer
        self._least_amax = least_amax
        self._names = names
        self._before = [_fingerprint(shard.codes) for shard in _shards(optimizer)]

    @torch.no_grad()
    def problems(self, lr: float) -> Iterator[Difference]:
        """Each weight that did not follow its master; every rank calls it, and it waits for the device.

        A weight must have changed where the step's learning rate moved so many values that some reached another code.
        """
        for shard, before in zip(_shards(self._optimizer), self._before, strict=True):
            name, what = self._names.get(id(shard.weight), "a weight"), "weight after the step"
            size = shard.master.numel()
            off = shard.count_off()
            if off:
                near = "the code" if shard.is_of_local_layer else "within one FP8 step"
                planned, live = f"every value {near} of its master", f"{off:,} of {size:,} values are not"
                yield Difference(module=name, what=what, planned=planned, live=live)
            # Codes of usual weights (standard deviation 0.02) are about 2e-3 apart.
            must_change = size * lr / 2e-3 > 30
            if must_change and torch.equal(_fingerprint(shard.codes), before):
                yield Difference(module=name, what=what, planned="changed", live="the same codes as before")
        for weight, scale, found in _scales(self._optimizer, self._least_amax):
            if abs(found - scale) > QUOTIENT_ERROR * scale:
                name, what = self._names.get(id(weight), "a weight"), "scale of the weight after the step"
                yield Difference(module=name, what=what, planned=f"{scale:.6g}", live=f"{found:.6g}")
