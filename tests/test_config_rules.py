"""Cross-field rules: one row breaks a rule, its neighbour obeys it."""

import random
import re
from dataclasses import replace

import pytest

from gpt_pretrain.config.derived import max_time_s
from gpt_pretrain.config.errors import ConfigError, how_to_install
from gpt_pretrain.launch.ranks import first_host, read_launch, without_launcher
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.rules.layout import attention_heads, rotated_pairs, sequence, widths_over_tensor_ranks

TP4 = "model.tensor_model_parallel_size=4"
TP2 = "model.tensor_model_parallel_size=2"
PP2 = "model.pipeline_model_parallel_size=2"
VP2 = "model.virtual_pipeline_model_parallel_size=2"
FULL = "model.activations_checkpoint_granularity=full"
WSD = "model.optim.sched.name=wsd"
LEAN, DISTRIBUTED = "model.optim.use_precision_aware_optimizer=true", "model.use_distributed_optimizer=true"
TIED = "model.share_embeddings_and_output_weights=true"
# Rows about the schedule state what they depend on: presets may tune theirs.
WARMUP = "model.optim.sched.warmup_steps=20"
STEPS = "trainer.max_steps=300"
MIN_LR = "model.optim.sched.min_lr=3e-5"

# What breaks a rule, with how many processes; the message, or how it starts; a neighbour that is legal.
RULES = {
    "time to hang": (
        ["trainer.hang_timeout=0.5"],
        1,
        "trainer.hang_timeout=0.5 is too small; use 1 or more",
        ["trainer.hang_timeout=null"],
    ),
    "positive size": (["model.num_layers=0"], 1, "model.num_layers=0 is not positive; use 1 or more", []),
    "heads over width": (
        ["model.hidden_size=130"],
        1,
        "model.hidden_size=130 is not divisible by model.num_attention_heads=4; use hidden_size 128 or 136, "
        "or set model.kv_channels",
        ["model.hidden_size=136"],
    ),
    "heads over groups": (
        ["model.num_query_groups=3"],
        1,
        "model.num_attention_heads=4 is not divisible by model.num_query_groups=3; "
        "use model.num_query_groups=1, 2 or 4",
        ["model.num_query_groups=4"],
    ),
    "groups over heads": (
        ["model.num_query_groups=8"],
        1,
        "model.num_attention_heads=4 is not divisible by model.num_query_groups=8; "
        "use model.num_query_groups=1, 2 or 4, or model.num_attention_heads=8",
        ["model.num_query_groups=8", "model.num_attention_heads=8"],
    ),
    # One group divides the heads, and not among the ranks.
    "heads over groups over TP": (
        ["model.num_query_groups=3", "parallelism=tp2_sp"],
        2,
        "model.num_attention_heads=4 is not divisible by model.num_query_groups=3; use model.num_query_groups=2 or 4",
        ["model.num_query_groups=2", "parallelism=tp2_sp"],
    ),
    "heads over TP": (
        ["model.num_attention_heads=12", "model.num_query_groups=12", "model.hidden_size=192", "parallelism=tp8_sp"],
        8,
        "model.num_attention_heads=12 is not divisible by model.tensor_model_parallel_size=8; "
        "use model.num_attention_heads=8 or 16 with model.num_query_groups=8, or "
        "model.tensor_model_parallel_size=2 or 4",
        ["model.num_attention_heads=8", "model.num_query_groups=8", "model.hidden_size=192", "parallelism=tp8_sp"],
    ),
    "groups over TP": (
        [TP4],
        4,
        "model.num_query_groups=2 is not divisible by model.tensor_model_parallel_size=4; "
        "use model.num_query_groups=4, or model.tensor_model_parallel_size=1 or 2",
        [TP2],
    ),
    "one group over TP and SP": (
        ["model.num_query_groups=1", "parallelism=tp2_sp"],
        2,
        "model.num_query_groups=1 is not divisible by model.tensor_model_parallel_size=2; use model.num_query_groups="
        "2 or 4, or model.tensor_model_parallel_size=1 with model.sequence_parallel=false",
        ["model.num_query_groups=1", "model.tensor_model_parallel_size=1", "model.sequence_parallel=false"],
    ),
    "odd rotated channels": (
        ["model.kv_channels=33"],
        1,
        "model.kv_channels=33, and rope rotates pairs of channels; use 32 or 34",
        ["model.kv_channels=34"],
    ),
    "a width of odd heads": (
        ["model.hidden_size=100"],
        1,
        "model.hidden_size=100 makes 4 heads (model.num_attention_heads) of 25 channels, and rope rotates pairs of "
        "channels; use hidden_size 96 or 104, or set model.kv_channels",
        ["model.hidden_size=104"],
    ),
    "an odd share of a head": (
        ["model.rotary_percentage=0.1"],
        1,
        "model.hidden_size=128 makes 4 heads (model.num_attention_heads) of 32 channels, of which "
        "model.rotary_percentage=0.1 rotates 3, and rope rotates pairs of channels; use hidden_size 116 or 160, or set "
        "model.kv_channels, or another rotary_percentage",
        ["model.rotary_percentage=0.1", "model.hidden_size=160"],
    ),
    "rotary percentage": (
        ["model.rotary_percentage=1.5"],
        1,
        "model.rotary_percentage=1.5 is no share of a head; use above 0 up to 1",
        ["model.rotary_percentage=0.5"],
    ),
    "hidden over TP": (
        ["model.hidden_size=129", "model.kv_channels=32", TP2],
        2,
        "model.hidden_size=129 is not divisible by model.tensor_model_parallel_size=2; use 128 or 130",
        ["model.hidden_size=130", "model.kv_channels=32", TP2],
    ),
    "ffn over TP": (
        ["model.ffn_hidden_size=383", TP2],
        2,
        "model.ffn_hidden_size=383 is not divisible by model.tensor_model_parallel_size=2; use 382 or 384",
        ["model.ffn_hidden_size=382", TP2],
    ),
    "vocabulary over TP": (
        ["model.vocab_size=2049", "model.make_vocab_size_divisible_by=1", TP2],
        2,
        "model.vocab_size=2049, padded to 2049, is not divisible by model.tensor_model_parallel_size=2; "
        "use model.make_vocab_size_divisible_by=2",
        ["model.vocab_size=2049", "model.make_vocab_size_divisible_by=2", TP2],
    ),
    "layers over PP": (
        ["model.num_layers=5", PP2],
        2,
        "model.num_layers=5 is not divisible by model.pipeline_model_parallel_size=2; use 4 or 6 layers, "
        "or a product of 1 or 5",
        ["model.num_layers=6", PP2],
    ),
    "layers over PP and VP": (
        ["model.num_layers=6", PP2, VP2],
        2,
        "model.num_layers=6 is not divisible by model.pipeline_model_parallel_size=2 × "
        "model.virtual_pipeline_model_parallel_size=2; use 4 or 8 layers",
        ["model.num_layers=8", PP2, VP2],
    ),
    "VP without PP": (
        [VP2],
        1,
        "model.virtual_pipeline_model_parallel_size=2 needs model.pipeline_model_parallel_size of 2 or more",
        [VP2, PP2],
    ),
    "microbatches over PP when interleaved": (
        [PP2, VP2, "model.global_batch_size=24"],
        2,
        "model.global_batch_size=24 makes 3 microbatches, and the interleaved schedule needs a multiple of "
        "model.pipeline_model_parallel_size=2; use global_batch_size 16 or 32",
        [PP2, VP2, "model.global_batch_size=32"],
    ),
    "SP without TP": (
        ["model.sequence_parallel=true"],
        1,
        "model.sequence_parallel=true needs model.tensor_model_parallel_size of 2 or more",
        ["parallelism=tp2_sp"],
    ),
    "sequence over SP": (
        ["parallelism=tp2_sp", "model.encoder_seq_length=255"],
        2,
        "model.encoder_seq_length=255 is not divisible by 2, as model.tensor_model_parallel_size=2 "
        "(sequence_parallel) ask; use 254 or 256",
        ["parallelism=tp2_sp", "model.encoder_seq_length=254"],
    ),
    "sequence over CP": (
        ["parallelism=cp2", "model.encoder_seq_length=254"],
        2,
        "model.encoder_seq_length=254 is not divisible by 4, as 2 × model.context_parallel_size=2 ask; use 252 or 256",
        ["parallelism=cp2", "model.encoder_seq_length=252"],
    ),
    "CP without TE": (
        ["parallelism=cp2", "model.transformer_engine=false"],
        2,
        "model.context_parallel_size=2 needs Transformer Engine's attention, and model.transformer_engine=false",
        ["parallelism=cp2", "model.transformer_engine=true"],
    ),
    "world size": (
        [TP2, PP2],
        6,
        "model.tensor_model_parallel_size=2 × model.pipeline_model_parallel_size=2 × model.context_parallel_size=1 "
        "needs a multiple of 4 processes, and this run has 6; start it with torchrun --nproc-per-node 4",
        [TP2, PP2, "parallelism=tp2_pp2"],
    ),
    "batch over ranks": (
        ["model.global_batch_size=20"],
        1,
        "model.global_batch_size=20 is not divisible by model.micro_batch_size=8 × 1 data-parallel ranks = 8; "
        "use 16 or 24",
        ["model.global_batch_size=24"],
    ),
    "devices": (
        ["trainer.devices=8"],
        1,
        "trainer.devices=8, and the launcher started 1 on each node; start with torchrun --nproc-per-node 8",
        ["trainer.devices=1"],
    ),
    "nodes": (
        ["trainer.num_nodes=2"],
        1,
        "trainer.num_nodes=2, and the launcher started 1; start with torchrun --nnodes 2",
        ["trainer.num_nodes=1"],
    ),
    "sequence over positions": (
        ["model.max_position_embeddings=128"],
        1,
        "model.encoder_seq_length=256 is longer than model.max_position_embeddings=128; use at most 128",
        ["model.max_position_embeddings=512"],
    ),
    "overlapped gather": (
        ["model.overlap_param_gather=true"],
        1,
        "model.overlap_param_gather=true needs model.use_distributed_optimizer=true and model.overlap_grad_reduce=true",
        ["parallelism=dp"],
    ),
    "buckets of what is exchanged at the end": (
        ["model.ddp_bucket_size=1000000"],
        1,
        "model.ddp_bucket_size=1000000 is how much is exchanged at once behind computation, and "
        "model.overlap_grad_reduce=false leaves all of it to the end; use null, or overlap_grad_reduce=true",
        ["parallelism=dp", "model.ddp_bucket_size=1000000"],
    ),
    "empty buckets": (
        ["parallelism=dp", "model.ddp_bucket_size=0"],
        1,
        "model.ddp_bucket_size=0 is not positive; use 1 or more",
        ["parallelism=dp", "model.ddp_bucket_size=1"],
    ),
    "distributed SGD": (
        ["parallelism=dp", "model.optim.name=sgd"],
        1,
        "model.optim.name=sgd has no distributed form in megatron-core",
        ["parallelism=single", "model.optim.name=sgd"],
    ),
    "types of states without their optimizer": (
        ["model.optim.exp_avg_sq_dtype=fp16"],
        1,
        "model.optim.exp_avg_sq_dtype=fp16 has no effect with model.optim.use_precision_aware_optimizer=false; use "
        "true, or exp_avg_sq_dtype=fp32",
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_sq_dtype=fp16"],
    ),
    "small masters without their optimizer": (
        ["model.optim.main_params_dtype=fp16"],
        1,
        "model.optim.main_params_dtype=fp16 has no effect",
        [LEAN, DISTRIBUTED, "model.optim.main_params_dtype=fp16"],
    ),
    "second moments in FP8": (
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_sq_dtype=fp8"],
        1,
        "model.optim.exp_avg_sq_dtype=fp8: E4M3 has 4 bits, too few for a second moment with the betas that are usual: "
        "rounded to the nearest in each step, it grows with the gradients and never falls again; use fp16, bf16 or "
        "fp32",
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_sq_dtype=bf16"],
    ),
    "second moments that never fall": (
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_sq_dtype=bf16", "model.optim.betas=[0.9,0.999]"],
        1,
        "model.optim.exp_avg_sq_dtype=bf16 with a beta of 0.999 (model.optim.betas): the 0.001 that a step takes "
        "of the average is less than half of what lies between two numbers of bf16, up to 2^-8; rounded to the nearest "
        "in each step, it grows with the gradients and never falls again; use fp16, fp32, or a beta of at most "
        "0.99609375",
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_sq_dtype=fp16", "model.optim.betas=[0.9,0.999]"],
    ),
    "first moments that never fall": (
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_dtype=fp8", "model.optim.betas=[0.95,0.95]"],
        1,
        "model.optim.exp_avg_dtype=fp8 with a beta of 0.95 (model.optim.betas): the 0.05 that a step takes of",
        [LEAN, DISTRIBUTED, "model.optim.exp_avg_dtype=fp8", "model.optim.betas=[0.9375,0.95]"],
    ),
    "small states of weights in blocks": (
        [LEAN, "fp8=blockwise", "model.fp8_params=true"],
        1,
        "model.optim.use_precision_aware_optimizer=true with model.fp8_params=true and model.fp8_recipe=blockwise",
        [LEAN, "fp8=tensorwise", "model.fp8_params=true"],
    ),
    "small states of copies on two stages": (
        [LEAN, "parallelism=pp2", TIED, "model.optim.main_params_dtype=fp16"],
        2,
        "model.optim.main_params_dtype=fp16 with model.share_embeddings_and_output_weights=true and "
        "model.pipeline_model_parallel_size=2: it rounds by the place in a rank's part, and the copies on the first "
        "and the last stage would part; use fp32, or one stage",
        [LEAN, "parallelism=pp2", TIED, "model.optim.exp_avg_dtype=bf16"],
    ),
    "small states that are not distributed": (
        [LEAN],
        1,
        "model.optim.use_precision_aware_optimizer=true is a form of the distributed optimizer, and "
        "model.use_distributed_optimizer=null comes to false; use use_distributed_optimizer=true (on one GPU, too), or "
        "use_precision_aware_optimizer=false",
        [LEAN, "fp8=delayed", "model.fp8_params=true"],
    ),
    "small states of SGD": (
        [LEAN, DISTRIBUTED, "model.optim.name=sgd"],
        1,
        "model.optim.use_precision_aware_optimizer=true is a form of Adam, and model.optim.name=sgd; use adam, "
        "or false",
        [LEAN, DISTRIBUTED],
    ),
    "small states without masters": (
        [LEAN, DISTRIBUTED, "trainer.precision=fp32"],
        1,
        "model.optim.use_precision_aware_optimizer=true is for weights in BF16 or FP8 with masters beside them, and "
        "trainer.precision=fp32 has no masters; use bf16, or false",
        [LEAN, DISTRIBUTED, "trainer.precision=bf16"],
    ),
    "full recomputation without method": (
        [FULL, "model.activations_checkpoint_num_layers=1"],
        1,
        "model.activations_checkpoint_granularity=full needs model.activations_checkpoint_method; use uniform or block",
        [FULL, "model.activations_checkpoint_num_layers=1", "model.activations_checkpoint_method=block"],
    ),
    "full recomputation without layers": (
        [FULL, "model.activations_checkpoint_method=block"],
        1,
        "model.activations_checkpoint_num_layers=null with activations_checkpoint_granularity=full; use 1 to 4",
        [FULL, "model.activations_checkpoint_method=block", "model.activations_checkpoint_num_layers=4"],
    ),
    "recomputation of more layers than a stage has": (
        [FULL, "model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=3", PP2],
        2,
        "model.activations_checkpoint_num_layers=3 with activations_checkpoint_granularity=full; use 1 to 2",
        [FULL, "model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=2", PP2],
    ),
    "method without full recomputation": (
        ["model.activations_checkpoint_granularity=selective", "model.activations_checkpoint_method=block"],
        1,
        "model.activations_checkpoint_method=block has no effect with "
        "model.activations_checkpoint_granularity=selective",
        ["model.activations_checkpoint_granularity=selective"],
    ),
    "fusion of another activation": (
        ["model.activation=gelu", "model.bias_activation_fusion=true"],
        1,
        "model.bias_activation_fusion=true computes GELU's tanh form, and model.activation=gelu is the exact one",
        ["model.activation=gelu"],
    ),
    "fusion without bias": (
        ["model.activation=gelu_tanh", "model.bias_activation_fusion=true"],
        1,
        "model.bias_activation_fusion=true needs model.bias=true with model.activation=gelu_tanh",
        ["model.activation=gelu_tanh", "model.bias_activation_fusion=true", "model.bias=true"],
    ),
    "rope fusion without rope": (
        ["model.position_embedding_type=learned_absolute", "model.apply_rope_fusion=true"],
        1,
        "model.apply_rope_fusion=true has nothing to fuse",
        ["model.position_embedding_type=learned_absolute", "model.apply_rope_fusion=false"],
    ),
    "dropout": (
        ["model.hidden_dropout=1"],
        1,
        "model.hidden_dropout=1.0 is no dropout probability; use 0 up to below 1",
        ["model.hidden_dropout=0.9"],
    ),
    "epsilon": (["model.layernorm_epsilon=0"], 1, "model.layernorm_epsilon=0.0 is not positive", []),
    "seed": (["model.seed=-1"], 1, "model.seed=-1 is negative; use 0 or more", ["model.seed=0"]),
    "learning rate": (
        ["model.optim.lr=0", "model.optim.sched.min_lr=0"],
        1,
        "model.optim.lr=0.0 is not positive",
        ["model.optim.lr=1", "model.optim.sched.min_lr=0"],
    ),
    "min_lr above lr": (
        ["model.optim.lr=1e-5", MIN_LR],
        1,
        "model.optim.sched.min_lr=3e-05 is not between 0 and model.optim.lr=1e-05",
        ["model.optim.lr=3e-5", MIN_LR],
    ),
    "min_lr without decay": (
        ["model.optim.sched.name=constant", MIN_LR],
        1,
        "model.optim.sched.min_lr=3e-05 has no effect with model.optim.sched.name=constant; use null, or name=cosine",
        ["model.optim.sched.name=linear", MIN_LR],
    ),
    "init_lr above lr": (
        ["model.optim.sched.init_lr=1", "model.optim.lr=0.5"],
        1,
        "model.optim.sched.init_lr=1.0 is not between 0 and model.optim.lr=0.5",
        ["model.optim.sched.init_lr=0.5", "model.optim.lr=0.5"],
    ),
    "betas": (
        ["model.optim.betas=[0.9,1]"],
        1,
        "model.optim.betas=[0.9, 1.0] are not two numbers of at least 0 and below 1",
        ["model.optim.betas=[0,0.999]"],
    ),
    "one beta": (["model.optim.betas=[0.9]"], 1, "model.optim.betas=[0.9] are not two numbers", []),
    "eps": (["model.optim.eps=0"], 1, "model.optim.eps=0.0 is not positive", ["model.optim.eps=1e-15"]),
    "momentum": (["model.optim.momentum=1"], 1, "model.optim.momentum=1.0 is not at least 0 and below 1", []),
    "weight decay": (["model.optim.weight_decay=-1"], 1, "model.optim.weight_decay=-1.0 is negative", []),
    "warmup longer than the run": (
        ["trainer.max_steps=20", WARMUP],
        1,
        "model.optim.sched.warmup_steps=20 is not below trainer.max_steps=20 (decay_steps=null); use 0 to 19",
        ["trainer.max_steps=21", WARMUP],
    ),
    "warmup longer than the decay": (
        ["model.optim.sched.decay_steps=10", WARMUP],
        1,
        "model.optim.sched.warmup_steps=20 is not below model.optim.sched.decay_steps=10; use 0 to 9",
        ["model.optim.sched.decay_steps=21", WARMUP],
    ),
    "wsd without its phase": (
        [WSD, WARMUP, STEPS],
        1,
        "model.optim.sched.name=wsd needs model.optim.sched.wsd_decay_steps, the length of its last phase; "
        "use 1 to 280",
        [WSD, WARMUP, STEPS, "model.optim.sched.wsd_decay_steps=280"],
    ),
    "phase too long": (
        [WSD, WARMUP, STEPS, "model.optim.sched.wsd_decay_steps=281"],
        1,
        "model.optim.sched.wsd_decay_steps=281 is longer than what the warmup leaves of trainer.max_steps=300",
        [WSD, "model.optim.sched.wsd_decay_steps=1"],
    ),
    "phase without wsd": (
        ["model.optim.sched.wsd_decay_steps=5", "model.optim.sched.name=cosine"],
        1,
        "model.optim.sched.wsd_decay_steps=5 has no effect with model.optim.sched.name=cosine",
        [WSD, "model.optim.sched.wsd_decay_steps=5"],
    ),
    "mmap without prefix": (
        ["data=mmap"],
        1,
        "model.data.data_impl=mmap needs model.data.data_prefix=[…]",
        ["data=mmap", "model.data.data_prefix=[web]"],
    ),
    "text without files": (
        ["data=text"],
        1,
        "model.data.data_impl=text needs model.data.text_files=[…]",
        ["data=text", "model.data.text_files=[a.txt]"],
    ),
    "prefix for another corpus": (
        ["model.data.data_prefix=[web]"],
        1,
        "model.data.data_prefix is given, and model.data.data_impl=stdlib does not read it; use data=mmap",
        [],
    ),
    "files for another corpus": (
        ["data=mock", "model.data.text_files=[a.txt]"],
        1,
        "model.data.text_files is given, and model.data.data_impl=mock does not read it; use data=text",
        ["data=mock"],
    ),
    "weights out of turn": (
        ["data=mmap", "model.data.data_prefix=[web,0.7,code,0.3]"],
        1,
        "model.data.data_prefix=[web,0.7,code,0.3] mixes weights and paths out of turn",
        ["data=mmap", "model.data.data_prefix=[0.7,web,0.3,code]"],
    ),
    "weight without path": (
        ["data=mmap", "model.data.data_prefix=[0.7,web,0.3]"],
        1,
        "model.data.data_prefix=[0.7,web,0.3] mixes weights and paths out of turn",
        ["data=mmap", "model.data.data_prefix=[a,b,c]"],
    ),
    "weight of nothing": (
        ["data=mmap", "model.data.data_prefix=[0,web,1,code]"],
        1,
        "model.data.data_prefix=[0,web,1,code] has a weight that is not positive",
        ["data=mmap", "model.data.data_prefix=[30,web,70,code]"],
    ),
    "workers": (["model.data.num_workers=-1"], 1, "model.data.num_workers=-1 is too small; use 0 or more", []),
    "splits that are none": (
        ["model.data.splits_string='90,-5,5'"],
        1,
        "model.data.splits_string='90,-5,5' is not one to three shares of 0 or more, separated by commas",
        ["model.data.splits_string='90.5, 9.5'"],
    ),
    "nothing to train on": (
        ["model.data.splits_string='0,1,1'"],
        1,
        "model.data.splits_string='0,1,1' leaves nothing to train on",
        ["model.data.splits_string='1,1,0'"],
    ),
    "nothing to validate on": (
        ["model.data.splits_string='1,0,0'"],
        1,
        "model.data.splits_string='1,0,0' leaves nothing to validate on, and trainer.limit_val_batches=8",
        ["model.data.splits_string='1,0,0'", "trainer.limit_val_batches=0"],
    ),
    "text without tokenizer": (
        ["model.tokenizer.library=none"],
        1,
        "model.tokenizer.library=none cannot read text, and model.data.data_impl=stdlib is text",
        ["model.tokenizer.library=none", "data=mock"],
    ),
    "BPE without text": (
        ["data=mock", "model.tokenizer.library=bpe"],
        1,
        "model.tokenizer.library=bpe has no text to train on with model.data.data_impl=mock",
        ["data=mock"],
    ),
    "tokenizer file not named": (
        ["model.tokenizer.library=file"],
        1,
        "model.tokenizer.library=file needs model.tokenizer.model",
        ["model.tokenizer.library=file", "model.tokenizer.model=tokenizer.json"],
    ),
    "tokenizer file not used": (
        ["model.tokenizer.model=tokenizer.json"],
        1,
        "model.tokenizer.model='tokenizer.json' has no effect with model.tokenizer.library=bpe",
        [],
    ),
    "BPE larger than the model": (
        ["model.tokenizer.vocab_size=2049"],
        1,
        "model.tokenizer.vocab_size=2049 is not between 257 (every byte and the end of a document) and "
        "model.vocab_size=2048",
        ["model.tokenizer.vocab_size=257"],
    ),
    "no steps": (["trainer.max_steps=0"], 1, "trainer.max_steps=0 is too small; use 1 or more", []),
    "no validation interval": (
        ["trainer.val_check_interval=0"],
        1,
        "trainer.val_check_interval=0 is too small; use 1 or more",
        ["trainer.val_check_interval=null"],
    ),
    "negative clip": (
        ["trainer.gradient_clip_val=-1"],
        1,
        "trainer.gradient_clip_val=-1.0 is too small; use 0 or more",
        ["trainer.gradient_clip_val=0"],
    ),
    "time without days": (
        ["trainer.max_time='10:00:00'"],
        1,
        "trainer.max_time='10:00:00' is not DD:HH:MM:SS",
        ["trainer.max_time='00:10:00:00'"],
    ),
    "no step may be skipped": (
        ["trainer.max_skipped_steps=0"],
        1,
        "trainer.max_skipped_steps=0 is too small; use 1 or more",
        ["trainer.max_skipped_steps=1"],
    ),
    "spikes everywhere": (
        ["trainer.spike_threshold=0.5"],
        1,
        "trainer.spike_threshold=0.5 is too small; use 1 or more",
        ["trainer.spike_threshold=null"],
    ),
    "no rewinds": (
        ["trainer.max_spike_rewinds=0", "checkpoint.save_interval=100"],
        1,
        "trainer.max_spike_rewinds=0 is too small; use 1 or more",
        ["trainer.max_spike_rewinds=1", "checkpoint.save_interval=100"],
    ),
    "rewinds without a margin": (
        ["trainer.spike_margin=0"],
        1,
        "trainer.spike_margin=0 is too small; use 1 or more",
        ["trainer.spike_margin=1"],
    ),
    "rewinds behind no spikes": (
        ["trainer.max_spike_rewinds=3", "checkpoint.save_interval=100", "trainer.spike_threshold=null"],
        1,
        "trainer.max_spike_rewinds=3 goes back behind spikes, and trainer.spike_threshold=null finds none",
        ["trainer.max_spike_rewinds=3", "checkpoint.save_interval=100"],
    ),
    "rewinds to no checkpoints": (
        ["trainer.max_spike_rewinds=3"],
        1,
        "trainer.max_spike_rewinds=3 goes back to checkpoints, and checkpoint.save_interval=null writes none",
        ["trainer.max_spike_rewinds=3", "checkpoint.save_interval=100"],
    ),
    "rewinds to a checkpoint that has gone": (
        [
            "trainer.max_spike_rewinds=3",
            "trainer.spike_margin=101",
            "checkpoint.save_interval=50",
            "checkpoint.keep_last=3",
        ],
        1,
        "trainer.max_spike_rewinds=3 goes back to a checkpoint trainer.spike_margin=101 steps before a spike, which "
        "may be the last but 3, and checkpoint.keep_last=3; use 4 or more, or null for all",
        [
            "trainer.max_spike_rewinds=3",
            "trainer.spike_margin=100",
            "checkpoint.save_interval=50",
            "checkpoint.keep_last=3",
        ],
    ),
    "rewinds without FP8 state": (
        [
            "fp8=delayed",
            "model.fp8_emulate=true",
            "trainer.max_spike_rewinds=3",
            "checkpoint.save_interval=100",
            "checkpoint.reset_fp8_state=true",
        ],
        1,
        "trainer.max_spike_rewinds=3 restores FP8 scales with all else, and checkpoint.reset_fp8_state=true leaves",
        ["fp8=delayed", "model.fp8_emulate=true", "trainer.max_spike_rewinds=3", "checkpoint.save_interval=100"],
    ),
    "no time": (["trainer.max_time='00:00:00:00'"], 1, "trainer.max_time='00:00:00:00' leaves no time to train", []),
    "deterministic with a fusion that is not": (
        ["trainer.deterministic=true", "model.cross_entropy_fusion_impl=native"],
        1,
        "trainer.deterministic=true excludes model.cross_entropy_fusion_impl=native",
        ["trainer.deterministic=true", "model.cross_entropy_fusion_impl=linear"],
    ),
    "an implementation of what is off": (
        ["model.cross_entropy_loss_fusion=false", "model.cross_entropy_fusion_impl=linear"],
        1,
        "model.cross_entropy_fusion_impl=linear says which fused cross entropy computes the loss",
        ["model.cross_entropy_loss_fusion=true", "model.cross_entropy_fusion_impl=linear"],
    ),
    "save interval": (
        ["checkpoint.save_interval=0"],
        1,
        "checkpoint.save_interval=0 is too small; use 1 or more",
        ["checkpoint.save_interval=1"],
    ),
    "save interval by the clock": (
        ["checkpoint.save_interval_minutes=0"],
        1,
        "checkpoint.save_interval_minutes=0.0 is not positive; use 30, or null",
        ["checkpoint.save_interval_minutes=0.5"],
    ),
    "nothing is saved": (
        [
            "checkpoint.save_interval_minutes=null",
            "checkpoint.save_at_end=false",
            "checkpoint.keep_last=2",
        ],
        1,
        "checkpoint.keep_last=2 has no effect: nothing saved",
        ["checkpoint.save_at_end=false", "checkpoint.keep_last=2"],
    ),
    "resume from nowhere": (
        ["checkpoint.resume=nowhere"],
        1,
        "checkpoint.resume='nowhere' is neither auto nor never nor a directory that exists",
        ["checkpoint.resume=never"],
    ),
    "weights from nowhere": (
        ["checkpoint.init_from=nowhere"],
        1,
        "checkpoint.init_from='nowhere' is no directory that exists; name a checkpoint, or null",
        ["checkpoint.init_from=tests"],
    ),
    "weights and all": (
        ["checkpoint.init_from=tests", "checkpoint.resume=docs"],
        1,
        "checkpoint.init_from='tests' takes the weights of a checkpoint, and checkpoint.resume='docs' all of one",
        ["checkpoint.init_from=tests", "checkpoint.resume=auto"],
    ),
    "name with a slash": (["name=a/b"], 1, "name='a/b' becomes part of a directory's name", ["name=a_b"]),
    "run_dir is a file": (["run_dir=pyproject.toml"], 1, "run_dir='pyproject.toml' is a file", ["run_dir=new"]),
    "peak": (["logging.peak_tflops=0"], 1, "logging.peak_tflops=0.0 is not positive", ["logging.peak_tflops=989"]),
    "temperature": (["sample.temperature=-1"], 1, "sample.temperature=-1.0 is too small; use 0 or more", []),
    "empty prompt": (
        ["sample.prompt=''"],
        1,
        "sample.prompt is empty, and sample.max_new_tokens=160",
        ["sample.prompt=''", "sample.max_new_tokens=0"],
    ),
}
WORLD_OF_LEGAL = {"world size": 8, "VP without PP": 2, "SP without TP": 2}


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_told_with_the_legal_values(rule, broken_rules):
    overrides, world_size, message, _ = RULES[rule]
    problems = broken_rules(*overrides, world_size=world_size)
    assert [problem for problem in problems if problem.startswith(message)], problems


@pytest.mark.parametrize("rule", RULES)
def test_the_legal_neighbour_of_a_broken_rule_passes(rule, broken_rules):
    _, world_size, _, legal = RULES[rule]
    world_size = WORLD_OF_LEGAL.get(rule, world_size)
    batch = [] if any("global_batch_size" in override for override in legal) else ["model.global_batch_size=64"]
    assert broken_rules(*legal, *batch, world_size=world_size) == []


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
    launch = replace(read_launch({}), world_size=8)
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
        problems = heads_and_ranks(model, launch)
        if len(problems) == 1:
            for change in offers(problems[0]):
                assert heads_and_ranks(replace(model, **change), launch) == [], (problems, change)
                offered |= change.keys()
    expected = {"hidden_size", GROUPS, HEADS} | ({TP_SIZE} if layout != "single" else set())
    assert expected <= offered <= {*expected, SP}


def heads_and_ranks(model, launch):
    return [
        *attention_heads(model, launch),
        *rotated_pairs(model),
        *widths_over_tensor_ranks(model),
        *sequence(model),
    ]


def test_wandb_is_refused_where_it_is_not_installed(broken_rules, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = broken_rules("logging=wandb")
    assert problem.endswith(f"{how_to_install('wandb')}, or use logging.wandb=false")


@pytest.mark.parametrize("extra", ["te", "wandb", "plot"])
def test_an_extra_is_installed_as_the_gpu_page_says(extra, pytestconfig):
    command = re.search(r"python -m pip .*", how_to_install(extra))[0]
    assert command.endswith(f"-e '.[{extra}]'")
    assert command in (pytestconfig.rootpath / "docs" / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:00:00:05", 5), ("00:02:30:00", 9000), ("1:00:00:01", 86401), ("400:23:59:59", 34646399)]
)
def test_max_time_counts_days_hours_minutes_seconds(text, seconds):
    assert max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer) == seconds


@pytest.mark.parametrize("text", ["5", "00:24:00:00", "00:00:60:00", "-1:00:00:00", "1d", ""])
def test_other_times_are_refused(text):
    with pytest.raises(ConfigError, match="DD:HH:MM:SS"):
        max_time_s(load_config([f"trainer.max_time='{text}'"]).trainer)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[012-013]",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 3, 4, 2)),
        (SRUN, ("srun", 5, 8, 1, 4, 2)),
        ({"SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1, 1)),
    ],
)
def test_the_launcher_is_read_from_its_variables(env, expected):
    launch = read_launch(env)
    shown = (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    assert (*shown, launch.num_nodes) == expected
    alone = without_launcher({**env, "SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "x"})
    assert read_launch(alone).launcher == "none"
    assert alone["SLURM_JOB_ID"] == "77", "the job of a step is still the process's"
    assert "TORCHELASTIC_RUN_ID" not in alone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "2"}, "rank 3 is not below the world size 2"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' in the environment is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x' in the environment is not a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x' in the environment is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "0"}, "the launcher states 0 processes on each node"),
    ],
)
def test_contradicting_launcher_variables_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_launch({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[012-015,020],login1", "gpu012"), ("a1,b[1-2]", "a1"), ("node7", "node7")]
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host
