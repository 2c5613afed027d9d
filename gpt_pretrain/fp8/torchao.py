"""TorchAO's float8 casts and products, as its own linear layer makes them (`torchao.float8`, 0.18).

`Float8Linear` computes its three products in one autograd function. Here each cast and each product is a function, so
that codes and scales can be watched and checked like those of any engine. Scales and products are the operations that
Float8Linear calls, in the same order, compiled by torch.compile. It must not fall back: a graph that breaks, or one
shape too many, is an error (`fullgraph=True`).

On a GPU our kernel writes the same codes as TorchAO's operations, along with the transpose that a product reads
(`kernels/fp8_codes_triton.py`): compiled alone, TorchAO's casts read the values again for each direction, and its
products first copy operands of the wrong layout. A product is `torch._scaled_mm`, by cuBLAS or CUTLASS. PyTorch has it
on a CPU, too, except for the forward product of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchao.float8 import Float8LinearConfig, GemmInputRole, LinearMMConfig, ScaledMMConfig, ScalingGranularity
from torchao.float8.float8_training_tensor import Float8TrainingTensor, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from gpt_pretrain.fp8.casts import Directions, Quantized
from gpt_pretrain.fp8.gemms import CODE_TYPES, OPERANDS, Phase, Role, multiply, role_format
from gpt_pretrain.megatron.whole_layers import prepare_compiler
from gpt_pretrain.run.fp8 import Fp8Settings

_ROLES = {
    Role.input: GemmInputRole.INPUT,
    Role.weight: GemmInputRole.WEIGHT,
    Role.output_gradient: GemmInputRole.GRAD_OUTPUT,
}
# Codes, scale, the dimension along which values share it (None: both), and the tensor's role.
type _Operand = tuple[torch.Tensor, torch.Tensor, int | None, GemmInputRole]
# Codes, scale and amax [1] in each direction.
type _Casts = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class TorchAO:
    """The casts and products of a recipe.

    `compiled` takes seconds for each shape. `emulate` is TorchAO's own emulation, in fp32.
    """

    def __init__(self, settings: Fp8Settings, *, compiled: bool, emulate: bool = False) -> None:
        self._settings = settings
        config = Float8LinearConfig.from_recipe_name(settings.recipe.name)
        self._powers_of_two = config.round_scales_to_power_of_2
        gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        self._gemms = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))
        self._scale = _compiled(amax_to_scale) if compiled else amax_to_scale
        self._multiply = _compiled(_multiply) if compiled else _multiply

    def cast(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix [rows, columns]; see `fp8.casts.Cast`."""
        recipe, (rows, columns) = self._settings.recipe, x.shape
        whole_in_dgrad = recipe.numerics.scales_dgrad_weight_whole and role is Role.weight
        axes: list[int | None] = [None if recipe.numerics.scales_tensors else -1]
        if recipe.has_wgrad or role is Role.weight:
            axes.append(None if recipe.numerics.scales_tensors or whole_in_dgrad else 0)
        blocks = {None: None, -1: (1, columns), 0: (rows, 1)}
        format = role_format(self._settings, role)
        cast = self._cast_on_gpu if x.is_cuda else self._cast_by_operations
        directions = [
            Quantized(format=format, codes=codes, scale=scale, amax=amax, block=blocks[axis])
            for axis, (codes, scale, amax) in zip(axes, cast(x, CODE_TYPES[format], axes), strict=True)
        ]
        # Without a second axis no product reads along columns.
        return Directions(directions[0], directions[-1])

    def _cast_by_operations(self, x: torch.Tensor, dtype: torch.dtype, axes: Sequence[int | None]) -> _Casts:
        """Like `hp_tensor_to_float8_dynamic`, which keeps no amax."""
        casts = {}
        for axis in set(axes):
            granularity = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
            amax = tensor_to_amax(x, scaling_granularity=granularity, axiswise_dim=axis)
            scale = self._scale(amax.reshape(1) if axis is None else amax, dtype, self._powers_of_two)
            codes = hp_tensor_and_scale_to_float8(x, scale, dtype, axiswise_dim=axis)._data
            casts[axis] = (codes, scale, amax.amax().float().reshape(1))
        return [casts[axis] for axis in axes]

    def _cast_on_gpu(self, x: torch.Tensor, dtype: torch.dtype, axes: Sequence[int | None]) -> _Casts:
        """The same codes, by one kernel for both directions."""
        from gpt_pretrain.kernels import fp8_codes_triton

        x = x.contiguous()
        whole, of_rows, of_columns = fp8_codes_triton.measure(x, of_rows=-1 in axes, of_columns=0 in axes)
        amaxes = {None: whole, -1: of_rows, 0: of_columns}
        scales = {axis: self._scale(amaxes[axis], dtype, self._powers_of_two) for axis in set(axes)}
        codes = fp8_codes_triton.cast(x, dtype, *(scales[axis] for axis in axes))
        return [(each, scales[axis], whole) for axis, each in zip(axes, codes, strict=True)]

    def multiply(
        self, phase: Phase, first: Quantized, second: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One of the three products; see `linear_products.Multiply`."""
        operands: list[_Operand] = []
        for role, quantized in zip(OPERANDS[phase], (first, second), strict=True):
            along_rows = phase is Phase.forward or (phase is Phase.dgrad and role is Role.output_gradient)
            axis = None if quantized.block is None else -1 if along_rows else 0
            operands.append((quantized.codes, quantized.scale, axis, _ROLES[role]))
        y = self._multiply(phase, operands[0], operands[1], dtype, self._gemms)
        return y if bias is None else y + bias


def _compiled[**Arguments, Result](function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    prepare_compiler()
    # Compiled code must round wherever the operations do; TorchAO asks for this with scales of rows.
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def _multiply(
    phase: Phase, first: _Operand, second: _Operand, dtype: torch.dtype, gemms: LinearMMConfig
) -> torch.Tensor:
    """x·wᵀ, dy·w or dyᵀ·x (`matmul_with_hp_or_float8_args`)."""
    a, b = (
        Float8TrainingTensor(codes, scale, dtype, gemms, role, axis) for codes, scale, axis, role in (first, second)
    )
    return multiply(phase, a, b)
