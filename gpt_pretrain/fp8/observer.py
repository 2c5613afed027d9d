"""Watches the matrix products of live linear layers, for the proof and for the statistics.

Emulated layers report their products themselves. Transformer Engine's are watched where they are computed: its linear
modules call `general_gemm` three times, those of experts `general_grouped_gemm` with one product for each expert, and
what these are handed is what runs, whatever was configured. While nobody watches, nothing is changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.fp8.gemms import CODE_TYPES, OPERANDS, Operand, Phase, Product, ProductListener, Role
from gpt_pretrain.megatron.layers import whole_model_modules

# A module's name in the whole model, and a product right before it is computed. Must not wait for the device.
Listener = Callable[[str, Product], None]
# The same of a grouped product that has no rows: no token came to any of this rank's experts.
IdleListener = Callable[[str, Phase], None]

# How general_gemm's layout tells the three products apart (TE 2.12, pytorch/module/linear.py).
_PHASES = {"TN": Phase.forward, "NN": Phase.dgrad, "NT": Phase.wgrad}
# Its first two arguments in each of them.
_ARGUMENTS = {
    Phase.forward: (Role.weight, Role.input),
    Phase.dgrad: (Role.weight, Role.output_gradient),
    Phase.wgrad: (Role.input, Role.output_gradient),
}
# Where a tensor is cast: its amax is that of the cast until the next microbatch's.
_CAST_IN = {Role.input: Phase.forward, Role.weight: Phase.forward, Role.output_gradient: Phase.dgrad}


@contextmanager
def observe_products(
    chunks: Sequence[GPTModel],
    listener: Listener,
    *,
    idle_listener: IdleListener | None = None,
    measure_amax: bool = False,
) -> Iterator[None]:
    """Tells the listener of every product that the linear layers of these model chunks compute inside.

    Args:
        chunks: This rank's GPTModels.
        listener: Receives the layer's name in the whole model ("decoder.layers.3.mlp.linear_fc1") and the product.
        idle_listener: Receives the layer's name and which product of it, where experts compute nothing.
        measure_amax: Take the amax from the codes where the recipe keeps none, which costs a pass over the tensor.
    """
    emulated: list[tuple[Any, ProductListener | None]] = []
    transformer_engine: dict[str, torch.nn.Module] = {}
    for chunk in chunks:
        for name, module in whole_model_modules(chunk):
            if hasattr(module, "product_listener"):
                layer: Any = module
                emulated.append((layer, layer.product_listener))
                layer.product_listener = _both(layer.product_listener, partial(listener, name))
            elif is_te_linear(module):
                transformer_engine[name] = module
    with ExitStack() as stack:
        if transformer_engine:
            stack.enter_context(
                _watch_transformer_engine(transformer_engine, listener, idle_listener, measure_amax=measure_amax)
            )
        try:
            yield
        finally:
            for module, before in emulated:
                module.product_listener = before


def _both(first: ProductListener | None, second: ProductListener) -> ProductListener:
    """The proof and the statistics may watch the same step."""
    if first is None:
        return second

    def tell(product: Product) -> None:
        first(product)
        second(product)

    return tell


def is_te_linear(module: torch.nn.Module) -> bool:
    """Whether a module is one of Transformer Engine's linear layers, without importing it where it is not loaded."""
    return any(
        cls.__module__.startswith("transformer_engine.pytorch.module.")
        and cls.__name__ in ("Linear", "LayerNormLinear", "GroupedLinear")
        for cls in type(module).__mro__
    )


@contextmanager
def _watch_transformer_engine(
    modules: dict[str, torch.nn.Module], listener: Listener, idle_listener: IdleListener | None, *, measure_amax: bool
) -> Iterator[None]:
    from transformer_engine.pytorch.module import grouped_linear, layernorm_linear, linear

    # The module whose product comes next: set when its forward pass begins, and when its backward pass does.
    current: list[str] = [""]

    def enter(name: str, module: torch.nn.Module, arguments: Any) -> None:
        current[0] = name

    def watched_gemm(gemm: Callable[..., Any]) -> Callable[..., Any]:
        def run(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            phase = _PHASES[kwargs.get("layout", "TN")]
            listener(current[0], _product(phase, a, b, measure_amax=measure_amax))
            return gemm(a, b, *args, **kwargs)

        return run

    def watched_grouped_gemm(gemm: Callable[..., Any]) -> Callable[..., Any]:
        def run(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
            phase = _PHASES[kwargs.get("layout", "TN")]
            if idle_listener is not None and not any(kwargs["m_splits"]):
                idle_listener(current[0], phase)
            for rows, of_weights, of_rows in zip(kwargs["m_splits"], a, b, strict=True):
                # An expert that no token came to computes nothing.
                if rows:
                    listener(current[0], _product(phase, of_weights, of_rows, measure_amax=measure_amax))
            return gemm(a, b, *args, **kwargs)

        return run

    def watched_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(ctx: Any, *args: Any) -> Any:
            # Without gradients there is no context to remember the name in.
            if hasattr(ctx, "save_for_backward"):
                ctx.observed_name = current[0]
            return forward(ctx, *args)

        return run

    def watched_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(ctx: Any, *args: Any) -> Any:
            current[0] = getattr(ctx, "observed_name", "")
            return backward(ctx, *args)

        return run

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
        for place, function, name, watched in (
            (linear, linear._Linear, "general_gemm", watched_gemm),
            (layernorm_linear, layernorm_linear._LayerNormLinear, "general_gemm", watched_gemm),
            (grouped_linear, grouped_linear._GroupedLinear, "general_grouped_gemm", watched_grouped_gemm),
        ):
            stack.enter_context(_replaced(place, name, watched(getattr(place, name))))
            stack.enter_context(_replaced(function, "forward", staticmethod(watched_forward(function.forward))))
            stack.enter_context(_replaced(function, "backward", staticmethod(watched_backward(function.backward))))
        yield


@contextmanager
def observe_attention(listener: Callable[[Phase, str], None]) -> Iterator[None]:
    """Tells the listener of every fused attention of Transformer Engine inside: its pass, and its queries' format.

    Attention by another backend (flash-attn, unfused) is not reported: neither computes in FP8.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    # Where the queries are among the arguments.
    places = {"fused_attn_fwd": (Phase.forward, 5), "fused_attn_bwd": (Phase.dgrad, 4)}

    def watched(function: Callable[..., Any], phase: Phase, queries: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            listener(phase, _format(args[queries]))
            return function(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name, (phase, queries) in places.items():
            stack.enter_context(_replaced(backends, name, watched(getattr(backends, name), phase, queries)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _product(phase: Phase, a: Any, b: Any, *, measure_amax: bool) -> Product:
    first, second = _ARGUMENTS[phase]
    given = {first: a, second: b}
    operands = [_operand(role, phase, given[role], measure_amax=measure_amax) for role in OPERANDS[phase]]
    return Product(phase=phase, operands=(operands[0], operands[1]))


def _format(tensor: Any) -> str:
    dtype = getattr(tensor, "_fp8_dtype", None)
    if dtype is None:
        return str(tensor.dtype).removeprefix("torch.")
    return "e4m3" if str(dtype).endswith("kFloat8E4M3") else "e5m2"


def _operand(role: Role, phase: Phase, tensor: Any, *, measure_amax: bool) -> Operand:
    """What TE hands to cuBLAS: a plain tensor, or one of its quantised storages (TE 2.12, pytorch/tensor/storage)."""
    name = _format(tensor)
    if name not in CODE_TYPES:
        return Operand(role=role, format=name, codes=None, scale=None, amax=None)
    codes, scale_inv = _stored(tensor)
    # E8M0 is an exponent with a bias of 127. Blocks that only pad the array of scales hold zeros.
    scale = torch.exp2(127.0 - scale_inv.float()) if scale_inv.dtype is torch.uint8 else 1.0 / scale_inv
    amax = None
    if phase is _CAST_IN[role]:
        amax = getattr(tensor._quantizer, "amax", None)
        if amax is None and measure_amax:
            amax = tensor.dequantize(dtype=torch.float32).abs().max().view(1)
    return Operand(
        role=role,
        format=name,
        codes=codes.view(CODE_TYPES[name]),
        scale=torch.where(scale_inv > 0, scale, torch.nan),
        amax=amax,
    )


def _stored(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes and inverse scales of the copy that is there: row-wise, or the transposed one."""
    if hasattr(tensor, "_scale_inv"):
        return (tensor._transpose if tensor._data is None else tensor._data), tensor._scale_inv
    if tensor._rowwise_data is not None:
        return tensor._rowwise_data, tensor._rowwise_scale_inv
    return tensor._columnwise_data, tensor._columnwise_scale_inv
