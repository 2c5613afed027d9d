"""Emulated FP8 in megatron-core's local layers: what `model.fp8_emulate` builds the model from.

The column- and row-parallel layers keep megatron-core's weights, communication and checkpoint keys; only the products
are ours. Where ranks split the sequence, the input is gathered before it is cast, and megatron-core gathers the
gradient of a row-parallel output likewise. Transformer Engine casts first and gathers codes, with an amax that it has
reduced over these ranks, or blocks that end where the parts do: the same codes for fewer bytes.

Attention, embeddings and the LM head stay as they are. With delayed scaling TE computes the norm before a
column-parallel layer and its cast in one kernel, which takes amax and codes from values that were never rounded to BF16
(TE 2.12, pytorch/csrc/extensions/normalization.cpp); such a norm hands on fp32 here. The other recipes cast what was
rounded.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from gpt_pretrain.fp8.emulation.delayed import DelayedScaling, LayerScaling, Scaling
from gpt_pretrain.fp8.emulation.products import LinearProducts
from gpt_pretrain.fp8.emulation.recipes import Cast, stateless_cast
from gpt_pretrain.fp8.gemms import ProductListener
from gpt_pretrain.megatron.layers import LocalLayers, TorchNorm
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.run_spec import RunSpec


class _EmulatedLinear(torch.nn.Module):
    """What emulated column- and row-parallel layers have in common, in front of megatron-core's class."""

    def __init__(self, *args: Any, settings: Fp8Settings, cast: Cast, name: str, **kwargs: Any) -> None:
        super().__init__(*args, name=name, **kwargs)
        self.fp8_settings = settings
        self.product_listener: ProductListener | None = None
        self.is_first_microbatch = True
        """Set by megatron-core's schedules: the weight has changed."""
        self._scaling = cast if isinstance(cast, LayerScaling) else None
        self._products = LinearProducts(settings, cast)

    @property
    def fp8_meta(self) -> dict[str, Scaling]:
        """State of delayed scaling by the names that Transformer Engine's layers use; empty for other recipes."""
        scaling = self._scaling
        return {} if scaling is None else {"scaling_fwd": scaling.forward, "scaling_bwd": scaling.backward}

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """x·wᵀ + b in the weight's type; megatron-core's other arguments belong to fusions that the rules refuse."""
        if sequence_parallel:
            # Its backward sums the gradients over the ranks and scatters them.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return self._products(input, weight, bias, is_first_microbatch=is_first, listener=lambda: self.product_listener)

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Scales and amax histories; None for recipes without."""
        return None if self._scaling is None else self._scaling.state()

    def set_extra_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Restores them; a checkpoint without leaves them at their start."""
        if self._scaling is not None and state is not None:
            self._scaling.load(state)


class _LayerNorm(torch.nn.LayerNorm):
    """torch's, or with its result left in fp32."""

    is_rounded = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        if self.is_rounded:
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias.float()
        return torch.nn.functional.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


class _RMSNorm(torch.nn.RMSNorm):
    """torch's, or with its result left in fp32."""

    is_rounded = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        if self.is_rounded:
            return super().forward(input)
        weight = self.weight.float()
        return torch.nn.functional.rms_norm(input.float(), self.normalized_shape, weight, self.eps)


class _Norm(TorchNorm):
    """The norms of emulated layers."""

    layer_norm = _LayerNorm
    rms_norm = _RMSNorm


class EmulatedColumnParallelLinear(_EmulatedLinear, ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are split over the tensor parallel ranks."""


class EmulatedRowParallelLinear(_EmulatedLinear, RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are split over the tensor parallel ranks."""


class EmulatedLayers(LocalLayers):
    """megatron-core's local layers with emulated products in the linear layers that the plan has in FP8.

    Args:
        settings: The FP8 of the run.
        modules: Names in the whole model of the layers in FP8; the others are megatron-core's own.
    """

    def __init__(self, settings: Fp8Settings, modules: frozenset[str]) -> None:
        super().__init__(apex_layer_norm=False)
        self._settings = settings
        self._modules = modules
        self._scaling: DelayedScaling | None = None
        if settings.recipe.keeps_history:
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            self._scaling = DelayedScaling(settings, group)

    def column_parallel_linear(self) -> Any:
        """Builds column-parallel layers."""
        return self._column

    def row_parallel_linear(self) -> Any:
        """Builds row-parallel layers."""
        return self._row

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """The norm's class."""
        return _Norm

    def attach(self, chunk: GPTModel) -> None:
        """Follows the passes of a model chunk that was built from these layers."""
        if self._scaling is None:
            return
        self._scaling.attach(chunk.decoder)
        for layer in chunk.decoder.layers:
            for norm, linear in (
                (layer.input_layernorm, layer.self_attention.linear_qkv),
                (layer.pre_mlp_layernorm, layer.mlp.linear_fc1),
            ):
                norm.is_rounded = not isinstance(linear, EmulatedColumnParallelLinear)

    def _column(self, *args: Any, name: str, **kwargs: Any) -> torch.nn.Module:
        return self._build(ColumnParallelLinear, EmulatedColumnParallelLinear, *args, name=name, **kwargs)

    def _row(self, *args: Any, name: str, **kwargs: Any) -> torch.nn.Module:
        return self._build(RowParallelLinear, EmulatedRowParallelLinear, *args, name=name, **kwargs)

    def _build(
        self, plain: type[torch.nn.Module], emulated: type[_EmulatedLinear], *args: Any, name: str, **kwargs: Any
    ) -> torch.nn.Module:
        if name not in self._modules:
            return plain(*args, name=name, **kwargs)
        cast = stateless_cast(self._settings) if self._scaling is None else self._scaling.new_layer()
        return emulated(*args, settings=self._settings, cast=cast, name=name, **kwargs)


def emulated_layers(spec: RunSpec) -> EmulatedLayers | None:
    """The layers of a run with `model.fp8_emulate`; None without.

    Process groups must be open (`megatron.parallel.process_groups`).
    """
    if spec.fp8 is None or not spec.fp8.emulate:
        return None
    return EmulatedLayers(spec.fp8, frozenset(linear.module for linear in spec.linears if linear.precision == "fp8"))
