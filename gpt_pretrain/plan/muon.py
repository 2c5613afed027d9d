"""What Muon needs beside Adam: products, exchanges and memory of the orthogonalization (`megatron.muon`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_pretrain.config.choices import MuonMatmulPrec, MuonTpMode, OptimizerName
from gpt_pretrain.config.derived import kv_channels, num_query_groups, uses_distributed_optimizer
from gpt_pretrain.plan.kernel_times import memory_s
from gpt_pretrain.plan.machine import EFFICIENCY, link_bytes_per_s
from gpt_pretrain.plan.stages import Stage
from gpt_pretrain.run.gpus import Gpu
from gpt_pretrain.run.optimizers import MUON_VALUES_AT_ONCE, OPTIMIZERS
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC1, QKV, ROUTER, Linear
from gpt_pretrain.run.run_spec import RunSpec

# Of each: what is orthogonalized, normalized and rounded, two products of the iteration where it is square, its result.
_BYTES_PER_VALUE = 16
# Times that products of these numbers take of BF16's on Hopper: TF32 has half of its rate, fp32 a fifteenth.
_TIMES_BF16 = {MuonMatmulPrec.medium: 1, MuonMatmulPrec.high: 2, MuonMatmulPrec.highest: 15}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrices:
    """All matrices of one form on a tensor-parallel rank."""

    linear: Linear
    """One of those that have them."""
    count: int
    shapes: tuple[tuple[int, int], ...]
    """Rows and columns of what is orthogonalized by itself, as they are on all ranks of `cut` together."""
    cut: int
    """Ranks that tensor parallelism cuts each into."""
    cuts_rows: bool
    shards: int
    """Ranks among which they are divided."""

    def flops(self, spec: RunSpec) -> float:
        """Multiplications and additions of this rank in one step."""
        optim = spec.model.optim
        together = optim.muon_tp_mode is MuonTpMode.distributed and self.cut > 1
        total = 0.0
        for rows, columns in self.shapes:
            inner = min(rows, columns)
            outer = max(rows, columns)
            if together:
                # Ranks share the dimension that is cut, but square the products of the other one each.
                inner, outer = (columns, rows) if self.cuts_rows else (rows, columns)
                outer //= self.cut
            total += 4 * inner**2 * outer + 2 * inner**3
        divided = self.shards * (self.cut if optim.muon_tp_mode is MuonTpMode.duplicated else 1)
        return total * optim.muon_num_ns_steps * self.count / divided

    @property
    def values(self) -> float:
        """This rank's values, sharded."""
        return self.count * self._size / self.shards

    @property
    def values_at_once(self) -> int:
        """Values of whole matrices, or of parts that add up to as many, on a rank at once."""
        return self._size * min(max(self.cut, MUON_VALUES_AT_ONCE // self._size), math.ceil(self.count / self.shards))

    @property
    def _size(self) -> int:
        return self.linear.out_features * self.linear.in_features


def _matrices(spec: RunSpec, stage: Stage) -> Iterator[_Matrices]:
    model, layout = spec.model, spec.layout
    sharded = uses_distributed_optimizer(model)
    blockwise = model.optim.muon_tp_mode is MuonTpMode.blockwise
    kinds = {linear.kind: linear for linear in stage.linears if linear.kind != ROUTER}
    for kind, linear in kinds.items():
        count = sum(each.count for each in stage.linears if each.kind == kind)
        of_experts = kind in (EXPERT_FC1, EXPERT_FC2)
        cut = 1 if blockwise else layout.etp if of_experts else layout.tp
        cuts_rows = kind in (QKV, FC1, EXPERT_FC1)
        rows = linear.out_features * (cut if cuts_rows else 1)
        columns = linear.in_features * (1 if cuts_rows else cut)
        shapes = [(rows, columns)]
        if kind == QKV and model.optim.muon_split_qkv:
            of_keys = num_query_groups(model) * kv_channels(model) // (layout.tp if blockwise else 1)
            shapes = [(rows - 2 * of_keys, columns), (of_keys, columns), (of_keys, columns)]
        shards = (layout.expert_shards if of_experts else layout.shards) if sharded else 1
        yield _Matrices(linear=linear, count=count, shapes=tuple(shapes), cut=cut, cuts_rows=cuts_rows, shards=shards)


def fp32_state_bytes(spec: RunSpec, stages: Sequence[Stage]) -> float:
    """Bytes of fp32 states per parameter that a GPU of these stages holds; any optimizer's."""
    optim = spec.model.optim
    optimizer = OPTIMIZERS[optim.name]
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


def orthogonalization_s(gpu: Gpu, spec: RunSpec, stage: Stage) -> dict[str, float]:
    """Seconds of a step by kind of work; none without Muon."""
    optim, layout = spec.model.optim, spec.layout
    if optim.name is not OptimizerName.muon:
        return {}
    matrices = list(_matrices(spec, stage))
    flops = sum(each.flops(spec) for each in matrices) * _TIMES_BF16[optim.muon_fp32_matmul_prec]
    moved, between, passed = 0.0, 0.0, 0.0
    for each in matrices:
        # Stretches go to the owners and back in fp32, and are put together, taken apart, and scaled.
        moved += 8 * each.values * (1 - 1 / each.shards)
        passed += 24 * each.values
        if optim.muon_tp_mode is MuonTpMode.duplicated:
            between += 8 * each.values * (1 - 1 / each.cut)
    ranks = layout.tp * layout.shards
    exchanges = moved / link_bytes_per_s(gpu, layout, ranks) + between / link_bytes_per_s(gpu, layout, layout.tp)
    return {
        "orthogonalization": flops / (gpu.bf16_tflops * 1e12 * EFFICIENCY.bf16) + memory_s(gpu, passed),
        "Muon's exchanges": exchanges,
    }
