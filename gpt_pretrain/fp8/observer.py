"""Watches the matrix products of live linear layers, for the proof and the statistics, and compares them with the plan.

Local layers report their products themselves; `fp8/te_products.py` watches Transformer Engine's.

A rank must compute every planned product itself, unless none of its experts got a token. A grouped product without rows
computes nothing in any format, so the ranks whose experts had tokens prove it; if there are none, nobody does. If each
expert computes a product of its own, one that had tokens proves it for the layer's others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.fp8.comparisons import PRODUCTS, Difference
from gpt_pretrain.fp8.gemms import CODE_TYPES, Phase, Product
from gpt_pretrain.fp8.local_layers import Fp8Linear, planned_name
from gpt_pretrain.fp8.te_products import Asks, IdleListener, Listener, Watch, format_of, is_te_linear
from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import patched
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import Linear

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
    turn: int = 0,
    measure_amax: bool = False,
) -> Iterator[None]:
    """Tells the listener about every product that the linear layers of these model chunks compute inside.

    Args:
        chunks: This rank's model chunks.
        listener: Receives the layer's name in the whole model ("decoder.layers.3.mlp.linear_fc1") and the product.
        idle_listener: Receives the layer's name and the phase of products of experts that compute nothing.
        asks: Limits the products of Transformer Engine that are reported. Local layers report all.
        asks_result: If given, Transformer Engine's products are reported with the values that were cast, and those for
            which it returns true with their result. Local layers always report both.
        turn: Selects the expert of a grouped product whose result is reported.
        measure_amax: Computes the amax from the codes if the recipe keeps none, which costs a pass over the tensor.
    """
    transformer_engine: dict[str, torch.nn.Module] = {}
    with ExitStack() as stack:
        for chunk in chunks:
            for name, module in whole_model_modules(chunk):
                if is_te_linear(module):
                    transformer_engine[name] = module
                elif isinstance(module, Fp8Linear):
                    tell = partial(listener, name)
                    module.product_listeners.append(tell)
                    stack.callback(module.product_listeners.remove, tell)
                    if idle_listener is not None:
                        module.idle_listener = partial(idle_listener, name)
                        stack.callback(setattr, module, "idle_listener", None)
        if transformer_engine:
            watch = Watch(
                modules=transformer_engine,
                listener=listener,
                idle_listener=idle_listener,
                asks=asks,
                asks_result=asks_result,
                turn=turn,
                measure_amax=measure_amax,
            )
            stack.enter_context(watch.watching())
        yield


@contextmanager
def observe_attention(listener: Callable[[Phase, str], None]) -> Iterator[None]:
    """Reports every fused attention of Transformer Engine inside: which pass, in which format.

    Other backends (flash-attn, unfused) never compute in FP8.
    """
    # The position of the queries among the arguments.
    places = {"fused_attn_fwd": (Phase.forward, 5), "fused_attn_bwd": (Phase.dgrad, 4)}

    def watched(function: Callable[..., Any], phase: Phase, queries: int, *args: Any, **kwargs: Any) -> Any:
        listener(phase, format_of(args[queries]))
        return function(*args, **kwargs)

    backends = patches.ATTENTION_PASSES.owner()
    watching = {name: partial(watched, getattr(backends, name), *place) for name, place in places.items()}
    with patched(patches.ATTENTION_PASSES, **watching):
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A rank's products compared with the plan."""

    differences: tuple[Difference, ...]
    as_planned: frozenset[_Key]
    """Products computed in the planned formats."""
    idle: Mapping[_Key, Difference]
    """Products without rows, each with the difference that it is if no other rank computed it as planned."""


class WatchedProducts:
    """Records what the linear layers of this rank compute; `high` is the type outside of FP8, like "bfloat16"."""

    def __init__(self, settings: Fp8Settings, high: str) -> None:
        self._settings = settings
        self._high = high
        self._formats: dict[_Key, set[_Formats]] = defaultdict(set)
        self._idle: set[_Key] = set()

    def note(self, module: str, product: Product) -> None:
        """Records a product."""
        self._formats[module, product.phase].add(product.formats)

    def note_idle(self, module: str, phase: Phase) -> None:
        """Records a product without rows."""
        self._idle.add((module, phase))

    def compare(self, planned: Mapping[str, Linear]) -> Compared:
        """Compares with the plan of this rank's linear layers, by their names in the whole model."""
        differences, as_planned, idle = [], set(), {}
        for name, linear in planned.items():
            for phase, formats in self._planned_formats(linear).items():
                live = self._formats.get((name, phase), set())
                difference = Difference(
                    comparison=PRODUCTS,
                    module=name,
                    what=phase.value,
                    planned=_listed({formats}),
                    live=_listed(live),
                )
                if live == {formats}:
                    as_planned.add((name, phase))
                elif live:
                    differences.append(difference)
                elif (name, phase) in self._idle:
                    idle[name, phase] = difference
                # Layers outside FP8 need not report their products.
                elif linear.precision == "fp8":
                    differences.append(difference)
        for (name, phase), live in self._formats.items():
            if name not in planned and any(part in CODE_TYPES for pair in live for part in pair):
                differences.append(
                    Difference(
                        comparison=PRODUCTS, module=name, what=phase.value, planned="not in FP8", live=_listed(live)
                    )
                )
        return Compared(differences=tuple(differences), as_planned=frozenset(as_planned), idle=idle)

    def _planned_formats(self, linear: Linear) -> dict[Phase, _Formats]:
        high = self._high, self._high
        if linear.precision != "fp8":
            return dict.fromkeys(Phase, high)
        forward, gradient = self._settings.forward_format, self._settings.gradient_format
        wgrad = (gradient, forward) if linear.wgrad_precision == "fp8" else high
        return {Phase.forward: (forward, forward), Phase.dgrad: (gradient, forward), Phase.wgrad: wgrad}


def differences_of_ranks(ranks: Sequence[Compared]) -> list[Difference]:
    """Every difference once, with its ranks; an idle product differs only if no rank computed it as planned."""
    computed = {(planned_name(name), phase) for rank in ranks for name, phase in rank.as_planned}
    found: dict[Difference, list[int]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        idle = [each for (name, phase), each in rank.idle.items() if (planned_name(name), phase) not in computed]
        for difference in dict.fromkeys([*rank.differences, *idle]):
            found[difference].append(number)
    return [replace(difference, ranks=tuple(numbers)) for difference, numbers in found.items()]


def _listed(formats: set[_Formats]) -> str:
    return " and ".join(sorted(f"{first} × {second}" for first, second in formats)) or "no such product"
