"""Which kernels each part of the model runs on: the configuration's nulls, resolved for a machine.

Each null becomes the fastest choice that is correct there. The functions `…_obstacles` name the settings that exclude
an optimization: beside one of them null leaves it out, and `rules.model` refuses an explicit true.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpt_pretrain.config.choices import (
    Activation,
    CrossEntropyFusion,
    CudaGraphImpl,
    MoeGroupedKernel,
    MoeTokenDispatcher,
    PositionEmbedding,
    Precision,
)
from gpt_pretrain.config.derived import kv_channels, matmul_parameters_per_layer, num_query_groups
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.run.fp8 import Fp8Settings, Obstacle, grouped_kernel, local_layers
from gpt_pretrain.run.platform import APEX_PARTS, Platform
from gpt_pretrain.run.products import FC1, FC2, Resolved

# Head widths that FlashAttention-4 takes (`_validate_head_dims` in its interface.py).
WIDTH_MULTIPLE, WIDEST, WIDEST_ON_BLACKWELL = 8, 256, 128
# Head widths at which it beat cuDNN on Hopper, with and without rotated queries and keys. Others were not measured
# (benchmarks/flash_attention_h200.md).
ROTATED_FLASH_ATTENTION_WIDTHS = (128,)
FLASH_ATTENTION_WIDTHS = (64, 128)

# Graphs gain up to this many operations of a layer on a microbatch, 6 per weight and token. On an H200 they sped up
# GPT-2 124M by 1.4 at 32 × 1,024 tokens (1.4e12), and not at 64 × 1,024 (2.8e12).
_MAX_LAYER_FLOPS = 2e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which implementation each part of the model runs on."""

    transformer_engine: bool
    compile: bool
    """torch.compile takes whole layers and fuses what lies between their products."""
    bias_activation_fusion: bool
    activation_cast_fusion: bool
    bias_dropout_add_fusion: bool
    masked_softmax_fusion: bool
    use_flash_attention: bool
    torch_attention: bool
    """Local layers use PyTorch's fused attention, not megatron-core's, which writes all scores."""
    apply_rope_fusion: bool
    fused_single_qkv_rope: bool
    gradient_accumulation_fusion: bool
    embedding_gradient_fusion: bool
    cross_entropy_fusion_impl: CrossEntropyFusion | None
    """None: megatron-core's unfused loss."""
    moe_grouped_gemm: bool
    moe_grouped_kernel: MoeGroupedKernel | None
    """None: no grouped products."""
    moe_permute_fusion: bool
    cuda_graph_impl: CudaGraphImpl | None
    """None: no CUDA graphs."""


def plan_kernels(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """Resolves the `null`s among the kernel keys; explicit values stand. The run breaks no rule."""
    config, model, settings = run.config, run.model, run.fp8
    # Emulated FP8, TorchAO's FP8 and compiled layers need local layers, even where TE is installed.
    in_local_layers = model.compile or (settings is not None and settings.in_local_layers)

    def choose(value: bool | None, otherwise: bool) -> bool:
        return otherwise if value is None else value

    te = choose(model.transformer_engine, platform.transformer_engine is not None and not in_local_layers)
    te_experts = te and model.num_moe_experts is not None
    graphs = _plan_graphs(run, world_size, transformer_engine=te)
    # A compiled layer has no place for separately fused kernels.
    fuses = platform.cuda and not model.compile
    accumulates = choose(model.gradient_accumulation_fusion, fuses)
    # References keep plain attention, and PyTorch's kernels draw dropout from their own random state.
    plain = _is_reference(config) or model.attention_dropout > 0
    fast_local = fuses and not te and not plain
    rotates = choose(model.fused_single_qkv_rope, (te or fast_local) and not any(qkv_rope_obstacles(model)))
    softmax = choose(model.masked_softmax_fusion, platform.apex_softmax and not te and plain and not model.compile)
    tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
    rows = model.vocab_size // model.tensor_model_parallel_size
    grouped = choose(model.moe_grouped_gemm, te_experts)
    return Kernels(
        transformer_engine=te,
        compile=model.compile,
        # torch.compile makes this and bias_dropout_add_fusion: worthwhile on a GPU, minutes of C++ without one.
        # The fused GELU needs a bias and computes the tanh form; SwiGLU has no such limits.
        bias_activation_fusion=choose(
            model.bias_activation_fusion,
            fuses
            and (model.activation is Activation.swiglu or (model.activation is Activation.gelu_tanh and model.bias)),
        ),
        activation_cast_fusion=choose(
            model.activation_cast_fusion,
            te
            and platform.is_hopper
            and settings is not None
            and graphs is None
            and not any(activation_cast_obstacles(run, sizes_known=True)),
        ),
        bias_dropout_add_fusion=choose(model.bias_dropout_add_fusion, fuses),
        masked_softmax_fusion=softmax,
        # Not measured with recomputed attention.
        use_flash_attention=choose(
            model.use_flash_attention,
            te
            and platform.is_hopper
            and platform.flash_attention is not None
            and graphs is None
            and _is_faster_by_flash_attention(model, rotates=rotates)
            and model.activations_checkpoint_granularity is None
            and not any(flash_attention_obstacles(model)),
        ),
        torch_attention=model.compile or (fast_local and not softmax),
        apply_rope_fusion=choose(
            model.apply_rope_fusion, te and model.position_embedding_type is PositionEmbedding.rope
        ),
        fused_single_qkv_rope=rotates,
        gradient_accumulation_fusion=accumulates,
        # Larger microbatches outweigh the table: 16,384 tokens with 51,200 rows gain, 131,072 with 50,304 lose, and
        # nothing in between was measured (benchmarks/fused_kernels_h200.md).
        embedding_gradient_fusion=choose(
            model.embedding_gradient_fusion,
            platform.cuda
            and accumulates
            and graphs is None
            and 3 * tokens <= rows
            and not any(embedding_gradient_obstacles(config)),
        ),
        cross_entropy_fusion_impl=_plan_loss(config, platform),
        moe_grouped_gemm=grouped,
        moe_grouped_kernel=grouped_kernel(model) if grouped else None,
        moe_permute_fusion=choose(model.moe_permute_fusion, te_experts and not any(permutation_obstacles(model))),
        cuda_graph_impl=graphs,
    )


def _plan_graphs(run: Resolved, world_size: int, *, transformer_engine: bool) -> CudaGraphImpl | None:
    """What records CUDA graphs of the layers; None: nothing."""
    model = run.model
    if model.cuda_graph_impl is not None:
        return None if model.cuda_graph_impl is CudaGraphImpl.none else model.cuda_graph_impl
    recipe_gains = run.fp8 is not None and run.fp8.recipe.gains_by_graphs
    layer_flops = 6 * matmul_parameters_per_layer(model) * model.micro_batch_size * model.encoder_seq_length
    # The bitwise comparison (tests/test_gpu_graphs.py) covers GPT's layers, all in FP8, on one rank.
    compared = model.position_embedding_type is PositionEmbedding.learned_absolute and not (
        model.first_last_layers_bf16 or model.fp8_exclude
    )
    small = layer_flops <= _MAX_LAYER_FLOPS
    gain = transformer_engine and recipe_gains and compared and small and world_size == 1
    # Requested kernels that are not tested in graphs take precedence over them.
    asked = model.activation_cast_fusion or model.embedding_gradient_fusion or model.use_flash_attention
    is_free = not asked and not any(graph_obstacles(run))
    return CudaGraphImpl.local if gain and is_free else None


def _is_faster_by_flash_attention(model: ModelConfig, *, rotates: bool) -> bool:
    """Whether FlashAttention-4 was measured to be faster at this head width, in a layout that needs no copies."""
    if rotates:
        return kv_channels(model) in ROTATED_FLASH_ATTENTION_WIDTHS
    # Only without rotation and grouped queries are q, k and v parts of one tensor, and their gradients too.
    parts_of_one = (
        model.position_embedding_type is not PositionEmbedding.rope
        and num_query_groups(model) == model.num_attention_heads
    )
    return parts_of_one and kv_channels(model) in FLASH_ATTENTION_WIDTHS


def _is_reference(config: Config) -> bool:
    """Whether others are compared with this run, so that it keeps plain kernels."""
    return config.trainer.deterministic or config.trainer.precision is Precision.fp32


def _plan_loss(config: Config, platform: Platform) -> CrossEntropyFusion | None:
    fused, implementation = config.model.cross_entropy_loss_fusion, config.model.cross_entropy_fusion_impl
    if fused is None:
        fused = implementation is not None or (platform.cuda and not _is_reference(config))
    return (implementation or CrossEntropyFusion.linear) if fused else None


def fused_parts(kernels: Kernels) -> str:
    """The fields of `Kernels` that are on, with their values, in one line."""
    values = {name: getattr(kernels, name) for name in Kernels.__dataclass_fields__ if name != "transformer_engine"}
    active = [name if value is True else f"{name} ({value.value})" for name, value in values.items() if value]
    return ", ".join(active) or "none"


def describe_kernels(kernels: Kernels, platform: Platform) -> Mapping[str, str]:
    """One line per part of the model for the run's header."""
    te = f"Transformer Engine {platform.transformer_engine}"
    apex = [part.removeprefix("apex_").replace("_", " ") for part in APEX_PARTS if getattr(platform, part)]
    local = "megatron-core local, compiled" if kernels.compile else "megatron-core local"
    return {
        "layers": te if kernels.transformer_engine else local,
        "fused": fused_parts(kernels),
        # It has nothing for a CPU.
        **({"apex": ", ".join(apex) or "not installed: nothing is lost but speed"} if platform.cuda else {}),
    }


def activation_cast_obstacles(run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
    """Settings that exclude `model.activation_cast_fusion`; `sizes_known`: the FP8 layers can be looked at."""
    model, settings = run.model, run.fp8
    if settings is None:
        yield "model.fp8=false", "there is no cast to compute an activation with"
    elif cause := local_layers(model):
        yield cause, "these layers cast for themselves"
    elif (why := settings.recipe.why_not("activation_cast_fusion")) is not None:
        yield f"model.fp8_recipe={settings.recipe.name}", why
    if model.activation is Activation.gelu:
        yield "model.activation=gelu", "it computes GELU's tanh form"
    if model.activation is Activation.swiglu and model.bias:
        yield "model.bias=true", "it adds a bias only to a GELU"
    if model.bias_activation_fusion is False:
        yield "model.bias_activation_fusion=false", "that asks for an unfused activation"
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it writes Transformer Engine's tensors"
    if model.num_moe_experts is not None:
        yield f"model.num_moe_experts={model.num_moe_experts}", "experts have their own MLP"
    elif settings is not None and sizes_known:
        yield from _no_layer_to_fuse_in(run, settings)
    yield from _untested_with_activation_cast(model, settings)


def _untested_with_activation_cast(model: ModelConfig, settings: Fp8Settings | None) -> Iterator[Obstacle]:
    if (granularity := model.activations_checkpoint_granularity) is not None:
        yield f"model.activations_checkpoint_granularity={granularity.name}", "not tested with recomputation"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"
    why = settings and settings.recipe.why_not("activation_cast_fusion with tp_comm_overlap")
    if model.tp_comm_overlap and why:
        yield "model.tp_comm_overlap=true", why


def _no_layer_to_fuse_in(run: Resolved, settings: Fp8Settings) -> Iterator[Obstacle]:
    """Settings that leave no layer whose activation lies between two FP8 products."""
    in_fp8 = {(linear.layer, linear.kind) for linear in run.linears if linear.precision == "fp8"}
    model = run.model
    if any({(layer, FC1), (layer, FC2)} <= in_fp8 for layer in range(model.num_layers)):
        return
    causes = [f"model.fp8_exclude={model.fp8_exclude}"] if settings.exclude else []
    causes += ["model.first_last_layers_bf16=true"] if model.first_last_layers_bf16 else []
    yield " and ".join(causes), "no layer has both projections of its MLP in FP8"


def embedding_gradient_obstacles(config: Config) -> Iterator[Obstacle]:
    """Settings that exclude `model.embedding_gradient_fusion`."""
    model = config.model
    if model.gradient_accumulation_fusion is False:
        yield "model.gradient_accumulation_fusion=false", "a tied LM head must also add its gradient in the product"
    if not model.grad_reduce_in_fp32 and config.trainer.precision is not Precision.fp32:
        yield "model.grad_reduce_in_fp32=false", "BF16 would round every token's gradient"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested beside replayed layers"


def qkv_rope_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.fused_single_qkv_rope`."""
    if model.position_embedding_type is not PositionEmbedding.rope:
        yield f"model.position_embedding_type={model.position_embedding_type.name}", "there is nothing to rotate"
    if model.apply_rope_fusion is False:
        yield "model.apply_rope_fusion=false", "that asks for an unfused rotation"
    if model.qk_layernorm:
        yield "model.qk_layernorm=true", "queries and keys are normalized between their projection and the rotation"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"


def flash_attention_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.use_flash_attention`."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it takes the place of Transformer Engine's attention"
    if cause := local_layers(model):
        yield cause, "it takes the place of Transformer Engine's attention"
    if model.fp8_dot_product_attention:
        yield "model.fp8_dot_product_attention=true", "its products are in BF16"
    if model.context_parallel_size > 1:
        size = model.context_parallel_size
        yield f"model.context_parallel_size={size}", "ranks exchange keys and values in Transformer Engine's attention"
    if model.attention_dropout:
        yield f"model.attention_dropout={model.attention_dropout}", "it has no dropout"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"
    width = kv_channels(model)
    if width % WIDTH_MULTIPLE or width > WIDEST:
        yield f"heads of {width} channels", f"it takes multiples of {WIDTH_MULTIPLE} up to {WIDEST}"


def permutation_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.moe_permute_fusion`."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "its kernels are Transformer Engine's"
    ep = model.expert_model_parallel_size
    if model.moe_token_dispatcher_type is MoeTokenDispatcher.allgather and ep > 1:
        yield (
            f"model.moe_token_dispatcher_type=allgather and model.expert_model_parallel_size={ep}",
            "Transformer Engine 2.12 returns no tokens at all on a rank whose experts got none, and the run would end",
        )


def graph_obstacles(run: Resolved) -> Iterator[Obstacle]:
    """Settings that exclude CUDA graphs."""
    model = run.model
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}", "graphs are for models that fit one GPU, and not tested across several"
    if model.overlap_grad_reduce:
        yield "model.overlap_grad_reduce=true", "reducing gradients during replays is not tested"
    yield from _layers_without_graphs(model)
    yield from _fp8_without_graphs(run)


def _layers_without_graphs(model: ModelConfig) -> Iterator[Obstacle]:
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "graphs hold Transformer Engine's layers"
    if model.num_moe_experts is not None:
        why = "a router gives each expert a different number of tokens, and a graph has fixed shapes"
        yield f"model.num_moe_experts={model.num_moe_experts}", why
    if (granularity := model.activations_checkpoint_granularity) is not None:
        yield f"model.activations_checkpoint_granularity={granularity.name}", "a graph keeps what backward needs"
    for name in ("hidden_dropout", "attention_dropout"):
        if (probability := getattr(model, name)) > 0:
            yield f"model.{name}={probability}", "random numbers drawn in replays are not tested"


def _fp8_without_graphs(run: Resolved) -> Iterator[Obstacle]:
    model, settings, interval = run.model, run.fp8, run.config.logging.fp8_statistics_interval
    if cause := local_layers(model):
        yield cause, "these layers decide in Python, which a replay would not repeat"
    if settings is not None and (why := settings.recipe.why_not("cuda_graph_impl")) is not None:
        yield f"model.fp8_recipe={settings.recipe.name}", why
    if model.fp8_dot_product_attention:
        why = "attention's own products have delayed scales, which replays do not update"
        yield "model.fp8_dot_product_attention=true", why
    if model.fp8_params:
        why = "a graph reads weights at recorded addresses, and transposes of FP8 weights move"
        yield "model.fp8_params=true", why
    if interval is not None:
        yield f"logging.fp8_statistics_interval={interval}", "a replay reports none of its products"
