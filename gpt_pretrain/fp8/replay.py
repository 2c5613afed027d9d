"""Delayed scaling replayed: the scales that a step must have cast with, and the state that it must have left.

The replay starts from the scales and histories before the step. It takes the amaxes of the tensors themselves, joins
them over the ranks of the amax reduction group, and follows the rule of `fp8/delayed.py` tensor by tensor:

    row 0 of the history  ← the pass's amax
    scale                 ← format maximum / 2^margin / max(history), or / row 0 (most_recent)
    history               rolls towards row 0, which ends up last; the new row 0 is zero

Each tensor passes once per microbatch, a weight once per step; one that is stored in FP8 is cast by the optimizer
behind the step, and its amax enters the history in the next one. It does not matter when a pass ends: no tensor is cast
twice before. A pass whose amax is zero changes nothing. A step with an infinite amax updates no weight and is not
judged.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.fp8.delayed import delayed_state
from gpt_pretrain.fp8.gemms import CAST_IN, QUOTIENT_ERROR, Phase, Role, role_format, role_name
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.recipes import FORMAT_MAX

type _Tensor = tuple[str, Role]


def is_recomputed(phase: Phase) -> bool:
    """Whether a product that is computed now repeats one: a forward pass inside of a backward pass does."""
    return phase is Phase.forward and torch._C._current_graph_task_id() != -1


class Replay:
    """Records the amaxes and scales of one training step's casts.

    `names` are the layers that the plan puts in FP8, the same on all ranks of the amax reduction group.
    """

    def __init__(
        self,
        settings: Fp8Settings,
        modules: Mapping[str, torch.nn.Module],
        names: Sequence[str],
        num_microbatches: int,
    ) -> None:
        self._settings = settings
        self._modules = modules
        self._num_microbatches = num_microbatches
        # Amax [1] and scale [1] of each pass, and the scales of codes that were cast before.
        self._amaxes: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._scales: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._reused: dict[_Tensor, list[torch.Tensor]] = defaultdict(list)
        self._stored: dict[_Tensor, torch.Tensor] = {}
        self._begin = {(name, role): self._state((name, role)) for name in names for role in Role}

    def _state(self, tensor: _Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of amax history and scale, fp32 [rows] and []; None where there are none."""
        name, role = tensor
        if name not in self._modules:
            return None
        state = delayed_state(self._modules[name], role)
        return None if state is None else (state[0].clone(), state[1].clone())

    def note(self, tensor: _Tensor, phase: Phase, amax: torch.Tensor | None, scale: torch.Tensor) -> None:
        """Records a tensor that a product reads.

        `amax` is there if the tensor was cast for the product; `scale` is that of its codes, each [1].
        """
        role = tensor[1]
        # A step casts a weight once. A recomputed pass must use the scales of the first.
        is_cast_again = role is not Role.weight or tensor not in self._scales
        if phase is CAST_IN[role] and is_cast_again and not is_recomputed(phase) and amax is not None:
            self._amaxes[tensor].append(amax)
            self._scales[tensor].append(scale)
        else:
            self._reused[tensor].append(scale)

    def note_stored(self, module: str, scale: torch.Tensor) -> None:
        """Records a weight that is stored in FP8: the optimizer casts it behind the step, where its amax waits."""
        tensor = module, Role.weight
        self._stored.setdefault(tensor, scale)
        if tensor not in self._amaxes:
            self._amaxes[tensor].append(torch.zeros_like(scale))

    def differences(self, group: torch.distributed.ProcessGroup) -> Iterator[Difference]:
        """All that is not as replayed, on every rank of the amax reduction group together; waits for the device."""
        tensors, device = list(self._begin), torch.cuda.current_device()
        ends = {tensor: self._state(tensor) for tensor in tensors}
        amaxes = torch.full((len(tensors), self._num_microbatches), -1.0, device=device)
        # Scale and history, which all ranks of the group must have in common.
        states = torch.full((2, len(tensors), 2), torch.nan, dtype=torch.float64, device=device)
        for row, tensor in enumerate(tensors):
            for index, amax in enumerate(self._amaxes[tensor][: self._num_microbatches]):
                amaxes[row, index] = amax[0]
            begin, end = self._begin[tensor], ends[tensor]
            # Of a stored weight row 0 waits for the next pass, in which the ranks join it.
            if tensor in self._stored and begin is not None:
                amaxes[row, 0] = begin[0][0]
            if end is not None:
                state = torch.stack([end[1].double(), end[0][1:].double().sum()])
                states[:, row] = torch.stack([state, -state])
        torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
        joined = states.clone()
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
        passes = [[amax for amax in row if amax >= 0] for row in amaxes.tolist()]
        for tensor, seen, own, (largest, smallest) in zip(
            tensors, passes, states[0].tolist(), joined.transpose(0, 1).tolist(), strict=True
        ):
            end, begin = ends[tensor], self._begin[tensor]
            if tensor[0] not in self._modules:
                continue
            rows, planned = 0 if end is None else len(end[0]), self._settings.amax_history_len
            if begin is None and end is not None:
                # Transformer Engine makes them in the first pass.
                begin = torch.zeros_like(end[0]), torch.ones_like(end[1])
            if rows != planned or end is None or begin is None:
                yield _difference(tensor, "rows of the amax history", planned, rows)
            elif all(map(math.isfinite, [*seen, *begin[0].tolist()])):
                yield from self._compare(tensor, begin, seen, end)
                for what, mine, high, low in zip(("scale", "amax history"), own, largest, smallest, strict=True):
                    if high != -low:
                        yield _difference(tensor, f"{what} on all ranks", high, -low if mine == high else mine)

    def _compare(
        self,
        tensor: _Tensor,
        begin: tuple[torch.Tensor, torch.Tensor],
        seen: list[float],
        end: tuple[torch.Tensor, ...],
    ) -> Iterator[Difference]:
        history, scale = begin[0].cpu(), begin[1].item()
        first = self._first_scale(tensor, history)
        if first is not None and not first[0] * (1 - QUOTIENT_ERROR) <= scale <= first[1] * (1 + QUOTIENT_ERROR):
            yield _difference(tensor, "first scale", first[1], scale)
        scales = [scale]
        for amax in seen:
            history[0] = max(history[0].item(), amax)
            newest = history[0].item()
            if newest:
                scale = self._scale(tensor, history.max().item() if self._takes_maximum else newest)
                history = history.roll(-1)
                history[0] = 0.0
            scales.append(scale)
        used = [float(each) for each in (*self._scales[tensor], *self._reused[tensor])]
        num_casts = len(self._scales[tensor])
        for index, found in enumerate(used):
            # Of codes that were cast before, the scale must be that of one of the step's casts.
            expected = scales[index : index + 1] if index < num_casts else scales[: max(1, num_casts)]
            if not any(_is_near(found, each) for each in expected):
                yield _difference(tensor, "scale", expected[0] if expected else scales[-1], found)
                break
        found_history, found_scale = end[0].cpu(), end[1].item()
        if tensor in self._stored:
            # The amax of the optimizer's cast waits here for the next pass.
            history[0] = found_history[0]
            weight: Any = self._modules[tensor[0]].weight
            used_scale = 1.0 / weight._scale_inv.item()
            if not _is_near(used_scale, found_scale):
                yield _difference(tensor, "scale of the stored codes", found_scale, used_scale)
        newest, found_newest = history[-1].item(), found_history[-1].item()
        if newest != found_newest:
            yield _difference(tensor, "newest amax of the history", newest, found_newest)
        off = int((history != found_history).sum())
        if off > (newest != found_newest):
            yield _difference(
                tensor, f"amax history after {len(seen)} passes", f"{len(history)} amaxes", f"{off} others"
            )
        if not _is_near(found_scale, scales[-1]):
            yield _difference(tensor, "next scale", scales[-1], found_scale)

    @property
    def _takes_maximum(self) -> bool:
        return self._settings.amax_compute_algo is AmaxComputeAlgo.max

    def _scale(self, tensor: _Tensor, amax: float) -> float:
        largest = FORMAT_MAX[role_format(self._settings, tensor[1])]
        return min(largest / amax * 2.0**-self._settings.margin, torch.finfo(torch.float32).max)

    def _first_scale(self, tensor: _Tensor, history: torch.Tensor) -> tuple[float, float] | None:
        """The least and the largest scale that a history can have led to; None where it does not say.

        The amaxes that led to a scale are those of the history and one that it has dropped since.
        """
        earlier = history[1:]
        if not self._takes_maximum:
            earlier = earlier[-1:]
        num_used = int((earlier != 0).sum())
        if num_used == 0:
            return None
        # A history is filled from its end. Amaxes that were not finite have been taken out of one with gaps.
        if not bool((earlier[-num_used:] != 0).all()):
            return None
        largest = self._scale(tensor, earlier.max().item())
        is_complete = not self._takes_maximum or num_used < len(earlier)
        return largest if is_complete else 0.0, largest


def _difference(tensor: _Tensor, what: str, planned: float | str, live: float | str) -> Difference:
    name, role = tensor
    shown = (each if isinstance(each, str) else f"{each:.6g}" for each in (planned, live))
    return Difference(module=name, what=f"{role_name(role)}: {what}", planned=next(shown), live=next(shown))


def _is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= QUOTIENT_ERROR * abs(expected)
