"""FP8 in megatron-core's local layers, from which emulated and TorchAO runs build the model.

The column- and row-parallel layers keep megatron-core's weights, communication and checkpoint keys. Only their three
products are ours (`fp8/linear_products.py`). An engine casts and multiplies: the emulation (`fp8/casts.py`,
`fp8/delayed.py`) or `fp8/torchao.py`.

If ranks split the sequence, the input is gathered before it is cast; megatron-core gathers the gradient of a
row-parallel output likewise. TE gets the same codes for fewer bytes: it casts the parts, with an amax reduced over the
ranks or with blocks that end where the parts do, and gathers codes.

With delayed scaling TE computes the norm before a column-parallel layer and its cast in one kernel, which takes amax
and codes from values that were never rounded to BF16 (TE 2.12, pytorch/csrc/extensions/normalization.cpp). Such a norm
returns fp32 here. The other recipes cast rounded values.

**Experts**: TE computes a rank's experts in one grouped product, whose layer the plan names
"decoder.layers.3.mlp.experts.linear_fc1". Here each expert has a layer, "…experts.local_experts.2.linear_fc1", with
products and scales of its own. Its rows are not padded. Without tokens it casts and computes nothing, and reports so.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP

from gpt_pretrain.config.choices import LayerName
from gpt_pretrain.fp8.casts import Cast, stateless_cast, torchao_scale
from gpt_pretrain.fp8.delayed import DelayedScaling, LayerScaling, Scaling
from gpt_pretrain.fp8.gemms import Phase, ProductListener
from gpt_pretrain.fp8.linear_products import LinearProducts, Multiply
from gpt_pretrain.megatron.layers import LocalLayers
from gpt_pretrain.megatron.stored_weights import StoredWeight, install_stored_weights
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, Linear, why_not_fp8
from gpt_pretrain.run.run_spec import RunSpec

if TYPE_CHECKING:
    from gpt_pretrain.fp8.torchao import TorchAO


def planned_name(module: str) -> str:
    """The planned linear layer that a module is, or that an expert's module is part of."""
    return re.sub(r"\.local_experts\.\d+(?=\.)", "", module)


def _expert_name(linear: Linear, expert: int) -> str:
    """The module of one expert in a planned linear layer of experts."""
    return linear.module.replace(".experts.", f".experts.local_experts.{expert}.")


def live_linears(linears: Iterable[Linear], modules: Container[str], num_experts: int | None) -> Iterator[Linear]:
    """The planned linear layers, named by the modules that compute them: one for each expert if experts have their own.

    `modules` are the names of this rank's modules in the whole model; `num_experts` is a layer's, on all ranks.
    """
    for linear in linears:
        own = []
        if linear.kind in (EXPERT_FC1, EXPERT_FC2) and linear.module not in modules:
            own = [name for name in (_expert_name(linear, each) for each in range(num_experts or 0)) if name in modules]
        yield from (replace(linear, module=name, count=1) for name in own)
        if not own:
            yield linear


class Fp8Linear(torch.nn.Module):
    """What column- and row-parallel layers in FP8 have in common, before megatron-core's class in the bases."""

    def __init__(
        self, *args: Any, settings: Fp8Settings, cast: Cast, multiply: Multiply | None, name: str, **kwargs: Any
    ) -> None:
        super().__init__(*args, name=name, **kwargs)
        self.product_listeners: list[ProductListener] = []
        self.is_first_microbatch = True
        """Set by megatron-core's schedules: the weight has changed."""
        self.idle_listener: Callable[[Phase], None] | None = None
        """Told which products compute nothing because an expert has no tokens."""
        scaling = self._scaling = cast if isinstance(cast, LayerScaling) else None
        self.fp8_meta: dict[str, Scaling] = {}
        """The state of delayed scaling under the names of Transformer Engine's layers; empty for other recipes."""
        if scaling is not None:
            self.fp8_meta = {"scaling_fwd": scaling.forward, "scaling_bwd": scaling.backward}
        if settings.params:
            scale = partial(torchao_scale, "e4m3", settings.recipe)
            self.weight: torch.nn.Parameter = StoredWeight.in_place_of(self.weight, scale)
        self._products = LinearProducts(settings, cast, multiply)
        self.largest_amax = self._products.largest_amax
        """fp32 [1]: the largest amax of the casts since it was reset (`fp8.infinities.StepCasts`)."""

    @property
    def overwrites_main_grad(self) -> bool:
        """Whether the weight's product writes its gradient, and nothing else does (`sharded_gradients`)."""
        # An expert without tokens has no product.
        return bool(self.gradient_accumulation_fusion and not self.is_expert)

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """x·wᵀ + b in the weight's type; the other arguments belong to fusions that the rules refuse."""
        if input.numel() == 0:
            if self.idle_listener is not None:
                for phase in Phase:
                    self.idle_listener(phase)
            # The exchange of gradients waits for the weight's, which is zero.
            return input @ weight.t()
        if sequence_parallel:
            # The backward pass sums the gradients over the ranks and scatters them.
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return self._products(
            input,
            weight,
            bias,
            is_first_microbatch=is_first,
            accumulates=gradient_accumulation_fusion,
            listeners=self.product_listeners,
        )

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Scales and amax histories; None for recipes without."""
        return None if self._scaling is None else self._scaling.state()

    def set_extra_state(self, state: dict[str, torch.Tensor] | None) -> None:
        """Restores them; a checkpoint without them leaves the initial ones."""
        if self._scaling is not None and state is not None:
            self._scaling.load(state)


def _norm_in_fp32(norm: torch.nn.LayerNorm | torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    shape, weight = norm.normalized_shape, norm.weight.float()
    if isinstance(norm, torch.nn.RMSNorm):
        return torch.nn.functional.rms_norm(x.float(), shape, weight, norm.eps)
    return torch.nn.functional.layer_norm(x.float(), shape, weight, norm.bias.float(), norm.eps)


class Fp8ColumnParallelLinear(Fp8Linear, ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are split over the tensor parallel ranks."""


class Fp8RowParallelLinear(Fp8Linear, RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are split over the tensor parallel ranks."""


class Fp8Layers(LocalLayers):
    """megatron-core's local layers, but linear layers in FP8 where the plan has them.

    `modules` are the names of these layers in the whole model. Without an engine they are emulated.
    """

    def __init__(self, settings: Fp8Settings, modules: Container[str], engine: "TorchAO | None" = None) -> None:
        super().__init__(apex_layer_norm=False)
        self._settings = settings
        self._modules = modules
        self._engine = engine
        self._scaling: DelayedScaling | None = None
        if settings.params:
            install_stored_weights()
        if settings.recipe.keeps_history:
            group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
            self._scaling = DelayedScaling(settings, group)

    def column_parallel_linear(self) -> Any:
        """Builds column-parallel layers."""
        return partial(self._build, ColumnParallelLinear, Fp8ColumnParallelLinear)

    def row_parallel_linear(self) -> Any:
        """Builds row-parallel layers."""
        return partial(self._build, RowParallelLinear, Fp8RowParallelLinear)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Builds a layer's experts, one MLP each; only emulated runs have experts in FP8."""
        return partial(
            SequentialMLP,
            submodules=MLPSubmodules(
                linear_fc1=self.column_parallel_linear(),
                linear_fc2=self.row_parallel_linear(),
                activation_func=self.activation_func(),
            ),
        )

    def attach(self, chunk: MegatronModule) -> None:
        """Hooks delayed scaling into the passes of a model chunk built from these layers."""
        if self._scaling is None:
            return
        self._scaling.attach(chunk.decoder)
        for layer in chunk.decoder.layers:
            for norm, linear in (
                (layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None)),
                (layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
            ):
                if isinstance(linear, Fp8ColumnParallelLinear):
                    norm.forward = partial(_norm_in_fp32, norm)

    def _build(
        self, plain: type[torch.nn.Module], in_fp8: type[Fp8Linear], *args: Any, name: str, **kwargs: Any
    ) -> torch.nn.Module:
        if name not in self._modules:
            return plain(*args, name=name, **kwargs)
        cast: Cast
        if self._engine is not None:
            cast = self._engine.cast
        else:
            cast = stateless_cast(self._settings) if self._scaling is None else self._scaling.new_layer()
        multiply = None if self._engine is None else self._engine.multiply
        return in_fp8(*args, settings=self._settings, cast=cast, multiply=multiply, name=name, **kwargs)


def fp8_layers(spec: RunSpec) -> Fp8Layers | None:
    """The layers of a run whose FP8 is in local layers: emulated, or TorchAO's; None for other runs.

    Process groups must be open (`megatron.parallel.process_groups`).
    """
    settings = spec.fp8
    if settings is None or not settings.in_local_layers:
        return None
    in_fp8 = [linear for linear in spec.linears if linear.precision == "fp8"]
    # A rank numbers its own experts from 0 when it builds them.
    num_experts = spec.model.num_moe_experts or 0
    names = frozenset(linear.module for linear in in_fp8)
    names |= {_expert_name(each, n) for each in in_fp8 for n in range(num_experts)}
    modules = names if spec.model.layer is LayerName.gpt else _WithOthers(spec, settings, names)
    if settings.emulate:
        return Fp8Layers(settings, modules)
    from gpt_pretrain.fp8.torchao import TorchAO

    return Fp8Layers(settings, modules, TorchAO(settings, compiled=True))


class _WithOthers(Container[str]):
    """The planned linear layers in FP8, and those that only an extension's layer has, unless settings keep them out."""

    def __init__(self, spec: RunSpec, settings: Fp8Settings, in_fp8: frozenset[str]) -> None:
        self._model, self._settings, self._in_fp8 = spec.model, settings, in_fp8
        self._planned = {linear.module for linear in spec.linears}

    def __contains__(self, name: object) -> bool:
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", str(name))
        if name in self._in_fp8 or match is None or planned_name(str(name)) in self._planned:
            return name in self._in_fp8
        # Sizes, which `AUTO` asks for, are not known before it is built.
        return not why_not_fp8(self._model, self._settings, int(match[1]), match[2], (2**62, 2**62))
