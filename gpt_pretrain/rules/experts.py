"""Cross-field rules of a mixture of experts: how many, how tokens find them, and how ranks share them out.

Each rule yields one message. The sources are megatron-core 0.19.2 (transformer/moe, `initialize_model_parallel`) and
Transformer Engine 2.12. Combinations are refused as unproven if no test here trains them.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Fp8Backend, MoeGroupedKernel, MoeLoadBalancing, MoeTokenDispatcher, Precision
from gpt_pretrain.config.derived import expert_tensor_parallel_size, moe_ffn_hidden_size, num_microbatches
from gpt_pretrain.config.errors import divisors, multiples_near, one_of, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.model import refusals
from gpt_pretrain.spec.fp8 import grouped_kernel_obstacles
from gpt_pretrain.spec.kernels import permutation_obstacles
from gpt_pretrain.spec.products import Resolved
from gpt_pretrain.spec.recipes import recipes_for


def routing(model: ModelConfig, experts: int) -> Iterator[str]:
    """How many experts compute a token, and what balances them."""
    if experts < 2:
        yield f"model.num_moe_experts={experts} leaves a router no choice; use 2 or more, or a model without experts"
    elif not 2 <= model.moe_router_topk <= experts:
        # A softmax over the score of one expert is 1, whatever the router says.
        why = "one expert alone has weight 1, and the router learns nothing" if model.moe_router_topk == 1 else ""
        yield (
            f"model.moe_router_topk={model.moe_router_topk} with model.num_moe_experts={experts}"
            f"{': ' if why else ''}{why}; use {one_of(list(range(2, experts + 1)))}"
        )
    if model.moe_aux_loss_coeff < 0:
        yield f"model.moe_aux_loss_coeff={model.moe_aux_loss_coeff} is negative; use 0.01 or another above 0"
    elif model.moe_aux_loss_coeff == 0 and model.moe_router_load_balancing_type is not MoeLoadBalancing.none:
        yield (
            "model.moe_aux_loss_coeff=0 switches off model.moe_router_load_balancing_type="
            f"{model.moe_router_load_balancing_type.name}; use a coefficient above 0, or "
            "model.moe_router_load_balancing_type=none"
        )
    elif model.moe_router_load_balancing_type is MoeLoadBalancing.none and model.moe_aux_loss_coeff not in (0.01, 0.0):
        yield (
            f"model.moe_aux_loss_coeff={model.moe_aux_loss_coeff} has no effect with "
            "model.moe_router_load_balancing_type=none; leave it out, or use moe_router_load_balancing_type=aux_loss"
        )
    if model.moe_z_loss_coeff is not None and model.moe_z_loss_coeff <= 0:
        yield f"model.moe_z_loss_coeff={model.moe_z_loss_coeff} is not positive; use null for none"


def expert_layers(model: ModelConfig) -> Iterator[str]:
    """What experts require of their own layers and of those around them."""
    tp = model.tensor_model_parallel_size
    if model.bias:
        yield "model.bias=true is not implemented for experts; use model.bias=false (model.qkv_bias may be true)"
    if tp > 1 and not model.sequence_parallel:
        yield (
            f"model.tensor_model_parallel_size={tp} with experts needs model.sequence_parallel=true: otherwise every "
            "rank routes all tokens; use parallelism=tp2_sp, or tensor_model_parallel_size=1"
        )
    if model.context_parallel_size > 1:
        yield (
            f"model.context_parallel_size={model.context_parallel_size} with experts (model.num_moe_experts) is not "
            "proven: each router would balance only its part of a sequence; use context_parallel_size=1"
        )
    if model.moe_grouped_kernel is MoeGroupedKernel.triton:
        yield from refusals(
            "model.moe_grouped_kernel=triton", grouped_kernel_obstacles(model), "null or transformer_engine"
        )
    if model.moe_permute_fusion:
        yield from refusals("model.moe_permute_fusion=true", permutation_obstacles(model), "moe_permute_fusion=null")
    if model.moe_grouped_gemm and model.transformer_engine is False:
        yield (
            "model.moe_grouped_gemm=true needs Transformer Engine's layers, and model.transformer_engine=false; "
            "use moe_grouped_gemm=null"
        )


def overlapped_exchange(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """What overlapping the exchange of rows with another microbatch's layers requires."""
    model = run.model
    if not model.overlap_moe_expert_parallel_comm:
        return

    def obstacles() -> Iterator[tuple[str, str]]:
        if model.expert_model_parallel_size == 1:
            yield "model.expert_model_parallel_size=1", "no rows are exchanged"
        if model.moe_token_dispatcher_type is not MoeTokenDispatcher.alltoall:
            yield f"model.moe_token_dispatcher_type={model.moe_token_dispatcher_type.name}", "only alltoall is split up"
        if model.pipeline_model_parallel_size > 1:
            yield (
                f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}",
                "it is not proven with pipelines",
            )
        if (granularity := model.activations_checkpoint_granularity) is not None:
            yield (
                f"model.activations_checkpoint_granularity={granularity.name}",
                "it is not proven with recomputed layers",
            )
        if run.config.trainer.precision is Precision.fp32:
            yield "trainer.precision=fp32", "megatron-core overlaps it in bf16 alone"
        if launch is not None and num_microbatches(model, launch.world_size) == 1:
            yield (
                f"model.global_batch_size={model.global_batch_size} and "
                f"model.micro_batch_size={model.micro_batch_size}",
                "a step has one microbatch, and no other one to overlap with",
            )

    yield from refusals(
        "model.overlap_moe_expert_parallel_comm=true", obstacles(), "overlap_moe_expert_parallel_comm=false"
    )


def expert_ranks(model: ModelConfig, experts: int, launch: Launch | None) -> Iterator[str]:
    """How ranks share experts, and the matrices of each."""
    ep, etp = model.expert_model_parallel_size, expert_tensor_parallel_size(model)
    pp = model.pipeline_model_parallel_size
    per_stage = None if launch is None or launch.world_size % pp else launch.world_size // pp
    legal = [size for size in divisors(experts) if per_stage is None or per_stage % (size * etp) == 0]
    if experts % ep:
        yield (
            f"model.num_moe_experts={experts} is not divisible by model.expert_model_parallel_size={ep}; "
            f"use expert_model_parallel_size={one_of(legal or divisors(experts))}"
        )
    key = "tensor_model_parallel_size" if model.expert_tensor_parallel_size is None else "expert_tensor_parallel_size"
    inner = moe_ffn_hidden_size(model)
    if inner % etp:
        name = "ffn_hidden_size" if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
        yield (
            f"model.{name}={inner} is not divisible by model.{key}={etp}; use {one_of(multiples_near(inner, etp))}, "
            "or model.expert_tensor_parallel_size=1"
        )
    if launch is not None and per_stage is not None and per_stage % (ep * etp):
        way = f"use expert_model_parallel_size={one_of(legal)}, or " if legal else ""
        yield (
            f"model.expert_model_parallel_size={ep} × model.{key}={etp} does not divide the {per_stage} processes of a "
            f"pipeline stage; {way}{launch.how_to_start(ep * etp * pp)}"
        )


def fp8_experts(run: Resolved) -> Iterator[str]:
    """FP8 and experts: what their products can use, and what is proven."""
    model = run.model
    if run.fp8 is None:
        if model.moe_router_padding_for_quantization:
            yield (
                "model.moe_router_padding_for_quantization=true pads for FP8 products, and model.fp8=false; "
                "use false, or fp8=tensorwise"
            )
        return
    if (why := run.fp8.recipe.why_not("num_moe_experts")) is not None:
        asked, ways = f"model.fp8_recipe={show(model.fp8_recipe)}", one_of(recipes_for("num_moe_experts"))
        if run.fp8.backend is Fp8Backend.torchao:
            # A preset does not change the engine of the command line.
            asked, ways = "model.fp8_backend=torchao", f"{ways} with fp8_backend=null"
        yield f"{asked} with experts (model.num_moe_experts): {why}; use fp8={ways}"
    if model.fp8_params:
        yield "model.fp8_params=true is not proven with experts (model.num_moe_experts); use false"
    if model.fp8_emulate:
        yield from _emulated_experts(model)
    elif model.moe_grouped_gemm is False:
        yield (
            "model.moe_grouped_gemm=false with FP8: separate products over an expert's few tokens are not proven; "
            "use null or true"
        )
    if model.moe_router_padding_for_quantization and run.fp8.experts_left_out:
        yield (
            "model.moe_router_padding_for_quantization=true pads for FP8 products, and with model.moe_grouped_kernel="
            f"{show(model.moe_grouped_kernel)} one BF16 kernel computes the experts; use false, or "
            "moe_grouped_kernel=transformer_engine"
        )
    if model.moe_router_padding_for_quantization and model.moe_token_dispatcher_type is not MoeTokenDispatcher.alltoall:
        yield (
            "model.moe_router_padding_for_quantization=true needs model.moe_token_dispatcher_type=alltoall, and it is "
            f"{model.moe_token_dispatcher_type.name}; use alltoall, or false"
        )


def _emulated_experts(model: ModelConfig) -> Iterator[str]:
    """Settings without use for emulated experts, each of which has its own products."""
    if model.moe_grouped_kernel is MoeGroupedKernel.triton:
        yield (
            "model.moe_grouped_kernel=triton with model.fp8_emulate=true: each emulated expert is a local layer; use "
            "null or transformer_engine, or fp8_emulate=false"
        )
    for key in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_padding_for_quantization"):
        if getattr(model, key):
            yield (
                f"model.{key}=true with model.fp8_emulate=true: each emulated expert is a local layer and computes its "
                "own products, of as many rows as it has; use false, or fp8_emulate=false"
            )


def expert_problems(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """All problems of a mixture of experts with positive sizes; without `launch`, none about the number of ranks."""
    model = run.model
    if model.num_moe_experts is None:
        return
    yield from routing(model, model.num_moe_experts)
    yield from expert_layers(model)
    yield from expert_ranks(model, model.num_moe_experts, launch)
    yield from overlapped_exchange(run, launch)
    yield from fp8_experts(run)
