"""The FP8 state that a training step must have left: delayed scaling's scales and histories, and stored FP8 weights.

**Delayed scaling** is replayed from the scales and histories before the step. `Replay` takes the amaxes of the tensors
themselves, joins them over the ranks of the amax reduction group, and follows the rule of `fp8/delayed.py`:

    row 0 of the history  ← the pass's amax
    scale                 ← format maximum / 2^margin / max(history), or / row 0 (most_recent)
    history               rolls towards row 0, which ends up last; the new row 0 is zero

A tensor passes once per microbatch, a weight once per step. The optimizer casts a stored FP8 weight after the step, so
its amax enters the history in the next one. A pass whose amax is zero changes nothing. A step with an infinite amax
updates no weight and is not judged.

**FP8 weights** are compared with their masters after the optimizer's step (`weight_differences`). With the wrong fields
set, megatron-core's optimizer skips FP8 weights: the loss falls a little, through norms and embeddings, but the
matrices never change. Each rank checks the part of each weight whose master it holds, which is up to date even before
the parts are gathered. Each code must be that of its master: Transformer Engine rounds the master to BF16 first and may
scale it by earlier amaxes; local layers scale by the amax of all parts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.fp8.comparisons import DELAYED_STATE, EMPTY_HISTORY, RANKS, STORED_WEIGHT, Comparison, Difference
from gpt_pretrain.fp8.delayed import delayed_state
from gpt_pretrain.fp8.gemms import (
    CAST_IN,
    QUOTIENT_ERROR,
    Phase,
    Role,
    largest_magnitude,
    other_codes,
    role_format,
    role_name,
    spread_over_blocks,
)
from gpt_pretrain.megatron.stored_weights import StoredWeight, own_codes
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import Linear

# Rows and columns of the blocks of blockwise weights; mxfp8 weights are not stored in FP8.
_BLOCK = 128
# Values that are compared at once. Comparing a matrix of 5,120 × 20,480 as a whole would take 2 GiB.
_PIECE = 2**24

type _Tensor = tuple[str, Role]
# Amax history [rows] and scale.
type _State = tuple[list[float], float]


def is_recomputed(phase: Phase) -> bool:
    """Whether a product that is computed now repeats one: a forward pass inside a backward pass does."""
    return phase is Phase.forward and torch._C._current_graph_task_id() != -1


class Replay:
    """Records the amaxes and scales of one training step's casts.

    `linears` are the layers planned in FP8, the same on all ranks of the amax reduction group. Tensors are replayed one
    by one: it does not matter when a pass ends, because no tensor is cast twice before that.
    """

    def __init__(
        self,
        settings: Fp8Settings,
        modules: Mapping[str, torch.nn.Module],
        linears: Mapping[str, Linear],
        num_microbatches: int,
    ) -> None:
        self._settings = settings
        self._modules = modules
        self._linears = linears
        self._num_microbatches = num_microbatches
        # Amax [1] and scale [1] of each pass, and the scales of codes that were cast earlier.
        self._amaxes: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._scales: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._reused: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._stored: set[_Tensor] = set()
        self._tensors = [(name, role) for name in linears for role in Role]
        self._begin = self._copied_states()

    def _copied_states(self) -> dict[_Tensor, torch.Tensor]:
        """The scale and then the history of each tensor that has them, fp32 [1 + rows]."""
        states = {
            (name, role): delayed_state(self._modules[name], role)
            for name, role in self._tensors
            if name in self._modules
        }
        return {
            tensor: torch.cat([state[1].view(1), state[0]]) for tensor, state in states.items() if state is not None
        }

    def row_before(self, tensor: _Tensor) -> torch.Tensor | None:
        """Row 0 of the history before the step, []: what a validation or the optimizer's cast has left there."""
        begin = self._begin.get(tensor)
        return None if begin is None else begin[1]

    def note(self, tensor: _Tensor, phase: Phase, amax: torch.Tensor | None, scale: torch.Tensor) -> None:
        """Records a tensor that a product reads, with the scale of its codes, and its amax if it was cast for it."""
        role = tensor[1]
        # A step casts a weight once. A recomputed pass must use the scales of the first.
        is_cast_again = role is not Role.weight or tensor not in self._scales
        if phase is CAST_IN[role] and is_cast_again and not is_recomputed(phase) and amax is not None:
            self._amaxes[tensor].append(amax)
            self._scales[tensor].append(scale)
        else:
            self._reused[tensor].append(scale)

    def note_stored(self, module: str, scale: torch.Tensor) -> None:
        """Records a weight that is stored in FP8."""
        tensor = module, Role.weight
        self._stored.add(tensor)
        if tensor not in self._amaxes:
            self._amaxes[tensor].append(torch.zeros_like(scale))

    def differences(self, group: torch.distributed.ProcessGroup) -> Iterator[Difference]:
        """All that differs from the replay; every rank of the amax reduction group calls it together."""
        if not self._tensors:
            return
        copied = self._copied_states()
        passes, own, joined = self._joined(copied, group)
        begins, ends = _read_states(self._begin), _read_states(copied)
        used = _read({tensor: [*self._scales[tensor], *self._reused[tensor]] for tensor in self._tensors})
        stored = _read({tensor: [self._inverse_scale(tensor)] for tensor in self._tensors if tensor in self._stored})
        for tensor, seen in passes.items():
            begin, end = begins.get(tensor), ends.get(tensor)
            if tensor[0] not in self._modules:
                continue
            rows, planned = 0 if end is None else len(end[0]), self._settings.amax_history_len
            if begin is None and end is not None:
                # Transformer Engine creates them in the first pass.
                begin = [0.0] * rows, 1.0
            if rows != planned or end is None or begin is None:
                yield _difference(DELAYED_STATE, tensor, "rows of the amax history", planned, rows)
            elif all(map(math.isfinite, [*seen, *begin[0]])):
                yield from self._compare(tensor, begin, seen, end, used[tensor])
                for inverse in stored.get(tensor, []):
                    if not _is_near(1.0 / inverse, end[1]):
                        yield _difference(DELAYED_STATE, tensor, "scale of the stored codes", end[1], 1.0 / inverse)
                largest, smallest = joined[tensor]
                for what, mine, high, low in zip(
                    ("scale", "amax history"), own[tensor], largest, smallest, strict=True
                ):
                    if high != -low:
                        yield _difference(RANKS, tensor, f"{what} on all ranks", high, -low if mine == high else mine)
        yield from self._emptied(begins, passes)

    def _joined(
        self, ends: Mapping[_Tensor, torch.Tensor], group: torch.distributed.ProcessGroup
    ) -> tuple[dict[_Tensor, list[float]], dict[_Tensor, list[float]], dict[_Tensor, list[list[float]]]]:
        """Three facts about each tensor, read from the device together; every rank of the group calls it together.

        The largest amax of the ranks in each pass; its scale and the sum of its history on this rank; and the largest
        of the ranks' scales and sums, and of their negatives.
        """
        device = torch.cuda.current_device()
        none = torch.full((1,), -1.0, device=device)
        rows, states = [], []
        for tensor in self._tensors:
            amaxes = self._amaxes[tensor][: self._num_microbatches]
            # Row 0 has what a validation left there on each rank, or the optimizer's cast. The first pass joins it.
            if amaxes and tensor in self._begin:
                amaxes = [torch.maximum(amaxes[0].view(1), self._begin[tensor][1:2]), *amaxes[1:]]
            rows += [*amaxes, *[none] * (self._num_microbatches - len(amaxes))]
            end = ends.get(tensor)
            if end is None:
                states.append(torch.full((2,), torch.nan, dtype=torch.float64, device=device))
            else:
                states.append(torch.stack([end[0].double(), end[2:].double().sum()]))
        amaxes_of_ranks = torch.cat([amax.view(1) for amax in rows]).view(len(self._tensors), -1)
        torch.distributed.all_reduce(amaxes_of_ranks, op=torch.distributed.ReduceOp.MAX, group=group)
        # [tensors, with either sign, scale and history]
        own = torch.stack(states)
        joined = torch.stack([own, -own], dim=1)
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
        passes = [[amax for amax in row if amax >= 0] for row in amaxes_of_ranks.tolist()]
        by_tensor = partial(zip, self._tensors, strict=True)
        return dict(by_tensor(passes)), dict(by_tensor(own.tolist())), dict(by_tensor(joined.tolist()))

    def _inverse_scale(self, tensor: _Tensor) -> torch.Tensor:
        weight: Any = self._modules[tensor[0]].weight
        return weight._scale_inv  # type: ignore[no-any-return]

    def _emptied(self, begins: Mapping[_Tensor, _State], seen: Mapping[_Tensor, list[float]]) -> Iterator[Difference]:
        """Histories that were empty before the step, while half or more of the same tensors of other layers had one."""
        filled: dict[tuple[str, Role], list[bool]] = defaultdict(list)
        was_filled = {}
        for (name, role), (history, _) in begins.items():
            # The only row of a history of one is the present pass's.
            if len(history) > 1:
                was_filled[name, role] = any(history[1:])
                filled[self._linears[name].kind, role].append(was_filled[name, role])
        for (name, role), is_filled in was_filled.items():
            others = filled[self._linears[name].kind, role]
            if not is_filled and 2 * sum(others) >= len(others) and max(seen[name, role], default=0.0) > 0:
                planned, live = f"filled, as {sum(others)} of {len(others)} of its kind", "empty before the step"
                yield _difference(EMPTY_HISTORY, (name, role), "amax history", planned, live)

    def _compare(
        self, tensor: _Tensor, begin: _State, seen: list[float], end: _State, used: list[float]
    ) -> Iterator[Difference]:
        """Compares the state after the step, and the scales of codes that it read, with a replay of the amaxes."""
        (history, scale), (found_history, found_scale) = begin, end
        first = self._first_scale(tensor, history)
        if first is not None and not first[0] * (1 - QUOTIENT_ERROR) <= scale <= first[1] * (1 + QUOTIENT_ERROR):
            yield _difference(DELAYED_STATE, tensor, "first scale", first[1], scale)
        scales = [scale]
        for amax in seen:
            newest = history[0] = max(history[0], amax)
            if newest:
                scale = self._scale(tensor, max(history) if self._takes_maximum else newest)
                history = [*history[1:], newest]
                history[0] = 0.0
            scales.append(scale)
        num_casts = len(self._scales[tensor])
        for index, found in enumerate(used):
            # The scale of codes that were cast earlier must be that of one of the step's casts.
            expected = scales[index : index + 1] if index < num_casts else scales[: max(1, num_casts)]
            if not any(_is_near(found, each) for each in expected):
                yield _difference(DELAYED_STATE, tensor, "scale", expected[0] if expected else scales[-1], found)
                break
        if tensor in self._stored:
            # The amax of the optimizer's cast waits here for the next pass.
            history[0] = found_history[0]
        if history[-1] != found_history[-1]:
            yield _difference(DELAYED_STATE, tensor, "newest amax of the history", history[-1], found_history[-1])
        off = sum(amax != found for amax, found in zip(history, found_history, strict=True))
        if off > (history[-1] != found_history[-1]):
            what = f"amax history after {len(seen)} passes"
            yield _difference(DELAYED_STATE, tensor, what, f"{len(history)} amaxes", f"{off} others")
        if not _is_near(found_scale, scales[-1]):
            yield _difference(DELAYED_STATE, tensor, "next scale", scales[-1], found_scale)

    @property
    def _takes_maximum(self) -> bool:
        return self._settings.amax_compute_algo is AmaxComputeAlgo.max

    def _scale(self, tensor: _Tensor, amax: float) -> float:
        largest = FORMAT_MAX[role_format(self._settings, tensor[1])]
        return min(largest / amax * 2.0**-self._settings.margin, torch.finfo(torch.float32).max)

    def _first_scale(self, tensor: _Tensor, history: list[float]) -> tuple[float, float] | None:
        """The least and the largest scale that a history and one amax dropped since can have led to, if it says so."""
        earlier = history[1:] if self._takes_maximum else history[1:][-1:]
        num_used = sum(amax != 0 for amax in earlier)
        # A history is filled from its end. Gaps are amaxes that were not finite and were taken out.
        if num_used == 0 or 0.0 in earlier[-num_used:]:
            return None
        largest = self._scale(tensor, max(earlier))
        is_complete = not self._takes_maximum or num_used < len(earlier)
        return largest if is_complete else 0.0, largest


def _read(numbers: Mapping[_Tensor, list[torch.Tensor]]) -> dict[_Tensor, list[float]]:
    """Numbers in tensors, [n] each; waits for the device once."""
    whole = [each.view(-1) for of_tensor in numbers.values() for each in of_tensor]
    read = iter(torch.cat(whole).tolist() if whole else [])
    return {
        tensor: list(islice(read, sum(each.numel() for each in of_tensor))) for tensor, of_tensor in numbers.items()
    }


def _read_states(states: Mapping[_Tensor, torch.Tensor]) -> dict[_Tensor, _State]:
    read = _read({tensor: [state] for tensor, state in states.items()})
    return {tensor: (history, scale) for tensor, (scale, *history) in read.items()}


def _difference(
    comparison: Comparison, tensor: _Tensor, what: str, planned: float | str, live: float | str
) -> Difference:
    name, role = tensor
    shown = (each if isinstance(each, str) else f"{each:.6g}" for each in (planned, live))
    return Difference(
        comparison=comparison, module=name, what=f"{role_name(role)}: {what}", planned=next(shown), live=next(shown)
    )


def _is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= QUOTIENT_ERROR * abs(expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """A rank's part of an FP8 weight, and the fp32 or FP16 master of that part."""

    weight: Any
    master: torch.Tensor
    start: int

    @property
    def is_of_local_layer(self) -> bool:
        """Whether the weight belongs to a local layer, not Transformer Engine's."""
        return isinstance(self.weight, StoredWeight)

    @property
    def codes(self) -> torch.Tensor:
        """uint8 [n]."""
        return own_codes(self.weight, self.start, self.master.numel())

    @property
    def scale(self) -> torch.Tensor:
        """The factor of the master before it was rounded, fp32: [1], or [n] if each 128×128 values have their own."""
        if self.is_of_local_layer:
            return self.weight.scale  # type: ignore[no-any-return]
        if hasattr(self.weight, "_scale_inv"):
            return self.weight._scale_inv.reciprocal()  # type: ignore[no-any-return]
        blocks: torch.Tensor = self.weight._rowwise_scale_inv.reciprocal()
        factors = spread_over_blocks(blocks, (_BLOCK, _BLOCK), self.weight.shape).reshape(-1)
        return factors[self.start : self.start + self.master.numel()]

    def count_off(self) -> torch.Tensor:
        """Number of codes that are not their masters', int64 []."""
        dtype = torch.float32 if self.is_of_local_layer else self.weight.dtype
        exact = torch.zeros((), device=self.master.device)
        pieces = (
            each.split(_PIECE) for each in (self.codes, self.master.view(-1), self.scale.expand(self.master.numel()))
        )
        off = torch.zeros((), dtype=torch.int64, device=self.master.device)
        for codes, master, scale in zip(*pieces, strict=True):
            off += other_codes(codes, master.to(dtype), exact, scale, "e4m3").sum()
        return off


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    return [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]


def _shards(optimizer: MegatronOptimizer) -> Iterator[_Shard]:
    for part in _parts(optimizer):
        for weight, master, start in zip(*part._get_fp8_params_and_shard_fp32_from_fp8(), strict=True):
            if master is not None:
                yield _Shard(weight=weight, master=master, start=start)


def _scales(optimizer: MegatronOptimizer, least_amax: float) -> Iterator[tuple[StoredWeight, float, float]]:
    """Weights of local layers with the scale for their masters and the one they have; every rank calls it."""
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


@torch.no_grad()
def weight_differences(
    optimizer: MegatronOptimizer, weights: Mapping[str, Any], least_amax: float
) -> Iterator[Difference]:
    """Each FP8 weight of this rank that has not followed its master in an optimizer's step; every rank calls it.

    `weights` are this rank's FP8 weights, by name; `least_amax` replaces a smaller amax in a local layer's scale.
    """
    names = {id(weight): name for name, weight in weights.items()}

    def difference(weight: Any, what: str, planned: str, live: str) -> Difference:
        module = names.get(id(weight), "a weight")
        return Difference(comparison=STORED_WEIGHT, module=module, what=what, planned=planned, live=live)

    what = "weight after the step"
    updated = {id(weight) for part in _parts(optimizer) for weight in part._get_fp8_params_and_shard_fp32_from_fp8()[0]}
    for weight in weights.values():
        if id(weight) not in updated:
            yield difference(weight, what, "cast by the optimizer", "unknown to it")
    shards = list(_shards(optimizer))
    counts = torch.stack([shard.count_off() for shard in shards]).tolist() if shards else []
    for shard, off in zip(shards, counts, strict=True):
        if off:
            size = shard.master.numel()
            yield difference(shard.weight, what, "every code that of its master", f"{off:,} of {size:,} are not")
    for weight, scale, found in _scales(optimizer, least_amax):
        if abs(found - scale) > QUOTIENT_ERROR * scale:
            yield difference(weight, "scale of the weight after the step", f"{scale:.6g}", f"{found:.6g}")
