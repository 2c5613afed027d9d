"""Cross-field rules: each row breaks one; what its message offers and the row's neighbour obey it."""

import random
import re
import sys
from dataclasses import replace

import pytest

from gpt_pretrain.config.derived import max_time_s
from gpt_pretrain.config.errors import ConfigError, how_to_install
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.shapes import division_problems
from tests.refusals import Refused, check_refused

LEAN = "model.optim.use_precision_aware_optimizer=true model.use_distributed_optimizer=true"
SMALL = "model.optim.use_precision_aware_optimizer=true"
FULL = "model.activations_checkpoint_granularity=full"
WSD = "model.optim.sched.name=wsd model.optim.sched.warmup_steps=20 trainer.max_steps=300"
TP2 = "model.tensor_model_parallel_size=2"
PP2 = "model.pipeline_model_parallel_size=2"
VP2 = "model.virtual_pipeline_model_parallel_size=2"
WARMUP = "model.optim.sched.warmup_steps=20"
MIN_LR = "model.optim.sched.min_lr=3e-5"

RULES = {
    "time to hang": Refused(
        "trainer.hang_timeout=0.5", offers="trainer.hang_timeout=1", legal="trainer.hang_timeout=null"
    ),
    "positive size": Refused("model.num_layers=0", offers="model.num_layers=1"),
    "heads over width": Refused(
        "model.hidden_size=130",
        told="model.hidden_size=130 model.num_attention_heads=4 model.kv_channels",
        offers="model.hidden_size=128,136",
    ),
    "heads over groups": Refused(
        "model.num_query_groups=3",
        told="model.num_attention_heads=4 model.num_query_groups=3",
        offers="model.num_query_groups=1,2,4",
    ),
    "groups over heads": Refused(
        "model.num_query_groups=8",
        told="model.num_attention_heads=4 model.num_query_groups=8",
        offers="model.num_query_groups=1,2,4 | model.num_attention_heads=8",
    ),
    "heads over groups over TP": Refused(
        "model.num_query_groups=3 parallelism=tp2_sp",
        told="model.num_attention_heads=4 model.num_query_groups=3",
        offers="model.num_query_groups=2,4",
    ),
    "heads over TP": Refused(
        "model.num_attention_heads=12 model.num_query_groups=12 model.hidden_size=192 parallelism=tp8_sp",
        told="model.num_attention_heads=12 model.tensor_model_parallel_size=8",
        offers="model.num_attention_heads=8,16 model.num_query_groups=8 | model.tensor_model_parallel_size=2,4",
    ),
    "groups over TP": Refused(
        "model.tensor_model_parallel_size=4",
        told="model.num_query_groups=2 model.tensor_model_parallel_size=4",
        offers="model.num_query_groups=4 | model.tensor_model_parallel_size=1,2",
    ),
    "one group over TP and SP": Refused(
        "model.num_query_groups=1 parallelism=tp2_sp",
        told=f"model.num_query_groups=1 {TP2}",
        offers="model.num_query_groups=2,4 | model.tensor_model_parallel_size=1 model.sequence_parallel=false",
    ),
    "odd rotated channels": Refused("model.kv_channels=33", offers="model.kv_channels=32,34"),
    "a width of odd heads": Refused(
        "model.hidden_size=100",
        told="model.hidden_size=100 model.num_attention_heads 25 model.kv_channels",
        offers="model.hidden_size=96,104",
    ),
    "an odd share of a head": Refused(
        "model.rotary_percentage=0.1",
        told="model.hidden_size=128 model.num_attention_heads model.rotary_percentage=0.1 32 3 "
        "rotary_percentage model.kv_channels",
        legal="model.rotary_percentage=0.5",
    ),
    "a share of a head without a pair at any width": Refused(
        "model.kv_channels=64 model.rotary_percentage=0.0001",
        told="model.kv_channels=64 model.rotary_percentage=0.0001 0 rotary_percentage",
        legal="model.kv_channels=64 model.rotary_percentage=0.5",
    ),
    "rotary percentage": Refused(
        "model.rotary_percentage=1.5", offers="model.rotary_percentage=1", legal="model.rotary_percentage=0.5"
    ),
    "hidden over TP": Refused(
        f"model.hidden_size=129 model.kv_channels=32 {TP2}",
        told=f"model.hidden_size=129 {TP2}",
        offers="model.hidden_size=128,130",
    ),
    "hidden, of which ffn is a multiple, over TP": Refused(
        "model.hidden_size=129 model.kv_channels=32 model.ffn_hidden_size=null model.tensor_model_parallel_size=8 "
        "model.num_attention_heads=8 model.num_query_groups=8",
        told="model.hidden_size=129 model.tensor_model_parallel_size=8",
        offers="model.hidden_size=128,136",
    ),
    "ffn over TP": Refused(f"model.ffn_hidden_size=383 {TP2}", offers="model.ffn_hidden_size=382,384"),
    "vocabulary over TP": Refused(
        f"model.vocab_size=2049 model.make_vocab_size_divisible_by=1 {TP2}",
        told=f"model.vocab_size=2049 {TP2}",
        offers="model.make_vocab_size_divisible_by=2",
    ),
    "layers over PP": Refused(
        f"model.num_layers=5 {PP2}", offers="model.num_layers=4,6 | model.pipeline_model_parallel_size=1,5"
    ),
    "layers over PP and VP": Refused(
        f"model.num_layers=6 {PP2} {VP2}", told=f"model.num_layers=6 {PP2} {VP2} 1 2 3 6", offers="model.num_layers=4,8"
    ),
    "VP without PP": Refused(
        VP2,
        told=f"{VP2} model.pipeline_model_parallel_size",
        offers="model.virtual_pipeline_model_parallel_size=null",
        legal=f"{VP2} {PP2}",
    ),
    "microbatches over PP when interleaved": Refused(
        f"{PP2} {VP2} model.global_batch_size=24",
        told=f"model.global_batch_size=24 {PP2} 3",
        offers="model.global_batch_size=16,32",
    ),
    "SP without TP": Refused(
        "model.sequence_parallel=true",
        told="model.sequence_parallel=true model.tensor_model_parallel_size",
        offers="model.sequence_parallel=false | parallelism=tp2_sp",
    ),
    "sequence over SP": Refused(
        "parallelism=tp2_sp model.encoder_seq_length=255",
        told=f"model.encoder_seq_length=255 {TP2} 2",
        offers="model.encoder_seq_length=254,256",
    ),
    "sequence over CP": Refused(
        "parallelism=cp2 model.encoder_seq_length=254",
        told="model.encoder_seq_length=254 model.context_parallel_size=2 4",
        offers="model.encoder_seq_length=252,256",
    ),
    "CP without TE": Refused(
        "parallelism=cp2 model.transformer_engine=false",
        told="model.context_parallel_size=2 model.transformer_engine=false",
        offers="model.context_parallel_size=1 | model.transformer_engine=null",
        legal="parallelism=cp2 model.transformer_engine=true",
    ),
    "world size": Refused(
        f"{TP2} {PP2}",
        told=f"{TP2} {PP2} model.context_parallel_size=1 4 6 --nproc-per-node",
        legal="parallelism=tp2_pp2",
        world_size=6,
    ),
    "batch over ranks": Refused(
        "model.global_batch_size=20",
        told="model.global_batch_size=20 model.micro_batch_size=8 1 8",
        offers="model.global_batch_size=16,24",
    ),
    "devices": Refused(
        "trainer.devices=2",
        told="trainer.devices=2 1 --nproc-per-node",
        offers="trainer.devices=null",
        legal="trainer.devices=1",
    ),
    "nodes": Refused(
        "trainer.num_nodes=2",
        told="trainer.num_nodes=2 1 --nnodes",
        offers="trainer.num_nodes=null",
        legal="trainer.num_nodes=1",
    ),
    "sequence over positions": Refused(
        "model.max_position_embeddings=128",
        told="model.encoder_seq_length=256 model.max_position_embeddings=128",
        offers="model.encoder_seq_length=128",
        legal="model.max_position_embeddings=512",
    ),
    "overlapped gather": Refused(
        "model.overlap_param_gather=true",
        told="model.overlap_param_gather=true model.use_distributed_optimizer=true model.overlap_grad_reduce=true",
        offers="model.overlap_param_gather=false",
        legal="parallelism=dp",
    ),
    "buckets of what is exchanged at the end": Refused(
        "model.ddp_bucket_size=1000000",
        told="model.ddp_bucket_size=1000000 model.overlap_grad_reduce=false",
        offers="model.ddp_bucket_size=null | model.overlap_grad_reduce=true",
        legal="parallelism=dp model.ddp_bucket_size=1000000",
    ),
    "empty buckets": Refused(
        "parallelism=dp model.ddp_bucket_size=0", told="model.ddp_bucket_size=0", offers="model.ddp_bucket_size=1"
    ),
    "sharded gradients of a plain optimizer": Refused(
        "parallelism=zero2 model.use_distributed_optimizer=false model.overlap_param_gather=false",
        told="model.data_parallel_sharding_strategy=optim_grads model.use_distributed_optimizer=false",
        offers="model.data_parallel_sharding_strategy=null | model.use_distributed_optimizer=true",
        legal="parallelism=zero2",
    ),
    "sharded gradients where null leaves the optimizer whole": Refused(
        "model.overlap_grad_reduce=true model.data_parallel_sharding_strategy=optim_grads",
        told="model.data_parallel_sharding_strategy=optim_grads model.use_distributed_optimizer=null",
        offers="model.data_parallel_sharding_strategy=null | model.use_distributed_optimizer=true",
    ),
    "sharded gradients reduced at the end": Refused(
        "parallelism=zero2 model.overlap_grad_reduce=false model.overlap_param_gather=false",
        told="model.data_parallel_sharding_strategy=optim_grads model.overlap_grad_reduce=false",
        offers="model.data_parallel_sharding_strategy=null | model.overlap_grad_reduce=true",
    ),
    "sharded weights of a plain optimizer": Refused(
        "parallelism=fsdp model.use_distributed_optimizer=false model.overlap_param_gather=false",
        told="model.data_parallel_sharding_strategy=optim_grads_params model.use_distributed_optimizer=false",
        offers="model.data_parallel_sharding_strategy=null | model.use_distributed_optimizer=true",
        legal="parallelism=fsdp",
    ),
    "sharded weights and gradients reduced at the end": Refused(
        "parallelism=fsdp model.overlap_grad_reduce=false model.overlap_param_gather=false",
        told="model.data_parallel_sharding_strategy=optim_grads_params model.overlap_grad_reduce=false",
        offers="model.data_parallel_sharding_strategy=null | model.overlap_grad_reduce=true",
    ),
    "groups of ranks that share nothing": Refused(
        "parallelism=dp model.num_distributed_optimizer_instances=2",
        told="model.num_distributed_optimizer_instances=2 model.data_parallel_sharding_strategy",
        offers="model.num_distributed_optimizer_instances=1",
        world_size=4,
    ),
    "groups of ranks of different sizes": Refused(
        "parallelism=hsdp2 model.num_distributed_optimizer_instances=4 model.micro_batch_size=1 "
        "model.global_batch_size=12",
        told="model.num_distributed_optimizer_instances=4",
        offers="model.num_distributed_optimizer_instances=1,2,3,6",
        world_size=6,
    ),
    "no group of ranks": Refused(
        "parallelism=fsdp model.num_distributed_optimizer_instances=0",
        told="model.num_distributed_optimizer_instances=0",
        offers="model.num_distributed_optimizer_instances=1",
    ),
    "compiled layers with sharded gradients": Refused(
        "model.compile=true parallelism=zero2 model.overlap_param_gather=false",
        told="model.compile=true model.data_parallel_sharding_strategy=optim_grads",
        offers="model.compile=false | model.data_parallel_sharding_strategy=null",
    ),
    "compiled layers with sharded weights": Refused(
        "model.compile=true parallelism=fsdp model.overlap_param_gather=false",
        told="model.compile=true model.data_parallel_sharding_strategy=optim_grads_params",
        offers="model.compile=false | model.data_parallel_sharding_strategy=null",
    ),
    "compiled layers that wait for sharded weights": Refused(
        "model.compile=true parallelism=fsdp",
        told="model.compile=true model.overlap_param_gather=true",
        offers="model.compile=false",
    ),
    "optimizer states shared out among groups": Refused(
        "parallelism=hsdp2 model.outer_dp_sharding_strategy=optim model.micro_batch_size=1",
        told="model.outer_dp_sharding_strategy=optim",
        offers="model.outer_dp_sharding_strategy=no_shard",
        world_size=4,
    ),
    "optimizer states shared out among groups that there are none of": Refused(
        "parallelism=fsdp model.outer_dp_sharding_strategy=optim",
        told="model.outer_dp_sharding_strategy=optim",
        offers="model.outer_dp_sharding_strategy=no_shard",
        legal="parallelism=fsdp model.outer_dp_sharding_strategy=no_shard",
    ),
    "groups of what tensor parallelism leaves": Refused(
        "parallelism=tp2 model.use_distributed_optimizer=true model.overlap_grad_reduce=true model.micro_batch_size=1 "
        "model.data_parallel_sharding_strategy=optim_grads_params model.num_distributed_optimizer_instances=4",
        told="model.num_distributed_optimizer_instances=4",
        offers="model.num_distributed_optimizer_instances=1,2",
        world_size=4,
    ),
    "more groups than ranks": Refused(
        "parallelism=hsdp2",
        told="model.num_distributed_optimizer_instances=2",
        offers="model.num_distributed_optimizer_instances=1",
        world_size=1,
    ),
    "groups of a plain data-parallel run": Refused(
        "model.num_distributed_optimizer_instances=2",
        told="model.num_distributed_optimizer_instances=2 model.data_parallel_sharding_strategy",
        offers="model.num_distributed_optimizer_instances=1",
        world_size=4,
    ),
    "CUDA graphs of sharded weights": Refused(
        "parallelism=fsdp model.cuda_graph_impl=local model.hidden_dropout=0",
        told="model.cuda_graph_impl=local model.overlap_grad_reduce=true",
        offers="model.cuda_graph_impl=none",
        legal="parallelism=fsdp",
    ),
    "sharded weights of SGD": Refused(
        "parallelism=fsdp model.optim.name=sgd",
        told="model.optim.name=sgd model.use_distributed_optimizer=true",
        offers="model.optim.name=adam | model.use_distributed_optimizer=false model.overlap_param_gather=false "
        "model.data_parallel_sharding_strategy=null",
    ),
    "sharded gradients of SGD": Refused(
        "parallelism=zero2 model.optim.name=sgd",
        told="model.optim.name=sgd model.use_distributed_optimizer=true",
        offers="model.optim.name=adam | model.use_distributed_optimizer=false model.overlap_param_gather=false "
        "model.data_parallel_sharding_strategy=null",
    ),
    "distributed SGD": Refused(
        "parallelism=dp model.optim.name=sgd",
        told="model.optim.name=sgd model.use_distributed_optimizer=true",
        offers="model.optim.name=adam | model.use_distributed_optimizer=false model.overlap_param_gather=false",
        legal="parallelism=single model.optim.name=sgd",
    ),
    "types of states without their optimizer": Refused(
        "model.optim.exp_avg_sq_dtype=fp16",
        told="model.optim.exp_avg_sq_dtype=fp16 model.optim.use_precision_aware_optimizer=false",
        offers=f"model.optim.exp_avg_sq_dtype=fp32 | {LEAN}",
    ),
    "small masters without their optimizer": Refused(
        "model.optim.main_params_dtype=fp16",
        told="model.optim.main_params_dtype=fp16 model.optim.use_precision_aware_optimizer=false",
        offers=f"model.optim.main_params_dtype=fp32 | {LEAN}",
    ),
    "second moments in FP8": Refused(
        f"{LEAN} model.optim.exp_avg_sq_dtype=fp8",
        told="model.optim.exp_avg_sq_dtype=fp8 4",
        offers="model.optim.exp_avg_sq_dtype=fp16,bf16,fp32",
    ),
    "second moments that never fall": Refused(
        f"{LEAN} model.optim.exp_avg_sq_dtype=bf16 model.optim.betas=[0.9,0.999]",
        told="model.optim.exp_avg_sq_dtype=bf16 model.optim.betas 0.999 0.001 2^-8 0.99609375",
        offers="model.optim.exp_avg_sq_dtype=fp16,fp32",
    ),
    "first moments that never fall": Refused(
        f"{LEAN} model.optim.exp_avg_dtype=fp8 model.optim.betas=[0.95,0.95]",
        told="model.optim.exp_avg_dtype=fp8 model.optim.betas 0.95 0.05 2^-4 0.9375",
        offers="model.optim.exp_avg_dtype=bf16,fp16,fp32",
        legal=f"{LEAN} model.optim.exp_avg_dtype=fp8 model.optim.betas=[0.9375,0.95]",
    ),
    "small states of weights in blocks": Refused(
        f"{SMALL} fp8=blockwise model.fp8_params=true",
        told=f"{SMALL} model.fp8_params=true model.fp8_recipe=blockwise",
        offers="fp8=delayed,tensorwise | model.optim.use_precision_aware_optimizer=false",
    ),
    "small states of copies on two stages": Refused(
        f"{SMALL} parallelism=pp2 model.share_embeddings_and_output_weights=true model.optim.main_params_dtype=fp16",
        told=f"model.optim.main_params_dtype=fp16 model.share_embeddings_and_output_weights=true {PP2}",
        offers="model.optim.main_params_dtype=fp32 | model.pipeline_model_parallel_size=1",
        legal=f"{SMALL} parallelism=pp2 model.share_embeddings_and_output_weights=true model.optim.exp_avg_dtype=bf16",
    ),
    "small states that are not distributed": Refused(
        SMALL,
        told=f"{SMALL} model.use_distributed_optimizer=null",
        offers="model.use_distributed_optimizer=true | model.optim.use_precision_aware_optimizer=false",
        legal=f"{SMALL} fp8=delayed model.fp8_params=true",
    ),
    "small states of SGD": Refused(
        f"{LEAN} model.optim.name=sgd", told=f"{SMALL} model.optim.name=sgd", offers="model.optim.name=adam"
    ),
    "small states without masters": Refused(
        f"{LEAN} trainer.precision=fp32",
        told=f"{SMALL} trainer.precision=fp32",
        offers="trainer.precision=bf16 | model.optim.use_precision_aware_optimizer=false",
    ),
    "full recomputation without method": Refused(
        f"{FULL} model.activations_checkpoint_num_layers=1",
        told=f"{FULL} model.activations_checkpoint_method",
        offers="model.activations_checkpoint_method=uniform,block",
    ),
    "full recomputation without layers": Refused(
        f"{FULL} model.activations_checkpoint_method=block",
        told="model.activations_checkpoint_num_layers=null activations_checkpoint_granularity=full",
        offers="model.activations_checkpoint_num_layers=1,4",
    ),
    "recomputation of more layers than a stage has": Refused(
        f"{FULL} model.activations_checkpoint_method=uniform model.activations_checkpoint_num_layers=3 {PP2}",
        told="model.activations_checkpoint_num_layers=3 activations_checkpoint_granularity=full",
        offers="model.activations_checkpoint_num_layers=1,2",
    ),
    "method without full recomputation": Refused(
        "model.activations_checkpoint_granularity=selective model.activations_checkpoint_method=block",
        told="model.activations_checkpoint_method=block model.activations_checkpoint_granularity=selective",
        offers="model.activations_checkpoint_method=null",
        legal="model.activations_checkpoint_granularity=selective",
    ),
    "fusion of another activation": Refused(
        "model.activation=gelu model.bias_activation_fusion=true",
        told="model.bias_activation_fusion=true model.activation=gelu",
        offers="model.activation=gelu_tanh model.bias=true | model.bias_activation_fusion=null",
    ),
    "fusion without bias": Refused(
        "model.activation=gelu_tanh model.bias_activation_fusion=true",
        told="model.bias_activation_fusion=true model.bias=true model.activation=gelu_tanh",
        offers="model.bias=true | model.bias_activation_fusion=null",
    ),
    "rope fusion without rope": Refused(
        "model.position_embedding_type=learned_absolute model.apply_rope_fusion=true",
        told="model.apply_rope_fusion=true model.position_embedding_type=learned_absolute",
        offers="model.position_embedding_type=rope | model.apply_rope_fusion=null",
        legal="model.position_embedding_type=learned_absolute model.apply_rope_fusion=false",
    ),
    "dropout": Refused(
        "model.hidden_dropout=1",
        told="model.hidden_dropout=1.0",
        offers="model.hidden_dropout=0",
        legal="model.hidden_dropout=0.9",
    ),
    "epsilon": Refused(
        "model.layernorm_epsilon=0", told="model.layernorm_epsilon=0.0", offers="model.layernorm_epsilon=1e-5"
    ),
    "seed": Refused("model.seed=-1", offers="model.seed=0"),
    "learning rate": Refused(
        "model.optim.lr=0 model.optim.sched.min_lr=0",
        told="model.optim.lr=0.0",
        offers="model.optim.lr=3e-4",
        legal="model.optim.lr=1 model.optim.sched.min_lr=0",
    ),
    "min_lr above lr": Refused(
        f"model.optim.lr=1e-5 {MIN_LR}",
        told="model.optim.sched.min_lr=3e-05 model.optim.lr=1e-05",
        legal=f"model.optim.lr=3e-5 {MIN_LR}",
    ),
    "min_lr without decay": Refused(
        f"model.optim.sched.name=constant {MIN_LR}",
        told="model.optim.sched.min_lr=3e-05 model.optim.sched.name=constant",
        offers="model.optim.sched.min_lr=null | model.optim.sched.name=cosine,linear",
    ),
    "init_lr above lr": Refused(
        "model.optim.sched.init_lr=1 model.optim.lr=0.5",
        told="model.optim.sched.init_lr=1.0 model.optim.lr=0.5",
        legal="model.optim.sched.init_lr=0.5 model.optim.lr=0.5",
    ),
    "betas": Refused(
        "model.optim.betas=[0.9,1]",
        told="model.optim.betas=[0.9, 1.0]",
        offers="model.optim.betas=[0.9,0.95]",
        legal="model.optim.betas=[0,0.999]",
    ),
    "one beta": Refused("model.optim.betas=[0.9]", offers="model.optim.betas=[0.9,0.95]"),
    "eps": Refused(
        "model.optim.eps=0", told="model.optim.eps=0.0", offers="model.optim.eps=1e-8", legal="model.optim.eps=1e-15"
    ),
    "momentum": Refused(
        "model.optim.name=sgd parallelism=single model.optim.momentum=1",
        told="model.optim.momentum=1.0",
        offers="model.optim.momentum=0.9",
    ),
    "Muon's momentum": Refused(
        "optimizer=muon model.optim.muon_momentum=1",
        told="model.optim.muon_momentum=1.0",
        offers="model.optim.muon_momentum=0.95",
    ),
    "Muon without iterations": Refused(
        "optimizer=muon model.optim.muon_num_ns_steps=0",
        told="model.optim.muon_num_ns_steps=0",
        legal="optimizer=muon model.optim.muon_num_ns_steps=1",
    ),
    "Muon's factor": Refused(
        "optimizer=muon model.optim.muon_extra_scale_factor=0",
        told="model.optim.muon_extra_scale_factor=0.0",
        offers="model.optim.muon_extra_scale_factor=0.2",
    ),
    "small states with Muon": Refused(
        f"{LEAN} optimizer=muon",
        told=f"{SMALL} model.optim.name=muon",
        offers="model.optim.name=adam",
    ),
    "Adam with Muon's momentum": Refused(
        "model.optim.muon_momentum=0.9",
        told="model.optim.muon_momentum=0.9 model.optim.name=adam",
        offers="model.optim.name=muon | model.optim.muon_momentum=0.95",
    ),
    "Adam with Muon's iterations": Refused(
        "model.optim.muon_num_ns_steps=6",
        told="model.optim.muon_num_ns_steps=6 model.optim.name=adam",
        offers="model.optim.name=muon | model.optim.muon_num_ns_steps=5",
    ),
    "Adam with Muon's tensor parallelism": Refused(
        "model.optim.muon_tp_mode=blockwise",
        told="model.optim.muon_tp_mode=blockwise model.optim.name=adam",
        offers="model.optim.name=muon | model.optim.muon_tp_mode=duplicated",
    ),
    "SGD with Muon's heads": Refused(
        "model.optim.name=sgd parallelism=single model.optim.muon_split_qkv=false",
        told="model.optim.muon_split_qkv=false model.optim.name=sgd",
        offers="model.optim.name=muon | model.optim.muon_split_qkv=true",
    ),
    "no rate of embeddings": Refused(
        "model.optim.decoupled_lr=0", told="model.optim.decoupled_lr=0.0", offers="model.optim.decoupled_lr=3e-4,null"
    ),
    "init_lr above the rate of embeddings": Refused(
        "model.optim.decoupled_lr=1e-5 model.optim.sched.init_lr=1e-4",
        told="model.optim.sched.init_lr=0.0001 model.optim.decoupled_lr=1e-05",
        offers="model.optim.sched.init_lr=0 | model.optim.decoupled_lr=null",
    ),
    "weight decay": Refused(
        "model.optim.weight_decay=-1", told="model.optim.weight_decay=-1.0", offers="model.optim.weight_decay=0"
    ),
    "warmup longer than the run": Refused(
        f"trainer.max_steps=20 {WARMUP}",
        told=f"{WARMUP} trainer.max_steps=20",
        offers="model.optim.sched.warmup_steps=0,19",
        legal=f"trainer.max_steps=21 {WARMUP}",
    ),
    "warmup longer than the decay": Refused(
        f"model.optim.sched.decay_steps=10 {WARMUP}",
        told=f"{WARMUP} model.optim.sched.decay_steps=10",
        offers="model.optim.sched.warmup_steps=0,9",
        legal=f"model.optim.sched.decay_steps=21 {WARMUP}",
    ),
    "wsd without its phase": Refused(
        WSD,
        told="model.optim.sched.name=wsd model.optim.sched.wsd_decay_steps",
        offers="model.optim.sched.wsd_decay_steps=1,280",
    ),
    "phase too long": Refused(
        f"{WSD} model.optim.sched.wsd_decay_steps=281",
        told="model.optim.sched.wsd_decay_steps=281 trainer.max_steps=300",
        offers="model.optim.sched.wsd_decay_steps=1,280",
    ),
    "phase without wsd": Refused(
        "model.optim.sched.wsd_decay_steps=5 model.optim.sched.name=cosine",
        offers="model.optim.sched.name=wsd | model.optim.sched.wsd_decay_steps=null",
    ),
    "mmap without prefix": Refused(
        "data=mmap",
        told="model.data.data_impl=mmap model.data.data_prefix",
        legal="data=mmap model.data.data_prefix=[web]",
    ),
    "text without files": Refused(
        "data=text",
        told="model.data.data_impl=text model.data.text_files",
        legal="data=text model.data.text_files=[a.txt]",
    ),
    "prefix for another corpus": Refused(
        "model.data.data_prefix=[web]",
        told="model.data.data_prefix=[web] model.data.data_impl=stdlib",
        offers="data=mmap | ~model.data.data_prefix",
    ),
    "files for another corpus": Refused(
        "data=mock model.data.text_files=[a.txt]",
        told="model.data.text_files=[a.txt] model.data.data_impl=mock",
        offers="data=text | ~model.data.text_files",
    ),
    "validation files for another corpus": Refused(
        "model.data.validation_prefix=[web]",
        told="model.data.validation_prefix=[web] model.data.data_impl=stdlib",
        offers="model.data.validation_prefix=[]",
    ),
    "validation files without validation": Refused(
        "data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[valid] trainer.limit_val_batches=0",
        told="model.data.validation_prefix=[valid] trainer.limit_val_batches=0",
        offers="trainer.limit_val_batches=8 | model.data.validation_prefix=[]",
    ),
    "validation weights out of turn": Refused(
        "data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[web,0.7,code,0.3]",
        told="model.data.validation_prefix=[web,0.7,code,0.3]",
        legal="data=mmap model.data.data_prefix=[web] model.data.validation_prefix=[0.7,web,0.3,code]",
    ),
    "weights out of turn": Refused(
        "data=mmap model.data.data_prefix=[web,0.7,code,0.3]",
        told="model.data.data_prefix=[web,0.7,code,0.3]",
        offers="model.data.data_prefix=[0.7,web,0.3,code]",
    ),
    "weight without path": Refused(
        "data=mmap model.data.data_prefix=[0.7,web,0.3]",
        told="model.data.data_prefix=[0.7,web,0.3]",
        offers="model.data.data_prefix=[0.7,web,0.3,code]",
        legal="data=mmap model.data.data_prefix=[a,b,c]",
    ),
    "weight of nothing": Refused(
        "data=mmap model.data.data_prefix=[0,web,1,code]",
        told="model.data.data_prefix=[0,web,1,code]",
        legal="data=mmap model.data.data_prefix=[30,web,70,code]",
    ),
    "workers": Refused("model.data.num_workers=-1", offers="model.data.num_workers=0"),
    "splits that are none": Refused("model.data.splits_string='90,-5,5'", legal="model.data.splits_string='90.5, 9.5'"),
    "nothing to train on": Refused("model.data.splits_string='0,1,1'", legal="model.data.splits_string='1,1,0'"),
    "nothing to validate on": Refused(
        "model.data.splits_string='1,0,0'",
        told="model.data.splits_string='1,0,0' trainer.limit_val_batches=8",
        offers="trainer.limit_val_batches=0",
    ),
    "text without tokenizer": Refused(
        "model.tokenizer.library=none",
        told="model.tokenizer.library=none model.data.data_impl=stdlib file model.tokenizer.model",
        offers="model.tokenizer.library=bpe",
        legal="model.tokenizer.library=none data=mock",
    ),
    "BPE without text": Refused(
        "data=mock model.tokenizer.library=bpe",
        told="model.tokenizer.library=bpe model.data.data_impl=mock file model.tokenizer.model",
        offers="model.tokenizer.library=none",
        legal="data=mock",
    ),
    "tokenizer file not named": Refused(
        "model.tokenizer.library=file",
        told="model.tokenizer.library=file model.tokenizer.model",
        legal="model.tokenizer.library=file model.tokenizer.model=tokenizer.json",
    ),
    "tokenizer file not used": Refused(
        "model.tokenizer.model=tokenizer.json",
        told="model.tokenizer.model='tokenizer.json' model.tokenizer.library=bpe",
        offers="model.tokenizer.library=file | model.tokenizer.model=null",
    ),
    "BPE larger than the model": Refused(
        "model.tokenizer.vocab_size=2049",
        told="model.tokenizer.vocab_size=2049 model.vocab_size=2048 257",
        offers="model.tokenizer.vocab_size=257,2048",
    ),
    "no steps": Refused("trainer.max_steps=0", offers="trainer.max_steps=1"),
    "no validation interval": Refused(
        "trainer.val_check_interval=0", offers="trainer.val_check_interval=1", legal="trainer.val_check_interval=null"
    ),
    "negative clip": Refused(
        "trainer.gradient_clip_val=-1", told="trainer.gradient_clip_val=-1.0", offers="trainer.gradient_clip_val=0"
    ),
    "time without days": Refused(
        "trainer.max_time='10:00:00'",
        told="trainer.max_time='10:00:00' DD:HH:MM:SS 00:02:30:00",
        legal="trainer.max_time='00:10:00:00'",
    ),
    "no step may be skipped": Refused("trainer.max_skipped_steps=0", offers="trainer.max_skipped_steps=1"),
    "spikes everywhere": Refused(
        "trainer.spike_threshold=0.5", offers="trainer.spike_threshold=1", legal="trainer.spike_threshold=null"
    ),
    "no rewinds": Refused(
        "trainer.max_spike_rewinds=0 checkpoint.save_interval=100",
        told="trainer.max_spike_rewinds=0",
        offers="trainer.max_spike_rewinds=1",
    ),
    "rewinds without a margin": Refused("trainer.spike_margin=0", offers="trainer.spike_margin=1"),
    "rewinds behind no spikes": Refused(
        "trainer.max_spike_rewinds=3 checkpoint.save_interval=100 trainer.spike_threshold=null",
        told="trainer.max_spike_rewinds=3 trainer.spike_threshold=null",
        offers="trainer.spike_threshold=10 | trainer.max_spike_rewinds=null",
    ),
    "rewinds to no checkpoints": Refused(
        "trainer.max_spike_rewinds=3",
        told="trainer.max_spike_rewinds=3 checkpoint.save_interval=null",
        offers="trainer.max_spike_rewinds=null",
        legal="trainer.max_spike_rewinds=3 checkpoint.save_interval=100",
    ),
    "rewinds to a checkpoint that has gone": Refused(
        "trainer.max_spike_rewinds=3 trainer.spike_margin=101 checkpoint.save_interval=50 checkpoint.keep_last=3",
        told="trainer.max_spike_rewinds=3 trainer.spike_margin=101 checkpoint.keep_last=3 3",
        offers="checkpoint.keep_last=4,null",
        legal="trainer.max_spike_rewinds=3 trainer.spike_margin=100 checkpoint.save_interval=50 checkpoint.keep_last=3",
    ),
    "rewinds without FP8 state": Refused(
        "fp8=delayed model.fp8_emulate=true trainer.max_spike_rewinds=3 checkpoint.save_interval=100 "
        "checkpoint.reset_fp8_state=true",
        told="trainer.max_spike_rewinds=3 checkpoint.reset_fp8_state=true",
        offers="trainer.max_spike_rewinds=null | checkpoint.reset_fp8_state=false",
    ),
    "no time": Refused("trainer.max_time='00:00:00:00'", offers="trainer.max_time=null"),
    "deterministic with a fusion that is not": Refused(
        "trainer.deterministic=true model.cross_entropy_fusion_impl=native",
        offers="model.cross_entropy_fusion_impl=null,linear",
    ),
    "an implementation of what is off": Refused(
        "model.cross_entropy_loss_fusion=false model.cross_entropy_fusion_impl=linear",
        told="model.cross_entropy_fusion_impl=linear model.cross_entropy_loss_fusion=false",
        offers="model.cross_entropy_loss_fusion=true | model.cross_entropy_fusion_impl=null",
    ),
    "save interval": Refused("checkpoint.save_interval=0", offers="checkpoint.save_interval=1"),
    "save interval by the clock": Refused(
        "checkpoint.save_interval_minutes=0",
        told="checkpoint.save_interval_minutes=0.0",
        offers="checkpoint.save_interval_minutes=30,null",
        legal="checkpoint.save_interval_minutes=0.5",
    ),
    "nothing is saved": Refused(
        "checkpoint.save_interval_minutes=null checkpoint.save_at_end=false checkpoint.keep_last=2",
        told="checkpoint.keep_last=2",
        legal="checkpoint.save_at_end=false checkpoint.keep_last=2",
    ),
    "resume from nowhere": Refused(
        "checkpoint.resume=nowhere", told="checkpoint.resume='nowhere'", offers="checkpoint.resume=auto,never"
    ),
    "weights from nowhere": Refused(
        "checkpoint.init_from=nowhere",
        told="checkpoint.init_from='nowhere'",
        offers="checkpoint.init_from=null",
        legal="checkpoint.init_from=tests",
    ),
    "weights and all": Refused(
        "checkpoint.init_from=tests checkpoint.resume=docs",
        told="checkpoint.init_from='tests' checkpoint.resume='docs'",
        offers="checkpoint.resume=auto,never | checkpoint.init_from=null",
    ),
    "name with a slash": Refused("name=a/b", told="name='a/b'", legal="name=a_b"),
    "run_dir is a file": Refused("run_dir=pyproject.toml", told="run_dir='pyproject.toml'", legal="run_dir=new"),
    "peak": Refused(
        "logging.peak_tflops=0",
        told="logging.peak_tflops=0.0",
        offers="logging.peak_tflops=null",
        legal="logging.peak_tflops=989",
    ),
    "temperature": Refused("sample.temperature=-1", told="sample.temperature=-1.0", offers="sample.temperature=0"),
    "empty prompt": Refused(
        "sample.prompt=''",
        told="sample.prompt sample.max_new_tokens=160",
        offers="sample.max_new_tokens=0",
        legal="sample.prompt=text",
    ),
}


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_told_and_what_it_offers_is_legal(rule):
    check_refused(RULES[rule])


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


TP_SIZE, GROUPS, HEADS, SP = (
    "tensor_model_parallel_size",
    "num_query_groups",
    "num_attention_heads",
    "sequence_parallel",
)


def offers(problem):
    """What a message about heads and ranks offers: changes of the model's keys."""
    ways = re.findall(r"(\w+)[ =](\d+(?:, \d+)*(?: or \d+)?)(?: with model\.(\w+)=(\w+))?", problem.partition("; ")[2])
    for key, values, also, value in ways:
        for number in re.findall(r"\d+", values):
            yield {key: int(number), **({also: value != "false" and int(value)} if also else {})}


@pytest.mark.parametrize("layout", ["single", "tp2", "tp4_sp"])
def test_what_is_offered_instead_of_heads_and_groups_is_legal(layout):
    base = load_config([f"parallelism={layout}"]).model
    draw = random.Random(layout)
    offered = set()
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
            for change in offers(problems[0]):
                assert list(division_problems(replace(model, **change))) == [], (problems, change)
                offered |= change.keys()
    expected = {"hidden_size", GROUPS, HEADS} | ({TP_SIZE} if layout != "single" else set())
    assert expected <= offered <= {*expected, SP}


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


@pytest.mark.parametrize("extra", ["te", "flash", "torchao", "muon", "wandb"])
def test_an_extra_is_installed_as_the_gpu_page_says(extra, pytestconfig):
    command = re.search(r"python -m pip .*", how_to_install(extra))[0]
    assert command.endswith(f"-e '.[{extra}]'")
    assert command in (pytestconfig.rootpath / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:00:05", 5), ("00:02:30:00", 9000), ("1:00:00:01", 86401), ("400:23:59:59", 34646399)]
)
def test_max_time_counts_days_hours_minutes_seconds(text, seconds):
    assert max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer) == seconds


@pytest.mark.parametrize("text", ["5", "00:24:00:00", "00:00:60:00", "-1:00:00:00", "1d", "", f"{'9' * 400}:00:00:00"])
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer)
