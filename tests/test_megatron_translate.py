"""Every key that is meant for megatron-core reaches it: one row per key says which fields change, and no other does."""

import ast
import copy
import math
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.enums import Fp8Recipe
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.enums import InferenceCudaGraphScope

import gpt_pretrain
from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.registry import own_kernels
from gpt_pretrain.megatron.core_fields import params_dtype
from gpt_pretrain.megatron.model import torch_dtype, translate_ddp, translate_optimizer, translate_transformer
from gpt_pretrain.run.platform import Platform
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly

# Nothing here is null that another key of the table would decide.
BASE = ("model=llama3_8b", "data=mock", "parallelism=single", "model.kv_channels=128", "model.optim.sched.min_lr=1e-5")
TP2, PP2 = "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"
FULL = "model.activations_checkpoint_granularity=full"
UNIFORM = "model.activations_checkpoint_method=uniform"
ONE_LAYER = "model.activations_checkpoint_num_layers=1"
OVERLAP = "model.overlap_param_gather=true"
EXPERTS = "model.num_moe_experts=8"
DISTRIBUTED, BF16 = "model.use_distributed_optimizer=true", "trainer.precision=bf16"
LEAN = "model.optim.use_precision_aware_optimizer=true"
MUP = ("model.use_mup=true", "model.mup_base_hidden_size=1024")
FP8, TENSORWISE, KEPT = "model.fp8=true", "model.fp8_recipe=tensorwise", "model.first_last_layers_bf16=true"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A key's value, beside what it needs to be legal, and the fields that it changes in megatron-core's configs."""

    override: str
    context: tuple[str, ...] = ()
    transformer: dict[str, Any] | None = None
    ddp: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    needs_te: bool = False

    @property
    def key(self) -> str:
        return self.override.partition("=")[0]

    @property
    def expected(self) -> dict[str, Any]:
        parts = {"transformer": self.transformer, "ddp": self.ddp, "optimizer": self.optimizer}
        return {f"{part}.{name}": value for part, names in parts.items() for name, value in (names or {}).items()}


def normal(std: float) -> dict[str, float]:
    """megatron-core's own initialisation, which ours replaces: the arguments of torch's `normal_`."""
    return {"mean": 0.0, "std": std}


NO_FP8: dict[str, dict[str, Any]] = {
    "transformer": {
        "fp8": None,
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
        "quant_recipe": [],
    },
    "optimizer": {"fp8_recipe": None},
}
ROWS = [
    Row(
        override="model.num_layers=8",
        transformer={"num_layers": 8, "output_layer_init_method": normal(0.02 / math.sqrt(2 * 8))},
    ),
    Row(override="model.hidden_size=2048", transformer={"hidden_size": 2048}),
    Row(
        override="model.hidden_size=2048",
        context=("model.kv_channels=null",),
        transformer={"hidden_size": 2048, "kv_channels": 64},
    ),
    Row(override="model.ffn_hidden_size=512", transformer={"ffn_hidden_size": 512}),
    Row(override="model.ffn_hidden_size=null", transformer={"ffn_hidden_size": 4 * 4096}),
    Row(override="model.num_attention_heads=16", transformer={"num_attention_heads": 16}),
    Row(override="model.num_query_groups=4", transformer={"num_query_groups": 4}),
    Row(override="model.num_query_groups=null", transformer={"num_query_groups": 32}),
    Row(override="model.kv_channels=64", transformer={"kv_channels": 64}),
    Row(
        override="model.use_mup=true",
        context=("model.mup_base_hidden_size=1024",),
        transformer={
            "use_mup": True,
            "mup_base_hidden_size": 1024,
            "mup_width_mult": 4.0,
            "mup_output_mult": 0.25,
            "softmax_scale": 1 / 128,
            "init_method": normal(0.01),
            "output_layer_init_method": normal(0.01 / 8),
        },
    ),
    Row(override="model.mup_embedding_mult=10", context=MUP, transformer={"mup_embedding_mult": 10.0}),
    Row(override="model.mup_output_mult=0.5", context=MUP, transformer={"mup_output_mult": 0.5}),
    Row(
        override="model.mup_base_head_dim=64",
        context=MUP,
        transformer={"mup_base_head_dim": 64.0, "softmax_scale": 8 / 128},
    ),
    Row(
        override="model.mup_attn_scale_power=0.5",
        context=MUP,
        transformer={"mup_attn_scale_power": 0.5, "softmax_scale": 1 / 128**0.5},
    ),
    Row(override="model.normalization=layernorm", transformer={"normalization": "LayerNorm"}),
    Row(override="model.layernorm_epsilon=1e-6", transformer={"layernorm_epsilon": 1e-6}),
    Row(override="model.activation=gelu", transformer={"activation_func": F.gelu, "gated_linear_unit": False}),
    Row(
        override="model.activation=gelu_tanh",
        transformer={"activation_func": {"approximate": "tanh"}, "gated_linear_unit": False},
    ),
    # megatron-core finds its fused GELU, which computes the tanh form, by F.gelu.
    Row(
        override="model.bias_activation_fusion=true",
        context=("model.activation=gelu_tanh", "model.bias=true"),
        transformer={"bias_activation_fusion": True, "activation_func": F.gelu},
    ),
    Row(override="model.bias=true", transformer={"add_bias_linear": True}),
    Row(override="model.qkv_bias=true", transformer={"add_qkv_bias": True}),
    Row(override="model.no_rope_freq=4", transformer={"no_rope_freq": [0, 0, 0, 1] * 8}),
    Row(override="model.qk_layernorm=true", transformer={"qk_layernorm": True}),
    Row(override="model.window_size=[4095,0]", transformer={"window_size": (4095, 0)}),
    Row(override="model.qk_clip=true", transformer={"qk_clip": True}),
    Row(override="model.qk_clip_alpha=0.3", context=("model.qk_clip=true",), transformer={"qk_clip_alpha": 0.3}),
    Row(override="model.qk_clip_threshold=30", context=("model.qk_clip=true",), transformer={"qk_clip_threshold": 30}),
    Row(override="model.log_max_attention_logit=true", transformer={"log_max_attention_logit": True}),
    Row(
        override="model.init_method_std=0.01",
        transformer={
            "init_method_std": 0.01,
            "init_method": normal(0.01),
            "output_layer_init_method": normal(0.01 / math.sqrt(2 * 32)),
            "embedding_init_method_std": 0.01,
            "embedding_init_method": normal(0.01),
        },
    ),
    Row(override="model.hidden_dropout=0.1", transformer={"hidden_dropout": 0.1}),
    Row(override="model.attention_dropout=0.1", transformer={"attention_dropout": 0.1}),
    # megatron-core derives the second: it is about experts, and there are none.
    Row(override=TP2, transformer={"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    # megatron-core derives the third: what one virtual stage runs before the next.
    Row(
        override=PP2,
        transformer={
            "pipeline_model_parallel_size": 2,
            "deallocate_pipeline_outputs": True,
            "microbatch_group_size_per_vp_stage": 2,
        },
    ),
    Row(
        override="model.virtual_pipeline_model_parallel_size=2",
        context=(PP2,),
        transformer={"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
    ),
    Row(
        override="model.virtual_pipeline_model_parallel_size=2",
        context=("parallelism=pp2",),
        transformer={"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
        ddp={"align_param_gather": True},
    ),
    Row(override="model.context_parallel_size=2", transformer={"context_parallel_size": 2}),
    Row(override="model.sequence_parallel=true", context=(TP2,), transformer={"sequence_parallel": True}),
    Row(
        override="model.use_distributed_optimizer=true",
        ddp={"use_distributed_optimizer": True},
        optimizer={"use_distributed_optimizer": True},
    ),
    Row(override="model.overlap_grad_reduce=true", ddp={"overlap_grad_reduce": True, "bucket_size": 400_000_000}),
    Row(
        override=OVERLAP,
        context=("model.use_distributed_optimizer=true", "model.overlap_grad_reduce=true"),
        ddp={"overlap_param_gather": True},
        optimizer={"overlap_param_gather": True},
    ),
    Row(
        override="model.data_parallel_sharding_strategy=optim_grads",
        context=("model.use_distributed_optimizer=true", "model.overlap_grad_reduce=true"),
        ddp={"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 40_000_000},
    ),
    Row(
        override="model.data_parallel_sharding_strategy=optim_grads_params",
        context=("model.use_distributed_optimizer=true", "model.overlap_grad_reduce=true"),
        ddp={"data_parallel_sharding_strategy": "optim_grads_params", "bucket_size": 40_000_000},
    ),
    Row(
        override="model.num_distributed_optimizer_instances=2",
        context=(
            "model.use_distributed_optimizer=true",
            "model.overlap_grad_reduce=true",
            "model.data_parallel_sharding_strategy=optim_grads",
        ),
        ddp={"num_distributed_optimizer_instances": 2},
    ),
    Row(
        override="model.ddp_bucket_size=5000000",
        context=("model.overlap_grad_reduce=true",),
        ddp={"bucket_size": 5_000_000},
    ),
    Row(override="model.grad_reduce_in_fp32=false", ddp={"grad_reduce_in_fp32": False}),
    Row(
        override="model.transformer_engine=true",
        context=("model.apply_rope_fusion=false",),
        transformer={"transformer_impl": "transformer_engine"},
    ),
    Row(override="model.bias_activation_fusion=true", transformer={"bias_activation_fusion": True}),
    Row(override="model.bias_dropout_add_fusion=true", transformer={"bias_dropout_fusion": True}),
    Row(override="model.masked_softmax_fusion=true", transformer={"masked_softmax_fusion": True}),
    # megatron-core's config refuses it where TE is not installed.
    Row(override="model.apply_rope_fusion=true", transformer={"apply_rope_fusion": True}, needs_te=True),
    Row(override="model.fused_single_qkv_rope=true", transformer={"fused_single_qkv_rope": True}),
    Row(override="model.gradient_accumulation_fusion=true", transformer={"gradient_accumulation_fusion": True}),
    # megatron-core 0.19 has no linear, and does not compute the loss then.
    Row(override="model.cross_entropy_fusion_impl=native", transformer={"cross_entropy_loss_fusion": True}),
    Row(
        override="model.cross_entropy_loss_fusion=false",
        context=("model.cross_entropy_fusion_impl=native",),
        transformer={"cross_entropy_loss_fusion": False},
    ),
    Row(
        override="model.activations_checkpoint_granularity=selective",
        transformer={"recompute_granularity": "selective"},
    ),
    Row(
        override=FULL,
        context=(UNIFORM, ONE_LAYER),
        transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    Row(
        override="model.activations_checkpoint_method=block",
        context=(FULL, UNIFORM, ONE_LAYER),
        transformer={"recompute_method": "block"},
    ),
    Row(
        override="model.activations_checkpoint_num_layers=2",
        context=(FULL, UNIFORM, ONE_LAYER),
        transformer={"recompute_num_layers": 2},
    ),
    Row(override="model.data.eod_mask_loss=true", transformer={"calculate_per_token_loss": True}),
    Row(override="model.data.eod_mask_labels=true", transformer={"calculate_per_token_loss": True}),
    Row(override="model.optim.name=sgd", optimizer={"optimizer": "sgd", "decoupled_weight_decay": False}),
    Row(override="model.optim.lr=1e-3", optimizer={"lr": 1e-3}),
    Row(override="model.optim.decoupled_lr=1e-3", optimizer={"decoupled_lr": 1e-3, "decoupled_min_lr": 1e-4}),
    Row(
        override="model.optim.lr=1e-3",
        context=("model.optim.sched.min_lr=null",),
        optimizer={"lr": 1e-3, "min_lr": 1e-4},
    ),
    Row(override="model.optim.betas=[0.8,0.99]", optimizer={"adam_beta1": 0.8, "adam_beta2": 0.99}),
    Row(override="model.optim.eps=1e-6", optimizer={"adam_eps": 1e-6}),
    Row(override="model.optim.momentum=0.5", optimizer={"sgd_momentum": 0.5}),
    Row(override="model.optim.weight_decay=0.01", optimizer={"weight_decay": 0.01}),
    Row(override="model.optim.sched.min_lr=1e-6", optimizer={"min_lr": 1e-6}),
    Row(override=LEAN, context=(DISTRIBUTED, BF16), optimizer={"use_precision_aware_optimizer": True}),
    Row(
        override="model.optim.main_params_dtype=fp16",
        context=(DISTRIBUTED, BF16, LEAN),
        optimizer={"main_params_dtype": torch.float16},
    ),
    Row(
        override="model.optim.store_param_remainders=false",
        context=(DISTRIBUTED, BF16, LEAN),
        optimizer={"store_param_remainders": False},
    ),
    Row(
        override="model.optim.exp_avg_dtype=fp8",
        context=(DISTRIBUTED, BF16, LEAN),
        optimizer={"exp_avg_dtype": torch.float8_e4m3fn},
    ),
    Row(
        override="model.optim.exp_avg_sq_dtype=fp16",
        context=(DISTRIBUTED, BF16, LEAN),
        optimizer={"exp_avg_sq_dtype": torch.float16},
    ),
    Row(override="trainer.gradient_clip_val=0.5", optimizer={"clip_grad": 0.5}),
    Row(
        override="trainer.precision=bf16",
        transformer={
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "autocast_dtype": torch.bfloat16,
        },
        optimizer={"bf16": True, "params_dtype": torch.bfloat16},
    ),
    Row(override="trainer.deterministic=true", transformer={"deterministic_mode": True}),
    # megatron-core's own defaults stay where there is no FP8: a history of 1, one layer at each end.
    Row(
        override=FP8,
        transformer={
            "fp8": "hybrid",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 0,
        },
        optimizer={"fp8_recipe": "delayed"},
    ),
    Row(
        override=TENSORWISE,
        context=(FP8,),
        transformer={"fp8_recipe": "tensorwise"},
        optimizer={"fp8_recipe": "tensorwise"},
    ),
    Row(
        override="model.fp8_recipe=blockwise",
        context=(FP8,),
        transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"},
        optimizer={"fp8_recipe": "blockwise"},
    ),
    Row(override="model.fp8_hybrid=true", context=(FP8, "model.fp8_recipe=blockwise"), transformer={"fp8": "hybrid"}),
    Row(override="model.fp8_e4m3=true", context=(FP8,), transformer={"fp8": "e4m3"}),
    Row(override="model.fp8_e4m3=true", context=(FP8, "model.fp8_hybrid=true"), transformer={"fp8": "e4m3"}),
    Row(override="model.fp8_margin=2", context=(FP8,), transformer={"fp8_margin": 2}),
    Row(override="model.fp8_amax_history_len=16", context=(FP8,), transformer={"fp8_amax_history_len": 16}),
    Row(
        override="model.fp8_amax_compute_algo=most_recent",
        context=(FP8,),
        transformer={"fp8_amax_compute_algo": "most_recent"},
    ),
    Row(override="model.fp8_wgrad=false", context=(FP8,), transformer={"fp8_wgrad": False}),
    Row(
        override="model.fp8_params=true",
        context=(FP8,),
        transformer={"fp8_param": True},
        ddp={"fp8_param_gather": True, "use_distributed_optimizer": True},
        optimizer={"use_distributed_optimizer": True},
    ),
    Row(
        override="model.fp8_dot_product_attention=true", context=(FP8,), transformer={"fp8_dot_product_attention": True}
    ),
    Row(
        override=KEPT,
        context=(FP8, TENSORWISE),
        transformer={"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1},
    ),
    Row(
        override="model.num_layers_at_start_in_bf16=2",
        context=(FP8, TENSORWISE, KEPT),
        transformer={"num_layers_at_start_in_bf16": 2},
    ),
    Row(
        override="model.num_layers_at_end_in_bf16=0",
        context=(FP8, TENSORWISE, KEPT),
        transformer={"num_layers_at_end_in_bf16": 0},
    ),
    Row(
        override="model.fp8_exclude=[decoder.layers.0.*,*.linear_fc2]",
        context=(FP8,),
        transformer={"quant_recipe": ["decoder.layers.0.*", "*.linear_fc2"]},
    ),
    # What megatron-core is told of emulated FP8 is nothing; an override that matches no module makes it tell layers of
    # a step's first microbatch.
    Row(override="model.fp8_emulate=true", context=(FP8,), **NO_FP8),
    # Whatever differs from megatron-core's defaults, which a model without experts has.
    Row(
        override=EXPERTS,
        transformer={
            "num_moe_experts": 8,
            "moe_ffn_hidden_size": 14336,
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
        },
    ),
    Row(override="model.moe_ffn_hidden_size=512", context=(EXPERTS,), transformer={"moe_ffn_hidden_size": 512}),
    Row(override="model.moe_router_topk=4", context=(EXPERTS,), transformer={"moe_router_topk": 4}),
    Row(
        override="model.moe_router_load_balancing_type=seq_aux_loss",
        context=(EXPERTS,),
        transformer={"moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    Row(override="model.moe_aux_loss_coeff=0.1", context=(EXPERTS,), transformer={"moe_aux_loss_coeff": 0.1}),
    Row(override="model.moe_z_loss_coeff=1e-3", context=(EXPERTS,), transformer={"moe_z_loss_coeff": 1e-3}),
    Row(
        override="model.moe_token_dispatcher_type=allgather",
        context=(EXPERTS,),
        transformer={"moe_token_dispatcher_type": "allgather"},
    ),
    Row(
        override="model.overlap_moe_expert_parallel_comm=true",
        context=(EXPERTS, "model.expert_model_parallel_size=2", "trainer.precision=bf16"),
        transformer={"overlap_moe_expert_parallel_comm": True},
    ),
    Row(override="model.moe_grouped_gemm=true", context=(EXPERTS,), transformer={"moe_grouped_gemm": True}),
    Row(
        override="model.moe_permute_fusion=true",
        context=(EXPERTS,),
        transformer={"moe_permute_fusion": True},
        needs_te=True,
    ),
    Row(
        override="model.moe_router_padding_for_quantization=true",
        context=(EXPERTS, FP8, TENSORWISE),
        transformer={"moe_router_padding_for_quantization": True},
        needs_te=True,
    ),
    Row(
        override="model.expert_model_parallel_size=4", context=(EXPERTS,), transformer={"expert_model_parallel_size": 4}
    ),
    Row(
        override="model.expert_tensor_parallel_size=2",
        context=(EXPERTS,),
        transformer={"expert_tensor_parallel_size": 2},
    ),
    Row(override="model.fp8_emulate=true", context=(FP8, "model.fp8_exclude=['*']"), **NO_FP8),
    Row(
        override="model.tp_comm_overlap=true",
        transformer={"tp_comm_overlap": True, "tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False},
    ),
    Row(
        override="model.cuda_graph_impl=local",
        # megatron-core's own answer to the first, for its inference engines.
        transformer={"cuda_graph_impl": "local", "inference_cuda_graph_scope": InferenceCudaGraphScope.layer},
    ),
]

# Keys that none of the three translations handles: the module or room (relative to gpt_pretrain) that reads them.
ELSEWHERE = {
    "config/derived.py": ("model.vocab_size", "model.make_vocab_size_divisible_by", "trainer.max_time"),
    "config/schedule.py": (
        "model.global_batch_size",
        "model.rampup_batch_size",
        "model.step_batch_size_schedule",
        "model.optim.sched.warmup_steps",
        "model.optim.sched.warmup_tokens",
        "model.optim.sched.decay_steps",
        "model.optim.sched.decay_tokens",
        "model.optim.sched.wsd_decay_steps",
        "model.optim.sched.wsd_decay_tokens",
        "trainer.max_steps",
        "trainer.max_tokens",
    ),
    # Refused, but for its only value, which is a constant of the translation.
    "rules/no_effect.py": ("model.fp8_interval",),
    "run/fp8.py": ("model.fp8_backend", "model.moe_grouped_kernel"),
    # Compared with what the launcher started.
    "rules/training.py": ("trainer.devices", "trainer.num_nodes"),
    # Their other values are names that extensions register.
    "megatron/own_model.py": ("model.layer", "model.loss"),
    "features/of_extensions.py": ("model.features",),
    "megatron/gpt.py": (
        "model.final_logit_softcapping",
        "model.z_loss_coeff",
        "model.max_position_embeddings",
        "model.position_embedding_type",
        "model.rotary_percentage",
        "model.rotary_base",
        "model.rope_scaling_factor",
        "model.share_embeddings_and_output_weights",
    ),
    "features": ("model.compile", *(f"model.{feature.key}" for feature in own_kernels() if not feature.core_field)),
    # megatron-core reads YaRN's numbers from attributes that are no fields.
    "megatron/core_fields.py": ("model.yarn_original_max_position_embeddings",),
    "megatron/value_embeddings.py": ("model.value_embedding_mult",),
    "features/value_embeddings.py": ("model.value_embedding_freq",),
    "megatron/weights.py": ("model.seed",),
    "megatron/optimizer.py": (
        "model.optim.sched.name",
        "model.optim.sched.init_lr",
        "model.optim.sched.wsd_decay_style",
        "model.optim.ema_decay",
    ),
    "data": (
        "model.encoder_seq_length",
        "model.data.data_impl",
        "model.data.data_prefix",
        "model.data.validation_prefix",
        "model.data.splits_string",
        "model.data.temperature",
        "model.data.stages",
        "model.data.max_epochs",
        "model.data.text_files",
        "model.data.text_key",
        "model.data.cache_dir",
        "model.data.inter_document_masking",
        "model.data.num_dataset_builder_threads",
        "model.data.num_workers",
        "model.tokenizer.library",
        "model.tokenizer.model",
        "model.tokenizer.eod_token",
        "model.tokenizer.vocab_size",
    ),
    # What these two plan for and measure; training reads none of it.
    "plan": ("plan.gpu", "plan.num_gpus", "plan.document_length"),
    "benchmark": (
        "benchmark.variants",
        "benchmark.overrides",
        "benchmark.warmup_steps",
        "benchmark.steps",
        "benchmark.interval",
        "benchmark.rounds",
        "benchmark.profile",
    ),
    "training": (
        "model.micro_batch_size",
        "trainer.log_every_n_steps",
        "trainer.val_check_interval",
        "trainer.limit_val_batches",
        "trainer.validate_at_start",
        "trainer.gc_interval",
        "trainer.max_skipped_steps",
        "trainer.spike_threshold",
        "trainer.max_spike_rewinds",
        "trainer.spike_margin",
        "trainer.hang_timeout",
    ),
}


def describe(value: Any) -> Any:
    """Partials and overrides compare by identity; arguments and patterns say what they do."""
    if isinstance(value, RecipeConfig):
        return [matcher.pattern for matcher in value.matchers]
    return value.keywords if isinstance(value, partial) else value


def translate(config: Config) -> dict[str, Any]:
    """All fields of the three configs of megatron-core, under "part.field"."""
    spec = spec_of(config, CPU, shards=2)
    parts = {
        "transformer": translate_transformer(spec),
        "ddp": translate_ddp(spec),
        "optimizer": translate_optimizer(spec),
    }
    return {
        f"{part}.{field.name}": describe(getattr(translated, field.name))
        for part, translated in parts.items()
        for field in fields(translated)
    }


@cache
def translated(*overrides: str) -> dict[str, Any]:
    return translate(compose_quickly([*BASE, *overrides]))


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.override, marks=[pytest.mark.gpu] if row.needs_te else []) for row in ROWS]
)
def test_key_changes_exactly_its_fields(row: Row) -> None:
    before, after = translated(*row.context), translated(*row.context, row.override)
    assert {name: value for name, value in after.items() if value != before[name]} == row.expected


def test_every_key_of_model_trainer_plan_and_benchmark_lands_somewhere() -> None:
    keys = {path for path in schema_keys() if path.startswith(("model.", "trainer.", "plan.", "benchmark."))}
    in_table = {row.key for row in ROWS}
    elsewhere = [key for place in ELSEWHERE.values() for key in place]
    assert len(set(elsewhere)) == len(elsewhere)
    assert in_table.isdisjoint(elsewhere)
    told_by_schema = {path for path, key in schema_keys().items() if key.facts.core}
    assert in_table | set(elsewhere) | told_by_schema == keys


def test_every_field_of_megatron_core_in_the_facts_of_a_key_exists() -> None:
    names = {
        "TransformerConfig": vars(translate_transformer(spec_of(compose_quickly(BASE), CPU))),
        "DistributedDataParallelConfig": vars(translate_ddp(spec_of(compose_quickly(BASE), CPU))),
        "OptimizerConfig": vars(translate_optimizer(spec_of(compose_quickly(BASE), CPU))),
    }
    for path, key in schema_keys().items():
        for field in key.facts.core:
            config, _, name = field.partition(".")
            assert (name or path.rpartition(".")[2]) in names[config]


@pytest.mark.parametrize(("place", "keys"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_key_is_read_where_the_table_says(place: str, keys: tuple[str, ...]) -> None:
    path = Path(gpt_pretrain.__file__).parent / place
    nodes = [
        node
        for file in ([path] if path.is_file() else path.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    named |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert [key for key in keys if not named & {key, key.rpartition(".")[2]}] == []


def test_translation_is_pure() -> None:
    config = compose_quickly(BASE)
    before = copy.deepcopy(config)
    assert translate(config) == translate(copy.deepcopy(config))
    assert config == before


def erf_gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def squared_relu(x: float) -> float:
    return max(x, 0.0) ** 2


@pytest.mark.parametrize(
    ("activation", "formula"),
    [("gelu", erf_gelu), ("gelu_tanh", tanh_gelu), ("swiglu", silu), ("squared_relu", squared_relu)],
)
def test_activation_computes_its_formula(activation: str, formula: Any) -> None:
    config = compose_quickly([*BASE, f"model.activation={activation}"])
    activation_func = translate_transformer(spec_of(config, CPU)).activation_func
    points = [-4.0, -2.0, -1.0, -0.5, 0.0, 0.3, 1.0, 2.0, 4.0]
    values = activation_func(torch.tensor(points, dtype=torch.float64))
    # The two forms of GELU differ by up to 5e-4.
    torch.testing.assert_close(values.tolist(), [formula(x) for x in points], atol=1e-12, rtol=0.0)


@pytest.mark.parametrize(
    ("precision", "cuda", "expected"),
    [
        ("auto", False, torch.float32),
        ("auto", True, torch.bfloat16),
        ("fp32", True, torch.float32),
        ("bf16", False, torch.bfloat16),
    ],
)
def test_precision_decides_the_parameters_type(precision: str, cuda: bool, expected: torch.dtype) -> None:
    config = compose_quickly([*BASE, f"trainer.precision={precision}"])
    assert torch_dtype(params_dtype(spec_of(config, replace(CPU, cuda=cuda)))) is expected


def test_nothing_known_to_be_wrong_is_ever_chosen() -> None:
    """TE's fused cross entropy is known to be wrong; a precision-aware optimizer may hold masters in FP16."""
    for overrides in ((), (FP8,), (FP8, "model.fp8_params=true"), ("model.cross_entropy_fusion_impl=native",)):
        fields_of_run = translated(*overrides)
        assert fields_of_run["transformer.cross_entropy_fusion_impl"] == "native"
        assert fields_of_run["optimizer.use_precision_aware_optimizer"] is False


@pytest.mark.parametrize(
    ("platform", "num_shards", "overrides", "expected"),
    [
        (H200, 2, [], True),
        # A sum leaves one rank's gradients where they are; an average multiplies them by 1.
        (H200, 1, [], False),
        # Losses of single tokens are summed, and divided by their number at the end.
        (H200, 2, ["model.data.eod_mask_loss=true"], False),
        (H200, 2, ["model.num_moe_experts=4"], False),
        # gloo has no average.
        (CPU, 2, [], False),
    ],
)
def test_gradients_are_averaged_by_nccl_where_that_saves_a_pass(
    platform: Platform, num_shards: int, overrides: list[str], expected: bool
) -> None:
    config = compose_quickly([*BASE, *overrides])
    assert translate_ddp(spec_of(config, platform, shards=num_shards)).average_in_collective is expected


def test_megatron_core_knows_every_recipe_of_transformer_engine() -> None:
    known = {recipe.value for recipe in Fp8Recipe}
    assert {recipe.name for recipe in recipes_of(Fp8Backend.transformer_engine)} <= known
