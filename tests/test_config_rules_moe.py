"""Cross-field rules of a mixture of experts: each row breaks one; what its message offers obeys it."""

import pytest

from tests.refusals import Refused, broken_rules, check_refused

MOE = "model=moe_small"
# Dimensions that FP8 takes.
FP8 = f"{MOE} fp8=tensorwise"
# Sixteen experts, each with few rows.
MANY = "model.num_moe_experts=16"
ALL_GATHER = "model.moe_token_dispatcher_type=allgather"
OVERLAP = "model.overlap_moe_expert_parallel_comm=true"
PADDING = "model.moe_router_padding_for_quantization=true"

RULES = {
    "experts without experts": Refused(
        "model.expert_model_parallel_size=2",
        told="model.expert_model_parallel_size=2 model.num_moe_experts=null",
        offers="model.expert_model_parallel_size=1",
        legal=f"{MOE} model.expert_model_parallel_size=2",
        world_size=2,
    ),
    "width without experts": Refused(
        "model.moe_ffn_hidden_size=64",
        told="model.moe_ffn_hidden_size=64 model.num_moe_experts=null",
        offers="model.moe_ffn_hidden_size=null",
        legal=f"{MOE} model.moe_ffn_hidden_size=64",
    ),
    "choice without experts": Refused(
        "model.moe_router_topk=4",
        told="model.moe_router_topk=4 model.num_moe_experts=null",
        offers="model.moe_router_topk=2",
        legal=f"{MOE} model.moe_router_topk=4",
    ),
    "dispatcher without experts": Refused(
        "model.moe_token_dispatcher_type=allgather",
        told="model.moe_token_dispatcher_type=allgather model.num_moe_experts=null",
        offers="model.moe_token_dispatcher_type=alltoall",
        legal=f"{MOE} model.moe_token_dispatcher_type=allgather",
    ),
    "balance without experts": Refused(
        "model.moe_router_load_balancing_type=none",
        told="model.moe_router_load_balancing_type=none model.num_moe_experts=null",
        offers="model.moe_router_load_balancing_type=aux_loss",
        legal=f"{MOE} model.moe_router_load_balancing_type=none",
    ),
    "coefficient without a loss": Refused(
        f"{MOE} model.moe_aux_loss_coeff=3 model.moe_router_load_balancing_type=none",
        told="model.moe_aux_loss_coeff=3.0 model.moe_router_load_balancing_type=none",
        offers="~model.moe_aux_loss_coeff | model.moe_router_load_balancing_type=aux_loss",
    ),
    "one expert": Refused(
        f"{MOE} model.num_moe_experts=1", told="model.num_moe_experts=1", offers="model.num_moe_experts=2"
    ),
    "one of several": Refused(
        f"{MOE} model.moe_router_topk=1",
        told="model.moe_router_topk=1 model.num_moe_experts=4",
        offers="model.moe_router_topk=2,3,4",
    ),
    "more than there are": Refused(
        f"{MOE} model.moe_router_topk=5",
        told="model.moe_router_topk=5 model.num_moe_experts=4",
        offers="model.moe_router_topk=2,3,4",
    ),
    "not positive": Refused(f"{MOE} model.moe_router_topk=0", told="model.moe_router_topk=0", legal=MOE),
    "no coefficient": Refused(
        f"{MOE} model.moe_aux_loss_coeff=0",
        told="model.moe_aux_loss_coeff=0 model.moe_router_load_balancing_type=aux_loss",
        offers="model.moe_router_load_balancing_type=none",
    ),
    "negative coefficient": Refused(
        f"{MOE} model.moe_aux_loss_coeff=-1",
        told="model.moe_aux_loss_coeff=-1.0",
        offers="model.moe_aux_loss_coeff=0.01",
        legal=f"{MOE} model.moe_aux_loss_coeff=1",
    ),
    "no z-loss": Refused(
        f"{MOE} model.moe_z_loss_coeff=0",
        told="model.moe_z_loss_coeff=0.0",
        offers="model.moe_z_loss_coeff=null",
        legal=f"{MOE} model.moe_z_loss_coeff=1e-3",
    ),
    "biases": Refused(
        f"{MOE} model.bias=true",
        told="model.bias=true model.qkv_bias",
        offers="model.bias=false",
        legal=f"{MOE} model.qkv_bias=true",
    ),
    "all ranks route all": Refused(
        f"{MOE} parallelism=tp2",
        told="model.tensor_model_parallel_size=2 model.sequence_parallel=true",
        offers="parallelism=tp2_sp | model.tensor_model_parallel_size=1",
    ),
    "parts of a sequence": Refused(
        f"{MOE} parallelism=cp2",
        told="model.context_parallel_size=2 model.num_moe_experts",
        offers="model.context_parallel_size=1",
        legal=f"{MOE} parallelism=ep2",
        world_size=2,
    ),
    "overlap without experts": Refused(
        OVERLAP,
        told=f"{OVERLAP} model.num_moe_experts=null",
        offers="model.overlap_moe_expert_parallel_comm=false",
        legal=f"{MOE} parallelism=ep2 {OVERLAP}",
        world_size=2,
    ),
    "overlap without an exchange": Refused(
        f"{MOE} {OVERLAP}",
        told=f"{OVERLAP} model.expert_model_parallel_size=1",
        offers="model.overlap_moe_expert_parallel_comm=false",
    ),
    "overlap where all ranks gather": Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} {ALL_GATHER}",
        told=f"{OVERLAP} {ALL_GATHER}",
        offers="model.overlap_moe_expert_parallel_comm=false",
        world_size=2,
    ),
    "overlap in a pipeline": Refused(
        f"{MOE} parallelism=pp2 model.expert_model_parallel_size=2 {OVERLAP}",
        told=f"{OVERLAP} model.pipeline_model_parallel_size=2",
        offers="model.overlap_moe_expert_parallel_comm=false",
        world_size=4,
    ),
    "overlap with recomputed layers": Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} model.activations_checkpoint_granularity=selective",
        told=f"{OVERLAP} model.activations_checkpoint_granularity=selective",
        offers="model.overlap_moe_expert_parallel_comm=false",
        world_size=2,
    ),
    "overlap in fp32": Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} trainer.precision=fp32",
        told=f"{OVERLAP} trainer.precision=fp32",
        offers="model.overlap_moe_expert_parallel_comm=false",
        world_size=2,
    ),
    "overlap with no other microbatch": Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} model.micro_batch_size=1 model.global_batch_size=2",
        told=f"{OVERLAP} model.global_batch_size=2 model.micro_batch_size=1",
        offers="model.overlap_moe_expert_parallel_comm=false",
        world_size=2,
    ),
    "overlap with sharded gradients": Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} trainer.precision=bf16 model.data_parallel_sharding_strategy=optim_grads "
        "model.micro_batch_size=1 model.global_batch_size=4",
        told=f"model.data_parallel_sharding_strategy=optim_grads {OVERLAP}",
        offers="model.data_parallel_sharding_strategy=null | model.overlap_moe_expert_parallel_comm=false",
        world_size=2,
    ),
    "grouped local layers": Refused(
        f"{MOE} model.moe_grouped_gemm=true model.transformer_engine=false",
        told="model.moe_grouped_gemm=true model.transformer_engine=false",
        offers="model.moe_grouped_gemm=null",
        legal=f"{MOE} model.moe_grouped_gemm=false model.transformer_engine=false",
    ),
    "fused permutation on ranks that gather all tokens": Refused(
        f"{MOE} {ALL_GATHER} model.moe_permute_fusion=true parallelism=ep2",
        told=f"model.moe_permute_fusion=true {ALL_GATHER} model.expert_model_parallel_size=2",
        offers="model.moe_permute_fusion=null",
        legal=f"{MOE} {ALL_GATHER} parallelism=ep2",
        world_size=2,
    ),
    "fused permutation of local layers": Refused(
        f"{MOE} model.moe_permute_fusion=true model.transformer_engine=false",
        told="model.moe_permute_fusion=true model.transformer_engine=false",
        offers="model.moe_permute_fusion=null",
        legal=f"{MOE} model.moe_permute_fusion=false model.transformer_engine=false",
    ),
    "fused permutation without experts": Refused(
        "model.moe_permute_fusion=true",
        told="model.moe_permute_fusion=true model.num_moe_experts=null",
        offers="model.moe_permute_fusion=null",
        legal=f"{MOE} model.moe_permute_fusion=true",
    ),
    "one kernel of local layers": Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.transformer_engine=false",
        told="model.moe_grouped_kernel=triton model.transformer_engine=false",
        offers="model.moe_grouped_kernel=null,transformer_engine",
    ),
    "one kernel of single products": Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.moe_grouped_gemm=false",
        told="model.moe_grouped_kernel=triton model.moe_grouped_gemm=false",
        offers="model.moe_grouped_kernel=null,transformer_engine",
        legal=f"{MOE} model.moe_grouped_kernel=triton",
    ),
    "one kernel without main gradients": Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.gradient_accumulation_fusion=false",
        told="model.moe_grouped_kernel=triton model.gradient_accumulation_fusion=false",
        offers="model.moe_grouped_kernel=null,transformer_engine",
    ),
    "one kernel with main gradients in BF16": Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.grad_reduce_in_fp32=false trainer.precision=bf16",
        told="model.moe_grouped_kernel=triton model.grad_reduce_in_fp32=false",
        offers="model.moe_grouped_kernel=null,transformer_engine",
    ),
    "one kernel without experts": Refused(
        "model.moe_grouped_kernel=triton",
        told="model.moe_grouped_kernel=triton model.num_moe_experts=null",
        offers="model.moe_grouped_kernel=null",
    ),
    "one kernel of emulated experts": Refused(
        f"{FP8} model.fp8_emulate=true model.moe_grouped_kernel=triton",
        told="model.moe_grouped_kernel=triton model.fp8_emulate=true",
        offers="model.moe_grouped_kernel=null,transformer_engine | model.fp8_emulate=false",
    ),
    "padding for experts in BF16": Refused(
        f"{FP8} {MANY} {PADDING}",
        told=f"{PADDING} model.moe_grouped_kernel=null",
        offers="model.moe_router_padding_for_quantization=false | model.moe_grouped_kernel=transformer_engine",
    ),
    "excluded where one kernel computes": Refused(
        f"{FP8} {MANY} model.fp8_exclude=['*.experts.linear_fc2']",
        told="model.fp8_exclude '*.experts.linear_fc2' model.moe_grouped_kernel=null",
        offers="~model.fp8_exclude | model.moe_grouped_kernel=transformer_engine",
    ),
    "nothing left beside one kernel": Refused(
        f"{FP8} {MANY} model.fp8_exclude=['*.self_attention.*']",
        told="model.fp8=true model.fp8_exclude model.moe_grouped_kernel=null",
        offers="model.moe_grouped_kernel=transformer_engine",
    ),
    "experts over ranks": Refused(
        f"{MOE} model.expert_model_parallel_size=3 model.global_batch_size=24",
        told="model.num_moe_experts=4 model.expert_model_parallel_size=3",
        offers="model.expert_model_parallel_size=1",
        legal=f"{MOE} model.num_moe_experts=6 model.expert_model_parallel_size=3 model.global_batch_size=24",
        world_size=3,
    ),
    "expert over its ranks": Refused(
        f"{MOE} model.expert_tensor_parallel_size=2 model.moe_ffn_hidden_size=63",
        told="model.moe_ffn_hidden_size=63 model.expert_tensor_parallel_size=2",
        offers="model.moe_ffn_hidden_size=62,64 | model.expert_tensor_parallel_size=1",
        world_size=2,
    ),
    "ranks of a stage": Refused(
        f"{MOE} model.expert_model_parallel_size=4",
        told="model.expert_model_parallel_size=4 model.tensor_model_parallel_size=1 --nproc-per-node 4",
        offers="model.expert_model_parallel_size=1,2",
        world_size=2,
    ),
    "ranks of a stage with TP": Refused(
        f"{MOE} parallelism=tp2_sp model.expert_model_parallel_size=2",
        told="model.expert_model_parallel_size=2 model.tensor_model_parallel_size=2 --nproc-per-node 4",
        offers="model.expert_model_parallel_size=1",
        legal=f"{MOE} parallelism=tp2_sp model.expert_model_parallel_size=2 model.expert_tensor_parallel_size=1",
    ),
    "padding without FP8": Refused(
        f"{MOE} {PADDING}",
        told=f"{PADDING} model.fp8=false",
        offers="model.moe_router_padding_for_quantization=false | fp8=tensorwise",
    ),
    "padding of gathered tokens": Refused(
        f"{FP8} {PADDING} model.moe_token_dispatcher_type=allgather",
        told=f"{PADDING} model.moe_token_dispatcher_type=alltoall allgather",
        offers="model.moe_token_dispatcher_type=alltoall | model.moe_router_padding_for_quantization=false",
    ),
    "grouped products of emulated experts": Refused(
        f"{FP8} model.fp8_emulate=true model.moe_grouped_gemm=true",
        told="model.moe_grouped_gemm=true model.fp8_emulate=true",
        offers="model.moe_grouped_gemm=false | model.fp8_emulate=false",
    ),
    "fused permutation for emulated experts": Refused(
        f"{FP8} model.fp8_emulate=true model.moe_permute_fusion=true",
        told="model.moe_permute_fusion=true model.fp8_emulate=true",
        offers="model.moe_permute_fusion=false | model.fp8_emulate=false",
    ),
    "padding for emulated experts": Refused(
        f"{FP8} model.fp8_emulate=true {PADDING}",
        told=f"{PADDING} model.fp8_emulate=true",
        offers="model.moe_router_padding_for_quantization=false | model.fp8_emulate=false",
        legal=f"{FP8} model.fp8_emulate=true",
    ),
    "delayed scales": Refused(
        f"{MOE} fp8=delayed",
        told="model.fp8_recipe=delayed model.num_moe_experts",
        offers="fp8=tensorwise,blockwise,mxfp8",
    ),
    "stored in FP8": Refused(
        f"{FP8} parallelism=dp model.fp8_params=true",
        told="model.fp8_params=true model.num_moe_experts",
        offers="model.fp8_params=false",
        world_size=2,
    ),
    "single products": Refused(
        f"{FP8} model.moe_grouped_gemm=false",
        told="model.moe_grouped_gemm=false",
        offers="model.moe_grouped_gemm=null,true",
    ),
    "width in FP8": Refused(
        f"{FP8} model.moe_ffn_hidden_size=200",
        told="model.moe_ffn_hidden_size=200 128×200 16",
        offers="model.moe_ffn_hidden_size=192,208",
    ),
    "excluded router": Refused(
        f"{FP8} model.fp8_exclude=['*.router']",
        told="model.fp8_exclude '*.router' decoder.layers.0.self_attention.linear_qkv "
        "decoder.layers.3.mlp.experts.linear_fc2",
        legal=f"{FP8} model.fp8_exclude=['*.experts.linear_fc2']",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_told_and_what_it_offers_is_legal(rule):
    check_refused(RULES[rule])


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_router_and_rows_of_experts_ask_for_no_multiples(fp8):
    """Six experts and 300 rows each: neither is a multiple of 16."""
    assert broken_rules([MOE, f"fp8={fp8}", "model.num_moe_experts=6", "model.encoder_seq_length=80"]) == []


def test_an_overlap_in_a_layout_of_more_ranks_than_there_are_is_refused_for_both(broken_rules):
    """No data-parallel rank is left, whose microbatches could be counted."""
    told = "\n".join(broken_rules(*MOE.split(), "parallelism=pp2", OVERLAP, world_size=1))
    assert "model.pipeline_model_parallel_size=2" in told
    assert OVERLAP in told
