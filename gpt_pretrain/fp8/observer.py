"""Watches the matrix products of live linear layers, for the proof and the statistics, and compares them with the plan.

Emulated layers report their products themselves. Transformer Engine's are watched where they are computed: its linear
modules call `general_gemm` three times, those of experts `general_grouped_gemm` with one product per expert, and what
these functions are given is what runs, whatever was configured. While nobody watches, nothing is changed.

A rank must have computed every planned product itself, with one exception: its experts, where no token came to any of
them. It has then called their grouped product for no rows, which computes nothing in any format. The ranks whose
experts had tokens prove that product; if there are none, nobody does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.fp8.gemms import CODE_TYPES, OPERANDS, Operand, Phase, Product, ProductListener, Role
from gpt_pretrain.megatron import patches
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.patches import patched
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import Fp8Settings

# Called with a module's name in the whole model and a product, right before that is computed. Must not wait for the
# device.
Listener = Callable[[str, Product], None]
# The same for a grouped product without rows: no token came to any of this rank's experts.
IdleListener = Callable[[str, Phase], None]

# A linear layer's name in the whole model, and one of its products.
type _Key = tuple[str, Phase]
type _Formats = tuple[str, str]

# The layouts by which general_gemm's three products can be told apart (TE 2.12, pytorch/module/linear.py).
_PHASES = {"TN": Phase.forward, "NN": Phase.dgrad, "NT": Phase.wgrad}
# Its first two arguments in each product.
_ARGUMENTS = {
    Phase.forward: (Role.weight, Role.input),
    Phase.dgrad: (Role.weight, Role.output_gradient),
    Phase.wgrad: (Role.input, Role.output_gradient),
}
# The product before which a tensor is cast; until the next microbatch its amax belongs to that cast.
_CAST_IN = {Role.input: Phase.forward, Role.weight: Phase.forward, Role.output_gradient: Phase.dgrad}


@contextmanager
def observe_products(
    chunks: Sequence[MegatronModule],
    listener: Listener,
    *,
    idle_listener: IdleListener | None = None,
    measure_amax: bool = False,
) -> Iterator[None]:
    """Tells the listener about every product that the linear layers of these model chunks compute inside.

    Args:
        chunks: This rank's model chunks.
        listener: Receives the layer's name in the whole model ("decoder.layers.3.mlp.linear_fc1") and the product.
        idle_listener: Receives the layer's name and which of its products, where experts compute nothing.
        measure_amax: Computes the amax from the codes where the recipe keeps none, which costs a pass over the tensor.
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
    """One listener for two: the proof and the statistics may watch the same step."""
    if first is None:
        return second

    def tell(product: Product) -> None:
        first(product)
        second(product)

    return tell


def is_te_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer of Transformer Engine, without importing that."""
    return any(
        cls.__module__.startswith("transformer_engine.pytorch.module.")
        and cls.__name__ in ("Linear", "LayerNormLinear", "GroupedLinear")
        for cls in type(module).__mro__
    )


@contextmanager
def _watch_transformer_engine(
    modules: dict[str, torch.nn.Module], listener: Listener, idle_listener: IdleListener | None, *, measure_amax: bool
) -> Iterator[None]:
    # The module that computes the next product: set at the beginning of its forward and its backward pass.
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
                # An expert without tokens computes nothing.
                if rows:
                    listener(current[0], _product(phase, of_weights, of_rows, measure_amax=measure_amax))
            return gemm(a, b, *args, **kwargs)

        return run

    def watched_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(ctx: Any, *args: Any) -> Any:
            # Without gradients there is no context to store the name in.
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
        for products, passes, watched in (
            (patches.LINEAR_PRODUCTS, patches.LINEAR_PASSES, watched_gemm),
            (patches.NORM_LINEAR_PRODUCTS, patches.NORM_LINEAR_PASSES, watched_gemm),
            (patches.GROUPED_PRODUCTS, patches.GROUPED_PASSES, watched_grouped_gemm),
        ):
            (name,), place, function = products.names, products.owner(), passes.owner()
            stack.enter_context(patched(products, **{name: watched(getattr(place, name))}))
            stack.enter_context(
                patched(
                    passes,
                    forward=staticmethod(watched_forward(function.forward)),
                    backward=staticmethod(watched_backward(function.backward)),
                )
            )
        yield


@contextmanager
def observe_attention(listener: Callable[[Phase, str], None]) -> Iterator[None]:
    """Tells the listener about every fused attention of Transformer Engine inside: which pass, in which format.

    Other backends (flash-attn, unfused) are not reported, because none of them computes in FP8.
    """
    # The position of the queries among the arguments.
    places = {"fused_attn_fwd": (Phase.forward, 5), "fused_attn_bwd": (Phase.dgrad, 4)}

    def watched(function: Callable[..., Any], phase: Phase, queries: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            listener(phase, _format(args[queries]))
            return function(*args, **kwargs)

        return run

    backends = patches.ATTENTION_PASSES.owner()
    watching = {name: watched(getattr(backends, name), phase, queries) for name, (phase, queries) in places.items()}
    with patched(patches.ATTENTION_PASSES, **watching):
        yield


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
    """An operand of cuBLAS: a plain tensor, or one of TE's quantised storages (TE 2.12, pytorch/tensor/storage)."""
    name = _format(tensor)
    if name not in CODE_TYPES:
        return Operand(role=role, format=name, codes=None, scale=None, amax=None)
    codes, scale_inv = _stored(tensor)
    # E8M0 is an exponent with a bias of 127. Blocks that only pad the array of scales contain zeros.
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
    """Codes as bytes and inverse scales, of the row-wise copy or, without one, of the transposed copy."""
    if hasattr(tensor, "_scale_inv"):
        return (tensor._transpose if tensor._data is None else tensor._data), tensor._scale_inv
    if tensor._rowwise_data is not None:
        return tensor._rowwise_data, tensor._rowwise_scale_inv
    return tensor._columnwise_data, tensor._columnwise_scale_inv


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One way in which a layer differs from the plan."""

    module: str
    what: str
    planned: str
    live: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A rank's products compared with the plan."""

    differences: tuple[Difference, ...]
    as_planned: frozenset[_Key]
    """Products that this rank has computed in the planned formats."""
    idle: Mapping[_Key, Difference]
    """Products that this rank has only called for no rows, each with its difference if no other rank computed it."""


class WatchedProducts:
    """Records what the linear layers of this rank compute.

    Args:
        settings: The FP8 of the run.
        high: The type of everything outside of FP8, like "bfloat16".
    """

    def __init__(self, settings: Fp8Settings, high: str) -> None:
        self._settings = settings
        self._high = high
        self._formats: dict[_Key, set[_Formats]] = defaultdict(set)
        self._idle: set[_Key] = set()

    def note(self, module: str, product: Product) -> None:
        """Records a product that is computed."""
        self._formats[module, product.phase].add(product.formats)

    def note_idle(self, module: str, phase: Phase) -> None:
        """Records a grouped product that is called for no rows."""
        self._idle.add((module, phase))

    def compare(self, planned: Mapping[str, Linear]) -> Compared:
        """Compares with the plan of this rank's linear layers, by their names in the whole model."""
        differences, as_planned, idle = [], set(), {}
        for name, linear in planned.items():
            for phase, formats in self._planned_formats(linear).items():
                live = self._formats.get((name, phase), set())
                difference = Difference(module=name, what=phase.value, planned=_listed({formats}), live=_listed(live))
                if live == {formats}:
                    as_planned.add((name, phase))
                elif live:
                    differences.append(difference)
                elif (name, phase) in self._idle:
                    idle[name, phase] = difference
                # Layers outside of FP8 need not report their products.
                elif linear.precision == "fp8":
                    differences.append(difference)
        differences += self._unplanned(planned)
        return Compared(differences=tuple(differences), as_planned=frozenset(as_planned), idle=idle)

    def _unplanned(self, planned: Mapping[str, Linear]) -> Iterator[Difference]:
        for (name, phase), formats in self._formats.items():
            if name not in planned and any(part in CODE_TYPES for pair in formats for part in pair):
                yield Difference(module=name, what=phase.value, planned="not in FP8", live=_listed(formats))

    def _planned_formats(self, linear: Linear) -> dict[Phase, _Formats]:
        forward, gradient = self._settings.forward_format, self._settings.gradient_format
        if linear.precision != "fp8":
            forward = gradient = self._high
        formats = {
            Phase.forward: (forward, forward),
            Phase.dgrad: (gradient, forward),
            Phase.wgrad: (gradient, forward),
        }
        if linear.wgrad_precision != "fp8":
            formats[Phase.wgrad] = (self._high, self._high)
        return formats


def differences_of_ranks(ranks: Sequence[Compared]) -> list[Difference]:
    """Every difference of any rank, once; an idle product differs only if no rank has computed it as planned."""
    computed = {key for rank in ranks for key in rank.as_planned}
    found = [difference for rank in ranks for difference in rank.differences]
    found += [difference for rank in ranks for key, difference in rank.idle.items() if key not in computed]
    return list(dict.fromkeys(found))


def _listed(formats: set[_Formats]) -> str:
    return " and ".join(sorted(f"{first} × {second}" for first, second in formats)) or "no such product"
