"""QK clipping (`model.qk_clip`): a head whose attention logits exceed a threshold has them shrunk through its weights.

    η = min(1, threshold / largest logit of the step)         of each query group, over all replicas
    rows of the group's queries  ← rows · η^α                 weights and biases, after the optimizer's step
    rows of its keys             ← rows · η^(1 − α)

MuonClip (Kimi K2, arXiv 2507.20534), with the names and the groups of megatron-core. Logits of the same inputs are then
η times what they were, because rotation is linear. megatron-core 0.19.2's `clip_qk` clips a copy of whole masters and
the weights beside them. It knows no sharded masters, no FP8 weights and no biases, divides by negative logits, and
needs Transformer Engine. Here the masters are clipped between the optimizer's step and the cast to weights, each rank
its stretch: BF16 and FP8 weights follow, are gathered, proven and saved as after any other step.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
from torch.distributed import ReduceOp

from gpt_pretrain.megatron.masters import masters_of
from gpt_pretrain.megatron.model import Model


class _Stretch(NamedTuple):
    """What a rank has of the master of a QKV projection's weight or bias."""

    attention: Any
    master: torch.Tensor
    start: int
    """Its first value in the whole parameter."""
    columns: int


class LargestLogits:
    """The attention logits of one step; made before its first microbatch, which forgets those of a validation."""

    def __init__(self, model: Model) -> None:
        config = model.spec.model
        self._is_asked = config.qk_clip or config.log_max_attention_logit
        self._attentions = list(_attentions(model)) if self._is_asked else []
        for attention in self._attentions:
            attention.core_attention.current_max_attn_logits = None

    def share(self) -> torch.Tensor | None:
        """After the last microbatch, on all ranks: each layer learns η. Returns the model's largest logit, fp32 []."""
        if not self._is_asked:
            return None
        largest = torch.full((), -torch.inf, device=torch.cuda.current_device())
        if self._attentions:
            of_layers = torch.stack(
                [attention.core_attention.current_max_attn_logits.float() for attention in self._attentions]
            )
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(of_layers, op=ReduceOp.MAX, group=replicas)
            for attention, of_heads in zip(self._attentions, of_layers, strict=True):
                attention.qk_clip_balancing_eta = _eta(attention, of_heads)
            largest = of_layers.max()
        torch.distributed.all_reduce(largest, op=ReduceOp.MAX)
        return largest


def clip_after_steps(optimizer: MegatronOptimizer, model: Model) -> None:
    """Lets each step of a fresh optimizer end with a clip of its masters, unless the update was skipped."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        masters = masters_of(part, model.chunks)
        stretches = [
            _Stretch(attention, masters[parameter], _start(part, parameter), parameter.shape[1:].numel())
            for attention in _attentions(model)
            for parameter in (attention.linear_qkv.weight, attention.linear_qkv.bias)
            if parameter in masters
        ]
        part.optimizer.register_step_post_hook(partial(_clip, stretches))


def _attentions(model: Model) -> Iterator[Any]:
    for chunk in model.gpt_chunks:
        yield from (layer.self_attention for layer in chunk.decoder.layers)


def _eta(attention: Any, of_heads: torch.Tensor) -> torch.Tensor:
    of_groups = of_heads.view(attention.num_query_groups_per_partition, -1).amax(dim=1)
    threshold = attention.config.qk_clip_threshold
    return torch.where(of_groups > threshold, threshold / of_groups, 1.0)


def _start(part: Any, parameter: torch.nn.Parameter) -> int:
    if not isinstance(part, DistributedOptimizer):
        return 0
    start: int = part._get_model_param_range_map(parameter)["param"].start
    return start


@torch.no_grad()
def _clip(stretches: Sequence[_Stretch], inner: Any, *_: Any) -> None:
    """Multiplies a rank's stretches of masters by the factors of their rows; by ones after a skipped update."""
    for each in stretches:
        rows = _row_factors(each.attention, torch.where(inner.found_inf > 0, 1.0, each.attention.qk_clip_balancing_eta))
        end = each.start + each.master.numel()
        first, last = each.start // each.columns, -(-end // each.columns)
        factors = rows[first:last].repeat_interleave(each.columns)
        each.master.view(-1).mul_(factors[each.start - first * each.columns :][: each.master.numel()])


def _row_factors(attention: Any, eta: torch.Tensor) -> torch.Tensor:
    """Factors of the rows of this rank's QKV projection, [rows]; `eta`: of its query groups."""
    alpha = attention.config.qk_clip_alpha
    # Values stay.
    factors, rows = (eta**alpha, eta ** (1 - alpha), torch.ones_like(eta)), _get_qkv_split_shapes(attention.config)
    return torch.cat([of.view(-1, 1).expand(-1, num) for of, num in zip(factors, rows, strict=True)], dim=1).flatten()
