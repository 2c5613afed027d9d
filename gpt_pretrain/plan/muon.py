"""The memory that Muon needs beside Adam: states, and the matrices of the orthogonalization (`megatron.muon`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_pretrain.config.choices import MuonTpMode, OptimizerName
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.plan.stages import Stage
from gpt_pretrain.run.optimizers import optimizer_of
from gpt_pretrain.run.optimizers.muon import MUON_VALUES_AT_ONCE
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, ROUTER
from gpt_pretrain.run.run_spec import RunSpec

# Of each: what is orthogonalized, normalized and rounded, two products of the iteration where it is square, its result.
_BYTES_PER_VALUE = 16
# Of an averaged weight (`megatron.weight_average`).
AVERAGE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrices:
    """All matrices of one form on a tensor-parallel rank."""

    count: int
    size: int
    """Values of one."""
    cut: int
    """Ranks that tensor parallelism cuts each into."""
    shards: int
    """Ranks among which they are divided."""

    @property
    def values(self) -> float:
        """This rank's values, sharded."""
        return self.count * self.size / self.shards

    @property
    def values_at_once(self) -> int:
        """Values of whole matrices, or of parts that add up to as many, on a rank at once."""
        return self.size * min(max(self.cut, MUON_VALUES_AT_ONCE // self.size), math.ceil(self.count / self.shards))


def _matrices(spec: RunSpec, stage: Stage) -> Iterator[_Matrices]:
    layout = spec.layout
    sharded = uses_distributed_optimizer(spec.model)
    blockwise = spec.model.optim.muon_tp_mode is MuonTpMode.blockwise
    kinds = {linear.kind: linear for linear in stage.linears if linear.kind != ROUTER}
    for kind, linear in kinds.items():
        of_experts = kind in (EXPERT_FC1, EXPERT_FC2)
        yield _Matrices(
            count=sum(each.count for each in stage.linears if each.kind == kind),
            size=linear.out_features * linear.in_features,
            cut=1 if blockwise else layout.etp if of_experts else layout.tp,
            shards=(layout.expert_shards if of_experts else layout.shards) if sharded else 1,
        )


def fp32_state_bytes(spec: RunSpec, stages: Sequence[Stage]) -> float:
    """Bytes of fp32 states per parameter that a GPU of these stages holds; any optimizer's."""
    optim = spec.model.optim
    optimizer = optimizer_of(optim.name)
    of_all = optimizer.state_bytes(optim)
    if optimizer.matrix_state_bytes is None:
        return of_all
    matrices = sum(each.values for stage in stages for each in _matrices(spec, stage))
    share = matrices / sum(stage.optimizer_parameters(spec) for stage in stages)
    return of_all + share * (optimizer.matrix_state_bytes - of_all)


def orthogonalization_bytes(spec: RunSpec, stage: Stage) -> float:
    """Memory of one GPU during the optimizer's step; none without Muon."""
    if spec.model.optim.name is not OptimizerName.muon:
        return 0.0
    return _BYTES_PER_VALUE * max(each.values_at_once for each in _matrices(spec, stage))
