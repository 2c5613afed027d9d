"""A run on a machine: what the machine has, and which kernels and features the run uses there.

Each null of the configuration becomes the fastest choice that is correct on the machine. Settings that exclude an
optimization are its obstacles: beside one of them null leaves it out, and `rules.model` refuses an explicit true.
"""

import os
from dataclasses import replace
from typing import Any

from gpt_pretrain.config.choices import Activation, CrossEntropyFusion, LossName, PositionEmbedding
from gpt_pretrain.config.derived import is_reference, keeps_plain_kernels, uses_yarn
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.cuda_graphs import CudaGraphs
from gpt_pretrain.features.registry import fused_kernels, libraries
from gpt_pretrain.features.sliding_window import takes_window
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.signals import ended_at_once
from gpt_pretrain.run.fp8 import grouped_kernel
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import (
    Platform,
    apex_parts,
    compiler_problem,
    environment_fields,
    library_fields,
    torchao,
    transformer_engine,
)
from gpt_pretrain.run.products import Resolved, resolve
from gpt_pretrain.run.run_spec import RunSpec, plan_layout


def detect_platform() -> Platform:
    """Looks up what there is; imports Transformer Engine, TorchAO, apex and `libraries()` if they are installed."""
    with ended_at_once():
        import torch

    variables = environment_fields(os.environ)
    if not torch.cuda.is_available():
        return Platform(cuda=False, num_gpus=0, device_name="CPU", compiler_problem=compiler_problem(), **variables)
    with ended_at_once():
        found = library_fields(transformer_engine(), torchao(), {each.name: each.find() for each in libraries()})
        parts: dict[str, Any] = apex_parts()
    return Platform(
        cuda=True,
        num_gpus=torch.cuda.device_count(),
        device_name=torch.cuda.get_device_name(),
        compute_capability=torch.cuda.get_device_capability(),
        torch_cuda=torch.version.cuda,
        **found,
        **variables,
        **parts,
    )


def build_run_spec(config: Config, launch: Launch, platform: Platform) -> RunSpec:
    """Resolves a configuration that breaks no rule; `rules.machine` checks whether the machine can run it."""
    run = resolve(config, launch)
    return RunSpec(
        config=config,
        fp8=run.fp8,
        launch=launch,
        platform=platform,
        kernels=plan_kernels(run, platform, launch.world_size),
        layout=plan_layout(config.model, launch),
    )


def plan_kernels(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """Resolves the `null`s among the kernel keys; explicit values stand. The run breaks no rule."""
    kernels = _plan_parts(run, platform, world_size)
    for kernel in fused_kernels():
        used: bool | None = kernel.wanted(run.model)
        if used is None:
            # None is tested in replayed layers.
            allowed = kernels.cuda_graph_impl is None and kernel.gains(run, platform, kernels)
            used = allowed and not any(kernel.obstacles(run, sizes_known=True))
        kernels = replace(kernels, features={**kernels.features, kernel.key: used})
    return kernels


def _plan_parts(run: Resolved, platform: Platform, world_size: int) -> Kernels:
    """The kernels without features."""
    config, model, settings = run.config, run.model, run.fp8
    # Emulated FP8, TorchAO's FP8 and compiled layers need local layers, even where TE is installed.
    in_local_layers = model.compile or (settings is not None and settings.in_local_layers)

    def choose(value: bool | None, otherwise: bool) -> bool:
        return otherwise if value is None else value

    te = choose(model.transformer_engine, platform.transformer_engine is not None and not in_local_layers)
    # Requested kernels, which are not tested in graphs, take precedence over them.
    is_free = te and world_size == 1 and not any(kernel.is_asked(model) for kernel in fused_kernels())
    # A compiled layer has no place for separately fused kernels.
    fuses = platform.cuda and not model.compile
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
        torch_attention=model.compile or (fast_local and not softmax and takes_window(model)),
        apply_rope_fusion=choose(
            model.apply_rope_fusion,
            te and model.position_embedding_type is PositionEmbedding.rope and not uses_yarn(model),
        ),
        gradient_accumulation_fusion=choose(model.gradient_accumulation_fusion, fuses),
        cross_entropy_fusion_impl=_plan_loss(config, platform),
        moe_grouped_gemm=grouped,
        moe_grouped_kernel=grouped_kernel(model) if grouped else None,
        cuda_graph_impl=CudaGraphs().choose(run, is_free=is_free),
        features={},
    )


def _plan_loss(config: Config, platform: Platform) -> CrossEntropyFusion | None:
    if config.model.loss is not LossName.cross_entropy:
        return None
    fused, implementation = config.model.cross_entropy_loss_fusion, config.model.cross_entropy_fusion_impl
    if fused is None:
        asked = implementation is not None or config.model.z_loss_coeff > 0
        fused = asked or (platform.cuda and not is_reference(config))
    return (implementation or CrossEntropyFusion.linear) if fused else None
