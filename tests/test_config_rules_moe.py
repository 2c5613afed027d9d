"""Cross-field rules of a mixture of experts: one row breaks a rule, its neighbour obeys it."""

import pytest

MOE = "model=moe_small"
EP2, ETP2 = "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=2"
PADDING = "model.moe_router_padding_for_quantization=true"
# Dimensions that FP8 takes.
FP8 = (MOE, "fp8=tensorwise")

# What breaks a rule, with how many processes; the message, or how it starts; a neighbour that is legal.
RULES = {
    "experts without experts": (
        [EP2],
        2,
        "model.expert_model_parallel_size=2 has no effect without experts (model.num_moe_experts=null); use 1, or a "
        "number of experts",
        [MOE, EP2],
    ),
    "width without experts": (
        ["model.moe_ffn_hidden_size=64"],
        1,
        "model.moe_ffn_hidden_size=64 has no effect without experts (model.num_moe_experts=null); use null, or a "
        "number of experts",
        [MOE, "model.moe_ffn_hidden_size=64"],
    ),
    "choice without experts": (
        ["model.moe_router_topk=4"],
        1,
        "model.moe_router_topk=4 has no effect without experts (model.num_moe_experts=null); use 2, or a number of "
        "experts",
        [MOE, "model.moe_router_topk=4"],
    ),
    "dispatcher without experts": (
        ["model.moe_token_dispatcher_type=allgather"],
        1,
        "model.moe_token_dispatcher_type=allgather has no effect without experts (model.num_moe_experts=null); use "
        "alltoall, or a number of experts",
        [MOE, "model.moe_token_dispatcher_type=allgather"],
    ),
    "balance without experts": (
        ["model.moe_router_load_balancing_type=none"],
        1,
        "model.moe_router_load_balancing_type=none has no effect without experts (model.num_moe_experts=null); use "
        "aux_loss, or a number of experts",
        [MOE, "model.moe_router_load_balancing_type=none"],
    ),
    "coefficient without a loss": (
        [MOE, "model.moe_aux_loss_coeff=3", "model.moe_router_load_balancing_type=none"],
        1,
        "model.moe_aux_loss_coeff=3.0 has no effect with model.moe_router_load_balancing_type=none; leave it out, or "
        "choose a load-balancing loss",
        [MOE, "model.moe_aux_loss_coeff=3"],
    ),
    "one expert": (
        [MOE, "model.num_moe_experts=1"],
        1,
        "model.num_moe_experts=1 leaves the router nothing to choose; use 2 or more, or null for one MLP",
        [MOE, "model.num_moe_experts=2"],
    ),
    "one of several": (
        [MOE, "model.moe_router_topk=1"],
        1,
        "model.moe_router_topk=1 with model.num_moe_experts=4: one expert alone has weight 1, and the router learns "
        "nothing; use 2, 3 or 4",
        [MOE, "model.moe_router_topk=3"],
    ),
    "more than there are": (
        [MOE, "model.moe_router_topk=5"],
        1,
        "model.moe_router_topk=5 with model.num_moe_experts=4; use 2, 3 or 4",
        [MOE, "model.moe_router_topk=4"],
    ),
    "not positive": (
        [MOE, "model.moe_router_topk=0"],
        1,
        "model.moe_router_topk=0 is not positive; use 1 or more",
        [MOE],
    ),
    "no coefficient": (
        [MOE, "model.moe_aux_loss_coeff=0"],
        1,
        "model.moe_aux_loss_coeff=0 leaves nothing of model.moe_router_load_balancing_type=aux_loss; use a "
        "coefficient, or model.moe_router_load_balancing_type=none",
        [MOE, "model.moe_aux_loss_coeff=0", "model.moe_router_load_balancing_type=none"],
    ),
    "negative coefficient": (
        [MOE, "model.moe_aux_loss_coeff=-1"],
        1,
        "model.moe_aux_loss_coeff=-1.0 is negative; use 0 or more",
        [MOE, "model.moe_aux_loss_coeff=1"],
    ),
    "no z-loss": (
        [MOE, "model.moe_z_loss_coeff=0"],
        1,
        "model.moe_z_loss_coeff=0.0 is not positive; use null for none",
        [MOE, "model.moe_z_loss_coeff=1e-3"],
    ),
    "biases": (
        [MOE, "model.bias=true"],
        1,
        "model.bias=true is not carried through to experts; use model.bias=false (model.qkv_bias may be true)",
        [MOE, "model.qkv_bias=true"],
    ),
    "all ranks route all": (
        [MOE, "parallelism=tp2"],
        2,
        "model.tensor_model_parallel_size=2 with experts needs model.sequence_parallel=true: all of its ranks would "
        "route all tokens; use parallelism=tp2_sp, or tensor_model_parallel_size=1",
        [MOE, "parallelism=tp2_sp"],
    ),
    "parts of a sequence": (
        [MOE, "parallelism=cp2"],
        2,
        "model.context_parallel_size=2 with experts (model.num_moe_experts) is not proven: routers would balance each "
        "part of a sequence by itself; use context_parallel_size=1",
        [MOE, "parallelism=ep2"],
    ),
    "grouped local layers": (
        [MOE, "model.moe_grouped_gemm=true", "model.transformer_engine=false"],
        1,
        "model.moe_grouped_gemm=true is a product of Transformer Engine's, and model.transformer_engine=false; use "
        "moe_grouped_gemm=null",
        [MOE, "model.moe_grouped_gemm=false", "model.transformer_engine=false"],
    ),
    "experts over ranks": (
        [MOE, "model.expert_model_parallel_size=3"],
        3,
        "model.num_moe_experts=4 is not divisible by model.expert_model_parallel_size=3; use 1, 2 or 4",
        [MOE, "model.num_moe_experts=6", "model.expert_model_parallel_size=3", "model.global_batch_size=24"],
    ),
    "expert over its ranks": (
        [MOE, ETP2, "model.moe_ffn_hidden_size=63"],
        2,
        "model.moe_ffn_hidden_size=63 is not divisible by model.expert_tensor_parallel_size=2; use 62 or 64, or "
        "model.expert_tensor_parallel_size=1",
        [MOE, ETP2, "model.moe_ffn_hidden_size=64", "model.global_batch_size=16"],
    ),
    "ranks of a stage": (
        [MOE, "model.expert_model_parallel_size=4"],
        2,
        "model.expert_model_parallel_size=4 × model.tensor_model_parallel_size=1 does not divide the 2 processes of a "
        "pipeline stage; use expert_model_parallel_size=1 or 2, or start it with torchrun --nproc-per-node 4 -m",
        [MOE, EP2],
    ),
    "ranks of a stage with TP": (
        [MOE, "parallelism=tp2_sp", EP2],
        2,
        "model.expert_model_parallel_size=2 × model.tensor_model_parallel_size=2 does not divide the 2 processes of a "
        "pipeline stage; use expert_model_parallel_size=1, or start it with torchrun --nproc-per-node 4 -m",
        [MOE, "parallelism=tp2_sp", EP2, "model.expert_tensor_parallel_size=1"],
    ),
    "padding without FP8": (
        [MOE, PADDING],
        1,
        "model.moe_router_padding_for_quantization=true pads for FP8 products, and model.fp8=false; use false, or "
        "fp8=tensorwise",
        [*FP8, PADDING],
    ),
    "padding of gathered tokens": (
        [*FP8, PADDING, "model.moe_token_dispatcher_type=allgather"],
        1,
        "model.moe_router_padding_for_quantization=true needs model.moe_token_dispatcher_type=alltoall, and it is "
        "allgather; use alltoall, or false",
        [*FP8, "model.moe_token_dispatcher_type=allgather"],
    ),
    "emulation": (
        [*FP8, "model.fp8_emulate=true"],
        1,
        "model.fp8_emulate=true does not reach the products of experts (model.num_moe_experts); use fp8=none, or a GPU "
        "with FP8",
        [*FP8],
    ),
    "delayed scales": (
        [MOE, "fp8=delayed"],
        1,
        "model.fp8_recipe=delayed with experts (model.num_moe_experts): the history of an expert that gets few tokens "
        "goes stale, and delayed scales are not proven; use fp8=tensorwise, blockwise or mxfp8",
        [MOE, "fp8=blockwise"],
    ),
    "stored in FP8": (
        [*FP8, "parallelism=dp", "model.fp8_params=true"],
        2,
        "model.fp8_params=true is not proven with experts (model.num_moe_experts); use false",
        [*FP8, "parallelism=dp"],
    ),
    "single products": (
        [*FP8, "model.moe_grouped_gemm=false"],
        1,
        "model.moe_grouped_gemm=false with FP8: single products of an expert's few tokens are not proven; use null or "
        "true",
        [*FP8, "model.moe_grouped_gemm=true"],
    ),
    "width in FP8": (
        [*FP8, "model.moe_ffn_hidden_size=200"],
        1,
        "model.moe_ffn_hidden_size=200: the weight of mlp.experts.linear_fc2 is 128×200, and FP8 products take "
        "multiples of 16; use 192 or 208",
        [*FP8, "model.moe_ffn_hidden_size=208"],
    ),
    "excluded router": (
        [*FP8, "model.fp8_exclude=['*.router']"],
        1,
        "model.fp8_exclude: '*.router' matches no linear layer; they are named",
        [*FP8, "model.fp8_exclude=['*.experts.linear_fc2']"],
    ),
}


@pytest.mark.parametrize(("overrides", "world_size", "message", "legal"), RULES.values(), ids=RULES)
def test_rule_is_told_and_its_neighbour_passes(overrides, world_size, message, legal, broken_rules):
    problems = broken_rules(*overrides, world_size=world_size)
    assert [problem for problem in problems if problem.startswith(message)], problems
    assert broken_rules(*legal, world_size=world_size) == []


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_router_and_rows_of_experts_ask_for_no_multiples(fp8, broken_rules):
    """Six experts and 300 rows each: neither is a multiple of 16."""
    six = ["model.num_moe_experts=6", "model.encoder_seq_length=80"]
    assert broken_rules(MOE, f"fp8={fp8}", *six, world_size=1) == []
