"""The proof that the live layers did in a training step what the configuration asked of FP8.

During one step each rank watches every matrix product of its linear layers (`fp8/observer.py`). Then it compares the
formats of the products, the storage of the weights and the recipe objects of Transformer Engine's layers with the plan,
computes the numbers again (`fp8/values.py`), and compares FP8 weights with their masters (`fp8/state_checks.py`). Any
difference on any rank ends the run on all of them, with a table. Other steps are not slowed down.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.fp8.gemms import Phase, Product
from gpt_pretrain.fp8.local_layers import live_linears
from gpt_pretrain.fp8.observer import (
    Difference,
    WatchedProducts,
    differences_of_ranks,
    observe_attention,
    observe_products,
)
from gpt_pretrain.fp8.state_checks import MasterCheck
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.fp8.values import WatchedValues
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model, sums_over_parameters
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import Linear

_WAY_OUT = (
    "The layers do not do what the configuration says. `python -m gpt_pretrain.plan` with the same overrides shows the "
    "plan; environment variables named NVTE_… and code that replaces layers or recipes are the usual causes."
)

# Rows of one kind of difference, and ranks named in a row.
_MOST_ROWS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """What the proof found, the same on all ranks."""

    fp8_flops_share: float
    """Share of FP8 in a step's matrix operations, attention and LM head included."""
    fp8_parameter_bytes_share: float
    kept_out: tuple[str, ...]
    """Linear layers that settings keep out of FP8; none of them computed in it."""
    time_s: float
    """Time of the comparison, without the step."""


class ProofError(UserError):
    """The live layers do not do what was planned."""

    def __init__(self, differences: list[Difference]) -> None:
        self.differences = tuple(differences)
        super().__init__("FP8 does not run as planned:\n" + _table(differences) + "\n" + _WAY_OUT)


def _table(differences: list[Difference]) -> str:
    """One row for all layers with the same difference on the same ranks."""
    places: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for each in differences:
        places[each.what, each.planned, each.live, _listed_ranks(each.ranks)].append(each.module)
    rows = [("what", "planned", "live", "rank", "where")]
    # A fault may show in every layer, with different numbers.
    rows_of: Counter[str] = Counter()
    for (what, planned, live, ranks), modules in places.items():
        rows_of[what] += 1
        if rows_of[what] > _MOST_ROWS:
            continue
        rest = len(modules) - 1
        rows.append((what, planned, live, ranks, f"{modules[0]} and {rest} more" if rest else modules[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )
    left_out = sum(max(0, num - _MOST_ROWS) for num in rows_of.values())
    return table + (f"\nand {left_out} more like these" if left_out else "")


def _listed_ranks(ranks: tuple[int, ...]) -> str:
    rest = len(ranks) - _MOST_ROWS
    return ", ".join(map(str, ranks[:_MOST_ROWS])) + (f" and {rest} more" if rest > 0 else "")


class Proof:
    """Watches one training step of a model with FP8 and judges it."""

    def __init__(self, model: Model, optimizer: MegatronOptimizer, step: int) -> None:
        spec, settings = model.spec, model.spec.fp8
        assert settings is not None, "without FP8 there is nothing to prove"
        self._spec = spec
        self._settings = settings
        self._chunks = model.gpt_chunks
        self._high = str(model.transformer_config.params_dtype).removeprefix("torch.")
        self._modules = {name: module for chunk in self._chunks for name, module in whole_model_modules(chunk)}
        held = {layer.layer_number - 1 for chunk in self._chunks for layer in chunk.decoder.layers}
        held_linears = [linear for linear in spec.linears if linear.layer in held]
        live = live_linears(held_linears, self._modules, spec.model.num_moe_experts)
        self._planned = {linear.module: linear for linear in live}
        self._products = WatchedProducts(settings, self._high)
        self._attention: dict[Phase, set[str]] = defaultdict(set)
        self._masters: MasterCheck | None = None
        if settings.params:
            names = {id(getattr(module, "weight", None)): name for name, module in self._modules.items()}
            self._masters = MasterCheck(optimizer, names, settings.recipe.least_amax)
        self._values: WatchedValues | None = None
        # User buffers gather operands within their products. MXFP8's scales were never read on a GPU.
        if settings.emulate or (not spec.model.tp_comm_overlap and settings.recipe.capability[0] < (10, 0)):
            self._values = WatchedValues(
                settings,
                {name: linear for name, linear in self._planned.items() if linear.precision == "fp8"},
                self._modules,
                num_microbatches=spec.layout.num_microbatches,
                turn=step + torch.distributed.get_rank(),
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training step inside, which `judge` compares with the plan."""
        with ExitStack() as stack:
            if self._values is not None:
                stack.enter_context(self._values.watching())
            asks_result = None if self._values is None else self._values.asks_result
            stack.enter_context(
                observe_products(self._chunks, self._note, idle_listener=self._note_idle, asks_result=asks_result)
            )
            if self._settings.dot_product_attention:
                stack.enter_context(observe_attention(lambda phase, name: self._attention[phase].add(name)))
            yield

    def _note_idle(self, module: str, phase: Phase) -> None:
        self._products.note_idle(module, phase)
        if self._values is not None:
            self._values.note_idle(module, phase)

    def _note(self, module: str, product: Product) -> None:
        self._products.note(module, product)
        if self._values is not None:
            self._values.note(module, product)

    def judge(self, lr: float) -> Proven:
        """Compares the watched step with the plan, on all ranks together; every rank calls it.

        Raises:
            ProofError: This rank or another found a difference.
        """
        torch.cuda.synchronize()
        began = time.monotonic()
        products = self._products.compare({n: linear for n, linear in self._planned.items() if n in self._modules})
        this_rank = replace(products, differences=(*self._differences(lr), *products.differences))
        ranks = [this_rank] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, this_rank)
        differences = differences_of_ranks(ranks)
        if differences:
            raise ProofError(differences)
        # Scales are not counted.
        total, in_fp8 = sums_over_parameters(
            self._chunks,
            lambda each: each.numel() * (1 if is_float8tensor(each) else each.element_size()),
            lambda each: each.numel() if is_float8tensor(each) else 0,
        )
        return Proven(
            fp8_flops_share=self._spec.fp8_flops_share,
            fp8_parameter_bytes_share=in_fp8 / total,
            kept_out=tuple(linear.module for linear in self._spec.kept_out),
            time_s=time.monotonic() - began,
        )

    def _differences(self, lr: float) -> Iterator[Difference]:
        for name, linear in self._planned.items():
            module = self._modules.get(name)
            if module is None:
                yield Difference(module=name, what="layer", planned="a linear layer", live="not in the model")
                continue
            # The settings of local layers are no evidence of what they do.
            if not self._settings.in_local_layers or is_te_linear(module):
                yield from _recipe_differences(linear, module, self._settings)
            planned = "fp8" if self._settings.params and linear.precision == "fp8" else self._high
            live = _weight_storage(module)
            if live != planned:
                yield Difference(module=name, what="weight stored in", planned=planned, live=live)
        if self._settings.dot_product_attention:
            for phase, name in ((Phase.forward, "forward"), (Phase.dgrad, "backward")):
                live = ", ".join(sorted(self._attention[phase])) or "none"
                if live != "e4m3":
                    yield Difference(module="core_attention", what=f"attention, {name}", planned="e4m3", live=live)
        if self._values is not None:
            yield from self._values.differences(parallel_state.get_amax_reduction_group(with_context_parallel=True))
        if self._masters is not None:
            yield from self._masters.problems(lr)


def _recipe_differences(linear: Linear, module: torch.nn.Module, settings: Fp8Settings) -> Iterator[Difference]:
    """Compares the recipe of a layer's last forward pass with the plan's; both are "none" outside FP8."""
    planned = settings.recipe.te_class if linear.precision == "fp8" else "none"
    live, meta = "none", getattr(module, "fp8_meta", {})
    if getattr(module, "fp8", False):
        classes = type(meta["recipe"]).__mro__
        live = next(cls.__name__ for cls in classes if cls.__module__.startswith("transformer_engine."))
    facts = [("recipe", planned, live)]
    if planned == live != "none":
        facts = sorted(_recipe_facts(settings, meta))
    for what, planned, live in facts:
        if planned != live:
            yield Difference(module=linear.module, what=what, planned=planned, live=live)


def _recipe_facts(settings: Fp8Settings, meta: Any) -> Iterator[tuple[str, str, str]]:
    """What a recipe's fields are named, what they should be, and what they are in a layer."""
    recipe, live = settings.recipe, meta["recipe"]
    yield "format", "HYBRID" if settings.hybrid else "E4M3", live.fp8_format.name
    yield "FP8 attention", str(settings.dot_product_attention), str(live.fp8_dpa)
    if recipe.keeps_history:
        # The layer's own history, whatever its recipe says.
        length = meta["scaling_fwd"].amax_history.shape[0]
        yield "margin", str(settings.margin), str(live.margin)
        yield "amax history", str(settings.amax_history_len), str(length)
        yield "amax of the history", settings.amax_compute_algo.value, str(live.amax_compute_algo)
        yield "amax reduced over ranks", "True", str(live.reduce_amax)
    if recipe.scales_flag is not None:
        flag, if_true, if_false = recipe.scales_flag
        planned = "powers of two" if recipe.powers_of_two else "any"
        yield "scales", planned, if_true if getattr(live, flag) else if_false


def _weight_storage(module: torch.nn.Module) -> str:
    """How a linear layer stores its weights: "fp8", or their type. Layers of experts have weight0, weight1, …."""
    stored = {
        "fp8" if is_float8tensor(parameter) else str(parameter.dtype).removeprefix("torch.")
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    return " and ".join(sorted(stored))
