"""Which kernels each part of the model runs on: the configuration's nulls, resolved for a machine.

Each null becomes the fastest choice that is correct there; a choice that the rules refuse is never made.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt_pretrain.config.choices import CrossEntropyFusion, CudaGraphImpl, PositionEmbedding, Precision
from gpt_pretrain.config.derived import kv_channels, matmul_parameters_per_layer, num_query_groups
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.spec.obstacles import (
    activation_cast_obstacles,
    embedding_gradient_obstacles,
    flash_attention_obstacles,
    graph_obstacles,
    qkv_rope_obstacles,
)
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.resolved import Resolved

# Head widths with which FlashAttention-4 made steps faster than cuDNN on Hopper, with and without rotated queries and
# keys. Others were not measured (benchmarks/flash_attention_h200.md).
ROTATED_FLASH_ATTENTION_WIDTHS = (128,)
FLASH_ATTENTION_WIDTHS = (64, 128)

# Operations of one layer on one microbatch, 6 for each weight and token. On an H200, graphs made GPT-2 124M 1.4 times
# as fast at 32 × 1,024 tokens (1.4e12), and no faster at 64 × 1,024 (2.8e12).
_MAX_LAYER_FLOPS = 2e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which implementation each part of the model runs on: the configuration's nulls, resolved for this machine."""

    transformer_engine: bool
    bias_activation_fusion: bool
    activation_cast_fusion: bool
    bias_dropout_add_fusion: bool
    masked_softmax_fusion: bool
    use_flash_attention: bool
    apply_rope_fusion: bool
    fused_single_qkv_rope: bool
    gradient_accumulation_fusion: bool
    embedding_gradient_fusion: bool
    cross_entropy_loss_fusion: CrossEntropyFusion | None
    """None: megatron-core's loss of separate operations."""
    moe_grouped_gemm: bool
    cuda_graph_impl: CudaGraphImpl | None
    """None: no CUDA graphs."""


def plan_kernels(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """Resolves each `null` of the kernel keys; explicit values stand.

    Args:
        run: A configuration that breaks no rule.
        platform: The machine.
        world_size: Processes of the run.
    """
    config, model, settings = run.config, run.model, run.fp8
    # Local layers compute emulated FP8, even where TE is installed.
    otherwise_te = platform.transformer_engine is not None and not model.fp8_emulate

    def choose(value: bool | None, otherwise: bool) -> bool:
        return otherwise if value is None else value

    te = choose(model.transformer_engine, otherwise_te)
    graphs = _plan_graphs(run, world_size, transformer_engine=te)
    # Emulated layers compute their weight gradients themselves.
    accumulates = choose(model.gradient_accumulation_fusion, platform.cuda and not model.fp8_emulate)
    rotates = choose(model.fused_single_qkv_rope, te and not any(qkv_rope_obstacles(model)))
    rotary = model.position_embedding_type is PositionEmbedding.rope
    tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
    rows = model.vocab_size // model.tensor_model_parallel_size
    return Kernels(
        transformer_engine=te,
        # These two are compiled by torch.compile: worth it on a GPU, minutes of C++ compilation without one.
        # The fused GELU adds the bias itself and computes the tanh form; SwiGLU has no such limits.
        bias_activation_fusion=choose(
            model.bias_activation_fusion,
            platform.cuda
            and (model.activation.value == "swiglu" or (model.activation.value == "gelu_tanh" and model.bias)),
        ),
        # With tensorwise scaling the losses of 200 steps have been 0.55% apart (benchmarks/fused_kernels_h200.md).
        activation_cast_fusion=choose(
            model.activation_cast_fusion,
            te
            and platform.is_hopper
            and settings is not None
            and settings.recipe.fuses_activation_cast
            and graphs is None
            and not any(activation_cast_obstacles(run, sizes_known=True)),
        ),
        bias_dropout_add_fusion=choose(model.bias_dropout_add_fusion, platform.cuda),
        masked_softmax_fusion=choose(model.masked_softmax_fusion, platform.apex_softmax and not te),
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
        apply_rope_fusion=choose(model.apply_rope_fusion, te and rotary),
        fused_single_qkv_rope=rotates,
        gradient_accumulation_fusion=accumulates,
        # With more tokens in a microbatch, the table is not what costs: 16,384 tokens and 51,200 rows gain, 131,072 and
        # 50,304 lose, and nothing between them was measured (benchmarks/fused_kernels_h200.md).
        embedding_gradient_fusion=choose(
            model.embedding_gradient_fusion,
            platform.cuda
            and accumulates
            and graphs is None
            and 3 * tokens <= rows
            and not any(embedding_gradient_obstacles(config)),
        ),
        cross_entropy_loss_fusion=_plan_loss(config, platform),
        moe_grouped_gemm=choose(model.moe_grouped_gemm, te and model.num_moe_experts is not None),
        cuda_graph_impl=graphs,
    )


def _plan_graphs(run: Resolved, world_size: int, *, transformer_engine: bool) -> CudaGraphImpl | None:
    """What records graphs of the layers; None: nothing does. Replays on several ranks are not tested."""
    model = run.model
    if model.cuda_graph_impl is not None:
        return None if model.cuda_graph_impl is CudaGraphImpl.none else model.cuda_graph_impl
    recipe_gains = run.fp8 is not None and run.fp8.recipe.gains_by_graphs
    layer_flops = 6 * matmul_parameters_per_layer(model) * model.micro_batch_size * model.encoder_seq_length
    # The bitwise comparison (tests/test_gpu_graphs.py) covers GPT's layers, all of them in FP8.
    compared = model.position_embedding_type is PositionEmbedding.learned_absolute and not (
        model.first_last_layers_bf16 or model.fp8_exclude
    )
    small = layer_flops <= _MAX_LAYER_FLOPS
    gain = transformer_engine and recipe_gains and compared and small and world_size == 1
    # A requested kernel that is not tested in graphs takes precedence over them.
    asked = model.activation_cast_fusion or model.embedding_gradient_fusion or model.use_flash_attention
    is_free = not asked and not any(graph_obstacles(run))
    return CudaGraphImpl.local if gain and is_free else None


def _is_faster_by_flash_attention(model: ModelConfig, *, rotates: bool) -> bool:
    """Whether heads have a measured width, in layouts that need no copies for it."""
    if rotates:
        return kv_channels(model) in ROTATED_FLASH_ATTENTION_WIDTHS
    # Without rotation and shared keys, queries, keys and values are parts of one tensor, and so are their gradients.
    parts_of_one = (
        model.position_embedding_type is not PositionEmbedding.rope
        and num_query_groups(model) == model.num_attention_heads
    )
    return parts_of_one and kv_channels(model) in FLASH_ATTENTION_WIDTHS


def _plan_loss(config: Config, platform: Platform) -> CrossEntropyFusion | None:
    fused, implementation = config.model.cross_entropy_loss_fusion, config.model.cross_entropy_fusion_impl
    if fused is None:
        # Deterministic and fp32 runs serve as references: they keep the plain loss.
        to_compare = config.trainer.deterministic or config.trainer.precision is Precision.fp32
        fused = implementation is not None or (platform.cuda and not to_compare)
    return (implementation or CrossEntropyFusion.linear) if fused else None


def fused_parts(kernels: Kernels) -> str:
    """The keys of `Kernels` that are on, with their values, in one line."""
    values = {name: getattr(kernels, name) for name in Kernels.__dataclass_fields__ if name != "transformer_engine"}
    active = [name if value is True else f"{name} ({value.value})" for name, value in values.items() if value]
    return ", ".join(active) or "none"


def describe_kernels(kernels: Kernels, platform: Platform) -> Mapping[str, str]:
    """One line per part of the model for the run's header."""
    layers = (
        f"Transformer Engine {platform.transformer_engine}" if kernels.transformer_engine else "megatron-core local"
    )
    apex = [
        name.removeprefix("apex_").replace("_", " ")
        for name in platform.__dataclass_fields__
        if name.startswith("apex_") and getattr(platform, name)
    ]
    return {
        "layers": layers,
        "fused": fused_parts(kernels),
        "apex": ", ".join(apex) or "not installed: nothing is lost but speed",
    }
