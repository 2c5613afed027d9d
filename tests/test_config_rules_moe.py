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

RULES = [
    Refused(
        f"{MOE} model.moe_aux_loss_coeff=3 model.moe_router_load_balancing_type=none",
        "model.moe_aux_loss_coeff=3.0 model.moe_router_load_balancing_type=none",
    ),
    Refused(f"{MOE} model.moe_router_topk=1", "model.moe_router_topk=1 model.num_moe_experts=4"),
    Refused(f"{MOE} model.moe_router_topk=5", "model.moe_router_topk=5 model.num_moe_experts=4"),
    Refused(
        f"{MOE} model.moe_aux_loss_coeff=0", "model.moe_aux_loss_coeff=0 model.moe_router_load_balancing_type=aux_loss"
    ),
    Refused(f"{MOE} model.bias=true", "model.bias=true model.qkv_bias"),
    Refused(f"{MOE} parallelism=tp2", "model.tensor_model_parallel_size=2 model.sequence_parallel=true"),
    Refused(f"{MOE} parallelism=cp2", "model.context_parallel_size=2 model.num_moe_experts", world_size=2),
    Refused(f"{MOE} {OVERLAP}", f"{OVERLAP} model.expert_model_parallel_size=1"),
    Refused(f"{MOE} parallelism=ep2 {OVERLAP} {ALL_GATHER}", f"{OVERLAP} {ALL_GATHER}", world_size=2),
    Refused(
        f"{MOE} parallelism=pp2 model.expert_model_parallel_size=2 {OVERLAP}",
        f"{OVERLAP} model.pipeline_model_parallel_size=2",
        world_size=4,
    ),
    Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} model.activations_checkpoint_granularity=selective",
        f"{OVERLAP} model.activations_checkpoint_granularity=selective",
        world_size=2,
    ),
    Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} trainer.precision=fp32", f"{OVERLAP} trainer.precision=fp32", world_size=2
    ),
    Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} model.micro_batch_size=1 model.global_batch_size=2",
        f"{OVERLAP} model.global_batch_size=2 model.micro_batch_size=1",
        world_size=2,
    ),
    Refused(
        f"{MOE} parallelism=ep2 {OVERLAP} trainer.precision=bf16 model.data_parallel_sharding_strategy=optim_grads "
        "model.micro_batch_size=1 model.global_batch_size=4",
        f"model.data_parallel_sharding_strategy=optim_grads {OVERLAP}",
        world_size=2,
    ),
    Refused(
        f"{MOE} model.moe_grouped_gemm=true model.transformer_engine=false",
        "model.moe_grouped_gemm=true model.transformer_engine=false",
    ),
    Refused(
        f"{MOE} {ALL_GATHER} model.moe_permute_fusion=true parallelism=ep2",
        f"model.moe_permute_fusion=true {ALL_GATHER} model.expert_model_parallel_size=2",
        world_size=2,
    ),
    Refused(
        f"{MOE} model.moe_permute_fusion=true model.transformer_engine=false",
        "model.moe_permute_fusion=true model.transformer_engine=false",
    ),
    Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.transformer_engine=false",
        "model.moe_grouped_kernel=triton model.transformer_engine=false",
    ),
    Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.moe_grouped_gemm=false",
        "model.moe_grouped_kernel=triton model.moe_grouped_gemm=false",
    ),
    Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.gradient_accumulation_fusion=false",
        "model.moe_grouped_kernel=triton model.gradient_accumulation_fusion=false",
    ),
    Refused(
        f"{MOE} model.moe_grouped_kernel=triton model.grad_reduce_in_fp32=false trainer.precision=bf16",
        "model.moe_grouped_kernel=triton model.grad_reduce_in_fp32=false",
    ),
    Refused(
        f"{FP8} model.fp8_emulate=true model.moe_grouped_kernel=triton",
        "model.moe_grouped_kernel=triton model.fp8_emulate=true",
    ),
    Refused(f"{FP8} {MANY} {PADDING}", f"{PADDING} model.moe_grouped_kernel=null"),
    Refused(
        f"{FP8} {MANY} model.fp8_exclude=['*.self_attention.*']",
        "model.fp8=true model.fp8_exclude model.moe_grouped_kernel=null",
    ),
    Refused(
        f"{MOE} model.expert_model_parallel_size=3 model.global_batch_size=24",
        "model.num_moe_experts=4 model.expert_model_parallel_size=3",
        world_size=3,
    ),
    Refused(
        f"{MOE} model.expert_tensor_parallel_size=2 model.moe_ffn_hidden_size=63",
        "model.moe_ffn_hidden_size=63 model.expert_tensor_parallel_size=2",
        world_size=2,
    ),
    Refused(
        f"{MOE} model.expert_model_parallel_size=4",
        "model.expert_model_parallel_size=4 model.tensor_model_parallel_size=1 --nproc-per-node 4",
        world_size=2,
    ),
    Refused(
        f"{MOE} parallelism=tp2_sp model.expert_model_parallel_size=2",
        "model.expert_model_parallel_size=2 model.tensor_model_parallel_size=2 --nproc-per-node 4",
    ),
    Refused(f"{MOE} {PADDING}", f"{PADDING} model.fp8=false"),
    Refused(
        f"{FP8} {PADDING} model.moe_token_dispatcher_type=allgather",
        f"{PADDING} model.moe_token_dispatcher_type=alltoall allgather",
    ),
    Refused(
        f"{FP8} model.fp8_emulate=true model.moe_grouped_gemm=true",
        "model.moe_grouped_gemm=true model.fp8_emulate=true",
    ),
    Refused(
        f"{FP8} model.fp8_emulate=true model.moe_permute_fusion=true",
        "model.moe_permute_fusion=true model.fp8_emulate=true",
    ),
    Refused(f"{FP8} model.fp8_emulate=true {PADDING}", f"{PADDING} model.fp8_emulate=true"),
    Refused(f"{MOE} fp8=delayed", "model.fp8_recipe=delayed model.num_moe_experts"),
    Refused(f"{FP8} parallelism=dp model.fp8_params=true", "model.fp8_params=true model.num_moe_experts", world_size=2),
    Refused(f"{FP8} model.moe_grouped_gemm=false", "model.moe_grouped_gemm=false"),
    Refused(f"{FP8} model.moe_ffn_hidden_size=200", "model.moe_ffn_hidden_size=200 128×200 16"),
    Refused(
        f"{FP8} model.fp8_exclude=['*.router']",
        "model.fp8_exclude '*.router' decoder.layers.0.self_attention.linear_qkv "
        "decoder.layers.3.mlp.experts.linear_fc2",
        legal=f"{FP8} model.fp8_exclude=['*.experts.linear_fc2']",
    ),
]


@pytest.mark.parametrize("row", RULES, ids=str)
def test_a_broken_rule_is_told_and_what_it_offers_is_legal(row):
    check_refused(row)


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_router_and_rows_of_experts_ask_for_no_multiples(fp8):
    """Six experts and 300 rows each: neither is a multiple of 16."""
    assert broken_rules([MOE, f"fp8={fp8}", "model.num_moe_experts=6", "model.encoder_seq_length=80"]) == []


def test_an_overlap_in_a_layout_of_more_ranks_than_there_are_is_refused_for_both(broken_rules):
    """No data-parallel rank is left, whose microbatches could be counted."""
    told = "\n".join(broken_rules(*MOE.split(), "parallelism=pp2", OVERLAP, world_size=1))
    assert "model.pipeline_model_parallel_size=2" in told
    assert OVERLAP in told
