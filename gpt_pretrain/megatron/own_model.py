"""Layers, losses and FP8 recipes that extensions register, built into the model; their errors say whose they are."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import Registered, registered_choice
from gpt_pretrain.launch.patches import FP8_RECIPE, patch
from gpt_pretrain.run.run_spec import RunSpec


def own_layer(spec: RunSpec, layer: ModuleSpec) -> ModuleSpec:
    """The spec of `model.layer`; the given one unless an extension has registered that.

    Raises:
        UserError: What the extension returns is no spec.
    """
    registered = registered_choice("layer", spec.model.layer)
    if registered is None:
        return layer
    with registered.named("the spec of a layer"):
        own = registered.value(spec, layer)
        if not isinstance(own, ModuleSpec):
            raise UserError(f"it returned {type(own).__name__}, which is no megatron.core.transformer.ModuleSpec")
    return own


def named_layers(spec: RunSpec, doing: str) -> AbstractContextManager[None]:
    """Around code that builds or calls layers: an exception from an extension's modules says whose it is."""
    registered = registered_choice("layer", spec.model.layer)
    return nullcontext() if registered is None else registered.named_if_inside(doing)


def mark_replicas(state: dict[str, Any]) -> None:
    """Makes one of the tensor parallel ranks the writer of a weight that all of them hold whole.

    megatron-core 0.19's MLP takes each rank's copy of a plain module, such as `torch.nn.Linear`, for the one to write.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    for key, part in state.items():
        if not isinstance(part, ShardedTensor) or ".experts." in key:
            continue
        pipeline, writer, data = part.replica_id
        if part.local_shape == part.global_shape[part.prepend_axis_num :] and writer == 0:
            part.replica_id = (pipeline, rank, data)


# megatron-core's own, for runs of the same process without a variant.
_core_recipe = fp8_utils.get_fp8_recipe


def install_recipe(spec: RunSpec) -> None:
    """Lets megatron-core take the recipe of `model.fp8_recipe` from the extension that registered it, if any did."""
    name = spec.model.fp8_recipe
    registered = None if name is None or spec.te_fp8 is None else registered_choice("fp8_recipe", name)
    patch(FP8_RECIPE, get_fp8_recipe=_core_recipe if registered is None else partial(_variant, registered))


def _variant(registered: Registered, config: TransformerConfig) -> Any:
    plain = _core_recipe(config)
    kind = type(plain)
    with registered.named("making a recipe"):
        recipe = registered.value.change(plain)
        if not isinstance(recipe, kind):
            raise UserError(f"it returned {type(recipe).__name__}, and a variant of {kind.__name__} is one")
    return recipe


def own_loss(spec: RunSpec) -> Callable[..., torch.Tensor] | None:
    """megatron-core's `output_processor` for `model.loss`; None unless an extension has registered that."""
    registered = registered_choice("loss", spec.model.loss)
    return None if registered is None else partial(_token_losses, registered, spec.config)


def _token_losses(
    registered: Registered,
    run_config: Config,
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """Losses [b, s]: in training those of the extension, otherwise the cross entropy."""
    logits, _bias = output_layer(hidden_states, output_weight)
    if not output_layer.training:
        return compute_language_model_loss(labels, logits)
    whole = gather_from_tensor_model_parallel_region(logits, group=output_layer.tp_group).transpose(0, 1)
    with registered.named("the loss of a microbatch"):
        losses = registered.value(whole, labels, run_config)
        if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape or not losses.is_floating_point():
            got = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserError(f"it returned {got} for labels {list(labels.shape)}; return a loss for each token")
    return losses
