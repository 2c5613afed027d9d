"""Layer specs: which module each part of a transformer layer is built from.

With Transformer Engine (TE) that is megatron-core's own spec. Without it, `LocalLayers` supplies megatron-core's
tensor-parallel linear layers and a norm that also works under sequence parallelism, which megatron-core's wrapper of
torch's norms does not.

**CUDA graphs**: a layer's kernels are recorded once and from then on launched together, because those of a small model
end sooner than the host can launch the next. With `model.cuda_graph_impl=local` megatron-core
(megatron.core.transformer.cuda_graphs) runs the first training step as usual, records a graph of each layer's forward
pass and one of its backward pass at the end of the step, and replays them in later steps. Embedding, LM head, loss, the
exchange of gradients and the optimizer stay outside.

A replay reads and writes the recorded addresses and calls no Python. So only training steps, which have one shape, are
replayed; `without_graphs` has the layers computed by their modules for whatever looks into them. The proof of FP8
(`fp8/proof.py`) watches the first step, the recording included.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer import ModuleSpec, TransformerConfig, cuda_graphs
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from gpt_pretrain.config.choices import MoeGroupedKernel
from gpt_pretrain.megatron.fused_layers import CastingMLP
from gpt_pretrain.megatron.parallel import seed_dropout, track_random_states
from gpt_pretrain.megatron.patches import GRAPH_MEMORY, GRAPH_RECORDING, patch
from gpt_pretrain.megatron.torch_attention import TorchAttention
from gpt_pretrain.spec.kernels import Kernels

# megatron-core's own; and the pool that it took memory from, listed once per call.
_allocate = cuda_graphs.alloc_tensor_from_graph_mempool
_taken_from: list[tuple[int, int]] = []


class TorchNorm:
    """torch's LayerNorm or RMSNorm, its parameters marked for sequence parallelism.

    Under sequence parallelism each tensor parallel rank normalises its own part of the sequence, so that the gradients
    of the norm's parameters must be summed over the ranks. megatron-core does so for parameters with the attribute
    `sequence_parallel` (megatron.core.distributed.finalize_model_grads).
    """

    layer_norm: ClassVar[type[torch.nn.LayerNorm]] = torch.nn.LayerNorm
    rms_norm: ClassVar[type[torch.nn.RMSNorm]] = torch.nn.RMSNorm

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:  # type: ignore[misc]
        """Builds the norm that `config.normalization` names, over the last dimension of [s, b, h]."""
        norm_cls = cls.rms_norm if config.normalization == "RMSNorm" else cls.layer_norm
        norm = norm_cls(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class LocalLayers(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local layers; apex's fused layer norm where it is installed."""

    layer: type[torch.nn.Module] = TransformerLayer
    """The class of a transformer layer."""

    def __init__(self, *, apex_layer_norm: bool) -> None:
        self._apex_layer_norm = apex_layer_norm

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm's class; apex has a fused kernel for LayerNorm only."""
        if self._apex_layer_norm and not rms_norm:
            from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

            return FusedLayerNorm  # type: ignore[no-any-return]
        return TorchNorm

    def attach(self, chunk: MegatronModule) -> None:
        """Called with each model chunk built from these layers, for layers that follow its passes."""


def build_layer_spec(
    config: TransformerConfig, kernels: Kernels, local_layers: LocalLayers, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one model chunk, TE's or local ones, each with its name in the whole model."""
    if kernels.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        if kernels.use_flash_attention:
            from gpt_pretrain.megatron.flash_attention import FlashAttention

            layer.submodules.self_attention.submodules.core_attention = FlashAttention
        if kernels.activation_cast_fusion:
            mlp = layer.submodules.mlp
            layer.submodules.mlp = partial(CastingMLP.as_mlp_submodule, **mlp.keywords)
        if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
            from gpt_pretrain.megatron.expert_layers import with_one_kernel

            layer.submodules.mlp = with_one_kernel(layer.submodules.mlp)
        norm = TENorm
    else:
        layer = _local_layer_spec(config, local_layers)
        if kernels.torch_attention:
            layer.submodules.self_attention.submodules.core_attention = TorchAttention
        # Left to megatron-core, the final norm is TE's wherever TE is installed.
        norm = local_layers.layer_norm(rms_norm=config.normalization == "RMSNorm")
    first = get_transformer_layer_offset(config, vp_stage, parallel_state.get_pipeline_model_parallel_rank())
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=layer.module if kernels.cuda_graph_impl is None else GraphedLayer,
                submodules=layer.submodules,
                params={**layer.params, "name": _layer_name(first + index)},
            )
            for index in range(get_num_layers_to_build(config, vp_stage))
        ],
        layer_norm=norm,
    )


def _layer_name(layer: int) -> str:
    return f"decoder.layers.{layer}"


def whole_model_modules(chunk: MegatronModule) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model chunk with their names in the whole model.

    Layers are counted over all pipeline stages, experts over all expert parallel ranks.
    """
    decoder: Any = chunk.decoder
    layers = list(decoder.layers)
    first = layers[0].layer_number - 1 if layers else 0
    experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()

    def in_whole_model(name: str) -> str:
        match = re.match(r"decoder\.layers\.(\d+)", name)
        whole = _layer_name(int(match[1]) + first) + name[match.end() :] if match else name
        return re.sub(r"(?<=\.local_experts\.)\d+", lambda expert: str(int(expert[0]) + first_expert), whole)

    for name, module in chunk.named_modules():
        yield in_whole_model(name), module


def apply_quantization_overrides(chunk: MegatronModule) -> None:
    """Takes the modules of `model.fp8_exclude` out of FP8 by their names in the whole model.

    megatron-core matches names within the chunk, which start at layer 0 on every pipeline stage.
    """
    for name, module in whole_model_modules(chunk):
        finish: Any = getattr(module, "finish_init", None)
        if finish is not None:
            finish(get_quant_config_or_none(name, chunk.config.quant_recipe))


def _local_layer_spec(config: TransformerConfig, backend: LocalLayers) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    # megatron-core's own local spec stores its norms under the names of TE's fused modules, too.
    stored_under = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if config.num_moe_experts is None:
        # Before experts the norm is a separate module with TE, too.
        stored_under["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=backend.layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=backend.core_attention(),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=norm if config.qk_layernorm else IdentityOp,
                    k_layernorm=norm if config.qk_layernorm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=stored_under,
        ),
    )


class WholeLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no types
    """A layer that training steps run by what was recorded or compiled of it; otherwise its modules compute it."""

    is_replayed = True
    """Whether training steps do so: hooks of modules, such as those that search for NaN, are not called then."""


class GraphedLayer(WholeLayer):
    """A layer that training steps replay."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        # megatron-core would also replay validations, and has no graph for the length of a sampled text.
        return self.training and self.is_replayed and super()._should_call_local_cudagraph(*args, **kwargs)


def prepare_graphs(seed: int) -> None:
    """Prepares megatron-core for graphs, before the layers are built, on a GPU.

    An earlier job of a sweep may have left graphs behind. Graphs also need random states that they can hold.
    """
    cuda_graphs.delete_cuda_graphs()
    patch(GRAPH_RECORDING, create_cudagraphs=_create_graphs)
    patch(GRAPH_MEMORY, HAVE_TQDM=False, alloc_tensor_from_graph_mempool=_allocate_in_pool)
    track_random_states(in_graphs=True)
    seed_dropout(seed)


def _allocate_in_pool(meta: Any) -> torch.Tensor:
    """A tensor in the graphs' memory pool, which torch keeps until `release_graphs`."""
    _taken_from.append(cuda_graphs.CudaGraphManager.global_mempool)
    tensor: torch.Tensor = _allocate(meta)
    return tensor


def _create_graphs() -> None:
    """Records graphs at the end of a step like megatron-core's function, and undoes the rest of what that does.

    Before a recording it runs passes that draw random numbers, which a run without graphs, or one that is resumed
    elsewhere, would not draw. The first step took memory on another stream, which no later step needs.
    """
    if not cuda_graphs._CudagraphGlobalRecord.cudagraph_record:
        return
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states().values()
    generators = [torch.cuda.default_generators[torch.cuda.current_device()], *tracked]
    states = [generator.get_state() for generator in generators]
    try:
        cuda_graphs.create_cudagraphs()
    except BaseException:
        # Otherwise megatron-core and Transformer Engine would take the next job of a sweep for a recording, and leave
        # out its gradients.
        cuda_graphs._set_capture_end()
        if cuda_graphs.HAVE_TE_GRAPHS:
            cuda_graphs.te_set_capture_end()
        torch.cuda.set_stream(torch.cuda.default_stream())
        raise
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    torch.cuda.empty_cache()


@contextmanager
def without_graphs(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, modules compute the layers, and their hooks are called."""
    layers = _layers_of(WholeLayer, chunks)
    for layer in layers:
        layer.is_replayed = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_replayed = True


def release_graphs(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the graphs of a run that has ended, and their memory, which no other tensor can use.

    Otherwise the next job of a sweep has to do without that memory: a layer's runner and the outputs of its replay
    refer to each other through autograd's nodes, which Python's collector does not see. torch also counts the users of
    a pool, from `_cuda_beginAllocateCurrentThreadToPool` to `_cuda_releasePool`, which megatron-core 0.19 never calls.
    """
    for layer in _layers_of(GraphedLayer, chunks):
        for runner in layer.cudagraph_manager.cudagraph_runners:
            vars(runner).clear()
        layer.cudagraph_manager.cudagraph_runners.clear()
    while _taken_from:
        torch._C._cuda_releasePool(torch.cuda.current_device(), _taken_from.pop())


def _layers_of[Layer: WholeLayer](kind: type[Layer], chunks: Sequence[torch.nn.Module]) -> list[Layer]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)]
