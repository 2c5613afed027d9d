"""Rows of experts: how many the fullest rank has, and how they get to their experts and back.

Read from megatron-core 0.19.2 (transformer/moe: `permute`, `unpermute` and `sort_chunks_by_idxs` with and
without their fused kernels, `MoEAlltoAllTokenDispatcher`, `MoELayer.forward`, `TEGroupedMLP.forward`) and Transformer
Engine 2.12 (`_GroupedLinear` and `_Fp8Padding` of pytorch/module); `model.moe_token_dispatcher_type=allgather` is
assumed to cost the same. Loads are fitted (`forecast.CALIBRATED_ON`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import Feature
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, Linear

# Rows of the busiest expert over the mean of a layer's experts. In the first steps, before a router has learned to
# balance, it is 1.8 to 2.4, and peaks of four runs of Mixtral ask for 1.91 to 2.01: memory is forecast for such a load.
BUSIEST_EXPERT_AT_FIRST = 2.0
# From step 100 on it was 1.2 (benchmarks/experts.md#losses-over-200-steps): speed is forecast for that load.
BUSIEST_EXPERT = 1.2
# FP8 products take rows in multiples of this.
_PADDED_TO = 16


def rank_load(model: ModelConfig, busiest: float) -> float:
    """Rows of the fullest rank over the mean of all ranks that share the experts; 1 without experts or sharing.

    `busiest`, the rows of the busiest expert over the mean, says how far loads spread. The load of a rank is the mean
    over its n of the E experts, which spreads less by the factor of a sample mean drawn without replacement,
    sqrt((E − n) / ((E − 1) n)): 1 where each rank has one expert, 0 where it has all of them.
    """
    if model.num_moe_experts is None:
        return 1.0
    experts = model.num_moe_experts
    own = experts // model.expert_model_parallel_size
    return 1 + (busiest - 1) * math.sqrt((experts - own) / ((experts - 1) * own))


def on_rank(layer: Sequence[Linear], load: float) -> list[Linear]:
    """A transformer layer's linear layers, with `load` times the mean rows in each expert, padded for FP8."""

    def loaded(linear: Linear) -> Linear:
        unit = _PADDED_TO if linear.precision == "fp8" else 1
        rows = math.ceil(linear.tokens * load / unit) * unit
        return replace(linear, tokens=rows, local_tokens=rows)

    return [loaded(linear) if linear.kind in (EXPERT_FC1, EXPERT_FC2) else linear for linear in layer]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDispatch:
    """How rows get to their experts and back, in one layer and microbatch of one rank."""

    choices: int
    """Experts of a token."""
    sent: int
    """Rows that the rank's own tokens become: one for each of their experts."""
    received: int
    """Rows that the rank's experts compute, without padding."""
    exchanged: bool
    """Other ranks have some of these experts; otherwise the rank receives what it sends."""
    sorted: bool
    """Rows from several ranks are copied into the order of the rank's experts."""
    padded: bool
    """Each expert's rows are copied once more, between zeros: FP8 without padded routing."""

    def passes(self, features: Iterable[Feature]) -> float:
        """How often a row's values are read or written, forward and backward, summed over the rows sent and received.

        Rows are gathered (read, written), and added up (read, and their sum read and written); each is the other's
        gradient. Sorting and padding read and write, there and back, forward and backward.
        """
        per_row = 10.0
        for feature in features:
            per_row = feature.permutation_passes(self.choices, per_row)
        return per_row * self.sent + (8 * self.sorted + 8 * self.padded) * self.received


def token_dispatch(model: ModelConfig, layer: Sequence[Linear]) -> TokenDispatch:
    """How rows get to the experts of a layer that `on_rank` returned."""
    qkv, *_, fc1, _ = layer
    exchanged = model.expert_model_parallel_size * expert_tensor_parallel_size(model) > 1
    return TokenDispatch(
        choices=model.moe_router_topk,
        sent=qkv.local_tokens * model.moe_router_topk,
        received=fc1.tokens * fc1.count,
        exchanged=exchanged,
        sorted=fc1.count > 1 and exchanged,
        padded=fc1.precision == "fp8" and not model.moe_router_padding_for_quantization,
    )
