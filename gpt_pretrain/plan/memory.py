"""The memory of one GPU at its peak, item by item, for each pipeline stage.

The peak is that of torch's allocator (`torch.cuda.max_memory_allocated`), from the second optimizer step on: the first
one allocates the moments. It is reached in the forward or backward pass, where all kept activations and the logits are
alive, or in an optimizer step that has to copy gradients. Weights, gradients and optimizer states follow
megatron-core 0.19 (distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py and optimizer.py), the FP8
copies of weights Transformer Engine 2.12 (`TransformerEngineBaseModule.get_weight_workspace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpt_pretrain.config.choices import (
    CrossEntropyFusion,
    MainParamsDtype,
    MoeGroupedKernel,
    RecomputeGranularity,
)
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.plan.experts import BUSIEST_EXPERT_AT_FIRST, on_rank, rank_load
from gpt_pretrain.plan.machine import Gpu
from gpt_pretrain.plan.stages import (
    LayerActivations,
    Stage,
    element_bytes,
    held_fp8,
    layer_activations,
    per_layer,
    plan_stages,
)
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.optimizers import MOMENT_BYTES, OPTIMIZERS
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, ROUTER, Linear, chunk_tokens
from gpt_pretrain.spec.run_spec import RunSpec

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
    "gradients",
    "masters",
    "moments",
    "activations",
    "logits and loss",
    "backward pass",
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
    """The memory of the run."""

    stages: tuple[StageMemory, ...]
    recompute_peaks: Mapping[str, float]
    """Peak of the worst stage without recomputation, with attention recomputed, and with every layer recomputed."""
    gpu_gib: float
    outside_gib: float
    """CUDA's and NCCL's own, and what the allocator cannot use."""

    @property
    def worst(self) -> StageMemory:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def needed_gib(self) -> float:
        """What a GPU must have."""
        return self.worst.peak / GIB + self.outside_gib

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough."""
        return self.needed_gib <= self.gpu_gib


def weight_copies(settings: Fp8Settings, gpu: Gpu) -> float:
    """Bytes that FP8 products read per weight: one, another in the other layout where needed, and scales."""
    if settings.recipe.scales_tensors:
        # TorchAO's products read one layout on every GPU.
        return 2.0 if gpu.needs_fp8_transposes or settings.in_local_layers else 1.0
    return 2 * (1 + settings.recipe.weight_scale_bytes)


def _optimizer_items(spec: RunSpec, stage: Stage) -> dict[str, float]:
    """Masters and moments (`kernels.adam`)."""
    model, optim, fp8 = spec.model, spec.model.optim, held_fp8(spec)
    updated = stage.optimizer_parameters(spec.layout, sharded=uses_distributed_optimizer(model))
    if not optim.use_precision_aware_optimizer:
        moments = OPTIMIZERS[optim.name].state_bytes(optim)
        return {"masters": updated * 4 if element_bytes(spec) == 2 else 0.0, "moments": updated * moments}
    in_fp8 = stage.fp8_weights / stage.num_parameters if fp8 is not None and fp8.params else 0.0
    # A BF16 weight holds one half of its master.
    whole = 2 if optim.main_params_dtype is MainParamsDtype.fp16 else 4
    master = whole * in_fp8 + (2 if optim.store_param_remainders else whole) * (1 - in_fp8)
    moment = sum(MOMENT_BYTES[dtype] for dtype in (optim.exp_avg_dtype, optim.exp_avg_sq_dtype))
    return {"masters": updated * master, "moments": updated * moment}


def _parameter_items(spec: RunSpec, stage: Stage, gpu: Gpu) -> dict[str, float]:
    model, fp8, element = spec.model, held_fp8(spec), element_bytes(spec)
    stored = 0 if fp8 is None else stage.fp8_weights
    in_fp8 = fp8 is not None and fp8.params
    return {
        "weights": element * (stage.num_parameters - (stored if in_fp8 else 0)),
        "FP8 weights" if in_fp8 else "FP8 copies of weights": 0.0 if fp8 is None else stored * weight_copies(fp8, gpu),
        "gradients": stage.num_parameters * (4 if model.grad_reduce_in_fp32 else element),
        **_optimizer_items(spec, stage),
    }


def _kept_activations(model: ModelConfig, stage: Stage, layers: Mapping[int, LayerActivations]) -> tuple[float, float]:
    """Bytes that all microbatches in flight keep, and what recomputation needs on top for a moment."""
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    chosen = list(layers.values())
    share = stage.layers_in_flight / len(chosen)
    if granularity is None:
        return share * sum(layer.kept for layer in chosen), 0.0
    if granularity is RecomputeGranularity.selective:
        return share * sum(layer.kept_selective for layer in chosen), max(layer.attention_core for layer in chosen)
    count = model.activations_checkpoint_num_layers or 1
    largest = max(layer.kept for layer in chosen)
    if method is not None and method.name == "block":
        whole = stage.layers_per_chunk - min(count, stage.layers_per_chunk)
        recomputed = share * (stage.layers_per_chunk - whole) / stage.layers_per_chunk
        kept = recomputed * sum(layer.layer_input for layer in chosen)
        kept += share * whole / stage.layers_per_chunk * sum(layer.kept for layer in chosen)
        return kept, largest
    units = -(-stage.layers_per_chunk // count)
    return stage.chunks_in_flight * units * chosen[0].layer_input, min(count, stage.layers_per_chunk) * largest


def _logits_bytes(spec: RunSpec, head: Linear) -> float:
    """Logits at the peak of the loss, and what else the loss keeps.

    There are the logits of the LM head in the run's precision, the fp32 softmax for the gradient, and where the loss is
    compiled (fusions/fused_cross_entropy.py) another fp32 tensor: the compiler copies what the code changes in place.
    `megatron.loss` has the logits of one chunk and the gradients of all hidden states. It also has the head's gradient
    in fp32, unless this goes into the main gradient, which several chunks do only where that is fp32 as well.
    """
    model, kernels = spec.model, spec.kernels
    columns = head.out_features
    if kernels.cross_entropy_loss_fusion is CrossEntropyFusion.linear:
        chunk = chunk_tokens(head.tokens, columns)
        values = chunk * columns + head.tokens * model.hidden_size
        in_place = kernels.gradient_accumulation_fusion and (model.grad_reduce_in_fp32 or chunk == head.tokens)
        weight_gradient = 0 if in_place else 4 * columns * model.hidden_size
        return values * element_bytes(spec) + weight_gradient
    compiled = kernels.cross_entropy_loss_fusion is CrossEntropyFusion.native
    per_logit = element_bytes(spec) if element_bytes(spec) == 4 else 2 + 4 + (4 if compiled else 0)
    return head.tokens * columns * per_logit


def _passing_peak(spec: RunSpec, stage: Stage, *, load: float) -> tuple[float, dict[str, float]]:
    """Bytes that all microbatches keep, and what the loss or passing through a layer needs on top, the larger one.

    `load` is the rows of the rank's experts over the mean.
    """
    by_layer = per_layer(stage, lambda layer: layer_activations(spec, on_rank(layer, load)))
    kept, recomputed = _kept_activations(spec.model, stage, by_layer)
    if spec.model.overlap_moe_expert_parallel_comm:
        # A layer of the next microbatch has computed before one of this one is done.
        kept += max(layer.kept for layer in by_layer.values())
    # The final norm's input and output; the embedding's output is the first layer's input.
    kept += 2 * next(iter(by_layer.values())).layer_input if stage.head is not None else 0
    logits = _logits_bytes(spec, stage.head) if stage.head is not None else 0.0
    passing = recomputed + max(layer.passing for layer in by_layer.values())
    # Logits and the layers' gradients are not alive at once.
    name = "logits and loss" if logits > passing else "backward pass"
    return kept, {name: max(logits, passing)}


def _placeholder_bytes(spec: RunSpec, stage: Stage) -> float:
    """Placeholders of the weight gradients that products add to the main gradient: one tensor of each shape.

    Transformer Engine hands them to autograd, and keeps them (TE 2.12, `get_dummy_wgrad` of module/base.py).
    """
    kernels = spec.kernels
    if not (kernels.gradient_accumulation_fusion and kernels.transformer_engine):
        return 0.0
    without = {ROUTER}
    if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
        without |= {EXPERT_FC1, EXPERT_FC2}
    of_layers = [linear for linear in stage.linears if linear.kind not in without]
    return sum(2.0 * rows * columns for rows, columns in {(each.out_features, each.in_features) for each in of_layers})


def _stage_memory(spec: RunSpec, stage: Stage, gpu: Gpu) -> StageMemory:
    model = spec.model
    items = _parameter_items(spec, stage, gpu)
    kept, passing = _passing_peak(spec, stage, load=1.0)
    uneven_kept, uneven_passing = _passing_peak(spec, stage, load=rank_load(model, BUSIEST_EXPERT_AT_FIRST))
    peak = kept + sum(passing.values())
    copies = 0.0
    if element_bytes(spec) == 2 and not (model.grad_reduce_in_fp32 or model.optim.use_precision_aware_optimizer):
        # torch's optimizers read gradients in the masters' type.
        copies = 4 * stage.optimizer_parameters(spec.layout, sharded=uses_distributed_optimizer(model))
    uneven_peak = uneven_kept + sum(uneven_passing.values())
    if copies > uneven_peak:
        items["gradients in fp32"] = copies
    else:
        items |= {"activations": kept, **passing, "uneven experts": uneven_peak - peak}
    items["placeholders of gradients"] = _placeholder_bytes(spec, stage)
    items["workspaces"] = WORKSPACE_BYTES + (GROUPED_WORKSPACE_BYTES if spec.kernels.moe_grouped_gemm else 0)
    return StageMemory(stage=stage.index, items={name: size for name, size in items.items() if size})


def forecast_memory(spec: RunSpec, gpu: Gpu) -> MemoryForecast:
    """The memory of a checked configuration."""
    config, stages = spec.config, plan_stages(spec)

    def peaks(granularity: RecomputeGranularity | None) -> tuple[StageMemory, ...]:
        chosen = config.model.activations_checkpoint_granularity
        model = config.model
        if granularity is not chosen:
            model = replace(
                model,
                activations_checkpoint_granularity=granularity,
                activations_checkpoint_method=None,
                activations_checkpoint_num_layers=1,
            )
        varied = replace(spec, config=replace(config, model=model))
        return tuple(_stage_memory(varied, stage, gpu) for stage in stages)

    names = {"none": None, "selective": RecomputeGranularity.selective, "full": RecomputeGranularity.full}
    own = peaks(config.model.activations_checkpoint_granularity)
    peak = max(stage.peak for stage in own) / GIB
    return MemoryForecast(
        stages=own,
        recompute_peaks={name: max(stage.peak for stage in peaks(granularity)) for name, granularity in names.items()},
        gpu_gib=gpu.memory_gib,
        outside_gib=CONTEXT_GIB + (NCCL_GIB if spec.layout.world_size > 1 else 0.0) + FRAGMENTATION * peak,
    )
