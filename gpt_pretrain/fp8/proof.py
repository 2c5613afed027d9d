"""The proof that the live layers did in a training step what the configuration asked of FP8.

During one step each rank watches every matrix product of its linear layers. Then it compares the products' formats and
how the weights are stored with `spec/products.py` and `spec/fp8.py`. It computes the numbers again
(`fp8/values.py`), and reads back the recipe objects of Transformer Engine's layers. Any difference on any rank ends the
run on all of them, with a table. Nothing stays in the way after that step. Where a rank's experts had no tokens, the
other ranks prove their products (`fp8/observer.py`).

FP8 weights are compared with their masters after the optimizer's step (`fp8/masters.py`).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.fp8.gemms import Phase, Product
from gpt_pretrain.fp8.local_layers import live_linears
from gpt_pretrain.fp8.masters import MasterCheck
from gpt_pretrain.fp8.observer import (
    Difference,
    WatchedProducts,
    differences_of_ranks,
    observe_attention,
    observe_products,
)
from gpt_pretrain.fp8.values import WatchedValues
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model, sums_over_parameters
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import recipes_of

_WAY_OUT = (
    "The layers do not do what the configuration says. `python -m gpt_pretrain.plan` with the same overrides shows the "
    "plan; environment variables named NVTE_… and code that replaces layers or recipes are the usual causes."
)

# Rows of one kind of difference, and ranks named in a row.
_MOST_ROWS = 3
_NOT_IN_FP8: Mapping[str, str] = {"recipe": "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """What the proof found, the same on all ranks."""

    fp8_flops_share: float
    """Share of a step's matrix operations in FP8, planned and now proven; the whole includes attention and LM head."""
    fp8_parameter_bytes_share: float
    """Share of the model's parameter bytes in FP8."""
    kept_out: tuple[str, ...]
    """Linear layers that settings keep out of FP8; none of them computed in it."""
    time_s: float
    """Seconds that the comparison took, without the step itself."""


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
    # One fault may show in every layer, with other numbers in each.
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
    """Like "0, 1, 2 and 5 more"."""
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
        self._optimizer = optimizer
        self._high = str(model.transformer_config.params_dtype).removeprefix("torch.")
        self._modules = {name: module for chunk in self._chunks for name, module in whole_model_modules(chunk)}
        held = {layer.layer_number - 1 for chunk in self._chunks for layer in chunk.decoder.layers}
        held_linears = [linear for linear in spec.linears if linear.layer in held]
        live = live_linears(held_linears, self._modules, spec.model.num_moe_experts)
        self._planned = {linear.module: linear for linear in live}
        self._products = WatchedProducts(settings, self._high)
        self._values: WatchedValues | None = None
        self._turn = step + torch.distributed.get_rank()
        self._attention: dict[Phase, set[str]] = defaultdict(set)
        self._masters: MasterCheck | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training step inside, which `judge` compares with the plan."""
        if self._settings.params:
            self._masters = MasterCheck(
                self._optimizer,
                {id(getattr(module, "weight", None)): name for name, module in self._modules.items()},
                self._settings.recipe.least_amax,
            )
        if self._has_known_numbers():
            self._values = WatchedValues(
                self._settings,
                {name: linear for name, linear in self._planned.items() if linear.precision == "fp8"},
                self._modules,
                num_microbatches=self._spec.layout.num_microbatches,
                turn=self._turn,
            )
        with ExitStack() as stack:
            if self._values is not None:
                stack.enter_context(self._values.watching())
            stack.enter_context(
                observe_products(
                    self._chunks,
                    self._note,
                    idle_listener=self._note_idle,
                    asks_result=None if self._values is None else self._values.asks_result,
                )
            )
            if self._settings.dot_product_attention:
                stack.enter_context(observe_attention(lambda phase, name: self._attention[phase].add(name)))
            yield

    def _has_known_numbers(self) -> bool:
        """Whether operands and scales of the run's layers are stored as they are read here."""
        # User buffers gather operands within their products. MXFP8's scales were never read on a GPU.
        own = not self._spec.model.tp_comm_overlap and self._settings.recipe.capability[0] < (10, 0)
        return self._settings.emulate or own

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
        # Without scales.
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
            # What local layers were told is no evidence of what they do.
            if not hasattr(module, "product_listener"):
                yield from _recipe_differences(linear, module, self._settings)
            planned = "fp8" if self._settings.params and linear.precision == "fp8" else self._high
            live = _weight_storage(module)
            if live != planned:
                yield Difference(module=name, what="weight stored in", planned=planned, live=live)
        yield from self._attention_differences()
        if self._values is not None:
            yield from self._values.differences(parallel_state.get_amax_reduction_group(with_context_parallel=True))
        if self._masters is not None:
            yield from self._masters.problems(lr)

    def _attention_differences(self) -> Iterator[Difference]:
        if not self._settings.dot_product_attention:
            return
        for phase, name in ((Phase.forward, "forward"), (Phase.dgrad, "backward")):
            live = ", ".join(sorted(self._attention[phase])) or "none"
            if live != "e4m3":
                yield Difference(module="core_attention", what=f"attention, {name}", planned="e4m3", live=live)


def _recipe_differences(linear: Linear, module: torch.nn.Module, settings: Fp8Settings) -> Iterator[Difference]:
    planned = _planned_recipe(settings) if linear.precision == "fp8" else _NOT_IN_FP8
    live = _live_recipe(module)
    # The fields of another recipe say nothing more.
    same = planned["recipe"] == live["recipe"]
    for what in sorted({*planned, *live}) if same else ["recipe"]:
        if planned.get(what) != live.get(what):
            yield Difference(
                module=linear.module, what=what, planned=planned.get(what, "none"), live=live.get(what, "none")
            )


def _planned_recipe(settings: Fp8Settings) -> Mapping[str, str]:
    """The result of `_live_recipe` for a layer that follows the settings."""
    recipe = settings.recipe
    said = {"recipe": recipe.te_class, "format": "HYBRID" if settings.hybrid else "E4M3"}
    if recipe.keeps_history:
        said |= {
            "margin": str(settings.margin),
            "amax history": str(settings.amax_history_len),
            "amax of the history": settings.amax_compute_algo.value,
            "amax reduced over ranks": "True",
        }
    if recipe.scales_flag is not None:
        said["scales"] = recipe.scales
    return said | {"FP8 attention": str(settings.dot_product_attention)}


def _live_recipe(module: torch.nn.Module) -> Mapping[str, str]:
    """The recipe of a layer's last forward pass: Transformer Engine's, or none."""
    if not getattr(module, "fp8", False):
        return _NOT_IN_FP8
    meta: Any = module.fp8_meta
    recipe = meta["recipe"]
    name = next(cls.__name__ for cls in type(recipe).__mro__ if cls.__module__.startswith("transformer_engine."))
    said = {"recipe": name, "format": recipe.fp8_format.name}
    known = next((each for each in recipes_of(Fp8Backend.transformer_engine) if each.te_class == name), None)
    if known is not None and known.keeps_history:
        # The history that the layer has, not the one that the recipe asks for.
        said |= {
            "margin": str(recipe.margin),
            "amax history": str(meta["scaling_fwd"].amax_history.shape[0]),
            "amax of the history": str(recipe.amax_compute_algo),
            "amax reduced over ranks": str(recipe.reduce_amax),
        }
    if known is not None and known.scales_flag is not None:
        flag, if_true, if_false = known.scales_flag
        said["scales"] = if_true if getattr(recipe, flag) else if_false
    return said | {"FP8 attention": str(recipe.fp8_dpa)}


def _weight_storage(module: torch.nn.Module) -> str:
    """How a linear layer stores its weights: "fp8", or their type. Layers of experts have weight0, weight1, …."""
    stored = {
        "fp8" if is_float8tensor(parameter) else str(parameter.dtype).removeprefix("torch.")
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    return " and ".join(sorted(stored))
