"""From our configuration to megatron-core's: pure functions, one per config class.

Every field whose default differs between NeMo, megatron-core and Transformer Engine is set explicitly, so that what
the user reads in `config.yaml` is what the layers get.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.config.choices import Activation, CrossEntropyFusion, OptimizerName, Precision
from gpt_pretrain.config.derived import (
    ddp_bucket_size,
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    min_lr,
    moe_ffn_hidden_size,
    num_query_groups,
    uses_distributed_optimizer,
)
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.spec.fp8 import Fp8Settings, fp8_settings
from gpt_pretrain.spec.kernels import Kernels
from gpt_pretrain.spec.platform import Platform

# Types of optimizer states by megatron-core's names.
_STATE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


def params_dtype(config: Config, platform: Platform) -> torch.dtype:
    """Type of parameters and activations: `trainer.precision`, where auto is bf16 on a GPU and fp32 without one."""
    precision = config.trainer.precision
    if precision is Precision.auto:
        return torch.bfloat16 if platform.cuda else torch.float32
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


def _activation(config: Config, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    activation = config.model.activation
    if activation is Activation.swiglu:
        return F.silu
    if activation is Activation.gelu_tanh and not kernels.bias_activation_fusion:
        return partial(F.gelu, approximate="tanh")
    # megatron-core's fused bias+GELU is selected by F.gelu and computes the tanh form.
    return F.gelu


def _transformer_engine_fp8(model: ModelConfig) -> Fp8Settings | None:
    """The FP8 that megatron-core is told of: emulated layers bring their own, and Transformer Engine must not act."""
    settings = fp8_settings(model)
    return None if settings is None or settings.emulate else settings


def _fp8_fields(settings: Fp8Settings | None) -> dict[str, Any]:
    """Every FP8 field of TransformerConfig: megatron-core's defaults are not Transformer Engine's, nor NeMo's."""
    if settings is None:
        return {"fp8": None}
    if settings.emulate:
        # Emulated layers bring their own FP8. An override, though it matches no module, is what lets megatron-core tell
        # them of a step's first microbatch (MegatronModule.set_is_first_microbatch).
        return {"fp8": None, "quant_recipe": RecipeConfig([], {})}
    return {
        "fp8": "hybrid" if settings.hybrid else "e4m3",
        "fp8_recipe": settings.recipe.value,
        "fp8_param": settings.params,
        "fp8_margin": settings.margin,
        "fp8_interval": 1,
        "fp8_amax_history_len": settings.amax_history_len,
        "fp8_amax_compute_algo": settings.amax_compute_algo.value,
        "fp8_wgrad": settings.wgrad,
        "fp8_dot_product_attention": settings.dot_product_attention,
        "fp8_multi_head_attention": settings.multi_head_attention,
        "first_last_layers_bf16": settings.num_layers_at_start_in_bf16 + settings.num_layers_at_end_in_bf16 > 0,
        "num_layers_at_start_in_bf16": settings.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": settings.num_layers_at_end_in_bf16,
        "quant_recipe": _high_precision_modules(settings.exclude),
    }


def _high_precision_modules(patterns: Sequence[str]) -> RecipeConfig | None:
    """megatron-core's per-module override that takes the linear layers of these names out of FP8."""
    if not patterns:
        return None
    override = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    return RecipeConfig([GlobMatcher(pattern, "high_precision") for pattern in patterns], {"high_precision": override})


def expert_fields(model: ModelConfig, kernels: Kernels) -> dict[str, Any]:
    """Every field of TransformerConfig that says something of a mixture of experts; none of them without one."""
    if model.num_moe_experts is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_ffn_hidden_size": moe_ffn_hidden_size(model),
        "moe_router_topk": model.moe_router_topk,
        # The weights of a token's experts add up to 1: the softmax is taken over their scores alone, as in Mixtral.
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        # BF16 scores tie, and ties fall differently at every layout.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type.value,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type.value,
        "moe_grouped_gemm": kernels.moe_grouped_gemm,
        "moe_router_padding_for_quantization": model.moe_router_padding_for_quantization,
        "expert_model_parallel_size": model.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(model),
    }


def translate_transformer(config: Config, platform: Platform, kernels: Kernels) -> TransformerConfig:
    """The layers: `model.*` to `TransformerConfig`."""
    model = config.model
    dtype = params_dtype(config, platform)
    recompute = model.activations_checkpoint_granularity
    method = model.activations_checkpoint_method
    interleaved = model.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_hidden_size(model),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=num_query_groups(model),
        kv_channels=kv_channels(model),
        normalization=model.normalization.value,
        layernorm_epsilon=model.layernorm_epsilon,
        activation_func=_activation(config, kernels),
        gated_linear_unit=model.activation is Activation.swiglu,
        add_bias_linear=model.bias,
        add_qkv_bias=model.qkv_bias,
        init_method_std=model.init_method_std,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        **expert_fields(model, kernels),
        # Parallel layout.
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
        # Batched sends to the stages before and after carry no tag: with two interleaved stages both are the same
        # rank, and activations arrive as gradients. Ordered, overlapped sends tell them apart.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The host need not wait for each exchange: that guards against a fault of older PyTorch.
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=model.pipeline_model_parallel_size > 1,
        # Precision.
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **_fp8_fields(fp8_settings(model)),
        deterministic_mode=config.trainer.deterministic,
        # A mean over unmasked tokens, exact at every layout. Without a mask the cheaper mean of means is the same.
        calculate_per_token_loss=model.data.eod_mask_loss,
        tp_comm_overlap=model.tp_comm_overlap,
        # Backward, NCCL exchanges beside a product that does not need what is exchanged, as without user buffers: with
        # them steps were about 0.5% slower (benchmarks/tp_overlap_h200_2026-11-22.md).
        tp_comm_bulk_dgrad=not model.tp_comm_overlap,
        tp_comm_bulk_wgrad=not model.tp_comm_overlap,
        # Kernels.
        cuda_graph_impl="none" if kernels.cuda_graph_impl is None else kernels.cuda_graph_impl.value,
        # Whole layers.
        cuda_graph_modules=[],
        transformer_impl="transformer_engine" if kernels.transformer_engine else "local",
        bias_activation_fusion=kernels.bias_activation_fusion,
        bias_dropout_fusion=kernels.bias_dropout_add_fusion,
        masked_softmax_fusion=kernels.masked_softmax_fusion,
        apply_rope_fusion=kernels.apply_rope_fusion,
        fused_single_qkv_rope=kernels.fused_single_qkv_rope,
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        # megatron-core 0.19 has no linear: `linear_loss.LossHead` takes the loss over from it.
        cross_entropy_loss_fusion=kernels.cross_entropy_loss_fusion is CrossEntropyFusion.native,
        cross_entropy_fusion_impl="native",
        recompute_granularity=None if recompute is None else recompute.value,
        recompute_method=None if method is None else method.value,
        recompute_num_layers=model.activations_checkpoint_num_layers,
        # Weights are drawn anew, independent of the layout, in megatron/initialization.py; built on the device.
        use_cpu_initialization=False,
    )


def translate_ddp(config: Config, platform: Platform, num_shards: int) -> DistributedDataParallelConfig:
    """Gradient reduction and parameter gathering: `model.*` to `DistributedDataParallelConfig`.

    Args:
        config: The run's configuration.
        platform: The machine.
        num_shards: Ranks that reduce gradients with each other, DP · CP.
    """
    model = config.model
    fp8 = _transformer_engine_fp8(model)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=model.grad_reduce_in_fp32,
        use_distributed_optimizer=uses_distributed_optimizer(model),
        # With fp8_param alone the optimizer skips FP8 weights: they never change. With this alone BF16 is gathered.
        fp8_param_gather=fp8 is not None and fp8.params,
        overlap_grad_reduce=model.overlap_grad_reduce,
        overlap_param_gather=model.overlap_param_gather,
        bucket_size=ddp_bucket_size(model, num_shards),
        # Chunks of one pipeline rank gather their parameters at the same points on all ranks.
        align_param_gather=model.overlap_param_gather and model.virtual_pipeline_model_parallel_size is not None,
        # NCCL divides as it reads; otherwise a pass of its own over the gradients does, 15 ms for those of Llama 3 8B.
        # gloo cannot, and with losses per token there is nothing to divide by. NCCL multiplies what one rank has by 1,
        # and leaves a sum of it as it is; what experts have, megatron-core scales in a pass before it averages.
        average_in_collective=platform.cuda
        and num_shards > 1
        and model.num_moe_experts is None
        and not model.data.eod_mask_loss,
        check_for_nan_in_grad=False,
    )


def translate_optimizer(config: Config, platform: Platform) -> OptimizerConfig:
    """`model.optim` and `trainer.gradient_clip_val` to `OptimizerConfig`."""
    model, optim = config.model, config.model.optim
    dtype = params_dtype(config, platform)
    fp8 = _transformer_engine_fp8(model)
    options = OptimizerConfig(
        optimizer=optim.name.value,
        lr=optim.lr,
        min_lr=min_lr(optim),
        weight_decay=optim.weight_decay,
        decoupled_weight_decay=optim.name is OptimizerName.adam,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        sgd_momentum=optim.momentum,
        clip_grad=config.trainer.gradient_clip_val,
        bf16=dtype is torch.bfloat16,
        fp16=False,
        params_dtype=dtype,
        use_distributed_optimizer=uses_distributed_optimizer(model),
        overlap_param_gather=model.overlap_param_gather,
        # None would be taken for delayed.
        fp8_recipe=None if fp8 is None else fp8.recipe.value,
    )
    if optim.use_precision_aware_optimizer:
        # Behind megatron-core's check, which wants Transformer Engine's FusedAdam: ours takes its place.
        options.use_precision_aware_optimizer = True
        options.main_params_dtype = _STATE_DTYPES[optim.main_params_dtype.name]
        options.store_param_remainders = optim.store_param_remainders
        options.exp_avg_dtype = _STATE_DTYPES[optim.exp_avg_dtype.name]
        options.exp_avg_sq_dtype = _STATE_DTYPES[optim.exp_avg_sq_dtype.name]
    return options
