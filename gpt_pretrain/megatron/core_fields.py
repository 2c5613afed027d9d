"""Every field of megatron-core's configs that a run sets, with its value and the keys that decide it.

The schema says which fields take a key's value as it is; the others stand here. `megatron.model` builds megatron-core's
configs from them and `plan.effective` prints them. Nothing here needs torch: values that torch or megatron-core has a
type for have names.

Fields whose defaults differ between NeMo, megatron-core and Transformer Engine are all set, so the layers get what
`config.yaml` says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Activation, CrossEntropyFusion, Precision
from gpt_pretrain.config.derived import (
    ddp_bucket_size,
    decoupled_min_lr,
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    masks_tokens,
    min_lr,
    moe_ffn_hidden_size,
    num_query_groups,
    uses_distributed_optimizer,
    uses_yarn,
)
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.features.mup import output_mult
from gpt_pretrain.features.registry import all_features
from gpt_pretrain.run.optimizers import optimizer_of
from gpt_pretrain.run.run_spec import RunSpec

# YaRN's settings that no key changes: those of its paper.
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "correction_range_round_to_int": True,
}


class Dtype(Enum):
    """A tensor type; the value is torch's name."""

    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"
    fp8 = "float8_e4m3fn"


class ActivationFunction(Enum):
    """The function that megatron-core gets for an activation."""

    silu = "silu"
    gelu = "gelu"
    """The exact GELU. It also selects megatron-core's fused bias+GELU, which computes the tanh form."""
    gelu_tanh = "gelu_tanh"
    squared_relu = "squared_relu"


@dataclass(frozen=True, slots=True)
class HighPrecision:
    """megatron-core's per-module override: linear layers whose names match a pattern stay out of FP8."""

    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one of megatron-core's configs."""

    name: str
    value: Any
    keys: tuple[str, ...] = ()
    """The configuration keys that decide it."""


def params_dtype(spec: RunSpec) -> Dtype:
    """Type of parameters and activations: `trainer.precision`; auto is bf16 on a GPU and fp32 without one."""
    precision = spec.config.trainer.precision
    if precision is Precision.auto:
        return Dtype.bf16 if spec.platform.cuda else Dtype.fp32
    return Dtype[precision.name]


def _named(section: object, path: str, *names: str) -> Iterator[Field]:
    """Fields with the name and the value of a key."""
    for name in names:
        value = getattr(section, name)
        yield Field(name, value.value if isinstance(value, Enum) else value, (f"{path}.{name}",))


def _told_by_schema(spec: RunSpec, config: str) -> Iterator[Field]:
    """Fields of one of megatron-core's configs that take a key's value as it is (`config.facts.Facts.core`)."""
    for path, key in schema_keys().items():
        fields = (field.partition(".") for field in key.facts.core)
        names = [name or path.rpartition(".")[2] for owner, _, name in fields if owner == config]
        if names and not any(each.applies(value_of(spec.config, each.key)) for each in key.facts.unread):
            value = value_of(spec.config, path)
            yield from (Field(name, value.value if isinstance(value, Enum) else value, (path,)) for name in names)


def _activation(spec: RunSpec) -> ActivationFunction:
    if spec.model.activation is Activation.swiglu:
        return ActivationFunction.silu
    if spec.model.activation is Activation.squared_relu:
        return ActivationFunction.squared_relu
    plain_tanh = spec.model.activation is Activation.gelu_tanh and not spec.kernels.bias_activation_fusion
    return ActivationFunction.gelu_tanh if plain_tanh else ActivationFunction.gelu


def _architecture_fields(spec: RunSpec) -> Iterator[Field]:
    model = spec.model
    yield Field("ffn_hidden_size", ffn_hidden_size(model), ("model.ffn_hidden_size",))
    yield Field("num_query_groups", num_query_groups(model), ("model.num_query_groups",))
    yield Field("kv_channels", kv_channels(model), ("model.kv_channels",))
    yield Field("activation_func", _activation(spec), ("model.activation",))
    yield Field("gated_linear_unit", model.activation is Activation.swiglu, ("model.activation",))
    yield Field("attention_softmax_in_fp32", True)
    yield Field("apply_query_key_layer_scaling", False)
    if model.window_size is not None:
        yield Field("window_size", tuple(model.window_size), ("model.window_size",))
    if model.use_mup:
        yield Field("mup_output_mult", output_mult(model), ("model.mup_output_mult",))
    # Weights are built on the device; megatron/weights.py draws them again, the same in every layout.
    yield Field("use_cpu_initialization", False)


def yarn_fields(spec: RunSpec) -> list[Field]:
    """What megatron-core looks for in `TransformerConfig` without it being a field there; nothing without YaRN.

    Without `mscale`s the factor of cosines and sines is the paper's, 0.1 · log(factor) + 1.
    """
    model = spec.model
    if not uses_yarn(model):
        return []
    values = {
        "rotary_scaling_factor": model.rope_scaling_factor,
        "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        **YARN,
    }
    keys = ("model.rope_scaling_factor", "model.yarn_original_max_position_embeddings")
    return [Field(f"yarn_{name}", value, keys) for name, value in values.items()]


def _expert_fields(spec: RunSpec) -> Iterator[Field]:
    """Fields of a mixture of experts; `expert_tensor_parallel_size` is set without one too."""
    model = spec.model
    ranks = expert_tensor_parallel_size(model)
    yield Field("expert_tensor_parallel_size", ranks, ("model.expert_tensor_parallel_size",))
    if model.num_moe_experts is None:
        return
    yield Field("moe_ffn_hidden_size", moe_ffn_hidden_size(model), ("model.moe_ffn_hidden_size",))
    # The softmax is over the chosen experts' scores alone, so a token's weights add up to 1, as in Mixtral.
    yield Field("moe_router_pre_softmax", False)
    yield Field("moe_router_score_function", "softmax")
    # BF16 scores tie, and every layout breaks ties differently.
    yield Field("moe_router_dtype", "fp32")
    yield from _named(spec.kernels, "model", "moe_grouped_gemm")


def _layout_fields(spec: RunSpec) -> Iterator[Field]:
    model, virtual = spec.model, "model.virtual_pipeline_model_parallel_size"
    interleaved = model.virtual_pipeline_model_parallel_size is not None
    # Batched sends carry no tag. With two interleaved stages the previous and the next stage are one rank, which would
    # take activations for gradients. Overlapped sends are ordered, which tells them apart.
    yield Field("overlap_p2p_comm", interleaved, (virtual,))
    yield Field("batch_p2p_comm", not interleaved, (virtual,))
    # Waiting on the host for each exchange guards against a bug of older PyTorch.
    yield Field("batch_p2p_sync", False)
    pipelined = model.pipeline_model_parallel_size > 1
    yield Field("deallocate_pipeline_outputs", pipelined, ("model.pipeline_model_parallel_size",))
    # In the backward pass NCCL exchanges beside independent products, with or without user buffers; exchanging through
    # the buffers made steps about 0.5% slower (benchmarks/LOG.md).
    yield Field("tp_comm_bulk_dgrad", not model.tp_comm_overlap, ("model.tp_comm_overlap",))
    yield Field("tp_comm_bulk_wgrad", not model.tp_comm_overlap, ("model.tp_comm_overlap",))


def _precision_fields(spec: RunSpec) -> Iterator[Field]:
    dtype, precision = params_dtype(spec), ("trainer.precision",)
    yield Field("bf16", dtype is Dtype.bf16, precision)
    yield Field("params_dtype", dtype, precision)
    yield Field("pipeline_dtype", dtype, precision)
    # The exact mean over unmasked tokens in every layout. Without a mask the cheaper mean of means is the same.
    masks = "model.data.eod_mask_loss", "model.data.eod_mask_labels"
    yield Field("calculate_per_token_loss", masks_tokens(spec.model), masks)


def _fp8_fields(spec: RunSpec) -> Iterator[Field]:
    """Every FP8 field of TransformerConfig: megatron-core's defaults are not Transformer Engine's, nor NeMo's."""
    fp8, formats = spec.te_fp8, ("model.fp8", "model.fp8_hybrid", "model.fp8_e4m3")
    if fp8 is None:
        yield Field("fp8", None, ("model.fp8",))
        if spec.fp8 is not None:
            # Local layers bring their own FP8. Any override, even one that matches no module, makes megatron-core tell
            # them of a step's first microbatch (MegatronModule.set_is_first_microbatch).
            yield Field("quant_recipe", HighPrecision(()))
        return
    yield Field("fp8", "hybrid" if fp8.hybrid else "e4m3", formats)
    yield Field("fp8_recipe", fp8.recipe.core_name, ("model.fp8_recipe",))
    yield Field("fp8_param", fp8.params, ("model.fp8_params",))
    yield Field("fp8_interval", 1, ("model.fp8_interval",))
    for name in ("margin", "amax_history_len", "wgrad", "dot_product_attention"):
        yield Field(f"fp8_{name}", getattr(fp8, name), (f"model.fp8_{name}",))
    yield Field("fp8_amax_compute_algo", fp8.amax_compute_algo.value, ("model.fp8_amax_compute_algo",))
    kept_out = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
    yield Field("first_last_layers_bf16", kept_out > 0, ("model.first_last_layers_bf16",))
    yield from _named(fp8, "model", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    keys = ("model.fp8_exclude", *(["model.moe_grouped_kernel"] if fp8.experts_left_out else []))
    yield Field("quant_recipe", HighPrecision(fp8.high_precision) if fp8.high_precision else None, keys)


def _kernel_fields(spec: RunSpec) -> Iterator[Field]:
    kernels = spec.kernels
    graphs = "none" if kernels.cuda_graph_impl is None else kernels.cuda_graph_impl.value
    yield Field("cuda_graph_impl", graphs, ("model.cuda_graph_impl",))
    # None named: whole layers.
    yield Field("cuda_graph_modules", [])
    layers = "transformer_engine" if kernels.transformer_engine else "local"
    yield Field("transformer_impl", layers, ("model.transformer_engine", "model.fp8_backend", "model.fp8_emulate"))
    for feature in all_features():
        if feature.core_field:
            yield Field(feature.core_field, feature.is_used(spec), (feature.path,))
    yield Field("bias_dropout_fusion", kernels.bias_dropout_add_fusion, ("model.bias_dropout_add_fusion",))
    yield from _named(kernels, "model", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    yield from _named(kernels, "model", "gradient_accumulation_fusion")
    # megatron-core 0.19 has no linear loss; `megatron.loss` replaces its loss.
    native = kernels.cross_entropy_fusion_impl is CrossEntropyFusion.native
    yield Field("cross_entropy_loss_fusion", native, ("model.cross_entropy_loss_fusion",))
    yield Field("cross_entropy_fusion_impl", "native")


def transformer_fields(spec: RunSpec) -> list[Field]:
    """Fields of `TransformerConfig`: the layers."""
    return [
        *_told_by_schema(spec, "TransformerConfig"),
        *_architecture_fields(spec),
        *_expert_fields(spec),
        *_layout_fields(spec),
        *_precision_fields(spec),
        *_fp8_fields(spec),
        *_kernel_fields(spec),
    ]


def ddp_fields(spec: RunSpec) -> list[Field]:
    """Fields of `DistributedDataParallelConfig`: gradient reduction and parameter gathering."""
    model, num_shards, virtual = spec.model, spec.layout.shards, "model.virtual_pipeline_model_parallel_size"
    interleaved = model.virtual_pipeline_model_parallel_size is not None
    strategy, sharding = model.data_parallel_sharding_strategy, "model.data_parallel_sharding_strategy"
    buckets = ddp_bucket_size(model, num_shards)
    averages = (
        spec.platform.cuda
        and spec.layout.dp * spec.layout.cp > 1
        and model.num_moe_experts is None
        and not masks_tokens(model)
    )
    return [
        *_told_by_schema(spec, "DistributedDataParallelConfig"),
        _distributed_optimizer(spec),
        # megatron-core reads it in Megatron-FSDP alone (`megatron.sharded_gradients`).
        Field("data_parallel_sharding_strategy", "no_shard" if strategy is None else strategy.value, (sharding,)),
        # With fp8_param alone the optimizer never updates FP8 weights; with this alone BF16 is gathered.
        Field("fp8_param_gather", spec.stored_fp8 is not None, ("model.fp8_params",)),
        Field("bucket_size", buckets, ("model.overlap_grad_reduce", "model.ddp_bucket_size", sharding)),
        # A rank's chunks gather their parameters at the same points on all pipeline ranks.
        Field("align_param_gather", model.overlap_param_gather and interleaved, (virtual,)),
        # NCCL divides as it reads, which saves a pass over the gradients (15 ms for Llama 3 8B). gloo cannot. One rank
        # would only multiply by 1, losses per token have nothing to divide by, and megatron-core scales experts'
        # gradients in a pass of its own.
        Field("average_in_collective", averages),
        Field("check_for_nan_in_grad", False),
    ]


def _distributed_optimizer(spec: RunSpec) -> Field:
    name = "use_distributed_optimizer"
    return Field(name, uses_distributed_optimizer(spec.model), (f"model.{name}",))


def optimizer_fields(spec: RunSpec) -> list[Field]:
    """Fields of `OptimizerConfig`, except for those of `optimizer_state_fields`."""
    optim, dtype, fp8 = spec.model.optim, params_dtype(spec), spec.te_fp8 or spec.stored_fp8
    optimizer = optimizer_of(optim.name)
    return [
        *_told_by_schema(spec, "OptimizerConfig"),
        Field("optimizer", optimizer.core_name, ("model.optim.name",)),
        Field("decoupled_weight_decay", optimizer.decoupled_weight_decay, ("model.optim.name",)),
        Field("min_lr", min_lr(optim), ("model.optim.sched.min_lr",)),
        Field("decoupled_min_lr", decoupled_min_lr(optim), ("model.optim.decoupled_lr",)),
        Field("adam_beta1", optim.betas[0], ("model.optim.betas",)),
        Field("adam_beta2", optim.betas[1], ("model.optim.betas",)),
        Field("bf16", dtype is Dtype.bf16, ("trainer.precision",)),
        Field("fp16", False),
        Field("params_dtype", dtype, ("trainer.precision",)),
        _distributed_optimizer(spec),
        # The default means delayed.
        Field("fp8_recipe", None if fp8 is None else fp8.recipe.core_name, ("model.fp8_recipe",)),
    ]


def optimizer_state_fields(spec: RunSpec) -> list[Field]:
    """Fields of `OptimizerConfig` about the types of the precision-aware optimizer's states."""
    optim, path = spec.model.optim, "model.optim"
    types = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return [
        *_named(optim, path, "use_precision_aware_optimizer", "store_param_remainders"),
        *(Field(name, Dtype[getattr(optim, name).name], (f"{path}.{name}",)) for name in types),
    ]
