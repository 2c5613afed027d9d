"""The linear layers of a model whose layers an extension builds: found in the live modules, not in the plan.

Transformer Engine's linear layers and those that `Fp8Layers` builds compute in FP8 wherever they are, so the proof and
the statistics cover them. Others, like `torch.nn.Linear`, are named among those kept out.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt_pretrain.config.choices import AUTO, LayerName
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.fp8.local_layers import Fp8Linear, planned_name
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import ROUTER, Linear, why_not_fp8

_PLAIN = "an extension's layer computes it in the run's precision"


def live_layers(model: Model) -> tuple[Linear, ...]:
    """The whole model's linear layers, as planned or as its ranks have built them, the LM head last.

    Every rank calls it.

    Raises:
        UserError: A pattern of `model.fp8_exclude` names none of the layers that an extension has built.
    """
    spec, settings = model.spec, model.spec.fp8
    if settings is None or spec.model.layer is LayerName.gpt:
        return spec.linears
    planned = {linear.module: linear for linear in spec.linears}
    modules = {name: module for chunk in model.gpt_chunks for name, module in whole_model_modules(chunk)}
    here = list(_found(planned, modules, settings, model))
    ranks = [here] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    # A stable order, because ranks add up their statistics by it.
    found = {linear.module: linear for linears in ranks for linear in linears}.values()
    for pattern in settings.exclude:
        if pattern != AUTO and not any(fnmatch.fnmatchcase(linear.module, pattern) for linear in found):
            names = ", ".join(dict.fromkeys(linear.kind for linear in found))
            raise UserError(f"model.fp8_exclude: {pattern!r} matches no linear layer; those of a layer are {names}")
    return (*sorted(found, key=lambda linear: linear.layer), planned["output_layer"])


def _found(
    planned: Mapping[str, Linear], modules: Mapping[str, torch.nn.Module], settings: Fp8Settings, model: Model
) -> Iterator[Linear]:
    for name, module in modules.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", planned_name(name))
        if match is None:
            continue
        layer, kind = int(match[1]), match[2]
        ours = planned.get(planned_name(name))
        if ours is not None and kind == ROUTER:
            yield ours
            continue
        can_be_fp8 = is_te_linear(module) or isinstance(module, Fp8Linear)
        if not (can_be_fp8 or isinstance(module, ColumnParallelLinear | RowParallelLinear | torch.nn.Linear)):
            continue
        rows, columns = next(each for each in module.parameters(recurse=False) if each.dim() == 2).shape
        why = "" if can_be_fp8 else _PLAIN
        if is_te_linear(module):
            why = why_not_fp8(model.spec.model, settings, layer, kind, (rows, columns))
        head = planned["output_layer"]
        yield replace(
            ours or head,
            module=planned_name(name),
            layer=layer,
            kind=kind,
            out_features=rows,
            in_features=columns,
            count=1 if ours is None else ours.count,
            precision="high" if why else "fp8",
            wgrad_precision="fp8" if settings.wgrad and not why else "high",
            reason=why,
        )
