"""Which kernel multiplies the rows of a rank's experts, and whether that leaves them out of FP8.

It follows from the configuration alone, because it decides which layers FP8 covers.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Activation, MoeGroupedKernel, MoeTokenDispatcher
from gpt_pretrain.config.derived import moe_ffn_hidden_size
from gpt_pretrain.config.schema import ModelConfig

# Null means one kernel for all from this many experts on a rank, and up to this many operations of an expert's first
# product. Transformer Engine launches a product for each expert. An H200's host took about 65 µs for each, in which the
# GPU computes 4e10 operations: with 128 experts of 3e9 a step took 983 ms, and its kernels 368 (the shape of
# Qwen3-30B-A3B, four layers, 2 × 4,096 tokens). For few large experts cuBLAS is faster.
MANY_EXPERTS = 16
MAX_PRODUCT_FLOPS = 4e10

# The linear layers of experts, by their names in the whole model.
EXPERT_LINEARS = "*.mlp.experts.*"


def grouped_kernel_obstacles(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Settings that exclude `model.moe_grouped_kernel=triton`, and why."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it takes the place of Transformer Engine's grouped product"
    if model.moe_grouped_gemm is False:
        yield "model.moe_grouped_gemm=false", "that asks for a product for each expert"
    if model.gradient_accumulation_fusion is False:
        yield "model.gradient_accumulation_fusion=false", "it adds weight gradients to the main gradient itself"
    if not model.grad_reduce_in_fp32:
        yield "model.grad_reduce_in_fp32=false", "it adds weight gradients in fp32"


def grouped_kernel(model: ModelConfig) -> MoeGroupedKernel:
    """The kernel of grouped products in a model with experts, also in one that breaks rules."""
    if model.moe_grouped_kernel is not None:
        return model.moe_grouped_kernel
    suits = _has_many_small_experts(model) and not any(grouped_kernel_obstacles(model))
    return MoeGroupedKernel.triton if suits else MoeGroupedKernel.transformer_engine


def permutation_obstacles(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Settings that exclude `model.moe_permute_fusion`, and why."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "its kernels are Transformer Engine's"
    if model.moe_token_dispatcher_type is MoeTokenDispatcher.allgather and model.expert_model_parallel_size > 1:
        yield (
            f"model.moe_token_dispatcher_type=allgather and model.expert_model_parallel_size="
            f"{model.expert_model_parallel_size}",
            "Transformer Engine 2.12 returns no tokens at all on a rank whose experts got none, and the run would end",
        )


def leaves_experts_out(model: ModelConfig) -> bool:
    """Whether FP8, if it is on, leaves the experts out because one BF16 kernel computes them."""
    return model.num_moe_experts is not None and grouped_kernel(model) is MoeGroupedKernel.triton


def _has_many_small_experts(model: ModelConfig) -> bool:
    experts, ep, tp = model.num_moe_experts, model.expert_model_parallel_size, model.tensor_model_parallel_size
    # The configuration may break rules.
    if experts is None or min(experts, ep, tp) < 1 or experts // ep < MANY_EXPERTS:
        return False
    tokens = model.micro_batch_size * model.encoder_seq_length / tp
    rows = tokens * ep * model.moe_router_topk / experts
    # Ranks that share an expert's matrices have fewer columns, and by the same factor more rows.
    columns = (2 if model.activation is Activation.swiglu else 1) * moe_ffn_hidden_size(model)
    return 2.0 * rows * columns * model.hidden_size <= MAX_PRODUCT_FLOPS
