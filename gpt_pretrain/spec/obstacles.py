"""Settings that exclude an optimisation: it is refused where requested, and `null` leaves it out.

`rules.kernels` refuses; `spec.kernels` resolves null.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Activation, CudaGraphImpl, PositionEmbedding, Precision
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import FC1, FC2
from gpt_pretrain.spec.resolved import Resolved

# A setting, and why it excludes the optimisation.
type Obstacle = tuple[str, str]

# Heads that FlashAttention-4 takes (`_validate_head_dims` of its interface.py).
WIDTH_MULTIPLE, WIDEST, WIDEST_ON_BLACKWELL = 8, 256, 128


def activation_cast_obstacles(run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
    """Settings that exclude `model.activation_cast_fusion`; the layers in FP8 are looked at only if `sizes_known`."""
    model, settings = run.model, run.fp8
    if settings is None:
        yield "model.fp8=false", "there is no cast to compute an activation with"
    elif settings.emulate:
        yield "model.fp8_emulate=true", "emulated layers cast for themselves"
    elif (why := settings.recipe.why_not("activation_cast_fusion")) is not None:
        yield f"model.fp8_recipe={settings.recipe.name}", why
    if model.activation is Activation.gelu:
        yield "model.activation=gelu", "it computes GELU's tanh form"
    if model.activation is Activation.swiglu and model.bias:
        yield "model.bias=true", "it adds a bias only to a GELU"
    if model.bias_activation_fusion is False:
        yield "model.bias_activation_fusion=false", "that asks for an activation of separate operations"
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it writes tensors of Transformer Engine"
    if model.num_moe_experts is not None:
        yield f"model.num_moe_experts={model.num_moe_experts}", "experts have an MLP of their own"
    elif settings is not None and sizes_known:
        yield from _no_layer_to_fuse_in(run, settings)
    yield from _untested_with_activation_cast(run)


def _untested_with_activation_cast(run: Resolved) -> Iterator[Obstacle]:
    model, settings = run.model, run.fp8
    if model.activations_checkpoint_granularity is not None:
        granularity = model.activations_checkpoint_granularity.name
        yield f"model.activations_checkpoint_granularity={granularity}", "not tested with recomputation"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"
    if model.tp_comm_overlap and settings is not None:
        why = settings.recipe.why_not("activation_cast_fusion with tp_comm_overlap")
        if why is not None:
            yield "model.tp_comm_overlap=true", why


def _no_layer_to_fuse_in(run: Resolved, settings: Fp8Settings) -> Iterator[Obstacle]:
    """Settings that leave no layer with an activation between two products in FP8."""
    in_fp8 = {(linear.layer, linear.kind) for linear in run.linears() if linear.precision == "fp8"}
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
        yield "model.gradient_accumulation_fusion=false", "a tied LM head must add its gradient in the product too"
    if model.fp8_emulate:
        yield "model.fp8_emulate=true", "emulated layers compute weight gradients themselves"
    if not model.grad_reduce_in_fp32 and config.trainer.precision is not Precision.fp32:
        yield "model.grad_reduce_in_fp32=false", "BF16 would round the gradient of every token"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested beside replayed layers"


def qkv_rope_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.fused_single_qkv_rope`."""
    if model.position_embedding_type is not PositionEmbedding.rope:
        yield f"model.position_embedding_type={model.position_embedding_type.name}", "there is nothing to rotate"
    if model.apply_rope_fusion is False:
        yield "model.apply_rope_fusion=false", "it asks for a rotation by separate operations"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"


def flash_attention_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.use_flash_attention`."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it takes the place of Transformer Engine's attention"
    if model.fp8_emulate:
        yield "model.fp8_emulate=true", "it takes the place of Transformer Engine's attention"
    if model.fp8_dot_product_attention:
        yield "model.fp8_dot_product_attention=true", "its products are in BF16"
    if model.context_parallel_size > 1:
        size = model.context_parallel_size
        yield f"model.context_parallel_size={size}", "ranks exchange keys and values in Transformer Engine's attention"
    if model.attention_dropout:
        yield f"model.attention_dropout={model.attention_dropout}", "it drops nothing"
    if model.cuda_graph_impl is CudaGraphImpl.local:
        yield "model.cuda_graph_impl=local", "not tested in replayed layers"
    width = kv_channels(model)
    if width % WIDTH_MULTIPLE or width > WIDEST:
        yield f"heads of {width} channels", f"it takes multiples of {WIDTH_MULTIPLE} up to {WIDEST}"


def graph_obstacles(run: Resolved) -> Iterator[Obstacle]:
    """Settings that exclude CUDA graphs; with any of them, `null` means none."""
    yield from _graphs_and_layout(run.model)
    yield from _graphs_and_layers(run.model)
    yield from _graphs_and_fp8(run)


def _graphs_and_layout(model: ModelConfig) -> Iterator[Obstacle]:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}", "graphs are for models that fit one GPU, and not tested across several"
    if model.overlap_grad_reduce:
        yield "model.overlap_grad_reduce=true", "reducing gradients behind replays is not tested"


def _graphs_and_layers(model: ModelConfig) -> Iterator[Obstacle]:
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "graphs hold Transformer Engine's layers"
    if model.num_moe_experts is not None:
        yield (
            f"model.num_moe_experts={model.num_moe_experts}",
            "a router gives each expert a different number of tokens, and a graph has fixed shapes",
        )
    granularity = model.activations_checkpoint_granularity
    if granularity is not None:
        yield (
            f"model.activations_checkpoint_granularity={granularity.name}",
            "a graph keeps what its backward pass needs",
        )
    for name in ("hidden_dropout", "attention_dropout"):
        probability = getattr(model, name)
        if probability > 0:
            yield f"model.{name}={probability}", "random numbers drawn in replays are not tested"


def _graphs_and_fp8(run: Resolved) -> Iterator[Obstacle]:
    model, settings, interval = run.model, run.fp8, run.config.logging.fp8_statistics_interval
    if model.fp8_emulate:
        yield "model.fp8_emulate=true", "emulated layers take decisions in Python, which a replay would not repeat"
    if settings is not None and (why := settings.recipe.why_not("cuda_graph_impl")) is not None:
        yield f"model.fp8_recipe={settings.recipe.name}", why
    if model.fp8_dot_product_attention:
        yield (
            "model.fp8_dot_product_attention=true",
            "attention's own products have delayed scales, which replays do not update",
        )
    if model.fp8_params:
        yield (
            "model.fp8_params=true",
            "a graph reads weights at recorded addresses, and transposes of FP8 weights move",
        )
    if interval is not None:
        yield (
            f"logging.fp8_statistics_interval={interval}",
            "a replay reports none of its products",
        )
