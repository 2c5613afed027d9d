"""Cross-field rules of a mixture of experts: their number, their routing, and their layout over ranks.

The sources are megatron-core 0.19.2 (transformer/moe, `initialize_model_parallel`) and Transformer Engine 2.12.
Combinations that no test trains are refused as untested.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Fp8Backend, MoeGroupedKernel, MoeLoadBalancing, MoeTokenDispatcher, Precision
from gpt_pretrain.config.derived import data_parallel_size, expert_tensor_parallel_size, moe_ffn_hidden_size
from gpt_pretrain.config.errors import divisors, indivisible, multiples_near, one_of, refusal, refusals, show
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.schedule import batches
from gpt_pretrain.run.fp8 import Obstacle, grouped_kernel_obstacles
from gpt_pretrain.run.products import Resolved


def routing(model: ModelConfig, experts: int) -> Iterator[str]:
    """The number of experts per token, and their load balancing."""
    if not 2 <= model.moe_router_topk <= experts:
        # A softmax over the score of one expert is 1, whatever the router says.
        why = ": one expert alone has weight 1, and the router learns nothing" if model.moe_router_topk == 1 else ""
        yield (
            f"model.moe_router_topk={model.moe_router_topk} with model.num_moe_experts={experts}{why}; "
            f"use {one_of(range(2, experts + 1))}"
        )
    if model.moe_aux_loss_coeff == 0 and model.moe_router_load_balancing_type is not MoeLoadBalancing.none:
        yield (
            "model.moe_aux_loss_coeff=0 switches off model.moe_router_load_balancing_type="
            f"{model.moe_router_load_balancing_type.name}; use a coefficient above 0, or "
            "model.moe_router_load_balancing_type=none"
        )
    elif model.moe_router_load_balancing_type is MoeLoadBalancing.none and model.moe_aux_loss_coeff not in (0.01, 0.0):
        yield (
            f"model.moe_aux_loss_coeff={model.moe_aux_loss_coeff} has no effect with "
            "model.moe_router_load_balancing_type=none; leave it out, or use "
            "model.moe_router_load_balancing_type=aux_loss"
        )


def expert_layers(model: ModelConfig) -> Iterator[str]:
    """What experts require of their own layers and of those around them."""
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    if model.bias:
        yield "model.bias=true is not implemented for experts; use model.bias=false (model.qkv_bias may be true)"
    if tp > 1 and not model.sequence_parallel:
        yield (
            f"model.tensor_model_parallel_size={tp} with experts needs model.sequence_parallel=true: otherwise every "
            "rank routes all tokens; use parallelism=tp2_sp, or model.tensor_model_parallel_size=1"
        )
    if cp > 1:
        why = "each router would balance only its part of a sequence, which is not proven"
        experts = f"experts (model.num_moe_experts={model.num_moe_experts})"
        yield refusal(f"model.context_parallel_size={cp}", experts, why, "model.context_parallel_size=1")
    if model.moe_grouped_kernel is MoeGroupedKernel.triton:
        obstacles = grouped_kernel_obstacles(model)
        yield from refusals("model.moe_grouped_kernel=triton", obstacles, "null or transformer_engine")
    if model.moe_grouped_gemm and model.transformer_engine is False:
        why, off = "it needs Transformer Engine's layers", "model.moe_grouped_gemm=null"
        yield refusal("model.moe_grouped_gemm=true", "model.transformer_engine=false", why, off)


def _exchange_obstacles(run: Resolved) -> Iterator[Obstacle]:
    """What keeps the exchange of rows from overlapping with another microbatch's layers."""
    model, pp = run.model, run.model.pipeline_model_parallel_size
    if model.expert_model_parallel_size == 1:
        yield "model.expert_model_parallel_size=1", "no rows are exchanged"
    if (dispatcher := model.moe_token_dispatcher_type) is not MoeTokenDispatcher.alltoall:
        yield f"model.moe_token_dispatcher_type={dispatcher.name}", "only alltoall is split up"
    if pp > 1:
        yield f"model.pipeline_model_parallel_size={pp}", "not proven with pipelines"
    if (granularity := model.activations_checkpoint_granularity) is not None:
        yield f"model.activations_checkpoint_granularity={granularity.name}", "not proven with recomputed layers"
    if run.config.trainer.precision is Precision.fp32:
        yield "trainer.precision=fp32", "megatron-core overlaps it in bf16 only"
    launch = run.launch
    batch, asked = next(iter(batches(model).items()))
    if launch is not None and batch == model.micro_batch_size * data_parallel_size(model, launch.world_size):
        setting = f"{asked} and model.micro_batch_size={model.micro_batch_size}"
        yield setting, "a step has one microbatch, and no other one to overlap with"


def expert_ranks(model: ModelConfig, experts: int, launch: Launch | None) -> Iterator[str]:
    """The division of experts, and of their matrices, over ranks."""
    ep, etp = model.expert_model_parallel_size, expert_tensor_parallel_size(model)
    pp = model.pipeline_model_parallel_size
    per_stage = None if launch is None or launch.world_size % pp else launch.world_size // pp
    legal = [size for size in divisors(experts) if per_stage is None or per_stage % (size * etp) == 0]
    if experts % ep:
        way = f"model.expert_model_parallel_size={one_of(legal or divisors(experts))}"
        yield indivisible(f"model.num_moe_experts={experts}", f"model.expert_model_parallel_size={ep}", way)
    key = "tensor_model_parallel_size" if model.expert_tensor_parallel_size is None else "expert_tensor_parallel_size"
    inner = moe_ffn_hidden_size(model)
    if inner % etp:
        name = "ffn_hidden_size" if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
        ways = one_of(multiples_near(inner, etp)), "model.expert_tensor_parallel_size=1"
        yield indivisible(f"model.{name}={inner}", f"model.{key}={etp}", *ways)
    if launch is not None and per_stage is not None and per_stage % (ep * etp):
        way = f"use model.expert_model_parallel_size={one_of(legal)}, or " if legal else ""
        yield (
            f"model.expert_model_parallel_size={ep} × model.{key}={etp} does not divide the {per_stage} processes of a "
            f"pipeline stage; {way}{launch.how_to_start(ep * etp * pp)}"
        )


def fp8_experts(run: Resolved) -> Iterator[str]:
    """FP8 and experts: what their products can use, and what is proven."""
    model = run.model
    padding = "model.moe_router_padding_for_quantization=true"
    pads = "it pads for FP8 products"
    if run.fp8 is None:
        if model.moe_router_padding_for_quantization:
            yield refusal(padding, "model.fp8=false", pads, "false", "fp8=tensorwise")
        return
    if (why := run.fp8.recipe.why_not(Use.num_moe_experts)) is not None:
        asked, ways = f"model.fp8_recipe={show(model.fp8_recipe)}", recipes_for(Use.num_moe_experts)
        if run.fp8.backend is Fp8Backend.torchao:
            # A preset does not change the engine of the command line.
            asked, ways = "model.fp8_backend=torchao", f"{ways} with model.fp8_backend=null"
        yield refusal(asked, "experts (model.num_moe_experts)", why, f"fp8={ways}")
    if model.fp8_params:
        yield refusal("model.fp8_params=true", "experts (model.num_moe_experts)", "not proven", "false")
    if model.fp8_emulate:
        why, on = "each emulated expert is a local layer with products of its own", "model.fp8_emulate=false"
        if model.moe_grouped_kernel is MoeGroupedKernel.triton:
            off = "null or transformer_engine"
            yield refusal("model.moe_grouped_kernel=triton", "model.fp8_emulate=true", why, off, on)
        for key in ("moe_grouped_gemm", "moe_router_padding_for_quantization"):
            if getattr(model, key):
                yield refusal(f"model.{key}=true", "model.fp8_emulate=true", why, "false", on)
    elif model.moe_grouped_gemm is False:
        why = "separate products over an expert's few tokens are not proven"
        yield refusal("model.moe_grouped_gemm=false", "model.fp8=true", why, "null or true")
    if model.moe_router_padding_for_quantization and run.fp8.experts_left_out:
        kernel = f"model.moe_grouped_kernel={show(model.moe_grouped_kernel)}"
        why = f"{pads}, and one BF16 kernel computes the experts"
        yield refusal(padding, kernel, why, "false", "model.moe_grouped_kernel=transformer_engine")
    dispatcher = model.moe_token_dispatcher_type
    if model.moe_router_padding_for_quantization and dispatcher is not MoeTokenDispatcher.alltoall:
        setting = f"model.moe_token_dispatcher_type={dispatcher.name}"
        yield refusal(padding, setting, "only alltoall can pad", "model.moe_token_dispatcher_type=alltoall", "false")


def expert_problems(run: Resolved) -> Iterator[str]:
    """All problems of a mixture of experts with positive sizes."""
    model = run.model
    if model.num_moe_experts is None:
        return
    yield from routing(model, model.num_moe_experts)
    yield from expert_layers(model)
    yield from expert_ranks(model, model.num_moe_experts, run.launch)
    if model.overlap_moe_expert_parallel_comm:
        key = "model.overlap_moe_expert_parallel_comm"
        yield from refusals(f"{key}=true", _exchange_obstacles(run), f"{key}=false")
    yield from fp8_experts(run)
