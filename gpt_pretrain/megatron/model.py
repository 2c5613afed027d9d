"""The model of this rank: one `GPT` per chunk of its pipeline stage, wrapped for data parallelism.

`translate_*` make a run's megatron-core configs: the fields of `core_fields` in torch's and megatron-core's types.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu as core_squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from gpt_pretrain.config.choices import CrossEntropyFusion, MoeGroupedKernel
from gpt_pretrain.config.derived import shards_gradients, shards_weights
from gpt_pretrain.features.registry import used_features
from gpt_pretrain.megatron.core_fields import (
    ActivationFunction,
    Dtype,
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
    yarn_fields,
)
from gpt_pretrain.megatron.fallbacks import install_split, install_weight_gradients
from gpt_pretrain.megatron.gpt import GPT
from gpt_pretrain.megatron.layers import LocalLayers, apply_quantization_overrides, build_layer_spec, leave_sorted
from gpt_pretrain.megatron.loss import losses_from_head
from gpt_pretrain.megatron.own_model import install_recipe, named_layers, own_loss
from gpt_pretrain.megatron.parallel import sum_over
from gpt_pretrain.megatron.sharded_gradients import ShardedGradients
from gpt_pretrain.megatron.weights import built_without_first_values, initialize_weights
from gpt_pretrain.megatron.whole_layers import CompiledLayers, prepare_graphs
from gpt_pretrain.run.run_spec import RunSpec


def _squared_relu(values: torch.Tensor) -> torch.Tensor:
    # Compiled at its first call, which takes minutes of C++ without a GPU. On one it reads and writes a third as much.
    return core_squared_relu(values) if values.is_cuda else F.relu(values).square()


_ACTIVATIONS = {
    ActivationFunction.silu: F.silu,
    ActivationFunction.gelu: F.gelu,
    ActivationFunction.gelu_tanh: partial(F.gelu, approximate="tanh"),
    ActivationFunction.squared_relu: _squared_relu,
}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type with this name."""
    return getattr(torch, dtype.value)  # type: ignore[no-any-return]


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
    """The layers' config."""
    config = TransformerConfig(**_arguments(transformer_fields(spec)))
    for name, value in _arguments(yarn_fields(spec)).items():
        setattr(config, name, value)
    return config


def translate_ddp(spec: RunSpec) -> DistributedDataParallelConfig:
    """The config of gradient reduction and parameter gathering."""
    return DistributedDataParallelConfig(**_arguments(ddp_fields(spec)))


def translate_optimizer(spec: RunSpec) -> OptimizerConfig:
    """The config of the optimizer."""
    options = OptimizerConfig(**_arguments(optimizer_fields(spec)))
    if spec.model.optim.use_precision_aware_optimizer:
        # Set after megatron-core's check, which demands Transformer Engine's FusedAdam.
        for name, value in _arguments(optimizer_state_fields(spec)).items():
            setattr(options, name, value)
    return options


def build_gpt_chunks(
    spec: RunSpec, local_layers: LocalLayers | None = None, *, put_off_weights: bool = False
) -> list[GPT]:
    """The `GPT`s of this pipeline rank (one, or one per virtual stage), with weights drawn from the seed.

    Without TE layers are built from `local_layers`; None: megatron-core's own, compiled if the run asks for it. With
    `put_off_weights` the matrices of layers have no memory, and whoever gives it to them draws them (`weights.draw`).
    """
    model, kernels, platform = spec.model, spec.kernels, spec.platform
    transformer_config = translate_transformer(spec)
    vp_size = model.virtual_pipeline_model_parallel_size
    if kernels.gradient_accumulation_fusion:
        install_weight_gradients()
    if kernels.transformer_engine:
        install_split()
    install_recipe(spec)
    for feature in used_features(spec):
        feature.prepare()
    if kernels.cuda_graph_impl is not None:
        prepare_graphs(model.seed)
    if local_layers is None:
        local_layers = CompiledLayers() if kernels.compile else LocalLayers(apex_layer_norm=platform.apex_layer_norm)
    chunks = []
    for vp_stage in range(vp_size or 1):
        stage = vp_stage if vp_size else None
        with built_without_first_values(
            platform.device, fp8_params=transformer_config.fp8_param, keeps_matrices=not put_off_weights
        ):
            layers = build_layer_spec(spec, transformer_config, local_layers, stage)
            with named_layers(spec, "building the model"):
                chunk = GPT(spec, transformer_config, layers, stage)
        apply_quantization_overrides(chunk)
        leave_sorted(chunk)
        local_layers.attach(chunk)
        chunks.append(chunk.to(platform.device))
    initialize_weights(chunks, model, put_off=put_off_weights)
    return chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """This rank's model, ready to train."""

    spec: RunSpec
    gpt_chunks: list[GPT]
    """This rank's model chunks."""
    chunks: list[DistributedDataParallel]
    """The same chunks wrapped, for the schedules and the optimizer; without gradients, as the schedules take them."""
    transformer_config: TransformerConfig
    output_processor: Callable[..., torch.Tensor] | None
    """Turns hidden states into losses: an extension's, or `loss.losses_from_head`. None: megatron-core does."""
    num_parameters: int
    """Parameters of the whole model, over all ranks; tied embeddings count once."""

    @contextmanager
    def newest_parameters(self) -> Iterator[None]:
        """Inside, validations, saves and loads find the newest parameters.

        With `overlap_param_gather` each rank has its own new shard after a step, and the next training forward pass
        gathers the rest. A validation or a checkpoint in between would see old ones. Where weights are sharded a rank
        has its part of them, and each pass gathers what it reads.
        """
        overlapped = self.chunks[0].ddp_config.overlap_param_gather and not shards_weights(self.spec.model)
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
    def gathered_parameters(self) -> Iterator[None]:
        """Inside, all ranks hold the newest parameters whole; where weights are sharded, the memory must suffice."""
        with ExitStack() as stack:
            stack.enter_context(self.newest_parameters())
            if shards_weights(self.spec.model):
                for chunk in self.chunks:
                    stack.enter_context(chunk.weights.gathered())
            yield

    @contextmanager
    def without_overlapped_exchange(self) -> Iterator[None]:
        """Inside, microbatches pass through the layers one after the other, for what counts or watches them."""
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


def _wrap(
    spec: RunSpec, config: TransformerConfig, modules: Sequence[torch.nn.Module], gpt_chunks: Sequence[GPT]
) -> list[DistributedDataParallel]:
    """Wraps this rank's chunks, the first ones inside the others, for data parallelism."""
    ddp_config = translate_ddp(spec)
    if shards_gradients(spec.model):
        return [
            ShardedGradients(config, ddp_config, module, chunk)
            for module, chunk in zip(modules, gpt_chunks, strict=True)
        ]
    return [
        # Only the first chunk's gradients are reduced while others compute.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]


def _in_precision(gpt_chunks: Sequence[GPT]) -> list[torch.nn.Module]:
    """The chunks, which take and return fp32 whatever they compute in."""
    return [Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk for chunk in gpt_chunks]


def build_inference_model(spec: RunSpec) -> Model:
    """Builds this rank's chunks for forward passes alone, without gradients; process groups must be open."""
    gpt_chunks = build_gpt_chunks(spec)
    return Model(
        spec=spec,
        gpt_chunks=gpt_chunks,
        chunks=_in_precision(gpt_chunks),
        transformer_config=gpt_chunks[0].config,
        output_processor=None,
        num_parameters=sums_over_parameters(gpt_chunks, torch.Tensor.numel)[0],
    )


def build_model(spec: RunSpec, local_layers: LocalLayers | None = None) -> Model:
    """Builds this rank's chunks (`build_gpt_chunks`), wrapped for data parallelism; process groups must be open."""
    gpt_chunks = build_gpt_chunks(spec, local_layers, put_off_weights=shards_weights(spec.model))
    transformer_config, kernels = gpt_chunks[0].config, spec.kernels
    for feature in used_features(spec):
        feature.build_into_model(gpt_chunks)
    chunks = _wrap(spec, transformer_config, _in_precision(gpt_chunks), gpt_chunks)
    # The schedules look for these in the config, as megatron-core's training script sets them.
    transformer_config.finalize_model_grads_func = finalize_model_grads
    transformer_config.grad_scale_func = None
    if spec.model.overlap_grad_reduce:
        if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
            from gpt_pretrain.megatron.te_layers import announce_gradients

            announce_gradients(chunks)
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer_config.no_sync_func = no_sync[0] if len(chunks) == 1 else no_sync
        if len(chunks) > 1 and not shards_gradients(spec.model):
            transformer_config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if spec.model.overlap_param_gather and len(chunks) > 1 and not shards_weights(spec.model):
        transformer_config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    linear = kernels.cross_entropy_fusion_impl is CrossEntropyFusion.linear
    return Model(
        spec=spec,
        gpt_chunks=gpt_chunks,
        chunks=chunks,
        transformer_config=transformer_config,
        output_processor=own_loss(spec) or (losses_from_head if linear else None),
        num_parameters=sums_over_parameters(gpt_chunks, torch.Tensor.numel)[0],
    )


def _parameters_by_group(
    chunks: Sequence[GPT],
) -> Iterator[tuple[torch.distributed.ProcessGroup, list[torch.nn.Parameter]]]:
    """This rank's parameters, those of experts apart, with the ranks that share the model.

    Each parameter is listed on one of these ranks: replicas and the copy of a tied embedding are left out elsewhere.
    """
    own = [
        (".experts." in name, parameter)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        # A tied embedding has its copy on the last stage.
        if chunk.pre_process or not getattr(parameter, "shared", False)
    ]
    dense_rank, dense_group = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_model_parallel_group()
    expert_rank = parallel_state.get_expert_tensor_parallel_rank()
    expert_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    for experts, rank, group in ((False, dense_rank, dense_group), (True, expert_rank, expert_group)):
        whole = [each for of_experts, each in own if of_experts is experts]
        yield group, [each for each in whole if rank == 0 or getattr(each, "tensor_model_parallel", False)]


def sums_over_parameters(chunks: Sequence[GPT], *measures: Callable[[torch.nn.Parameter], int]) -> list[int]:
    """The sum of each measure over all parameters of the whole model; all ranks call it."""
    totals = torch.zeros(len(measures), dtype=torch.int64)
    for group, parameters in _parameters_by_group(chunks):
        own = [sum(map(measure, parameters)) for measure in measures]
        sums = torch.tensor(own, dtype=torch.int64, device=torch.cuda.current_device())
        sum_over(group, sums)
        totals += sums.cpu()
    return totals.tolist()
