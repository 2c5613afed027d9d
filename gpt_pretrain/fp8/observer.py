"""Watches the matrix products of live linear layers, for the proof and the statistics, and compares them with the plan.

Local layers report their products themselves. Transformer Engine's are watched where they are computed
(`fp8/te_products.py`).

A rank must have computed every planned product itself, with one exception: its experts, where no token came to any of
them. It has then called their grouped product for no rows, which computes nothing in any format. The ranks whose
experts had tokens prove that product; if there are none, nobody does. Where each expert computes a product of its own,
one that had tokens proves it for the layer's others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.fp8.gemms import CODE_TYPES, Phase, Product, ProductListener
from gpt_pretrain.fp8.local_layers import planned_name
from gpt_pretrain.fp8.te_products import (
    Asks,
    IdleListener,
    Listener,
    Watch,
    format_of,
    is_te_linear,
    watch_transformer_engine,
)
from gpt_pretrain.megatron import patches
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.patches import patched
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import Linear

# A linear layer's name in the whole model, and one of its products.
type _Key = tuple[str, Phase]
type _Formats = tuple[str, str]


@contextmanager
def observe_products(
    chunks: Sequence[MegatronModule],
    listener: Listener,
    *,
    idle_listener: IdleListener | None = None,
    asks: Asks | None = None,
    asks_result: Asks | None = None,
    measure_amax: bool = False,
) -> Iterator[None]:
    """Tells the listener about every product that the linear layers of these model chunks compute inside.

    Args:
        chunks: This rank's model chunks.
        listener: Receives the layer's name in the whole model ("decoder.layers.3.mlp.linear_fc1") and the product.
        idle_listener: Receives the layer's name and which of its products, where experts compute nothing.
        asks: Products of Transformer Engine for which it returns false are not told of. Local layers tell of all.
        asks_result: Products of Transformer Engine are told of with the values that were cast, and those for which it
            returns true with their result. Local layers always tell both.
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
                if idle_listener is not None:
                    layer.idle_listener = partial(idle_listener, name)
            elif is_te_linear(module):
                transformer_engine[name] = module
    with ExitStack() as stack:
        if transformer_engine:
            stack.enter_context(
                watch_transformer_engine(
                    Watch(
                        modules=transformer_engine,
                        listener=listener,
                        idle_listener=idle_listener,
                        asks=asks,
                        asks_result=asks_result,
                        measure_amax=measure_amax,
                    )
                )
            )
        try:
            yield
        finally:
            for module, before in emulated:
                module.product_listener = before
                if idle_listener is not None:
                    module.idle_listener = None


def _both(first: ProductListener | None, second: ProductListener) -> ProductListener:
    """One listener for two: the proof and the statistics may watch the same step."""
    if first is None:
        return second

    def tell(product: Product) -> None:
        first(product)
        second(product)

    return tell


@contextmanager
def observe_attention(listener: Callable[[Phase, str], None]) -> Iterator[None]:
    """Tells the listener about every fused attention of Transformer Engine inside: which pass, in which format.

    Other backends (flash-attn, unfused) are not reported, because none of them computes in FP8.
    """
    # The position of the queries among the arguments.
    places = {"fused_attn_fwd": (Phase.forward, 5), "fused_attn_bwd": (Phase.dgrad, 4)}

    def watched(function: Callable[..., Any], phase: Phase, queries: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            listener(phase, format_of(args[queries]))
            return function(*args, **kwargs)

        return run

    backends = patches.ATTENTION_PASSES.owner()
    watching = {name: watched(getattr(backends, name), phase, queries) for name, (phase, queries) in places.items()}
    with patched(patches.ATTENTION_PASSES, **watching):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One way in which a layer differs from the plan."""

    module: str
    what: str
    planned: str
    live: str
    ranks: tuple[int, ...] = ()
    """The ranks that found it; empty until all have told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A rank's products compared with the plan."""

    differences: tuple[Difference, ...]
    as_planned: frozenset[_Key]
    """Products that this rank has computed in the planned formats."""
    idle: Mapping[_Key, Difference]
    """Products that this rank has only called for no rows, each with its difference if no other rank computed it."""


class WatchedProducts:
    """Records what the linear layers of this rank compute; `high` is the type outside of FP8, like "bfloat16"."""

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
        for (name, phase), live in self._formats.items():
            if name not in planned and any(part in CODE_TYPES for pair in live for part in pair):
                differences.append(Difference(module=name, what=phase.value, planned="not in FP8", live=_listed(live)))
        return Compared(differences=tuple(differences), as_planned=frozenset(as_planned), idle=idle)

    def _planned_formats(self, linear: Linear) -> dict[Phase, _Formats]:
        high = self._high, self._high
        if linear.precision != "fp8":
            return dict.fromkeys(Phase, high)
        forward, gradient = self._settings.forward_format, self._settings.gradient_format
        wgrad = (gradient, forward) if linear.wgrad_precision == "fp8" else high
        return {Phase.forward: (forward, forward), Phase.dgrad: (gradient, forward), Phase.wgrad: wgrad}


def differences_of_ranks(ranks: Sequence[Compared]) -> list[Difference]:
    """Every difference, once, with its ranks; an idle product differs only if no rank has computed it as planned."""
    computed = {(planned_name(name), phase) for rank in ranks for name, phase in rank.as_planned}
    found: dict[Difference, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        idle = [each for (name, phase), each in rank.idle.items() if (planned_name(name), phase) not in computed]
        for difference in dict.fromkeys([*rank.differences, *idle]):
            found[difference].append(number)
    return [replace(difference, ranks=tuple(numbers)) for difference, numbers in found.items()]


def _listed(formats: set[_Formats]) -> str:
    return " and ".join(sorted(f"{first} × {second}" for first, second in formats)) or "no such product"
