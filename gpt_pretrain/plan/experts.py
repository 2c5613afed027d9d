"""What experts add to a layer: an uneven load, passes that bring rows to their experts and back, and memory.

Read from megatron-core 0.19.2 (transformer/moe: `permute`, `unpermute` and `sort_chunks_by_idxs` with and without their
fused kernels, `MoEAlltoAllTokenDispatcher`, `MoELayer.forward`, `TEGroupedMLP.forward`) and Transformer Engine 2.12
(`_GroupedLinear` and `_Fp8Padding` of pytorch/module); `model.moe_token_dispatcher_type=allgather` is taken to cost the
same. The loads here and the host's times in `machine.EFFICIENCY` were fitted to the runs that `CALIBRATED_ON` names.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, Linear

# Rows of the busiest expert over the mean of a layer's experts. In the first steps, before a router has learned to
# balance, it is 1.8 to 2.4, and peaks of four runs of Mixtral ask for 1.91 to 2.01: memory is forecast for it.
BUSIEST_EXPERT_AT_FIRST = 2.0
# From step 100 on it was 1.2 (benchmarks/experts.md#losses-over-200-steps): speed is forecast for it.
BUSIEST_EXPERT = 1.2
CALIBRATED_ON = (
    "runs of two layers of Mixtral 8x7B and four of Qwen3-30B-A3B on one and two GPUs (benchmarks/experts.md), for "
    "memory also on four runs of two layers of Mixtral (benchmarks/mixtral_8x7b_2layers_4xh200.md)"
)
# Products of an expert's two linear layers, forward and backward.
PRODUCTS_OF_EXPERT = 6
# FP8 products take rows in multiples of this.
_PADDED_TO = 16
# Bytes per value of an expert's inner width that its activation reads and writes beyond a dense layer's, forward and
# backward: it multiplies by the routing weight in fp32, whose gradient is a sum over the activation. Two layers of
# Mixtral: 15 ms of 43 on an H100 that a dense layer's passes do not explain.
WEIGHTED_ACTIVATION_BYTES = 20
# Kernels of routing and permutation, forward and backward, beside passes over rows: scores, choice, weights, auxiliary
# losses, counts, the sort of the map and the exchange of counts, each over a few values per token.
ROUTING_KERNELS = 80
# Bytes that these read and write per token and expert, in fp32 or as 64-bit indices.
ROUTING_BYTES = 160


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


def exchanges_rows(model: ModelConfig) -> bool:
    """Whether other ranks have some of the experts that a rank's tokens choose."""
    return model.expert_model_parallel_size * expert_tensor_parallel_size(model) > 1


def on_rank(layer: Sequence[Linear], load: float) -> list[Linear]:
    """A transformer layer's linear layers, with the rows that a rank's experts have, padded where FP8 asks for it.

    In `layer` each expert has the mean number of rows; `load` is the rank's rows over that mean.
    """

    def rows(linear: Linear) -> int:
        unit = _PADDED_TO if linear.precision == "fp8" else 1
        return math.ceil(linear.tokens * load / unit) * unit

    return [
        replace(linear, tokens=rows(linear), local_tokens=rows(linear))
        if linear.kind in (EXPERT_FC1, EXPERT_FC2)
        else linear
        for linear in layer
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """How rows get to their experts and back, in one layer and microbatch of one rank."""

    choices: int
    """Experts of a token."""
    sent: int
    """Rows that the rank's own tokens become: one for each of their experts."""
    received: int
    """Rows that the rank's experts compute, without padding."""
    exchanged: bool
    """Whether other ranks have some of these experts; otherwise the rank receives what it sends."""
    sorted: bool
    """Whether rows from several ranks are copied into the order of the rank's experts."""
    padded: bool
    """Whether each expert's rows are copied once more, between zeros: FP8 without padded routing."""

    def passes(self, *, fused: bool) -> float:
        """How often a row's values are read or written, forward and backward, summed over the rows sent and received.

        Rows are gathered (read, written), and added up (read, and their sum read and written); each is the other's
        gradient. Sorting and padding read and write, there and back, forward and backward. If `fused`, one kernel
        gathers all rows of a token and reads it once, and another adds them up and writes the sum once.
        """
        per_row = 4 + 4 / self.choices if fused else 10
        return per_row * self.sent + (8 * self.sorted + 8 * self.padded) * self.received


def passage(model: ModelConfig, layer: Sequence[Linear]) -> Passage:
    """How rows get to the experts of a layer, as `on_rank` gives it."""
    qkv, *_, fc1, _ = layer
    return Passage(
        choices=model.moe_router_topk,
        sent=qkv.local_tokens * model.moe_router_topk,
        received=fc1.tokens * fc1.count,
        exchanged=exchanges_rows(model),
        sorted=fc1.count > 1 and exchanges_rows(model),
        padded=fc1.precision == "fp8" and not model.moe_router_padding_for_quantization,
    )


def passing_bytes(model: ModelConfig, layer: Sequence[Linear], *, element: int, input_bytes: float) -> float:
    """Bytes that a layer of experts needs at its peak on top of what it keeps, without the residual stream.

    Three moments compete. At the end of the experts' forward pass the callers still hold the rows as sent, received
    and, before a cast, sorted and padded, and the activation's output in the run's precision. Before the experts'
    backward pass the gradient of all rows is received and sorted. In it, the activation's gradients take the place of
    its kept output.

    Args:
        model: The checked configuration.
        layer: Its linear layers, as one rank has them.
        element: Bytes of a value in the run's precision.
        input_bytes: Bytes of a value in the kept input of the second product.
    """
    *_, fc1, fc2 = layer
    way, rows = passage(model, layer), fc1.tokens * fc1.count
    row = rows * model.hidden_size * element
    inner, cast = rows * fc2.in_features, fc1.precision == "fp8"
    # BF16 keeps the experts' input itself.
    held = way.sent * model.hidden_size * element
    held += row * (way.exchanged and (way.sorted or cast)) + row * (way.sorted and cast)
    # The result exists beside its copy without padding, and later beside its copy in the order of the way back.
    forward = held + max(row * (1 + 2 * way.padded) + (inner * element if cast else 0), row * (1 + way.sorted))
    received = 2 * row
    # FP8 reads the gradient from two copies of one byte per value.
    activation = inner * element + rows * fc1.out_features * element - inner * input_bytes
    output = row + (2 * rows * model.hidden_size if cast else 0) + inner * element
    return max(forward, received, activation, output)
