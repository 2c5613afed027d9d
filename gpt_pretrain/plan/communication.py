"""How long collectives take: bytes over the links that a group's ranks share, and what of it is not hidden.

Ranks are laid out with TP fastest, then CP, DP and PP (`gpt_pretrain.megatron.parallel`): a group
whose ranks lie on one node talks over NVLink, any other over the network.
"""

from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.plan.kernels import Machine
from gpt_pretrain.plan.stages import Stage
from gpt_pretrain.spec.layout import Layout
from gpt_pretrain.spec.products import FC1, QKV, Linear
from gpt_pretrain.spec.run_spec import RunSpec


def link_bytes_per_s(machine: Machine, layout: Layout, span: int) -> float:
    """Bytes per second and direction of a group whose first and last rank lie `span` ranks apart, counted with both."""
    gpu = machine.gpu
    return (gpu.nvlink_gb_s if span <= layout.gpus_per_node else gpu.network_gb_s) * 1e9 * machine.efficiency.links


def tensor_parallel_s(machine: Machine, spec: RunSpec, layer: list[Linear]) -> float:
    """Seconds of one layer's tensor parallel collectives for one microbatch; none is hidden behind a product.

    Without sequence parallelism: one all-reduce for each of the two blocks, forward and backward. With it: gathered
    inputs and scattered outputs forward, gathered gradients and inputs and scattered gradients backward. What an FP8
    product reads is gathered in FP8 (TE 2.12, `gather_along_first_dim`).
    """
    model, layout = spec.model, spec.layout
    if layout.tp == 1:
        return 0.0
    share = (layout.tp - 1) / layout.tp
    values = layer[0].tokens * model.hidden_size
    rate = link_bytes_per_s(machine, layout, layout.tp)
    if not model.sequence_parallel:
        return 4 * 2 * share * values * 2 / rate + 4 * machine.efficiency.kernel_s
    moved = 0.0
    for linear in layer[:2] if model.num_moe_experts is not None else layer:
        gathered = 1 if linear.precision == "fp8" else 2
        # Column-parallel: gather x, scatter dx, gather x again for dw. Row-parallel: scatter y, gather dy.
        moved += values * share * (2 * gathered + 2 if linear.kind in (QKV, FC1) else 2 + gathered)
    return moved / rate + 10 * machine.efficiency.kernel_s


def expert_parallel_s(machine: Machine, spec: RunSpec, layer: list[Linear]) -> float:
    """Seconds of one layer's exchanges of tokens between ranks that share experts out, for one microbatch.

    The rows that a rank's experts compute come from all of these ranks alike, go back, and their gradients do the same.
    What leaves and reaches a rank is taken to be even; none is hidden behind a product.
    """
    model, layout = spec.model, spec.layout
    ranks = layout.ep * layout.etp
    if model.num_moe_experts is None or ranks == 1:
        return 0.0
    experts = layer[-2]
    moved = 4 * experts.tokens * experts.count * model.hidden_size * 2 * (ranks - 1) / ranks
    return moved / link_bytes_per_s(machine, layout, ranks) + 4 * machine.efficiency.kernel_s


def data_parallel_s(machine: Machine, spec: RunSpec, stage: Stage, *, backward_s: float) -> float:
    """Seconds per step of gradient reduction and parameter gathering that computation does not hide.

    Args:
        machine: The GPU.
        spec: The run.
        stage: The pipeline stage.
        backward_s: The backward pass of the last microbatch, which overlapped reduction over a network hides behind.
    """
    model, layout = spec.model, spec.layout
    rate = link_bytes_per_s(machine, layout, layout.tp * layout.shards)
    # Of what a rank sends, as all but its own part of what is shared out.
    others = stage.num_parameters - stage.expert_weights
    moved = others * (1 - 1 / layout.shards) + stage.expert_weights * (1 - 1 / layout.expert_shards)
    gradient = 4 if model.grad_reduce_in_fp32 else 2
    if not uses_distributed_optimizer(model):
        reduce_s, gather_s = 2 * moved * gradient / rate, 0.0
    else:
        reduce_s = moved * gradient / rate
        # Weights of experts are not stored in FP8 (`rules.experts`).
        in_fp8 = stage.fp8_weights if spec.fp8 is not None and spec.fp8.params else 0
        gather_s = (2 * moved - in_fp8 * (1 - 1 / layout.shards)) / rate
    # Over NVLink it is counted in full, for what products beside it lose, and for waiting: steps of 4 and 32 layers of
    # Llama 3 8B on two and four H200s were longer by about that or more, BF16 and FP8. A profile has since found 52 to
    # 60 of the 92 ms of four (benchmarks/llama3_8b_4xh200.md). What a network adds is assumed to hide.
    lost = rate / link_bytes_per_s(machine, layout, 1)
    hidden_reduce = backward_s if model.overlap_grad_reduce else 0.0
    # The forward pass is half as long as the backward pass.
    hidden_gather = backward_s / 2 if model.overlap_param_gather else 0.0
    return max(lost * reduce_s, reduce_s - hidden_reduce) + max(lost * gather_s, gather_s - hidden_gather)


def context_parallel_s(machine: Machine, spec: RunSpec, layer: list[Linear], attention_s: float) -> float:
    """Seconds of one layer's ring exchange of keys and values that attention does not hide."""
    model, layout = spec.model, spec.layout
    if layout.cp == 1:
        return 0.0
    key_values = layer[0].out_features - layer[0].out_features * model.num_attention_heads // (
        model.num_attention_heads + 2 * (model.num_query_groups or model.num_attention_heads)
    )
    # Forward once, backward keys and values and their gradients.
    moved = 3 * (layout.cp - 1) * layer[0].tokens * key_values * 2
    return max(0.0, moved / link_bytes_per_s(machine, layout, layout.tp * layout.cp) - attention_s)


def pipeline_send_s(machine: Machine, spec: RunSpec, tokens: int) -> float:
    """Seconds of handing one microbatch to the next stage and its gradient back."""
    model, layout = spec.model, spec.layout
    if layout.pp == 1:
        return 0.0
    spread = layout.tp if model.sequence_parallel else 1
    sent = 2 * tokens // spread * model.hidden_size * 2
    return sent / link_bytes_per_s(machine, layout, layout.world_size // layout.pp + 1)
