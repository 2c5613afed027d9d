"""The model of this rank: one GPTModel per chunk of its pipeline stage, wrapped for data parallelism.

`translate_*` make megatron-core's configs of a run: the fields of `spec.core_fields`, in the types of torch and
megatron-core.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from gpt_pretrain.config.choices import CrossEntropyFusion, MoeGroupedKernel
from gpt_pretrain.config.derived import padded_vocab_size
from gpt_pretrain.megatron.fused_layers import (
    install_embeddings,
    install_rotation,
    install_split,
    install_weight_gradients,
)
from gpt_pretrain.megatron.layers import LocalLayers, apply_quantization_overrides, build_layer_spec, leave_sorted
from gpt_pretrain.megatron.loss import install_loss_heads, losses_from_head
from gpt_pretrain.megatron.parallel import sum_over
from gpt_pretrain.megatron.weights import built_without_first_values, initialize_weights
from gpt_pretrain.megatron.whole_layers import CompiledLayers, prepare_graphs
from gpt_pretrain.spec.core_fields import (
    ActivationFunction,
    Dtype,
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
)
from gpt_pretrain.spec.run_spec import RunSpec

_ACTIVATIONS = {
    ActivationFunction.silu: F.silu,
    ActivationFunction.gelu: F.gelu,
    ActivationFunction.gelu_tanh: partial(F.gelu, approximate="tanh"),
}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The type of torch with this name."""
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _live(value: Any) -> Any:
    """A field's value in the type that megatron-core expects."""
    if isinstance(value, Dtype):
        return torch_dtype(value)
    if isinstance(value, ActivationFunction):
        return _ACTIVATIONS[value]
    if isinstance(value, HighPrecision):
        override = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        overrides = {"high_precision": override} if value.patterns else {}
        return RecipeConfig([GlobMatcher(pattern, "high_precision") for pattern in value.patterns], overrides)
    return value


def _arguments(fields: Iterable[Field]) -> dict[str, Any]:
    return {field.name: _live(field.value) for field in fields}


def translate_transformer(spec: RunSpec) -> TransformerConfig:
    """The config of the layers."""
    return TransformerConfig(**_arguments(transformer_fields(spec)))


def translate_ddp(spec: RunSpec) -> DistributedDataParallelConfig:
    """The config of gradient reduction and parameter gathering."""
    return DistributedDataParallelConfig(**_arguments(ddp_fields(spec)))


def translate_optimizer(spec: RunSpec) -> OptimizerConfig:
    """The config of the optimizer."""
    options = OptimizerConfig(**_arguments(optimizer_fields(spec)))
    if spec.model.optim.use_precision_aware_optimizer:
        # Set after megatron-core's check, which asks for Transformer Engine's FusedAdam: ours replaces it.
        for name, value in _arguments(optimizer_state_fields(spec)).items():
            setattr(options, name, value)
    return options


def build_gpt_chunks(spec: RunSpec, local_layers: LocalLayers | None = None) -> list[GPTModel]:
    """The GPTModels of this pipeline rank (one, or one per virtual stage), with weights drawn from the seed.

    Layers without TE are built from `local_layers`; None: megatron-core's own, compiled if the run asks for that.

    Returns:
        Models that map tokens [b, s] to logits [b, s, vocab / TP], or with labels to losses [b, s], on the last
        stage, and to hidden states [s, b, h] on the others (s / TP under sequence parallelism).
    """
    model, kernels, platform = spec.model, spec.kernels, spec.platform
    transformer_config = translate_transformer(spec)
    vp_size = model.virtual_pipeline_model_parallel_size
    if kernels.gradient_accumulation_fusion:
        install_weight_gradients()
    if kernels.transformer_engine:
        install_split()
    if kernels.fused_single_qkv_rope:
        install_rotation()
    if kernels.cuda_graph_impl is not None:
        prepare_graphs(model.seed)
    if local_layers is None:
        local_layers = CompiledLayers() if kernels.compile else LocalLayers(apex_layer_norm=platform.apex_layer_norm)
    chunks = []
    for vp_stage in range(vp_size or 1):
        stage = vp_stage if vp_size else None
        with built_without_first_values(fp8_params=transformer_config.fp8_param):
            chunk = GPTModel(
                config=transformer_config,
                transformer_layer_spec=build_layer_spec(transformer_config, kernels, local_layers, stage),
                vocab_size=padded_vocab_size(model),
                max_sequence_length=model.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                parallel_output=True,
                share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
                position_embedding_type=model.position_embedding_type.value,
                rotary_percent=model.rotary_percentage,
                rotary_base=model.rotary_base,
                rope_scaling=model.rope_scaling_factor is not None,
                rope_scaling_factor=model.rope_scaling_factor or 1.0,
                vp_stage=stage,
            )
        apply_quantization_overrides(chunk)
        leave_sorted(chunk)
        local_layers.attach(chunk)
        chunks.append(chunk.to(platform.device))
    initialize_weights(chunks, model)
    return chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """This rank's model, ready to train."""

    spec: RunSpec
    """What it was built from."""
    gpt_chunks: list[GPTModel]
    """The model chunks of this rank, unwrapped."""
    chunks: list[DistributedDataParallel]
    """The same chunks, wrapped: what the schedules and the optimizer take."""
    transformer_config: TransformerConfig
    output_processor: Callable[..., torch.Tensor] | None
    """The function that turns GPTModel's hidden states into losses (`loss.losses_from_head`); its context is the
    gradient of each token's loss. None: GPTModel computes logits and losses itself."""
    num_parameters: int
    """Parameters of the whole model, over all ranks; tied embeddings count once."""

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """All ranks hold the newest parameters inside, for whatever reads them outside of a training step.

        With `overlap_param_gather` the optimizer leaves each rank with its own new shard, and the next forward pass in
        training gathers the rest. A validation or a checkpoint in between would see the old ones.
        """
        overlapped = self.chunks[0].ddp_config.overlap_param_gather
        if overlapped:
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            if overlapped:
                for chunk in self.chunks:
                    chunk.enable_forward_pre_hook()

    @contextmanager
    def without_overlapped_exchange(self) -> Iterator[None]:
        """Microbatches follow each other inside, each through whole layers, for what counts or watches them."""
        overlapped = self.transformer_config.overlap_moe_expert_parallel_comm
        self.transformer_config.overlap_moe_expert_parallel_comm = False
        try:
            yield
        finally:
            self.transformer_config.overlap_moe_expert_parallel_comm = overlapped

    def train(self) -> None:
        """Turns dropout on."""
        for chunk in self.chunks:
            chunk.train()

    def eval(self) -> None:
        """Turns dropout off."""
        for chunk in self.chunks:
            chunk.eval()


def build_model(spec: RunSpec, local_layers: LocalLayers | None = None) -> Model:
    """Builds this rank's chunks and wraps them in megatron-core's DistributedDataParallel.

    Process groups must be open (`megatron.parallel.process_groups`). The arguments are those of `build_gpt_chunks`.
    """
    gpt_chunks = build_gpt_chunks(spec, local_layers)
    transformer_config, kernels = gpt_chunks[0].config, spec.kernels
    linear = kernels.cross_entropy_loss_fusion is CrossEntropyFusion.linear
    if linear:
        install_loss_heads(gpt_chunks)
    if kernels.embedding_gradient_fusion:
        install_embeddings(gpt_chunks)
    modules: list[torch.nn.Module] = list(gpt_chunks)
    if transformer_config.bf16:
        modules = [Float16Module(transformer_config, chunk) for chunk in gpt_chunks]
    ddp_config = translate_ddp(spec)
    chunks = [
        DistributedDataParallel(
            transformer_config,
            ddp_config,
            module,
            # Only the first chunk's gradients are reduced while others still compute.
            disable_bucketing=index > 0,
        )
        for index, module in enumerate(modules)
    ]
    # The schedules look for these in the config; megatron-core's training script sets them in the same way.
    transformer_config.finalize_model_grads_func = finalize_model_grads
    transformer_config.grad_scale_func = None
    if spec.model.overlap_grad_reduce:
        if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
            from gpt_pretrain.megatron.te_layers import announce_gradients

            announce_gradients(chunks)
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer_config.no_sync_func = no_sync[0] if len(chunks) == 1 else no_sync
        if len(chunks) > 1:
            transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if spec.model.overlap_param_gather and len(chunks) > 1:
        transformer_config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    return Model(
        spec=spec,
        gpt_chunks=gpt_chunks,
        chunks=chunks,
        transformer_config=transformer_config,
        output_processor=losses_from_head if linear else None,
        num_parameters=sums_over_parameters(gpt_chunks, torch.Tensor.numel)[0],
    )


def _parameters_by_group(
    chunks: Sequence[GPTModel],
) -> Iterator[tuple[torch.distributed.ProcessGroup, list[torch.nn.Parameter]]]:
    """This rank's parameters with the ranks that share the model: those of experts, and those of all the rest.

    Over these ranks each counts once: replicas and copies of a tied embedding are left out on all but one of them.
    """
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    copies = {
        id(parameter)
        for chunk in chunks
        for parameter in chunk.parameters()
        if getattr(parameter, "shared", False) and not chunk.pre_process
    }
    for of_experts, rank, group in (
        (False, parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_model_parallel_group()),
        (
            True,
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        ),
    ):
        yield (
            group,
            [
                parameter
                for name, parameter in named
                if (".experts." in name) is of_experts
                and id(parameter) not in copies
                and (rank == 0 or getattr(parameter, "tensor_model_parallel", False))
            ],
        )


def sums_over_parameters(chunks: Sequence[GPTModel], *measures: Callable[[torch.nn.Parameter], int]) -> list[int]:
    """The sum of each measure over all parameters of the whole model; all ranks call it."""
    totals = torch.zeros(len(measures), dtype=torch.int64)
    for group, parameters in _parameters_by_group(chunks):
        own = [sum(map(measure, parameters)) for measure in measures]
        sums = torch.tensor(own, dtype=torch.int64, device=torch.cuda.current_device())
        sum_over(group, sums)
        totals += sums.cpu()
    return totals.tolist()
