"""What Muon takes beside Adam: memory of states and matrices, and the time of the iteration (`megatron.muon`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_pretrain.config.choices import MuonMatmulPrec, MuonTpMode, OptimizerName
from gpt_pretrain.config.derived import qkv_parts, uses_distributed_optimizer
from gpt_pretrain.plan.kernel_times import memory_s
from gpt_pretrain.plan.machine import EFFICIENCY, link_bytes_per_s
from gpt_pretrain.plan.stages import Stage
from gpt_pretrain.run.gpus import Gpu
from gpt_pretrain.run.optimizers import optimizer_of
from gpt_pretrain.run.optimizers.muon import MUON_VALUES_AT_ONCE
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC2, PROJ, QKV, ROUTER
from gpt_pretrain.run.run_spec import RunSpec

# Of each: what is orthogonalized, normalized and rounded, two products of the iteration where it is square, its result.
_BYTES_PER_VALUE = 16
# Of an averaged weight (`megatron.weight_average`).
AVERAGE_BYTES = 4
# Share of the BF16 peak that the iteration's products reach, beside the passes below. Eight layers of Llama 3 8B took
# 0.33 s a step on an H100, where this gives 0.33, and the 124M of GPT-2 6.1 ms, where it gives 6.7
# (benchmarks/llama3_8b_8layers_1xh100.md and gpt2_124m_1xh100.md).
_PRODUCTS_SHARE = 0.60
_SPEED_OF_NUMBERS = {MuonMatmulPrec.medium: 1.0, MuonMatmulPrec.high: 1 / 2, MuonMatmulPrec.highest: 1 / 15}
# Kernels of an iteration, and those that assemble matrices, normalize them and take them apart.
_KERNELS_OF_STEP, _KERNELS_OF_BATCH = 5, 40
# A rank sends fp32 momenta to the owners and gets fp32 updates.
_EXCHANGED_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrices:
    """All matrices of one form on a tensor-parallel rank."""

    count: int
    shape: tuple[int, int]
    """Rows and columns of one."""
    parts: tuple[int, ...]
    """Rows that are orthogonalized by themselves; they add up to all."""
    cut: int
    """Ranks that tensor parallelism cuts each into."""
    shards: int
    """Ranks among which they are divided."""

    @property
    def whole_size(self) -> int:
        """Values of one."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Values of the part of one that this rank holds."""
        return self.whole_size // self.cut

    @property
    def values(self) -> float:
        """This rank's values, sharded."""
        return self.count * self.size / self.shards

    @property
    def owned(self) -> int:
        """Matrices of which this rank is an owner, with the ranks that share them."""
        return math.ceil(self.count / self.shards)

    @property
    def at_once(self) -> int:
        """Those that are orthogonalized in one batch."""
        return min(max(self.cut, MUON_VALUES_AT_ONCE // self.size), self.owned)

    @property
    def values_at_once(self) -> int:
        """Values of whole matrices, or of parts that add up to as many, on a rank at once."""
        return self.size * self.at_once


def _matrices(spec: RunSpec, stage: Stage) -> Iterator[_Matrices]:
    layout = spec.layout
    sharded = uses_distributed_optimizer(spec.model)
    blockwise = spec.model.optim.muon_tp_mode is MuonTpMode.blockwise
    kinds = {linear.kind: linear for linear in stage.linears if linear.kind != ROUTER}
    for kind, linear in kinds.items():
        of_experts = kind in (EXPERT_FC1, EXPERT_FC2)
        cut = 1 if blockwise else layout.etp if of_experts else layout.tp
        by_columns = kind in (PROJ, FC2, EXPERT_FC2)
        rows = linear.out_features * (1 if by_columns else cut)
        yield _Matrices(
            count=sum(each.count for each in stage.linears if each.kind == kind),
            shape=(rows, linear.in_features * (cut if by_columns else 1)),
            parts=qkv_parts(spec.model, rows) if kind == QKV and spec.model.optim.muon_split_qkv else (rows,),
            cut=cut,
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


def orthogonalization_s(gpu: Gpu, spec: RunSpec, stage: Stage) -> float:
    """Seconds of one GPU in the optimizer's step, beside what Adam would take; 0 without Muon.

    An iteration of m × n, m ≤ n, is X ← aX + (bA + cA²)X with A = XXᵀ: 4m²n + 2m³ operations. Ranks that share a
    matrix compute a part of it each, or of as many matrices.
    """
    model, layout = spec.model, spec.layout
    optim = model.optim
    if optim.name is not OptimizerName.muon:
        return 0.0
    seconds = 0.0
    bytes_per_number = 2 if optim.muon_fp32_matmul_prec is MuonMatmulPrec.medium else 4
    rate = gpu.bf16_tflops * 1e12 * _PRODUCTS_SHARE * _SPEED_OF_NUMBERS[optim.muon_fp32_matmul_prec]
    for each in _matrices(spec, stage):
        own = each.count / (each.shards * each.cut)
        operations, moved = 0.0, 0.0
        for rows in each.parts:
            short, long = sorted((rows, each.shape[1]))
            operations += 4 * short**2 * long + 2 * short**3
            moved += (3 * short * long + 4 * short**2) * bytes_per_number
        # Assembled, normalized and rounded; scaled and taken apart.
        moved = optim.muon_num_ns_steps * moved + 2 * _BYTES_PER_VALUE * each.whole_size
        batches = math.ceil(each.owned / each.at_once) * len(each.parts)
        kernels = batches * (optim.muon_num_ns_steps * _KERNELS_OF_STEP + _KERNELS_OF_BATCH)
        seconds += own * optim.muon_num_ns_steps * operations / rate + memory_s(gpu, own * moved, kernels)
        if each.shards > 1:
            sent = _EXCHANGED_BYTES * each.values * (1 - 1 / each.shards)
            seconds += sent / link_bytes_per_s(gpu, layout, layout.tp * layout.shards) + 2 * EFFICIENCY.kernel_s
    return seconds
