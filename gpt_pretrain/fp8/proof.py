"""The proof that the live layers did in their first training step what the configuration asked of FP8.

During one step each rank watches every matrix product of its linear layers. Then it reads back their recipe objects and
how they store their weights, and compares all of it with `spec/products.py` and `spec/recipes.py`. Any difference
on any rank ends the run on all of them, with a table. Nothing stays in the way after that step. Where a rank's experts
had no tokens, the other ranks prove their products (`fp8/observer.py`).
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.fp8.gemms import Phase
from gpt_pretrain.fp8.masters import MasterCheck
from gpt_pretrain.fp8.observer import (
    Difference,
    WatchedProducts,
    differences_of_ranks,
    observe_attention,
    observe_products,
)
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model, parameters_by_group
from gpt_pretrain.megatron.parallel import sum_over
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import RECIPES, Fp8Settings
from gpt_pretrain.spec.run_spec import RunSpec

_WAY_OUT = (
    "The layers do not do what the configuration says. `python -m gpt_pretrain.plan` with the same overrides shows the "
    "plan; environment variables named NVTE_… and code that replaces layers or recipes are the usual causes."
)


_NOT_IN_FP8: Mapping[str, str] = {"recipe": "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """What the proof found, the same on all ranks."""

    fp8_flops_share: float
    """Share of a step's matrix operations in FP8, planned and now proven; the whole includes attention and LM head."""
    fp8_parameter_bytes_share: float
    """Share of the model's parameter bytes in FP8."""
    time_s: float
    """Seconds that the comparison took, without the step itself."""


class ProofError(UserError):
    """The live layers do not do what was planned.

    Args:
        differences: All differences of all ranks, at least one.
    """

    def __init__(self, differences: list[Difference]) -> None:
        self.differences = tuple(differences)
        super().__init__("FP8 does not run as planned:\n" + _table(differences) + "\n" + _WAY_OUT)


def _table(differences: list[Difference]) -> str:
    """One row for all layers with the same difference."""
    places: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in differences:
        places[each.what, each.planned, each.live].append(each.module)
    rows = [("what", "planned", "live", "where")]
    for (what, planned, live), modules in places.items():
        rest = len(modules) - 1
        rows.append((what, planned, live, f"{modules[0]} and {rest} more" if rest else modules[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )


class Proof:
    """Watches one training step of a model with FP8 and judges it.

    Args:
        model: This rank's model; FP8 is on.
        optimizer: Its optimizer.
    """

    def __init__(self, model: Model, optimizer: MegatronOptimizer) -> None:
        spec, settings = model.spec, model.spec.fp8
        assert settings is not None, "without FP8 there is nothing to prove"
        self._spec = spec
        self._settings = settings
        self._chunks = model.gpt_chunks
        self._optimizer = optimizer
        self._high = str(model.transformer_config.params_dtype).removeprefix("torch.")
        self._modules = {name: module for chunk in self._chunks for name, module in whole_model_modules(chunk)}
        self._planned = {linear.module: linear for linear in _linears_of(spec, self._chunks)}
        self._products = WatchedProducts(settings, self._high)
        self._attention: dict[Phase, set[str]] = defaultdict(set)
        self._masters: MasterCheck | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training step inside, which `judge` compares with the plan."""
        if self._settings.params:
            self._masters = MasterCheck(
                self._optimizer, {id(getattr(module, "weight", None)): name for name, module in self._modules.items()}
            )
        with ExitStack() as stack:
            stack.enter_context(
                observe_products(self._chunks, self._products.note, idle_listener=self._products.note_idle)
            )
            if self._settings.dot_product_attention:
                stack.enter_context(observe_attention(lambda phase, name: self._attention[phase].add(name)))
            yield

    def judge(self, lr: float) -> Proven:
        """Compares the watched step with the plan, on all ranks together; every rank calls it.

        Args:
            lr: Learning rate of the step.

        Raises:
            ProofError: This rank or another found a difference.
        """
        torch.cuda.synchronize()
        began = time.monotonic()
        products = self._products.compare(
            {name: self._planned[name] for name in self._planned if name in self._modules}
        )
        this_rank = replace(products, differences=(*self._differences(lr), *products.differences))
        ranks = [this_rank] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, this_rank)
        differences = differences_of_ranks(ranks)
        if differences:
            raise ProofError(differences)
        total, in_fp8 = self._parameter_bytes()
        return Proven(
            fp8_flops_share=self._spec.fp8_flops_share,
            fp8_parameter_bytes_share=in_fp8 / total,
            time_s=time.monotonic() - began,
        )

    def _differences(self, lr: float) -> Iterator[Difference]:
        for name, linear in self._planned.items():
            module = self._modules.get(name)
            if module is None:
                yield Difference(module=name, what="layer", planned="a linear layer", live="not in the model")
                continue
            yield from _recipe_differences(linear, module, self._settings)
            planned = "fp8" if self._settings.params and linear.precision == "fp8" else self._high
            live = _weight_storage(module)
            if live != planned:
                yield Difference(module=name, what="weight stored in", planned=planned, live=live)
        yield from self._attention_differences()
        for row in self._masters.problems(lr) if self._masters is not None else ():
            yield Difference(module=row[0], what=row[1], planned=row[2], live=row[3])

    def _attention_differences(self) -> Iterator[Difference]:
        if not self._settings.dot_product_attention:
            return
        for phase in (Phase.forward, Phase.dgrad):
            live = self._attention.get(phase, set())
            if live != {"e4m3"}:
                what = f"attention, {'forward' if phase is Phase.forward else 'backward'}"
                yield Difference(
                    module="core_attention", what=what, planned="e4m3", live=", ".join(sorted(live)) or "none"
                )

    def _parameter_bytes(self) -> tuple[int, int]:
        total = in_fp8 = 0
        for group, parameters in parameters_by_group(self._chunks):
            sums = torch.tensor(_parameter_bytes(parameters), dtype=torch.float64, device=torch.cuda.current_device())
            sum_over(group, sums)
            total, in_fp8 = total + int(sums[0].item()), in_fp8 + int(sums[1].item())
        return total, in_fp8


def _linears_of(spec: RunSpec, chunks: list[MegatronModule]) -> Iterator[Linear]:
    """The linear layers of the transformer layers that these chunks hold."""
    held = {layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers}
    return (linear for linear in spec.linears if linear.layer in held)


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
    """The recipe of a layer's last forward pass: emulated, Transformer Engine's, or none."""
    settings = getattr(module, "fp8_settings", None)
    if isinstance(settings, Fp8Settings):
        return _planned_recipe(settings)
    if not getattr(module, "fp8", False):
        return _NOT_IN_FP8
    meta: Any = module.fp8_meta
    recipe = meta["recipe"]
    name = next(cls.__name__ for cls in type(recipe).__mro__ if cls.__module__.startswith("transformer_engine."))
    said = {"recipe": name, "format": recipe.fp8_format.name}
    known = next((each for each in RECIPES.values() if each.te_class == name), None)
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


def _parameter_bytes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
    """Bytes of all these parameters, and of those stored in FP8; without scales."""
    total = in_fp8 = 0
    for parameter in parameters:
        if is_float8tensor(parameter):
            total += parameter.numel()
            in_fp8 += parameter.numel()
        else:
            total += parameter.numel() * parameter.element_size()
    return total, in_fp8
