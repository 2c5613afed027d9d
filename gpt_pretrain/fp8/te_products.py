"""Watches Transformer Engine's (TE's) matrix products where they are computed.

Its linear modules call `general_gemm` three times, those of experts `general_grouped_gemm` with one product per expert.
The arguments of these functions are what runs, whatever was configured. Nothing is changed unless somebody watches.

Checks of the numbers also need results and the values that were cast. Values are the arguments of a module's forward
and backward pass. A norm that is fused with its cast is computed again without it. Results are asked for one by one,
because one that is added to a main gradient needs a copy of that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpt_pretrain.fp8.gemms import (
    CAST_IN,
    CODE_TYPES,
    OPERANDS,
    Fp8Operand,
    Operand,
    Phase,
    Product,
    Role,
    Sums,
)
from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import patched

# The layouts of general_gemm's three products (TE 2.12, pytorch/module/linear.py).
_PHASES = {"TN": Phase.forward, "NN": Phase.dgrad, "NT": Phase.wgrad}
# Its first two arguments in each product.
_ARGUMENTS = {
    Phase.forward: (Role.weight, Role.input),
    Phase.dgrad: (Role.weight, Role.output_gradient),
    Phase.wgrad: (Role.input, Role.output_gradient),
}
# Rows and columns of the square blocks of weights, and values of the other blocks (TE 2.12, Float8BlockQuantizer).
_BLOCK = 128
# Two kernels that add up a norm's values and squares in fp32 in different orders, then round a few times.
_NORM_BLUR = 2.0**-18

# Called with a module's name in the whole model and a product, right before it is computed, or right after with its
# result. Must not wait for the device.
Listener = Callable[[str, Product], None]
# Called for a product without rows: none of this rank's experts got a token.
IdleListener = Callable[[str, Phase], None]
# Called before each product of a layer: whether to report it, or its result.
Asks = Callable[[str, Phase], bool]
# A function of Transformer Engine that is watched.
_Function = Callable[..., Any]


def is_te_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer of Transformer Engine, without importing it."""
    return any(
        cls.__module__.startswith("transformer_engine.pytorch.module.")
        and cls.__name__ in ("Linear", "LayerNormLinear", "GroupedLinear")
        for cls in type(module).__mro__
    )


@dataclass(kw_only=True, eq=False)
class Watch:
    """Who is told of what (see `observer.observe_products`), and the pass that is being computed."""

    modules: Mapping[str, torch.nn.Module]
    listener: Listener
    idle_listener: IdleListener | None
    asks: Asks | None
    asks_result: Asks | None
    turn: int
    measure_amax: bool
    # The module of the pass, and the values that it casts (those of all experts in one tensor).
    _name: str = field(default="", init=False)
    _values: dict[Role, torch.Tensor] = field(default_factory=dict, init=False)
    _blur: torch.Tensor | None = field(default=None, init=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reports every product of the modules inside."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                stack.callback(module.register_forward_pre_hook(partial(self._begin, name)).remove)
            for products, passes, product, find_input in (
                (patches.LINEAR_PRODUCTS, patches.LINEAR_PASSES, self._gemm, lambda weight, x, *_: x),
                # This layer casts the norm's result.
                (patches.NORM_LINEAR_PRODUCTS, patches.NORM_LINEAR_PASSES, self._gemm, lambda *_: None),
                (patches.GROUPED_PRODUCTS, patches.GROUPED_PASSES, self._grouped_gemm, lambda x, *_: x),
            ):
                (name,), place, function = products.names, products.owner(), passes.owner()
                stack.enter_context(patched(products, **{name: partial(product, getattr(place, name))}))
                forward = staticmethod(partial(self._forward, function.forward, find_input))
                backward = staticmethod(partial(self._backward, function.backward))
                stack.enter_context(patched(passes, forward=forward, backward=backward))
            if self.asks_result is not None:
                norm = patches.NORMS_OF_LINEARS.owner().apply_normalization
                stack.enter_context(patched(patches.NORMS_OF_LINEARS, apply_normalization=partial(self._norm, norm)))
            yield

    def _begin(self, name: str, *_: Any) -> None:
        """Before a pass of a module; usable as a hook."""
        self._name, self._blur = name, None
        self._values.clear()

    def _forward(self, forward: _Function, find_input: _Function, ctx: Any, *args: Any) -> Any:
        """Watches a module's forward pass, in whose arguments `find_input` finds the input."""
        # Without gradients there is no context to store the name in.
        if hasattr(ctx, "save_for_backward"):
            ctx.observed_name = self._name
        if self.asks_result is not None:
            self._take(Role.input, find_input(*args))
        return forward(ctx, *args)

    def _backward(self, backward: _Function, ctx: Any, *args: Any) -> Any:
        """Watches a module's backward pass."""
        self._begin(getattr(ctx, "observed_name", ""))
        if self.asks_result is not None:
            self._take(Role.output_gradient, args[0])
        result = backward(ctx, *args)
        self._values.clear()
        return result

    def _norm(self, norm: _Function, x: Any, _: Any, *args: Any) -> Any:
        """Watches the norm before a linear layer's product."""
        result = norm(x, _, *args)
        weight, bias, eps, quantizer, *more = args
        if quantizer is None:
            self._take(Role.input, result[0])
        elif type(quantizer).__name__ == "Float8Quantizer":
            # With a delayed scale the norm is cast without being rounded (TE 2.12, pytorch/csrc/extensions).
            self._take(Role.input, _norm_in_fp32(x, weight, bias, eps, *more[1:]))
            self._blur = _norm_blur(x, eps, *more[1:])
        else:
            self._take(Role.input, norm(x, None, weight, bias, eps, None, *more)[0])
        return result

    def _take(self, role: Role, values: Any) -> None:
        # Whoever computed codes has cast them.
        if isinstance(values, torch.Tensor) and not hasattr(values, "_fp8_dtype"):
            self._values[role] = values.detach()

    def _gemm(self, gemm: _Function, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """Watches `general_gemm`."""
        phase = _PHASES[kwargs.get("layout", "TN")]
        if not self._asks_for_result(phase):
            self._tell(phase, a, b)
            return gemm(a, b, *args, **kwargs)
        added = kwargs["out"].clone() if kwargs.get("accumulate") else kwargs.get("bias")
        result = gemm(a, b, *args, **kwargs)
        is_split = kwargs.get("use_split_accumulator", False)
        self._tell(phase, a, b, output=result[0], added=added, is_split=is_split)
        return result

    def _grouped_gemm(self, gemm: _Function, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """Watches `general_grouped_gemm`."""
        phase, rows = _PHASES[kwargs.get("layout", "TN")], kwargs["m_splits"]
        if self.idle_listener is not None and not any(rows):
            self.idle_listener(self._name, phase)
        # An expert without tokens computes nothing.
        computing = [expert for expert, num_rows in enumerate(rows) if num_rows]
        pairs = list(zip(a, b, strict=True))
        if not computing or not self._asks_for_result(phase):
            for part, expert in enumerate(computing):
                self._tell(phase, *pairs[expert], part=part, expert=expert, rows=rows)
            return gemm(a, b, *args, **kwargs)
        # One product is reported with its result: the same expert's in all phases of a microbatch.
        chosen, out = computing[self.turn % len(computing)], args[0]
        added = kwargs["bias"][chosen] if kwargs.get("use_bias") else None
        if kwargs.get("accumulate"):
            added = out[chosen].clone()
        result = gemm(a, b, *args, **kwargs)
        output = out[0].split(rows)[chosen] if kwargs.get("single_output") else out[chosen]
        is_split = kwargs.get("use_split_accumulator", False)
        for part, expert in enumerate(computing):
            told = {"output": output, "added": added, "is_split": is_split} if expert == chosen else {}
            self._tell(phase, *pairs[expert], part=part, expert=expert, rows=rows, **told)
        return result

    def _asks_for_result(self, phase: Phase) -> bool:
        return self.asks_result is not None and self.asks_result(self._name, phase)

    def _tell(
        self,
        phase: Phase,
        a: Any,
        b: Any,
        *,
        part: int = 0,
        expert: int | None = None,
        rows: Sequence[int] = (),
        output: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        is_split: bool = False,
    ) -> None:
        if self.asks is not None and not self.asks(self._name, phase):
            return
        given = dict(zip(_ARGUMENTS[phase], (a, b), strict=True))
        first, second = (
            self._operand(role, phase, given[role], self._values_of(role, expert, rows)) for role in OPERANDS[phase]
        )
        if output is not None:
            output = output.detach().reshape(-1, output.shape[-1])
        # Products of blocks are always split (pytorch/cpp_extensions/gemm.py).
        has_blocks = isinstance(first, Fp8Operand) and first.scale.dim() > 1
        product = Product(
            phase=phase,
            operands=(first, second),
            output=output,
            added=added,
            part=part,
            sums=Sums.split if is_split or has_blocks else Sums.unsplit,
        )
        self.listener(self._name, product)

    def _operand(self, role: Role, phase: Phase, tensor: Any, values: torch.Tensor | None) -> Operand:
        """An operand of cuBLAS: a plain tensor, or one of TE's quantized storages (TE 2.12, pytorch/tensor/storage)."""
        name = format_of(tensor)
        if name not in CODE_TYPES:
            return Operand(role=role, format=name)
        sums_over_rows = phase is Phase.wgrad or (phase, role) == (Phase.dgrad, Role.weight)
        codes, scale_inv = _stored(tensor, columnwise=sums_over_rows)
        # E8M0 is an exponent with a bias of 127.
        scale = torch.exp2(127.0 - scale_inv.float()) if scale_inv.dtype is torch.uint8 else scale_inv.reciprocal()
        if scale.numel() > 1:
            # Padding of the array of scales is zero.
            scale = torch.where(scale_inv > 0, scale, torch.nan)
        amax = None
        if phase is CAST_IN[role]:
            amax = getattr(tensor._quantizer, "amax", None)
            if amax is None and self.measure_amax:
                amax = tensor.dequantize(dtype=torch.float32).abs().max().view(1)
        # Ranks that split a sequence cast their parts and gather the codes.
        is_gathered = values is not None and values.shape != codes.shape
        return Fp8Operand(
            role=role,
            format=name,
            codes=codes.view(CODE_TYPES[name]),
            scale=scale,
            amax=amax,
            values=None if is_gathered else values,
            blur=self._blur if role is Role.input else None,
            is_gathered=is_gathered,
        )

    def _values_of(self, role: Role, expert: int | None, rows: Sequence[int]) -> torch.Tensor | None:
        if self.asks_result is None:
            return None
        if role is Role.weight:
            weight: Any = getattr(self.modules.get(self._name), f"weight{'' if expert is None else expert}", None)
            return None if weight is None or hasattr(weight, "_fp8_dtype") else weight.detach()
        values = self._values.get(role)
        if values is None:
            return None
        values = values.reshape(-1, values.shape[-1])
        return values if expert is None else values.split(list(rows))[expert]


def _norm_in_fp32(x: Any, weight: Any, bias: Any, eps: float, *how: Any) -> torch.Tensor:
    normalization, _, zero_centered = how
    factor, shape = weight.float() + float(zero_centered), x.shape[-1:]
    if normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(x.float(), shape, factor, eps)
    return torch.nn.functional.layer_norm(x.float(), shape, factor, bias.float(), eps)


def _norm_blur(x: Any, eps: float, normalization: str, *_: Any) -> torch.Tensor:
    """How far two kernels' results may be apart, relative to the largest value of them, [].

    A layer norm subtracts a mean: the error of the mean grows with it, and the rest may be small.
    """
    blur = torch.full((), _NORM_BLUR, device=x.device)
    if normalization == "RMSNorm":
        return blur
    variance, mean = torch.var_mean(x.float(), dim=-1, correction=0)
    return blur * (1 + 2 * (mean.abs() * (variance + eps).rsqrt()).max())


def format_of(tensor: Any) -> str:
    """The format of an operand or of attention's argument: "e4m3", "e5m2", or the type of a plain tensor."""
    dtype = getattr(tensor, "_fp8_dtype", None)
    if dtype is None:
        return str(tensor.dtype).removeprefix("torch.")
    return "e4m3" if str(dtype).endswith("kFloat8E4M3") else "e5m2"


def _stored(tensor: Any, *, columnwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A quantized storage's codes as a matrix of bytes, and inverse scales, [1] or [blocks of rows, blocks of columns].

    A product that sums over rows (`columnwise`) reads the copy for that if there is one.
    """
    if hasattr(tensor, "_scale_inv"):
        is_transposed = columnwise and tensor._transpose is not None and not tensor._transpose_invalid
        # The transpose of a reshaped tensor may have a wrong shape (TE 2.12, Float8Tensor.reshape).
        width = tensor._transpose.shape[0] if tensor._data is None else tensor._data.shape[-1]
        if is_transposed or tensor._data is None:
            return tensor._transpose.reshape(width, -1).t(), tensor._scale_inv
        return tensor._data.reshape(-1, width), tensor._scale_inv
    columnwise = tensor._rowwise_data is None or (columnwise and tensor._columnwise_data is not None)
    if columnwise:
        codes, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    else:
        codes, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    # MXFP8's scales are in an order of their own.
    if not hasattr(tensor, "_is_2D_scaled"):
        return codes, scales
    # The copy for products over rows is transposed.
    codes = codes.reshape(codes.shape[0], -1).t() if columnwise else codes.reshape(-1, codes.shape[-1])
    # Scales of square blocks are in the order of the codes, those of 1×128 and 128×1 have the long side first.
    if columnwise is tensor._is_2D_scaled:
        scales = scales.t()
    # Arrays of scales are padded.
    down, across = (_BLOCK, _BLOCK) if tensor._is_2D_scaled else (_BLOCK, 1) if columnwise else (1, _BLOCK)
    return codes, scales[: -(-codes.shape[0] // down), : -(-codes.shape[1] // across)]
