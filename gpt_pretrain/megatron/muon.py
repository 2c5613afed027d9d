"""Muon: momentum, orthogonalized by Newton-Schulz iteration, for the layers' matrices, and Adam for all else.

    momentum ← μ · momentum + (1 − μ) · gradient
    weight   ← weight · (1 − rate · decay) − rate · scale · orthogonalize(momentum)

Jordan (kellerjordan.github.io/posts/muon); weight decay and a scale that lets Adam's rates serve: Liu et al. 2025
(arXiv 2502.16982). Names and defaults that they leave open are megatron-core's (`OptimizerConfig.muon_*`), and NVIDIA's
package emerging-optimizers has the iteration.

Masters, momentum and gradients stay sharded like Adam's, so that FP8 weights, checkpoints and sharded gradients know
nothing of Muon. But the iteration needs whole matrices. megatron-core's LayerWiseDistributedOptimizer shards by whole
matrices instead, with another layout of weights that FP8 weights and their gather cannot have. Here each matrix has an
owner among the data-parallel ranks, and they exchange stretches:

    each rank    its stretches of momentum            → the owners
    an owner     whole matrices, orthogonalized       → the ranks that hold their stretches
    each rank    updates its stretches of the masters

That moves 8 bytes for each of a rank's own parameters in a step, and divides the iteration's work by the number of
ranks. Matrices of the same form are orthogonalized in one batch. Which rank has what never depends on values: the host
waits for nothing. Without sharding every rank holds, and orthogonalizes, all matrices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from gpt_pretrain.megatron.muon_matrices import Form, Matrix
from gpt_pretrain.run.optimizers.muon import MUON_VALUES_AT_ONCE

# The stretch of a rank that holds nothing of a matrix.
_NONE = (0, 0)


def is_muons(group: Mapping[str, Any]) -> bool:
    """Whether a group of parameters is Muon's; others say that they are Adam's."""
    return "optimizer" not in group


class _Batch:
    """Matrices of one form that are orthogonalized at once, and what this rank sends and gets for it.

    Args:
        by_owner: The matrices.
        rank: This one, among the owners.
    """

    def __init__(self, by_owner: Sequence[Sequence[Matrix]], rank: int) -> None:
        matrices = [matrix for of_owner in by_owner for matrix in of_owner]
        self.form: Form = matrices[0].form
        # Stretches that this rank holds, in the order of their owners.
        self.held = [matrix.master for matrix in matrices if matrix.master is not None]
        self.held_sizes = [master.numel() for master in self.held]
        self.given = [_num_values(matrix.stretches.get(rank, _NONE) for matrix in of_owner) for of_owner in by_owner]
        # Stretches of the matrices that it owns, in the order of their holders.
        own = by_owner[rank]
        self.num_own = len(own)
        self._of_holders = [[matrix.stretches.get(holder, _NONE) for matrix in own] for holder in range(len(by_owner))]
        self.taken = [_num_values(of_holder) for of_holder in self._of_holders]

    def assemble(self, stretches: torch.Tensor) -> torch.Tensor:
        """This rank's matrices, [matrices, rows, columns], from stretches that lie end to end by holder."""
        whole = stretches.new_empty(self.num_own, self.form.num_values)
        for stretch, place in zip(stretches.split(self._sizes()), self._places(whole), strict=True):
            place.copy_(stretch)
        return whole.view(-1, *self.form.shape)

    def take_apart(self, whole: torch.Tensor) -> torch.Tensor:
        """The opposite."""
        return torch.cat([*self._places(whole.view(-1, self.form.num_values)), whole.new_empty(0)])

    def _sizes(self) -> list[int]:
        return [end - start for of_holder in self._of_holders for start, end in of_holder]

    def _places(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        for of_holder in self._of_holders:
            for matrix, (start, end) in zip(whole, of_holder, strict=True):
                yield matrix[start:end]


def _num_values(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in stretches)


class Muon(torch.optim.Optimizer):
    """Updates matrices by Muon and other parameters by Adam; an update with `found_inf` set changes nothing.

    Args:
        params: torch's parameter groups, of which `is_muons` tells Muon's.
        matrices: All matrices of the ranks in `group`, in their common order.
        group: The ranks over which the matrices are sharded; None: they are not.
        config: Rates and settings.
    """

    found_inf: torch.Tensor

    def __init__(
        self,
        params: list[dict[str, Any]],
        matrices: Sequence[Matrix],
        group: torch.distributed.ProcessGroup | None,
        config: OptimizerConfig,
    ) -> None:
        super().__init__(params, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._group, self._config = group, config
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._batches = [_Batch(by_owner, rank) for by_owner in _by_owner(matrices, ranks)]
        self.steps_taken = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        # It notes its settings in its groups; experts leave it none.
        self._adam = torch.optim.AdamW(
            self._groups(of_muon=False) or [{"params": []}],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def _groups(self, *, of_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if is_muons(group) is of_muon]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters."""
        self.steps_taken += 1 - self.found_inf
        # Loading a checkpoint exchanges groups and states.
        self._adam.param_groups, self._adam.state = self._groups(of_muon=False), self.state
        self._adam.found_inf = self.found_inf  # type: ignore[attr-defined]  # torch's fused kernels read it
        self._adam.step()
        for group in self._groups(of_muon=True):
            rate = group["lr"] * (1 - self.found_inf)
            for batch in self._batches:
                self._update(batch, rate, 1 - rate * group["weight_decay"])

    def _update(self, batch: _Batch, rate: torch.Tensor, kept: torch.Tensor) -> None:
        """Updates this rank's stretches of the matrices."""
        whole = batch.assemble(self._exchange(self._momenta(batch), batch.taken, batch.given))
        if len(whole):
            whole = self._orthogonalize(whole, batch.form)
        updates = self._exchange(batch.take_apart(whole), batch.given, batch.taken)
        for master, update in zip(batch.held, updates.split(batch.held_sizes), strict=True):
            master.mul_(kept).addcmul_(update.view_as(master), rate, value=-1)

    def _momenta(self, batch: _Batch) -> torch.Tensor:
        """Takes the gradients into the momenta; returns what is to be orthogonalized, end to end."""
        momentum = self._config.muon_momentum
        result = torch.empty(sum(batch.given), dtype=torch.float32, device=self.found_inf.device)
        for master, out in zip(batch.held, result.split(batch.held_sizes), strict=True):
            buffer = self.state[master]["momentum_buffer"]
            assert master.grad is not None, "megatron-core gives every parameter its gradient"
            # Weighed with itself a momentum stays what it is.
            gradient = torch.where(self.found_inf > 0, buffer, master.grad)
            buffer.lerp_(gradient, 1 - momentum)
            out.copy_((gradient.lerp(buffer, momentum) if self._config.muon_nesterov else buffer).view(-1))
        return result

    def _exchange(self, values: torch.Tensor, taken: list[int], given: list[int]) -> torch.Tensor:
        """Sends stretches of these sizes to the ranks of the group, and gets those of the others."""
        return values if self._group is None else _all_to_all(values, taken, given, self._group)

    def _orthogonalize(self, whole: torch.Tensor, form: Form) -> torch.Tensor:
        """Of matrices of one form, [matrices, rows, columns]; queries, keys and values each by themselves."""
        if form.rows_of_heads is None:
            return self._scaled(whole, form)
        batch, rows, columns = whole.shape
        groups = rows // sum(form.rows_of_heads)
        parts = whole.view(batch, groups, -1, columns).split(form.rows_of_heads, dim=2)
        results = [
            self._scaled(part.reshape(batch, -1, columns), form).view(batch, groups, -1, columns) for part in parts
        ]
        return torch.cat(results, dim=2)

    def _scaled(self, whole: torch.Tensor, form: Form) -> torch.Tensor:
        from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor

        config, size = self._config, list(whole.shape[1:])
        with _precision(config.muon_fp32_matmul_prec):
            if form.cut is None or config.muon_tp_mode == "blockwise":
                result = self._newton_schulz(whole)
            else:
                size[form.cut] *= form.tp_group.size()
                result = self._over_tp_ranks(whole, form)
        scale = get_muon_scale_factor(*size, mode=config.muon_scale_mode)
        return result.mul_(scale * config.muon_extra_scale_factor)

    def _over_tp_ranks(self, parts: torch.Tensor, form: Form) -> torch.Tensor:
        """This rank's parts of orthogonalized matrices, which tensor-parallel ranks hold together."""
        assert form.cut is not None
        if self._config.muon_tp_mode == "distributed":
            return torch.stack([self._together(part, form) for part in parts])
        # What megatron-core computes on every rank (`duplicated`) is done once: each rank gets some of them whole.
        ranks, cut = form.tp_group.size(), form.cut + 1
        shares = [len(share) for share in torch.arange(len(parts)).tensor_split(ranks)]
        own = shares[form.tp_group.rank()]
        gathered = _all_to_all(parts.contiguous(), [own] * ranks, shares, form.tp_group)
        whole = torch.cat(gathered.chunk(ranks), dim=cut) if own else gathered
        results = torch.cat(self._newton_schulz(whole).chunk(ranks, dim=cut)) if own else gathered
        return _all_to_all(results, shares, [own] * ranks, form.tp_group)

    def _together(self, part: torch.Tensor, form: Form) -> torch.Tensor:
        """The part of one matrix; all ranks compute, and sum up products."""
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp

        steps, coefficients = self._config.muon_num_ns_steps, self._config.muon_coefficient_type
        result: torch.Tensor = newton_schulz_tp(part, steps, coefficients, form.tp_group, form.cut, "distributed")
        return result

    def _newton_schulz(self, whole: torch.Tensor) -> torch.Tensor:
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

        result: torch.Tensor = newton_schulz(whole, self._config.muon_num_ns_steps, self._config.muon_coefficient_type)
        return result.contiguous()


def _all_to_all(
    values: torch.Tensor, taken: list[int], given: list[int], group: torch.distributed.ProcessGroup
) -> torch.Tensor:
    """Sends so many of the first dimension to each rank of a group, and gets so many of each."""
    if group.size() == 1:
        return values
    received = values.new_empty(sum(taken), *values.shape[1:])
    torch.distributed.all_to_all_single(received, values, taken, given, group=group)
    return received


def _precision(name: str) -> AbstractContextManager[None]:
    """Of products of fp32 numbers; `medium` makes the iteration one of BF16 numbers."""
    from emerging_optimizers.utils import fp32_matmul_precision

    result: AbstractContextManager[None] = fp32_matmul_precision(name)
    return result


def _by_owner(matrices: Sequence[Matrix], num_ranks: int) -> Iterator[list[list[Matrix]]]:
    """Matrices of one form that are orthogonalized at once, by owner."""
    in_order = {form: index for index, form in enumerate(dict.fromkeys(matrix.form for matrix in matrices))}
    first = 0
    for form, same in groupby(sorted(matrices, key=lambda matrix: in_order[matrix.form]), lambda matrix: matrix.form):
        left = list(same)
        # Tensor-parallel ranks share the matrices of an owner.
        least = 1 if form.cut is None else form.tp_group.size()
        at_once = num_ranks * max(least, MUON_VALUES_AT_ONCE // form.num_values)
        for start in range(0, len(left), at_once):
            by_owner: list[list[Matrix]] = [[] for _ in range(num_ranks)]
            for matrix in left[start : start + at_once]:
                by_owner[first % num_ranks].append(matrix)
                first += 1
            yield by_owner
