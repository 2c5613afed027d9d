"""Layer specs: which module each part of a transformer layer is built from.

With Transformer Engine (TE) that is megatron-core's own spec. `LocalLayers` works without it: megatron-core's
tensor-parallel linear layers, norms that also support sequence parallelism, which megatron-core's wrapper of torch's
norms does not, and PyTorch's fused attention with `Kernels.torch_attention`.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, override

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from gpt_pretrain.config.choices import MoeGroupedKernel
from gpt_pretrain.features.registry import used_features
from gpt_pretrain.megatron.documents import attend_by_document, document_attention
from gpt_pretrain.megatron.own_model import own_layer
from gpt_pretrain.run.run_spec import RunSpec

# In this order: cuDNN is fastest on Hopper, and the last takes what the others refuse, also in O(s) memory.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class TorchNorm:
    """torch's LayerNorm or RMSNorm, its parameters marked for sequence parallelism.

    Each tensor parallel rank then normalizes its own part of the sequence, so the parameters' gradients must be summed
    over the ranks. The attribute `sequence_parallel` asks megatron-core to (`finalize_model_grads`).
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.Module:  # type: ignore[misc]
        """Builds the norm that `config.normalization` names, over the last dimension of [s, b, h]."""
        norm_cls = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_cls(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention; `scale` multiplies the scores.

    Queries are [s, b, heads, width], keys and values [s, b, groups, width], the result [s, b, heads · width].
    """
    q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=k.size(1) != q.size(1)
        )
    return out.permute(2, 0, 1, 3).flatten(2)


def attention_in_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    borders: torch.Tensor,
    longest: int,
    window: tuple[int, int] = (-1, 0),
) -> torch.Tensor:
    """`causal_attention` inside each document of one sequence, [s, 1, heads or groups, width].

    Documents reach from one of `borders`, int32 [documents + 1], to the next, over at most `longest` tokens. `window`
    is what a token attends to before and after itself; -1: all.
    """
    if not (query.is_cuda and query.element_size() == 2 and query.size(-1) % 8 == 0):
        # No kernel takes them all.
        assert window == (-1, 0), "only the kernel has windows"
        return attend_by_document(partial(causal_attention, scale=scale), (query, key, value), borders)
    heads = query.size(2) // key.size(2)
    # The kernel takes as many keys as queries.
    k, v = (each.squeeze(1).repeat_interleave(heads, dim=1) for each in (key, value))
    out = varlen_attn(query.squeeze(1), k, v, borders, borders, longest, longest, scale=scale, window_size=window)
    assert isinstance(out, torch.Tensor), "no log-sum-exp was asked for"
    return out.flatten(1).unsqueeze(1)


def attention_in_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, window: tuple[int, int]
) -> torch.Tensor:
    """`causal_attention` to `window[0]` tokens before itself, on a GPU in BF16 or FP16.

    Sequences are packed as if they were documents: that kernel skips what a window hides.
    """
    length, batch = query.shape[:2]
    borders = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    q, k, v = (each.transpose(0, 1).flatten(0, 1).unsqueeze(1) for each in (query, key, value))
    out = attention_in_documents(q, k, v, scale, borders=borders, longest=length, window=window)
    return out.view(batch, length, -1).transpose(0, 1)


class TorchAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's attention with PyTorch's fused kernels; it is built, stored and loaded in the same way.

    megatron-core's own writes the scores [b, heads, s, s] to memory in two precisions. Fused kernels keep one number
    per token and head instead (FlashAttention-2, Dao 2023, arXiv 2307.08691).
    """

    def __init__(self, *args: Any, longest: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._longest = longest

    @override
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """See `causal_attention`; the arguments are those of megatron-core's `DotProductAttention`.

        `attention_mask` are the borders of documents, if these do not see each other (`megatron.documents`); none is
        longer than `longest`.
        """
        assert (attn_mask_type or self.attn_mask_type) is AttnMaskType.causal, "only causal masks are computed here"
        assert attention_bias is None, "biases are not added"
        assert packed_seq_params is None, "sequences have one length"
        if (window := self.scale_mask_softmax.window_size) is not None:
            return attention_in_window(query, key, value, self.softmax_scale, window=window)
        if attention_mask is None:
            return causal_attention(query, key, value, self.softmax_scale)
        bounds: dict[str, Any] = {"borders": attention_mask, "longest": self._longest}
        return attention_in_documents(query, key, value, self.softmax_scale, **bounds)


class WholeLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that training steps run as it was recorded or compiled."""

    is_replayed = True
    """Whether they do so, which calls no hooks of modules, such as those that search for NaN."""


class GraphedLayer(WholeLayer):
    """A layer that training steps replay as a CUDA graph."""

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        # megatron-core would also replay validations, and has no graph for the length of a sample.
        return self.training and self.is_replayed and super()._should_call_local_cudagraph(*args, **kwargs)


class LocalLayers(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local layers."""

    layer: type[torch.nn.Module] = TransformerLayer

    def __init__(self, *, apex_layer_norm: bool) -> None:
        self._apex_layer_norm = apex_layer_norm

    @override
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        # apex has fused kernels for LayerNorm only.
        if self._apex_layer_norm and not rms_norm:
            from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

            return FusedLayerNorm  # type: ignore[no-any-return]
        return TorchNorm

    def attach(self, chunk: MegatronModule) -> None:
        """Called with each model chunk once it is built."""


def leave_sorted(chunk: torch.nn.Module) -> None:
    """Passes rows to the experts unsorted on ranks that exchange none: they are sorted by expert already.

    megatron-core 0.19 sorts the rows from all ranks by expert, which copies all of them, even if all are the rank's
    own.
    """
    for layer in chunk.modules():
        dispatcher = getattr(layer, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and dispatcher.ep_size * dispatcher.tp_size == 1:
            # It sorts for several experts only, and reads their number for nothing else.
            dispatcher.num_local_experts = 1


def build_layer_spec(
    spec: RunSpec, config: TransformerConfig, local_layers: LocalLayers, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of a model chunk, TE's or local, each with its name in the whole model."""
    kernels = spec.kernels
    if kernels.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        if kernels.moe_grouped_kernel is MoeGroupedKernel.triton:
            from gpt_pretrain.megatron.te_layers import with_one_kernel

            layer.submodules.mlp = with_one_kernel(layer.submodules.mlp)
        attention, norm = layer.submodules.self_attention.submodules, TENorm
    else:
        layer = _local_layer_spec(config, local_layers)
        attention = layer.submodules.self_attention.submodules
        if kernels.torch_attention:
            attention.core_attention = TorchAttention
        # megatron-core would use TE's final norm wherever TE is installed.
        norm = local_layers.layer_norm(rms_norm=config.normalization == "RMSNorm")
    for feature in used_features(spec):
        feature.build_into_layer(layer, spec.model)
    if spec.model.data.inter_document_masking:
        attention.core_attention = document_attention(spec, attention.core_attention)
    layer = own_layer(spec, layer)
    first = get_transformer_layer_offset(config, vp_stage, parallel_state.get_pipeline_model_parallel_rank())
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=layer.module if kernels.cuda_graph_impl is None else GraphedLayer,
                submodules=layer.submodules,
                params={**layer.params, "name": f"decoder.layers.{first + index}"},
            )
            for index in range(get_num_layers_to_build(config, vp_stage))
        ],
        layer_norm=norm,
    )


def whole_model_modules(chunk: MegatronModule) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model chunk with their names in the whole model.

    Layer numbers count over all pipeline stages, expert numbers over all expert parallel ranks.
    """
    decoder: Any = chunk.decoder
    layers = list(decoder.layers)
    first = layers[0].layer_number - 1 if layers else 0
    experts = (chunk.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()

    def in_whole_model(name: str) -> str:
        match = re.match(r"decoder\.layers\.(\d+)", name)
        whole = f"decoder.layers.{int(match[1]) + first}{name[match.end() :]}" if match else name
        return re.sub(r"(?<=\.local_experts\.)\d+", lambda expert: str(int(expert[0]) + first_expert), whole)

    for name, module in chunk.named_modules():
        yield in_whole_model(name), module


def apply_quantization_overrides(chunk: MegatronModule) -> None:
    """Takes the modules of `model.fp8_exclude` out of FP8 by their names in the whole model.

    megatron-core would match names within the chunk, which start at layer 0 on every pipeline stage.
    """
    for name, module in whole_model_modules(chunk):
        finish: Any = getattr(module, "finish_init", None)
        if finish is not None:
            finish(get_quant_config_or_none(name, chunk.config.quant_recipe))


def _local_layer_spec(config: TransformerConfig, backend: LocalLayers) -> ModuleSpec:
    """megatron-core's local layer with the modules of `backend`."""
    parts = get_gpt_layer_local_submodules(qk_layernorm=config.qk_layernorm)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm = backend.layer_norm(config.normalization == "RMSNorm")
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = backend.column_parallel_linear(), backend.row_parallel_linear()
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    parts.mlp = get_mlp_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts)
    if config.num_moe_experts is not None:
        # The map gives norms the names of TE's fused modules, but before experts TE's norm is a separate module, too.
        del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return ModuleSpec(module=backend.layer, submodules=parts)
