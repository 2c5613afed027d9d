"""Cross-field rules: each row breaks one; what its message offers and the row's neighbour obey it."""

import random
import re
import sys
from dataclasses import replace

import pytest
import yaml

from gpt_pretrain.config.derived import max_time_s
from gpt_pretrain.config.errors import ConfigError, how_to_install
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.rules.check import ranges
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.shapes import division_problems
from tests.refusals import Refused, check_refused, compose_quickly, offered

LEAN = "model.optim.use_precision_aware_optimizer=true model.use_distributed_optimizer=true"
SMALL = "model.optim.use_precision_aware_optimizer=true"
FULL = "model.activations_checkpoint_granularity=full"
WSD = "model.optim.sched.name=wsd model.optim.sched.warmup_steps=20 trainer.max_steps=300"
TP2 = "model.tensor_model_parallel_size=2"
PP2 = "model.pipeline_model_parallel_size=2"
VP2 = "model.virtual_pipeline_model_parallel_size=2"
WARMUP = "model.optim.sched.warmup_steps=20"
MIN_LR = "model.optim.sched.min_lr=3e-5"
MUP = "model.use_mup=true model.mup_base_hidden_size=64"

BATCH8 = "model.micro_batch_size=1 model.global_batch_size=8"
RAMP, STEPS = "model.rampup_batch_size", "model.step_batch_size_schedule"
TOKENS = "trainer.max_steps=null trainer.max_tokens=100000"

RULES = [
    Refused("model.hidden_size=130"),
    Refused("model.num_query_groups=3", "model.num_attention_heads=4 model.num_query_groups=3"),
    Refused("model.num_query_groups=8", "model.num_attention_heads=4 model.num_query_groups=8"),
    Refused("model.num_query_groups=3 parallelism=tp2_sp", "model.num_attention_heads=4 model.num_query_groups=3"),
    Refused(
        "model.num_attention_heads=12 model.num_query_groups=12 model.hidden_size=192 parallelism=tp8_sp",
        "model.num_attention_heads=12 model.tensor_model_parallel_size=8",
    ),
    Refused("model.tensor_model_parallel_size=4", "model.num_query_groups=2 model.tensor_model_parallel_size=4"),
    Refused("model.num_query_groups=1 parallelism=tp2_sp", f"model.num_query_groups=1 {TP2}"),
    Refused("model.no_rope_freq=3", "model.num_layers=4 model.no_rope_freq=3", legal="model.no_rope_freq=2"),
    Refused("model.no_rope_freq=4 model.compile=true", "model.compile=true model.no_rope_freq=4"),
    Refused("model.no_rope_freq=4 model.position_embedding_type=learned_absolute", "model.no_rope_freq=4"),
    Refused("model.window_size=[31, 1]", legal="model.window_size=[31,0]"),
    Refused("model.window_size=[2147483648, 0]", legal="model.window_size=[2147483647,0]"),
    *(
        Refused(
            f"model.rope_scaling_factor=4 model.yarn_original_max_position_embeddings=64 {setting}",
            f"model.yarn_original_max_position_embeddings=64 {setting}",
        )
        for setting in ("model.rotary_percentage=0.5", "model.apply_rope_fusion=true", "model.rotary_base=1")
    ),
    Refused("model.yarn_original_max_position_embeddings=64"),
    Refused(
        "model.window_size=[31,0] fp8=delayed model.fp8_dot_product_attention=true",
        "model.window_size model.fp8_dot_product_attention=true",
    ),
    Refused(
        "model.window_size=[31,0] model.use_flash_attention=true",
        "model.use_flash_attention=true model.window_size=[31, 0]",
    ),
    Refused("model.window_size=[32]", legal="model.window_size=[31,0]"),
    Refused("model.window_attn_skip_freq=[1,0,1,0]", legal="model.window_attn_skip_freq=null"),
    *(
        Refused(
            f"model.window_size=[31,0] model.window_attn_skip_freq={layers}",
            f"model.window_attn_skip_freq={layers} model.num_layers=4",
            legal="model.window_size=[31,0] model.window_attn_skip_freq=[1,0,1,0]",
        )
        for layers in ("[1, 0, 1]", "[0, 0, 0, 0]", "[1, 0, 2, 0]")
    ),
    *(
        Refused(f"model.window_size=[31,0] {setting}", f"model.window_size {setting}")
        for setting in (
            "model.context_parallel_size=2",
            "model.masked_softmax_fusion=true",
            "model.data.inter_document_masking=true",
        )
    ),
    *(
        Refused(f"model.window_size=[31,0] {setting}", f"{setting} model.window_size=[31, 0]")
        for setting in ("model.compile=true", "model.cuda_graph_impl=local", "model.log_max_attention_logit=true")
    ),
    Refused("model.kv_channels=33"),
    Refused("model.hidden_size=100"),
    Refused(
        "model.rotary_percentage=0.1",
        "model.hidden_size=128 model.rotary_percentage=0.1 32 3 rotary_percentage model.kv_channels",
        legal="model.rotary_percentage=0.5",
    ),
    Refused(
        "model.kv_channels=64 model.rotary_percentage=0.0001", legal="model.kv_channels=64 model.rotary_percentage=0.5"
    ),
    Refused(f"model.hidden_size=129 model.kv_channels=32 {TP2}", f"model.hidden_size=129 {TP2}"),
    Refused(
        "model.hidden_size=129 model.kv_channels=32 model.ffn_hidden_size=null model.tensor_model_parallel_size=8 "
        "model.num_attention_heads=8 model.num_query_groups=8",
        "model.hidden_size=129 model.tensor_model_parallel_size=8",
    ),
    Refused(f"model.ffn_hidden_size=383 {TP2}"),
    Refused(f"model.vocab_size=2049 model.make_vocab_size_divisible_by=1 {TP2}", f"model.vocab_size=2049 {TP2}"),
    Refused(f"model.num_layers=5 {PP2}"),
    Refused(f"model.num_layers=6 {PP2} {VP2}"),
    Refused(VP2),
    Refused(f"{PP2} {VP2} model.global_batch_size=24", f"model.global_batch_size=24 {PP2} 3"),
    Refused("model.sequence_parallel=true"),
    Refused("parallelism=tp2_sp model.encoder_seq_length=255", f"model.encoder_seq_length=255 {TP2} 2"),
    Refused(
        "parallelism=cp2 model.encoder_seq_length=254", "model.encoder_seq_length=254 model.context_parallel_size=2 4"
    ),
    Refused(
        "parallelism=cp2 model.transformer_engine=false", "model.context_parallel_size=2 model.transformer_engine=false"
    ),
    Refused(f"{TP2} {PP2}", legal="parallelism=tp2_pp2", world_size=6),
    Refused("model.global_batch_size=20"),
    Refused("trainer.devices=2"),
    Refused("trainer.num_nodes=2"),
    Refused("model.max_position_embeddings=128", "model.encoder_seq_length=256 model.max_position_embeddings=128"),
    Refused("model.overlap_param_gather=true"),
    Refused(
        "parallelism=zero2 model.use_distributed_optimizer=false model.overlap_param_gather=false",
        "model.data_parallel_sharding_strategy=optim_grads model.use_distributed_optimizer=false",
    ),
    Refused(
        "model.overlap_grad_reduce=true model.data_parallel_sharding_strategy=optim_grads",
        "model.data_parallel_sharding_strategy=optim_grads model.use_distributed_optimizer=null",
    ),
    Refused(
        "parallelism=zero2 model.overlap_grad_reduce=false model.overlap_param_gather=false",
        "model.data_parallel_sharding_strategy=optim_grads model.overlap_grad_reduce=false",
    ),
    Refused(
        "parallelism=fsdp model.use_distributed_optimizer=false model.overlap_param_gather=false",
        "model.data_parallel_sharding_strategy=optim_grads_params model.use_distributed_optimizer=false",
    ),
    Refused(
        "parallelism=fsdp model.overlap_grad_reduce=false model.overlap_param_gather=false",
        "model.data_parallel_sharding_strategy=optim_grads_params model.overlap_grad_reduce=false",
    ),
    Refused(
        "parallelism=dp model.num_distributed_optimizer_instances=2",
        "model.num_distributed_optimizer_instances=2 model.data_parallel_sharding_strategy",
        world_size=4,
    ),
    Refused(
        "parallelism=hsdp2 model.num_distributed_optimizer_instances=4 model.micro_batch_size=1 "
        "model.global_batch_size=12",
        "model.num_distributed_optimizer_instances=4",
        world_size=6,
    ),
    Refused(
        "model.compile=true parallelism=zero2 model.overlap_param_gather=false",
        "model.compile=true model.data_parallel_sharding_strategy=optim_grads",
    ),
    Refused("parallelism=zero2 model.optim.name=sgd", "model.optim.name=sgd model.use_distributed_optimizer=true"),
    Refused("parallelism=dp model.optim.name=sgd", "model.optim.name=sgd model.use_distributed_optimizer=true"),
    Refused(f"{LEAN} model.optim.exp_avg_sq_dtype=fp8", "model.optim.exp_avg_sq_dtype=fp8 4"),
    Refused(
        "model.compile=true parallelism=fsdp model.overlap_param_gather=false",
        "model.compile=true model.data_parallel_sharding_strategy=optim_grads_params",
    ),
    Refused("model.compile=true parallelism=fsdp", "model.compile=true model.overlap_param_gather=true"),
    Refused(
        "parallelism=hsdp2 model.outer_dp_sharding_strategy=optim model.micro_batch_size=1",
        "model.outer_dp_sharding_strategy=optim",
        world_size=4,
    ),
    Refused("parallelism=fsdp model.outer_dp_sharding_strategy=optim", "model.outer_dp_sharding_strategy=optim"),
    Refused(
        "parallelism=tp2 model.use_distributed_optimizer=true model.overlap_grad_reduce=true model.micro_batch_size=1 "
        "model.data_parallel_sharding_strategy=optim_grads_params model.num_distributed_optimizer_instances=4",
        "model.num_distributed_optimizer_instances=4",
        world_size=4,
    ),
    Refused("parallelism=hsdp2", "model.num_distributed_optimizer_instances=2", world_size=1),
    Refused(
        "model.num_distributed_optimizer_instances=2",
        "model.num_distributed_optimizer_instances=2 model.data_parallel_sharding_strategy",
        world_size=4,
    ),
    Refused(
        "parallelism=fsdp model.cuda_graph_impl=local model.hidden_dropout=0",
        "model.cuda_graph_impl=local model.overlap_grad_reduce=true",
        legal="parallelism=fsdp",
    ),
    Refused("parallelism=fsdp model.optim.name=sgd", "model.optim.name=sgd model.use_distributed_optimizer=true"),
    Refused(
        f"{LEAN} model.optim.exp_avg_sq_dtype=bf16 model.optim.betas=[0.9,0.999]",
        "model.optim.exp_avg_sq_dtype=bf16 model.optim.betas 0.999 0.001 2^-8 0.99609375",
    ),
    Refused(
        f"{LEAN} model.optim.exp_avg_dtype=fp8 model.optim.betas=[0.95,0.95]",
        "model.optim.exp_avg_dtype=fp8 model.optim.betas 0.95 0.05 2^-4 0.9375",
    ),
    Refused(
        f"{SMALL} fp8=blockwise model.fp8_params=true", f"{SMALL} model.fp8_params=true model.fp8_recipe=blockwise"
    ),
    Refused(
        f"{SMALL} parallelism=pp2 model.share_embeddings_and_output_weights=true model.optim.main_params_dtype=fp16",
        f"model.optim.main_params_dtype=fp16 model.share_embeddings_and_output_weights=true {PP2}",
    ),
    Refused(SMALL),
    Refused(f"{LEAN} model.optim.ema_decay=0.99", f"{SMALL} model.optim.ema_decay=0.99"),
    Refused("model.optim.ema_decay=1", "model.optim.ema_decay=1"),
    Refused("model.optim.ema_decay=0", "model.optim.ema_decay=0"),
    Refused(f"{LEAN} model.optim.name=sgd", f"{SMALL} model.optim.name=sgd"),
    Refused(f"{LEAN} trainer.precision=fp32", f"{SMALL} trainer.precision=fp32"),
    Refused(f"{FULL} model.activations_checkpoint_num_layers=1", f"{FULL} model.activations_checkpoint_method"),
    Refused(
        f"{FULL} model.activations_checkpoint_method=block",
        "model.activations_checkpoint_num_layers=null activations_checkpoint_granularity=full",
    ),
    Refused(
        f"{FULL} model.activations_checkpoint_method=uniform model.activations_checkpoint_num_layers=3 {PP2}",
        "model.activations_checkpoint_num_layers=3 activations_checkpoint_granularity=full",
    ),
    Refused(
        "model.activation=gelu model.bias_activation_fusion=true",
        "model.bias_activation_fusion=true model.activation=gelu",
    ),
    Refused("model.bias_activation_fusion=true model.activation=squared_relu"),
    Refused(
        "checkpoint.keep_best=true checkpoint.save_interval=250",
        "checkpoint.keep_best=true checkpoint.keep_last=null",
        legal="checkpoint.keep_best=true checkpoint.save_interval=250 checkpoint.keep_last=1",
    ),
    Refused(
        "checkpoint.keep_best=true checkpoint.keep_last=1 checkpoint.save_interval=250 trainer.limit_val_batches=0 "
        "trainer.val_check_interval=null",
        "checkpoint.keep_best=true trainer.val_check_interval=null",
        legal="checkpoint.keep_best=true checkpoint.save_interval=250 checkpoint.keep_last=1",
    ),
    Refused(
        "checkpoint.keep_best=true checkpoint.keep_last=1 checkpoint.save_interval=70",
        "checkpoint.keep_best=true checkpoint.save_interval=70 trainer.val_check_interval=250",
    ),
    Refused("model.z_loss_coeff=0.0001 model.cross_entropy_loss_fusion=false"),
    Refused("model.z_loss_coeff=0.0001 model.cross_entropy_fusion_impl=native"),
    Refused("model.qk_clip_threshold=30", legal="model.qk_clip_threshold=30 model.qk_clip=true"),
    Refused("model.qk_clip=true model.qk_layernorm=true"),
    *(
        Refused(f"{asked} {other}")
        for asked in ("model.qk_clip=true", "model.log_max_attention_logit=true")
        for other in (
            "model.compile=true",
            "model.cuda_graph_impl=local",
            "model.context_parallel_size=2",
            "model.data.inter_document_masking=true",
        )
    ),
    *(
        Refused(f"model.value_embedding_freq=2 {other}")
        for other in (
            "model.pipeline_model_parallel_size=2",
            "model.compile=true",
            "model.cuda_graph_impl=local",
            "model.context_parallel_size=2",
        )
    ),
    Refused(f"{MUP} model.value_embedding_freq=2", "model.value_embedding_freq=2 model.use_mup=true"),
    Refused("model.value_embedding_mult=2.0", legal="model.value_embedding_mult=2.0 model.value_embedding_freq=2"),
    Refused("model.use_flash_attention=true model.qk_clip=true"),
    Refused("model.use_flash_attention=true model.log_max_attention_logit=true"),
    Refused(
        "model.activation=gelu_tanh model.bias_activation_fusion=true",
        "model.bias_activation_fusion=true model.bias=true model.activation=gelu_tanh",
    ),
    Refused(
        "model.position_embedding_type=learned_absolute model.apply_rope_fusion=true",
        "model.apply_rope_fusion=true model.position_embedding_type=learned_absolute",
    ),
    Refused(
        f"model.optim.lr=1e-5 {MIN_LR}",
        "model.optim.sched.min_lr=3e-05 model.optim.lr=1e-05",
        legal=f"model.optim.lr=3e-5 {MIN_LR}",
    ),
    Refused("model.optim.sched.init_lr=1 model.optim.lr=0.5", legal="model.optim.sched.init_lr=0.5 model.optim.lr=0.5"),
    Refused("model.optim.betas=[0.9,1]", "model.optim.betas=[0.9, 1.0]"),
    Refused("model.optim.betas=[0.9]"),
    Refused(f"{LEAN} optimizer=muon", f"{SMALL} model.optim.name=muon"),
    Refused(
        "model.optim.decoupled_lr=1e-5 model.optim.sched.init_lr=1e-4",
        "model.optim.sched.init_lr=0.0001 model.optim.decoupled_lr=1e-05",
    ),
    Refused("model.use_mup=true", "model.use_mup=true model.mup_base_hidden_size"),
    *(
        Refused(f"model.mup_{setting}", f"model.mup_{setting} model.use_mup=false")
        for setting in ("base_hidden_size=64", "embedding_mult=2", "output_mult=0.5", "base_head_dim=16")
    ),
    Refused("model.mup_attn_scale_power=0.5", "model.mup_attn_scale_power=0.5 model.use_mup=false"),
    Refused(f"{MUP} model.num_moe_experts=4", "model.use_mup=true model.num_moe_experts=4"),
    Refused(f"{MUP} model.optim.name=sgd", "model.use_mup=true model.optim.name=sgd"),
    Refused(f"{MUP} optimizer=muon", "model.use_mup=true model.optim.muon_scale_mode=spectral"),
    Refused(f"{MUP} model.mup_output_mult=1", "model.mup_output_mult=1.0 model.mup_base_hidden_size=64"),
    Refused(
        f"{MUP} model.optim.lr=2e-3 model.optim.sched.init_lr=1.5e-3",
        "model.optim.sched.init_lr=0.0015 model.optim.lr=0.002 model.hidden_size=128 model.mup_base_hidden_size=64",
    ),
    *(Refused(f"{RAMP}={ramp} {BATCH8}", f"{RAMP}={ramp}") for ramp in ("[2,2]", "[0,2,96]", "[2,0,96]", "[2,2,0]")),
    *(
        Refused(f"{RAMP}=[{start},2,96] {BATCH8}", f"{RAMP}=[{start},2,96] model.global_batch_size=8")
        for start in (8, 9)
    ),
    Refused(
        f"{RAMP}=[2,4,96] {BATCH8}",
        f"{RAMP}=[2,4,96] model.global_batch_size=8 6 increment=4 3",
        legal=f"{RAMP}=[2,3,96] {BATCH8}",
    ),
    Refused(
        f"{RAMP}=[1,1,96] model.micro_batch_size=1 model.global_batch_size=2000",
        f"{RAMP}=[1,1,96] 1,999 1,000",
        legal=f"{RAMP}=[100,100,96] model.micro_batch_size=1 model.global_batch_size=2000",
    ),
    Refused(
        f"{RAMP}=[2,1,96] model.micro_batch_size=2 model.global_batch_size=8",
        f"{RAMP}=[2,1,96] 3 model.micro_batch_size=2",
        legal=f"{RAMP}=[2,2,96] model.micro_batch_size=2 model.global_batch_size=8",
    ),
    Refused(
        f"{RAMP}=[2,2,96] {BATCH8}",
        f"{RAMP}=[2,2,96] 2 model.micro_batch_size=1 4",
        legal=f"{RAMP}=[4,4,96] {BATCH8}",
        world_size=4,
    ),
    Refused(
        f"{PP2} {VP2} {RAMP}=[1,1,96] {BATCH8}",
        f"{RAMP}=[1,1,96] 1 {PP2}",
        legal=f"{PP2} {VP2} {RAMP}=[2,2,96] {BATCH8}",
    ),
    Refused(f"{RAMP}=[2,2,96] {STEPS}='0:2 1K:8' {BATCH8}", f"{RAMP}=[2,2,96] {STEPS}='0:2 1K:8'"),
    *(
        Refused(f"{STEPS}='{text}' {BATCH8}", f"{STEPS} {told}", legal=f"{STEPS}='0:2 1K:8' {BATCH8}")
        for text, told in {
            "0:2 1K-8": "1K-8",
            "0:2 1K:many": "1K:many",
            "0:2.5 1K:8": "0:2.5 whole",
            "0:2 0.1:4 1K:8": "0.1:4 whole",
            "0:2 1e300:8": "1e300:8",
            "1K:8": "tokens 0:8",
            "0:0 1K:8": "0",
            "0:2 2K:4 1K:8": "768 1,792 2,047",
            "0:2 300:4 500:8": "256 511",
            "0:4 1K:2 2K:8": "4 2",
            "0:2 1K:4": "4 model.global_batch_size=8",
        }.items()
    ),
    Refused("trainer.max_tokens=1000000", "trainer.max_tokens=1000000 trainer.max_steps=500"),
    Refused("trainer.max_steps=null", "trainer.max_steps=null trainer.max_tokens=null"),
    Refused(f"{WARMUP} model.optim.sched.warmup_tokens=5000", f"model.optim.sched.warmup_tokens=5000 {WARMUP}"),
    Refused(
        f"{TOKENS} model.optim.sched.warmup_tokens=100000",
        "model.optim.sched.warmup_tokens=100000 trainer.max_tokens=100000",
    ),
    Refused(
        f"{TOKENS} model.optim.sched.warmup_steps=50",
        "model.optim.sched.warmup_steps=50 102400 trainer.max_tokens=100000",
        legal=f"{TOKENS} model.optim.sched.warmup_steps=5 model.micro_batch_size=1 model.global_batch_size=8",
    ),
    Refused(
        f"{TOKENS} model.optim.sched.name=wsd", "model.optim.sched.name=wsd model.optim.sched.wsd_decay_tokens 90000"
    ),
    Refused(
        f"{TOKENS} model.optim.sched.name=wsd model.optim.sched.wsd_decay_tokens=90001",
        "model.optim.sched.wsd_decay_tokens=90001 trainer.max_tokens=100000 90000",
    ),
    Refused(
        "model.optim.sched.wsd_decay_tokens=5", "model.optim.sched.wsd_decay_tokens=5 model.optim.sched.name=cosine"
    ),
    Refused(f"trainer.max_steps=20 {WARMUP}", f"{WARMUP} trainer.max_steps=20"),
    Refused(f"model.optim.sched.decay_steps=10 {WARMUP}", f"{WARMUP} model.optim.sched.decay_steps=10"),
    Refused(WSD, "model.optim.sched.name=wsd model.optim.sched.wsd_decay_steps"),
    Refused(
        f"{WSD} model.optim.sched.wsd_decay_steps=281", "model.optim.sched.wsd_decay_steps=281 trainer.max_steps=300"
    ),
    Refused(
        "data=mmap", "model.data.data_impl=mmap model.data.data_prefix", legal="data=mmap model.data.data_prefix=[web]"
    ),
    Refused(
        "data=text", "model.data.data_impl=text model.data.text_files", legal="data=text model.data.text_files=[a.txt]"
    ),
    Refused(
        "data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[valid] trainer.limit_val_batches=0",
        "model.data.validation_prefix=[valid] trainer.limit_val_batches=0",
    ),
    Refused(
        "data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[web,0.7,code,0.3]",
        "model.data.validation_prefix=[web,0.7,code,0.3]",
        legal="data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[0.7,web,0.3,code]",
    ),
    Refused(
        "data=mmap model.data.data_prefix=[web,0.7,code,0.3]",
        "model.data.data_prefix=[web,0.7,code,0.3]",
        legal="data=mmap model.data.data_prefix=[0.7,web,0.3,code]",
    ),
    Refused(
        "data=mmap model.data.data_prefix=[0.7,web,0.3]",
        "model.data.data_prefix=[0.7,web,0.3]",
        legal="data=mmap model.data.data_prefix=[a,b,c]",
    ),
    Refused(
        "data=mmap model.data.data_prefix=[0,web,1,code]",
        "model.data.data_prefix=[0,web,1,code]",
        legal="data=mmap model.data.data_prefix=[30,web,70,code]",
    ),
    Refused("model.data.splits_string='90,-5,5'", legal="model.data.splits_string='90.5, 9.5'"),
    Refused("model.data.splits_string='0,1,1'", legal="model.data.splits_string='1,1,0'"),
    Refused("model.data.splits_string='1,0,0'"),
    Refused("model.tokenizer.library=none"),
    Refused(
        "data=mock model.tokenizer.library=bpe",
        "model.tokenizer.library=bpe model.data.data_impl=mock file model.tokenizer.model",
    ),
    Refused("model.tokenizer.library=file", legal="model.tokenizer.library=file model.tokenizer.model=tokenizer.json"),
    Refused("model.tokenizer.vocab_size=2049"),
    Refused("trainer.max_time='10:00:00'"),
    Refused(
        "trainer.max_spike_rewinds=3 checkpoint.save_interval=100 trainer.spike_threshold=null",
        "trainer.max_spike_rewinds=3 trainer.spike_threshold=null",
    ),
    Refused("trainer.max_spike_rewinds=3"),
    Refused(
        "trainer.max_spike_rewinds=3 trainer.spike_margin=101 checkpoint.save_interval=50 checkpoint.keep_last=3",
        "trainer.max_spike_rewinds=3 trainer.spike_margin=101 checkpoint.keep_last=3 3",
    ),
    Refused(
        "fp8=delayed model.fp8_emulate=true trainer.max_spike_rewinds=3 checkpoint.save_interval=100 "
        "checkpoint.reset_fp8_state=true",
        "trainer.max_spike_rewinds=3 checkpoint.reset_fp8_state=true",
    ),
    Refused("trainer.max_time='00:00:00:00'"),
    Refused("trainer.deterministic=true model.cross_entropy_fusion_impl=native"),
    Refused(
        "checkpoint.save_interval_minutes=null checkpoint.save_at_end=false checkpoint.keep_last=2",
        "checkpoint.keep_last=2",
    ),
    Refused("checkpoint.resume=nowhere", legal="checkpoint.resume=auto"),
    Refused("checkpoint.init_from=nowhere"),
    Refused("checkpoint.init_from=tests checkpoint.resume=docs"),
    Refused("name=a/b", legal="name=a_b"),
    Refused("run_dir=pyproject.toml", legal="run_dir=new"),
    Refused("sample.prompt=''", "sample.prompt sample.max_new_tokens=160"),
]


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)


@pytest.mark.parametrize("row", RULES, ids=str)
def test_a_broken_rule_is_told_and_what_it_offers_is_legal(row):
    check_refused(row)


RANGES = [
    (path, value)
    for path, key in schema_keys().items()
    for bound, step in ((key.facts.minimum, -1), (key.facts.above, 0), (key.facts.below, 0), (key.facts.maximum, 1))
    if bound is not None
    for value in [bound + step]
]


@pytest.mark.parametrize(("path", "value"), RANGES)
def test_a_value_out_of_its_range_is_told_and_what_is_offered_is_inside(path, value):
    (problem,) = [told for told in ranges(compose_quickly([f"{path}={value}"])) if told.startswith(f"{path}=")]
    assert problem.startswith(f"{path}={value}")
    assert "; use " in problem
    for way in offered(problem):
        assert [*ranges(compose_quickly(way))] == [], way


@pytest.mark.parametrize(
    "model", ["tiny", "gpt2_124m", "gpt2_1_5b", "gpt3_6_7b", "gpt3_175b", "llama3_8b", "llama3_70b", "qwen2_5_7b"]
)
def test_presets_break_no_rule(model, broken_rules):
    assert broken_rules(f"model={model}") == []


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("dp", 4),
        ("tp2", 2),
        ("tp2_sp", 4),
        ("pp2", 2),
        ("pp2_vp2", 2),
        ("tp2_pp2", 4),
        ("tp2_sp_pp2", 8),
        ("tp4_sp", 4),
    ],
)
def test_layouts_break_no_rule(layout, world_size, broken_rules):
    assert broken_rules("model=llama3_8b", f"parallelism={layout}", world_size=world_size) == []


def test_all_broken_rules_are_told_together(broken_rules):
    problems = broken_rules("model.num_query_groups=3", "model.fp8_margin=1", "trainer.max_steps=0", "sample.prompt=''")
    assert len(problems) == 4


@pytest.mark.parametrize("layout", ["single", "tp2", "tp4_sp"])
def test_what_is_offered_instead_of_heads_and_groups_is_legal(layout):
    base = load_config([f"parallelism={layout}"]).model
    draw = random.Random(layout)
    offers = set()
    for _ in range(300):
        model = replace(
            base,
            hidden_size=draw.choice([96, 100, 128, 192, 256]),
            num_attention_heads=draw.choice([1, 2, 3, 4, 6, 8, 12]),
            num_query_groups=draw.choice([None, 1, 2, 3, 4, 8]),
            kv_channels=draw.choice([None, None, 32]),
            ffn_hidden_size=384,
        )
        problems = list(division_problems(model))
        if len(problems) == 1:
            for way in offered(problems[0]):
                change = {
                    key.removeprefix("model."): yaml.safe_load(value)
                    for key, _, value in (each.partition("=") for each in way)
                }
                assert list(division_problems(replace(model, **change))) == [], (problems, way)
                offers |= change.keys()
    assert {"hidden_size", "num_query_groups"} <= offers


def test_wandb_is_refused_where_only_a_folder_has_its_name(broken_rules, tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    (problem,) = broken_rules("logging=wandb")
    assert problem.endswith(f"{how_to_install('wandb')}, or use logging.wandb=false")


def test_muon_is_refused_where_its_package_is_missing(broken_rules, monkeypatch):
    assert broken_rules("optimizer=muon") == []
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    (problem,) = broken_rules("optimizer=muon")
    assert problem.endswith(f"{how_to_install('muon')}, or use optimizer=adam")


@pytest.mark.parametrize("extra", ["te", "flash", "torchao", "muon", "wandb", "mlflow"])
def test_an_extra_is_installed_as_the_manual_says(extra, pytestconfig):
    command = re.search(r"python -m pip .*", how_to_install(extra))[0]
    assert command.endswith(f"-e '.[{extra}]'")
    assert command in (pytestconfig.rootpath / "docs" / "install.md").read_text()


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:00:05", 5), ("00:02:30:00", 9000), ("1:00:00:01", 86401), ("400:23:59:59", 34646399)]
)
def test_max_time_counts_days_hours_minutes_seconds(text, seconds):
    assert max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer) == seconds


@pytest.mark.parametrize("text", ["5", "00:24:00:00", "00:00:60:00", "-1:00:00:00", "1d", "", f"{'9' * 400}:00:00:00"])
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer)
