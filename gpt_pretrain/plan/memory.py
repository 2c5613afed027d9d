"""The memory of one GPU at its peak, item by item, for each pipeline stage.

The peak is that of torch's allocator (`torch.cuda.max_memory_allocated`) from the second optimizer step on, since the
first one allocates the moments. It occurs in the forward or backward pass, while all kept activations and the logits
are alive, or in an optimizer step that has to copy gradients. Weights, gradients and optimizer states follow
megatron-core 0.19 (distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py and optimizer.py), the FP8
copies of weights Transformer Engine 2.12 (`TransformerEngineBaseModule.get_weight_workspace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt_pretrain.config.choices import CrossEntropyFusion, MoeGroupedKernel, RecomputeGranularity, RecomputeMethod
from gpt_pretrain.config.derived import ddp_bucket_size, padded_vocab_size, shards_gradients, shards_weights
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.small_states import state_bytes
from gpt_pretrain.plan.experts import BUSIEST_EXPERT_AT_FIRST, on_rank, rank_load
from gpt_pretrain.plan.muon import AVERAGE_BYTES, fp32_state_bytes, orthogonalization_bytes
from gpt_pretrain.plan.stages import (
    LayerActivations,
    Stage,
    element_bytes,
    held_fp8,
    keeps_transposes,
    layer_activations,
    layer_parameters,
    per_layer,
    plan_stages,
)
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, ROUTER, Linear, chunk_tokens
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.run.sections import group_layers, place_in_turn

GIB = 2**30
# cuBLAS's and Transformer Engine's workspaces, token batches, amax histories, rotary tables.
WORKSPACE_BYTES = 0.1 * GIB
# Grouped products run on four streams, each with a workspace of cuBLAS's (TE 2.12, `get_cublas_workspace`).
GROUPED_WORKSPACE_BYTES = 4 * 2**25
# Outside of torch's allocator: the CUDA context with its kernels, and NCCL's communicators of 0.47 GiB each. On H200s
# DP 4 used four of these, TP 2 × DP 2 between five and six (benchmarks/llama3_8b_4xh200.md).
CONTEXT_GIB = 1.1
NCCL_GIB = 2.4
# What the allocator holds and cannot use: 1 to 2% of those peaks with expandable segments, 7 to 9% at TP 2 without.
FRAGMENTATION = 0.03

# What needs memory, in the order of the tables.
ITEMS = (
    "weights",
    "FP8 weights",
    "FP8 copies of weights",
    "weights being read",
    "gradients",
    "gradients being reduced",
    "masters",
    "moments",
    "averaged weights",
    "activations",
    "logits and loss",
    "backward pass",
    "first values",
    "uneven experts",
    "gradients in fp32",
    "placeholders of gradients",
    "workspaces",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One GPU of one pipeline stage, in bytes."""

    stage: int
    items: Mapping[str, float]
    """Parts of the peak, by their names in `ITEMS`."""

    @property
    def peak(self) -> float:
        """Peak of torch's allocator."""
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """The memory of a run."""

    stages: tuple[StageMemory, ...]
    outside_gib: float
    """CUDA's and NCCL's own, and what the allocator cannot use."""

    @property
    def worst(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak_gib(self) -> float:
        """Peak of torch's allocator on the GPU that needs most."""
        return self.worst.peak / GIB

    @property
    def needed_gib(self) -> float:
        """What a GPU must have."""
        return self.peak_gib + self.outside_gib


def _weight_copies(settings: Fp8Settings, platform: Platform) -> float:
    """Bytes that FP8 products read per weight: one, another in the other layout where needed, and scales."""
    if settings.recipe.numerics.scales_tensors:
        return 2.0 if keeps_transposes(settings, platform) else 1.0
    return 2 * (1 + settings.recipe.numerics.weight_scale_bytes)


def _optimizer_items(spec: RunSpec, stage: Stage) -> dict[str, float]:
    """Masters and moments (`kernels.adam`)."""
    optim, fp8, updated = spec.model.optim, held_fp8(spec), stage.optimizer_parameters(spec)
    if not optim.use_precision_aware_optimizer:
        masters = updated * 4 if element_bytes(spec) == 2 else 0.0
        averages = updated * (0.0 if optim.ema_decay is None else AVERAGE_BYTES)
        moments = updated * fp32_state_bytes(spec, [stage])
        return {"masters": masters, "moments": moments, "averaged weights": averages}
    in_fp8 = stage.fp8_weights / stage.num_parameters if fp8 is not None and fp8.params else 0.0
    master, moments = state_bytes(optim, in_fp8=in_fp8)
    return {"masters": updated * master, "moments": updated * moments}


def _section_values(spec: RunSpec, stage: Stage, *, table_bytes: int = 1, weight_bytes: float = 1) -> int:
    """Values of the two neighboring sections that are largest, and of what is whole beside them, in all chunks.

    Given sizes of a value of embedding and head, and of layers, it is bytes (`run.sections`).
    """
    model, layout = spec.model, spec.layout
    table = table_bytes * padded_vocab_size(model) // layout.tp * model.hidden_size
    first, last = stage.index == 0, stage.index == layout.pp - 1
    tied = model.share_embeddings_and_output_weights and first and last
    # A tied embedding has memory of its own.
    values = table if tied else 0
    sizes = [layer_parameters(model, layer) for layer in stage.layers.values()]
    # The backward pass of a chunk goes through it from the last layer to the first.
    chunks = [
        sizes[start : start + stage.layers_per_chunk][::-1] for start in range(0, len(sizes), stage.layers_per_chunk)
    ]
    for index, layers in enumerate(chunks):
        groups = group_layers(layers, ddp_bucket_size(model, layout.shards) or sum(layers))
        sections = [round(weight_bytes * sum(layers[layer] for layer in group)) for group in groups]
        head = [table] if last and index == len(chunks) - 1 and not tied else []
        embedding = [table] if first and index == 0 and not tied else []
        values += place_in_turn([*head, *sections, *embedding])[1]
    return values


def _gradient_items(spec: RunSpec, stage: Stage) -> dict[str, float]:
    size = 4 if spec.model.grad_reduce_in_fp32 else element_bytes(spec)
    if not shards_gradients(spec.model):
        return {"gradients": stage.num_parameters * size}
    own, shared = stage.optimizer_parameters(spec), _section_values(spec, stage)
    return {"gradients": own * size, "gradients being reduced": shared * size}


def _sharded_weight_items(
    spec: RunSpec, stage: Stage, stored: int, read_in_fp8: int, copies: float
) -> dict[str, float]:
    """The rank's part of weights, and those that passes make whole; `stored` of them are stored in FP8."""
    element, own = element_bytes(spec), stage.optimizer_parameters(spec) / stage.num_parameters
    fp8_share = stored / sum(linear.num_weights for linear in stage.linears)
    in_use: float = _section_values(spec, stage, table_bytes=element, weight_bytes=element - (element - 1) * fp8_share)
    items = {"weights": own * element * (stage.num_parameters - stored), "FP8 weights": own * stored}
    if not stored:
        items["FP8 copies of weights"] = read_in_fp8 * copies
    elif spec.fp8 is not None and spec.fp8.in_local_layers:
        # Local layers make transposes once a step.
        items["FP8 copies of weights"] = stored * (copies - 1)
    else:
        in_use += stored / len(stage.layers) * (copies - 1)
    return items | {"weights being read": in_use}


def _parameter_items(spec: RunSpec, stage: Stage) -> dict[str, float]:
    fp8, element = held_fp8(spec), element_bytes(spec)
    stored = 0 if fp8 is None else stage.fp8_weights
    in_fp8 = fp8 is not None and fp8.params
    copies = 0.0 if fp8 is None else _weight_copies(fp8, spec.platform)
    if shards_weights(spec.model):
        weights = _sharded_weight_items(spec, stage, stored if in_fp8 else 0, stored, copies)
    else:
        weights = {
            "weights": element * (stage.num_parameters - (stored if in_fp8 else 0)),
            "FP8 weights" if in_fp8 else "FP8 copies of weights": stored * copies,
        }
    return {
        **weights,
        **_gradient_items(spec, stage),
        **_optimizer_items(spec, stage),
    }


def _kept_activations(model: ModelConfig, stage: Stage, layers: list[LayerActivations]) -> tuple[float, float]:
    """Bytes that all microbatches in flight keep, and what recomputation needs on top for a moment."""
    granularity, num_layers = model.activations_checkpoint_granularity, stage.layers_per_chunk
    share = stage.chunks_in_flight * num_layers / len(layers)
    whole = sum(layer.kept for layer in layers)
    if granularity is None:
        return share * whole, 0.0
    if granularity is RecomputeGranularity.selective:
        kept = share * sum(layer.kept - layer.attention_core for layer in layers)
        return kept, max(layer.attention_core for layer in layers)
    count = min(model.activations_checkpoint_num_layers or 1, num_layers)
    largest = max(layer.kept for layer in layers)
    if model.activations_checkpoint_method is RecomputeMethod.block:
        kept = share * count / num_layers * sum(layer.layer_input for layer in layers)
        return kept + share * (num_layers - count) / num_layers * whole, largest
    units = -(-num_layers // count)
    return stage.chunks_in_flight * units * layers[0].layer_input, count * largest


def _logits_bytes(spec: RunSpec, head: Linear) -> float:
    """Logits at the peak of the loss, and what else the loss keeps.

    megatron-core's loss keeps the logits in the run's precision, the fp32 softmax for the gradient, and where it is
    compiled (fusions/fused_cross_entropy.py) another fp32 tensor: the compiler copies what the code changes in place.
    `megatron.loss` keeps the logits of one chunk and the gradients of all hidden states. It also keeps the head's
    gradient in fp32 unless this goes into the main gradient, which several chunks do only if that is fp32 as well.
    """
    model, kernels = spec.model, spec.kernels
    columns = head.out_features
    if kernels.cross_entropy_fusion_impl is CrossEntropyFusion.linear:
        chunk = chunk_tokens(head.tokens, columns)
        values = chunk * columns + head.tokens * model.hidden_size
        in_place = kernels.gradient_accumulation_fusion and (model.grad_reduce_in_fp32 or chunk == head.tokens)
        weight_gradient = 0 if in_place else 4 * columns * model.hidden_size
        return values * element_bytes(spec) + weight_gradient
    compiled = kernels.cross_entropy_fusion_impl is CrossEntropyFusion.native
    per_logit = element_bytes(spec) if element_bytes(spec) == 4 else 2 + 4 + (4 if compiled else 0)
    if model.final_logit_softcapping is not None:
        # The capped logits, and the tanh in fp32 for the gradient.
        per_logit += element_bytes(spec) + 4
    return head.tokens * columns * per_logit


def _passing_peak(spec: RunSpec, stage: Stage, *, load: float) -> dict[str, float]:
    """Bytes that all microbatches keep, and the larger of what the loss and passing through a layer need on top.

    By their names in `ITEMS`. `load` is the rows of the rank's experts over the mean.
    """
    layers = list(per_layer(stage, lambda layer: layer_activations(spec, on_rank(layer, load))).values())
    kept, recomputed = _kept_activations(spec.model, stage, layers)
    if spec.model.overlap_moe_expert_parallel_comm:
        # A layer of the next microbatch has computed before one of this one is done.
        kept += max(layer.kept for layer in layers)
    # The final norm's input and output; the embedding's output is the first layer's input.
    kept += 2 * layers[0].layer_input if stage.head is not None else 0
    logits = _logits_bytes(spec, stage.head) if stage.head is not None else 0.0
    passing = recomputed + max(layer.passing for layer in layers)
    # Logits and the layers' gradients are not alive at once.
    on_top = {"logits and loss": logits} if logits > passing else {"backward pass": passing}
    return {"activations": kept, **on_top}


def _placeholder_bytes(spec: RunSpec, stage: Stage) -> float:
    """One tensor of each shape of the weight gradients that products add to the main gradient.

    Transformer Engine passes these to autograd, and keeps them (TE 2.12, `get_dummy_wgrad` of module/base.py).
    """
    kernels = spec.kernels
    if not (kernels.gradient_accumulation_fusion and kernels.transformer_engine):
        return 0.0
    without = {ROUTER}
    if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
        without |= {EXPERT_FC1, EXPERT_FC2}
    shapes = {(each.out_features, each.in_features) for each in stage.linears if each.kind not in without}
    return sum(2.0 * rows * columns for rows, columns in shapes)


def _start_bytes(spec: RunSpec, stage: Stage, items: Mapping[str, float]) -> float:
    """What a start with sharded weights takes beside `items`, before there are moments and activations.

    First each section is drawn whole and shared out, and embedding and head are whole until it is their turn. Then
    come masters, in fp32 whatever they are stored in later. One matrix at a time is drawn, in fp32 and the run's
    precision: FP8 weights once more for their masters (`megatron.weights`).
    """
    element, own = element_bytes(spec), stage.optimizer_parameters(spec)
    table = padded_vocab_size(spec.model) * spec.model.hidden_size
    largest = max(table, *(linear.num_weights * spec.layout.tp for linear in stage.linears))
    matrix = (4 + element) * largest
    drawing = items["weights being read"] + 2 * element * table // spec.layout.tp
    masters = 4.0 * own if element == 2 else 0.0
    return max(drawing, masters) + matrix - items["masters"] - items["moments"] - items["weights being read"]


def _stage_memory(spec: RunSpec, stage: Stage) -> StageMemory:
    model, items = spec.model, _parameter_items(spec, stage)
    even = _passing_peak(spec, stage, load=1.0)
    uneven_peak = sum(_passing_peak(spec, stage, load=rank_load(model, BUSIEST_EXPERT_AT_FIRST)).values())
    copies = 0.0
    if element_bytes(spec) == 2 and not (model.grad_reduce_in_fp32 or model.optim.use_precision_aware_optimizer):
        # torch's optimizers read gradients in the masters' type.
        copies = 4 * stage.optimizer_parameters(spec)
    at_once: tuple[dict[str, float], ...] = (
        {"gradients in fp32": copies, "orthogonalization": orthogonalization_bytes(spec, stage)},
        {"first values": _start_bytes(spec, stage, items) if shards_weights(model) else 0.0},
        {**even, "uneven experts": uneven_peak - sum(even.values())},
    )
    sizes = [sum(each.values()) for each in at_once]
    items |= at_once[sizes.index(max(sizes))]
    items["placeholders of gradients"] = _placeholder_bytes(spec, stage)
    items["workspaces"] = WORKSPACE_BYTES + (GROUPED_WORKSPACE_BYTES if spec.kernels.moe_grouped_gemm else 0)
    return StageMemory(stage=stage.index, items={name: size for name, size in items.items() if size})


def forecast_memory(spec: RunSpec) -> MemoryForecast:
    """The memory of a checked configuration."""
    stages = tuple(_stage_memory(spec, stage) for stage in plan_stages(spec))
    peak = max(stage.peak for stage in stages)
    return MemoryForecast(
        stages=stages,
        outside_gib=CONTEXT_GIB + (NCCL_GIB if spec.layout.world_size > 1 else 0.0) + FRAGMENTATION * (peak / GIB),
    )
