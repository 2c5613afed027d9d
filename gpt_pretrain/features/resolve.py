"""A run on a machine: what the machine has, and which kernels and features the run uses there.

Each null of the configuration becomes the fastest choice that is correct on the machine. Settings that exclude an
optimization are its obstacles: beside one of them null leaves it out, and `rules.model` refuses an explicit true.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpt_pretrain.config.choices import (
    Activation,
    CrossEntropyFusion,
    CudaGraphImpl,
    PositionEmbedding,
)
from gpt_pretrain.config.derived import is_reference, keeps_plain_kernels, matmul_parameters_per_layer
from gpt_pretrain.config.recipes import Use
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.features.registry import FEATURES, LIBRARIES
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.signals import ended_at_once
from gpt_pretrain.run.fp8 import Obstacle, grouped_kernel, local_layers
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import (
    Platform,
    apex_parts,
    compiler_problem,
    environment_fields,
    torchao,
    transformer_engine,
)
from gpt_pretrain.run.products import Resolved, resolve
from gpt_pretrain.run.run_spec import RunSpec, plan_layout

# Graphs gain up to this many operations of a layer on a microbatch, 6 per weight and token. On an H200 they sped up
# GPT-2 124M by 1.4 at 32 × 1,024 tokens (1.4e12), and not at 64 × 1,024 (2.8e12).
_MAX_LAYER_FLOPS = 2e12


def detect_platform() -> Platform:
    """Looks up what there is; imports Transformer Engine, TorchAO, apex and `LIBRARIES` if they are installed."""
    with ended_at_once():
        import torch

    variables = environment_fields(os.environ)
    if not torch.cuda.is_available():
        return Platform(cuda=False, num_gpus=0, device_name="CPU", compiler_problem=compiler_problem(), **variables)
    with ended_at_once():
        te_version, te_problem = transformer_engine()
        torchao_version, torchao_problem = torchao()
        found = {library.name: library.find() for library in LIBRARIES}
        parts: dict[str, Any] = apex_parts()
    return Platform(
        cuda=True,
        num_gpus=torch.cuda.device_count(),
        device_name=torch.cuda.get_device_name(),
        compute_capability=torch.cuda.get_device_capability(),
        torch_cuda=torch.version.cuda,
        transformer_engine=te_version,
        transformer_engine_problem=te_problem,
        torchao=torchao_version,
        torchao_problem=torchao_problem,
        libraries={name: version for name, (version, _) in found.items() if version is not None},
        library_problems={name: problem for name, (_, problem) in found.items() if problem is not None},
        **variables,
        **parts,
    )


def build_run_spec(config: Config, launch: Launch, platform: Platform) -> RunSpec:
    """Resolves a configuration that breaks no rule; `rules.machine` checks whether the machine can run it."""
    resolved = resolve(config)
    return RunSpec(
        config=config,
        fp8=resolved.fp8,
        launch=launch,
        platform=platform,
        kernels=plan_kernels(resolved, platform, launch.world_size),
        layout=plan_layout(config.model, launch),
    )


def plan_kernels(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """Resolves the `null`s among the kernel keys; explicit values stand. The run breaks no rule."""
    kernels = _plan_parts(run, platform, world_size)
    for feature in FEATURES:
        used: bool | None = getattr(run.model, feature.key)
        if used is None:
            # None is tested in replayed layers.
            allowed = kernels.cuda_graph_impl is None and feature.gains(run, platform, kernels)
            used = allowed and not any(feature.obstacles(run, sizes_known=True))
        kernels = replace(kernels, features={**kernels.features, feature.key: used})
    return kernels


def _plan_parts(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """The kernels without features."""
    config, model, settings = run.config, run.model, run.fp8
    # Emulated FP8, TorchAO's FP8 and compiled layers need local layers, even where TE is installed.
    in_local_layers = model.compile or (settings is not None and settings.in_local_layers)

    def choose(value: bool | None, otherwise: bool) -> bool:
        return otherwise if value is None else value

    te = choose(model.transformer_engine, platform.transformer_engine is not None and not in_local_layers)
    graphs = _plan_graphs(run, world_size, transformer_engine=te)
    # A compiled layer has no place for separately fused kernels.
    fuses = platform.cuda and not model.compile
    accumulates = choose(model.gradient_accumulation_fusion, fuses)
    plain = keeps_plain_kernels(config)
    fast_local = fuses and not te and not plain
    softmax = choose(model.masked_softmax_fusion, platform.apex_softmax and not te and plain and not model.compile)
    grouped = choose(model.moe_grouped_gemm, te and model.num_moe_experts is not None)
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
        bias_dropout_add_fusion=choose(model.bias_dropout_add_fusion, fuses),
        masked_softmax_fusion=softmax,
        torch_attention=model.compile or (fast_local and not softmax),
        apply_rope_fusion=choose(
            model.apply_rope_fusion, te and model.position_embedding_type is PositionEmbedding.rope
        ),
        gradient_accumulation_fusion=accumulates,
        cross_entropy_fusion_impl=_plan_loss(config, platform),
        moe_grouped_gemm=grouped,
        moe_grouped_kernel=grouped_kernel(model) if grouped else None,
        cuda_graph_impl=graphs,
        features={},
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
    asked = any(feature.is_asked(model) for feature in FEATURES)
    is_free = not asked and not any(graph_obstacles(run))
    return CudaGraphImpl.local if gain and is_free else None


def _plan_loss(config: Config, platform: Platform) -> CrossEntropyFusion | None:
    fused, implementation = config.model.cross_entropy_loss_fusion, config.model.cross_entropy_fusion_impl
    if fused is None:
        fused = implementation is not None or (platform.cuda and not is_reference(config))
    return (implementation or CrossEntropyFusion.linear) if fused else None


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
    if settings is not None and (why := settings.recipe.why_not(Use.cuda_graph_impl)) is not None:
        yield f"model.fp8_recipe={settings.recipe.name}", why
    if model.fp8_dot_product_attention:
        why = "attention's own products have delayed scales, which replays do not update"
        yield "model.fp8_dot_product_attention=true", why
    if model.fp8_params:
        why = "a graph reads weights at recorded addresses, and transposes of FP8 weights move"
        yield "model.fp8_params=true", why
    if interval is not None:
        yield f"logging.fp8_statistics_interval={interval}", "a replay reports none of its products"
