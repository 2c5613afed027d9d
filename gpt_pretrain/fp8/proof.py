"""The proof that the live layers did in a training step what the configuration asked of FP8.

During one step each rank watches every matrix product of its linear layers (`fp8/observer.py`). Then it compares the
formats of the products, the storage of the weights and the recipe objects of Transformer Engine's layers with the plan,
computes the numbers again (`fp8/values.py`), and compares FP8 weights with their masters (`fp8/state_checks.py`). What
arithmetic implies is an error on all ranks if it fails on one; what is merely usual is a warning
(`fp8/comparisons.py`). Other steps are not slowed down.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.fp8.comparisons import (
    ATTENTION,
    GATHERED_WEIGHT,
    PRODUCTS,
    RECIPE,
    RESUMED_STATE,
    STORAGE,
    Difference,
)
from gpt_pretrain.fp8.delayed import state_digest
from gpt_pretrain.fp8.gemms import Phase, Product
from gpt_pretrain.fp8.local_layers import live_linears
from gpt_pretrain.fp8.observer import (
    WatchedProducts,
    differences_of_ranks,
    observe_attention,
    observe_products,
)
from gpt_pretrain.fp8.own_layers import live_layers
from gpt_pretrain.fp8.state_checks import weight_differences
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.fp8.turns import Turn
from gpt_pretrain.fp8.values import WatchedValues
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model, sums_over_parameters
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import Linear, kept_out_of

_WAY_OUT = (
    "The layers do not do what the configuration says. `python -m gpt_pretrain.plan` with the same overrides shows the "
    "plan; environment variables named NVTE_… and code that replaces layers or recipes are the usual causes. To train "
    "without the proof, repeat the command with logging.fp8_proof=warn, or never to look for no differences."
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
    """Names of the linear layers outside of FP8."""
    warnings: tuple[str, ...]
    """What is unusual, but no error."""
    time_s: float
    """Time of the comparison, without the step."""


class ProofError(UserError):
    """The live layers do not do what was planned."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = tuple(differences)
        self.step: int | None = None
        """The step that was proven, if it is known."""
        self.saved = ""
        """What became of the run's progress."""
        super().__init__()

    def __str__(self) -> str:
        where = "" if self.step is None else f" in step {self.step}"
        saved = f"{self.saved[:1].upper()}{self.saved[1:]}. " if self.saved else ""
        return f"FP8 does not run as planned{where}:\n{_table(self.differences)}\n{saved}{_WAY_OUT}"

    @property
    def rows(self) -> tuple[str, ...]:
        """The differences as the sentences of a warning."""
        return _sentences(self.differences)


def _sentences(differences: Sequence[Difference]) -> tuple[str, ...]:
    """One for each row of the table."""
    return tuple(
        f"{where}: {what}: expected {planned}, found {live} (rank {ranks})"
        for what, planned, live, ranks, where in _rows(differences)[0]
    )


def _rows(differences: Sequence[Difference]) -> tuple[list[tuple[str, str, str, str, str]], int]:
    """One row for all layers with the same difference on the same ranks, and how many rows were left out."""
    places: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for each in differences:
        places[each.what, each.planned, each.live, _listed_ranks(each.ranks)].append(each.module)
    rows = []
    # A fault may show in every layer, with different numbers.
    rows_of: Counter[str] = Counter()
    for (what, planned, live, ranks), modules in places.items():
        rows_of[what] += 1
        if rows_of[what] > _MOST_ROWS:
            continue
        rest = len(modules) - 1
        rows.append((what, planned, live, ranks, f"{modules[0]} and {rest} more" if rest else modules[0]))
    return rows, sum(max(0, num - _MOST_ROWS) for num in rows_of.values())


def _table(differences: Sequence[Difference]) -> str:
    rows, left_out = _rows(differences)
    rows = [("what", "planned", "live", "rank", "where"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )
    return table + (f"\nand {left_out} more like these" if left_out else "")


def _listed_ranks(ranks: tuple[int, ...]) -> str:
    rest = len(ranks) - _MOST_ROWS
    return ", ".join(map(str, ranks[:_MOST_ROWS])) + (f" and {rest} more" if rest > 0 else "")


class Proof:
    """Watches one training step of a model with FP8 and judges it.

    `number` counts the proofs of the run and decides what this one looks at (`fp8/turns.py`). `saved` are digests of
    delayed scaling's state (`delayed.state_digests`) in the checkpoint that was loaded before this step, if one was.
    The step has `num_microbatches`; None: those of model.global_batch_size.
    """

    def __init__(
        self,
        model: Model,
        optimizer: MegatronOptimizer,
        number: int,
        saved: Mapping[str, str] | None = None,
        num_microbatches: int | None = None,
    ) -> None:
        spec, settings = model.spec, model.spec.fp8
        assert settings is not None, "without FP8 there is nothing to prove"
        self._spec = spec
        self._settings = settings
        self._optimizer = optimizer
        self._chunks = model.gpt_chunks
        # Where weights are sharded: what passes make whole.
        self._gathered = [chunk.weights for chunk in model.chunks if getattr(chunk, "weights", None) is not None]
        self._high = str(model.transformer_config.params_dtype).removeprefix("torch.")
        self._modules = {name: module for chunk in self._chunks for name, module in whole_model_modules(chunk)}
        held = {layer.layer_number - 1 for chunk in self._chunks for layer in chunk.decoder.layers}
        self._linears = live_layers(model)
        held_linears = [linear for linear in self._linears if linear.layer in held]
        live = live_linears(held_linears, self._modules, spec.model.num_moe_experts)
        self._planned = {linear.module: linear for linear in live}
        self._products = WatchedProducts(settings, self._high)
        self._attention: dict[Phase, set[str]] = defaultdict(set)
        # Before the step changes them.
        self._changed_states = list(self._compare_states(saved or {}))
        self.turn = Turn(
            number=number,
            rank=torch.distributed.get_rank(),
            num_microbatches=num_microbatches or spec.layout.num_microbatches,
        )
        """What this rank looks at."""
        self._values: WatchedValues | None = None
        # User buffers gather operands within their products. MXFP8's scales were never read on a GPU.
        if settings.emulate or (not spec.model.tp_comm_overlap and settings.recipe.engine.capability[0] < (10, 0)):
            in_fp8 = {name: linear for name, linear in self._planned.items() if linear.precision == "fp8"}
            self._values = WatchedValues(settings, in_fp8, self._modules, self.turn)

    def _compare_states(self, saved: Mapping[str, str]) -> Iterator[Difference]:
        for name, digest in saved.items():
            if name in self._modules and (live := state_digest(self._modules[name])) != digest:
                yield Difference(
                    comparison=RESUMED_STATE,
                    module=name,
                    what="scales and amax histories",
                    planned="those of the checkpoint",
                    live="none" if live is None else "others",
                )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training step inside, which `judge` compares with the plan."""
        with ExitStack() as stack:
            for weights in self._gathered:
                stack.enter_context(weights.counted())
            if self._values is not None:
                stack.enter_context(self._values.watching())
            asks_result = None if self._values is None else self._values.asks_result
            stack.enter_context(
                observe_products(
                    self._chunks,
                    self._note,
                    idle_listener=self._note_idle,
                    asks_result=asks_result,
                    turn=self.turn.part,
                )
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

    def judge(self) -> Proven:
        """Compares the watched step with the plan, on all ranks together; every rank calls it.

        Raises:
            ProofError: This rank or another found a difference that arithmetic excludes.
        """
        torch.cuda.synchronize()
        began = time.monotonic()
        products = self._products.compare({n: linear for n, linear in self._planned.items() if n in self._modules})
        this_rank = replace(products, differences=(*self._differences(), *products.differences))
        ranks = [this_rank] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, this_rank)
        differences = differences_of_ranks(ranks)
        if any(difference.comparison.stops for difference in differences):
            raise ProofError(differences)
        # Scales are not counted.
        total, in_fp8 = sums_over_parameters(
            self._chunks,
            lambda each: each.numel() * (1 if is_float8tensor(each) else each.element_size()),
            lambda each: each.numel() if is_float8tensor(each) else 0,
        )
        return Proven(
            fp8_flops_share=self._spec.fp8_flops_share_of(self._linears),
            kept_out=tuple(linear.module for linear in kept_out_of(self._linears)),
            fp8_parameter_bytes_share=in_fp8 / total,
            warnings=_sentences(differences),
            time_s=time.monotonic() - began,
        )

    def _differences(self) -> Iterator[Difference]:
        yield from self._changed_states
        if off := sum(int(weights.num_off) for weights in self._gathered):
            yield Difference(
                comparison=GATHERED_WEIGHT,
                module="sections of sharded weights",
                what="weights that layers read",
                planned="the parts of all ranks",
                live=f"{off} others",
            )
        for name, linear in self._planned.items():
            module = self._modules.get(name)
            if module is None:
                yield Difference(
                    comparison=PRODUCTS, module=name, what="layer", planned="a linear layer", live="not in the model"
                )
                continue
            # The settings of local layers are no evidence of what they do.
            if not self._settings.in_local_layers or is_te_linear(module):
                yield from _recipe_differences(linear, module, self._settings)
            planned = "fp8" if self._settings.params and linear.precision == "fp8" else self._high
            live = _weight_storage(module)
            if live != planned:
                yield Difference(comparison=STORAGE, module=name, what="weight stored in", planned=planned, live=live)
        if self._settings.dot_product_attention:
            for phase, name in ((Phase.forward, "forward"), (Phase.dgrad, "backward")):
                live = ", ".join(sorted(self._attention[phase])) or "none"
                if live != "e4m3":
                    what = f"attention, {name}"
                    yield Difference(
                        comparison=ATTENTION, module="core_attention", what=what, planned="e4m3", live=live
                    )
        if self._values is not None:
            yield from self._values.differences(parallel_state.get_amax_reduction_group(with_context_parallel=True))
        if self._settings.params:
            yield from weight_differences(
                self._optimizer, self._stored_weights(), self._settings.recipe.numerics.least_amax
            )

    def _stored_weights(self) -> dict[str, torch.nn.Parameter]:
        """This rank's FP8 weights; a layer of experts has several."""
        return {
            name if of_layer == "weight" else f"{name}.{of_layer}": weight
            for name, module in self._modules.items()
            for of_layer, weight in module.named_parameters(recurse=False)
            if is_float8tensor(weight)
        }


def _recipe_differences(linear: Linear, module: torch.nn.Module, settings: Fp8Settings) -> Iterator[Difference]:
    """Compares the recipe of a layer's last forward pass with the plan's; both are "none" outside FP8."""
    planned = settings.recipe.engine.te_class if linear.precision == "fp8" else "none"
    live, meta = "none", getattr(module, "fp8_meta", {})
    if getattr(module, "fp8", False):
        classes = type(meta["recipe"]).__mro__
        live = next(cls.__name__ for cls in classes if cls.__module__.startswith("transformer_engine."))
    facts = [("recipe", planned, live)]
    if planned == live != "none":
        facts = sorted(_recipe_facts(settings, meta))
    for what, planned, live in facts:
        if planned != live:
            yield Difference(comparison=RECIPE, module=linear.module, what=what, planned=planned, live=live)


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
    if recipe.engine.scales_flag is not None:
        flag, if_true, if_false = recipe.engine.scales_flag
        planned = "powers of two" if recipe.numerics.powers_of_two else "any"
        yield "scales", planned, if_true if getattr(live, flag) else if_false


def _weight_storage(module: torch.nn.Module) -> str:
    """How a linear layer stores its weights: "fp8", or their type. Layers of experts have weight0, weight1, …."""
    stored = {
        "fp8" if is_float8tensor(parameter) else str(parameter.dtype).removeprefix("torch.")
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    }
    return " and ".join(sorted(stored))
