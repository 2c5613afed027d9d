"""Optimizer and schedule of this rank, and one update that happens on all ranks or on none.

An update is skipped if the loss or a gradient is NaN or infinite, or if a cast to FP8 met an infinity. megatron-core
0.19 would update with any gradient norm; its own check (`check_for_nan_in_grad`) waits for the GPU and ends the run.
Here the ranks sum one number on the device. torch's fused Adam and SGD take it as the `found_inf` of automatic mixed
precision, and `PrecisionAwareAdam` does the same: unless it is zero they keep masters, moments, step counts and BF16
weights. The host does not wait, and what it launches next (casting masters, gathering weights) repeats what was there.
Delayed scaling's state has moved on by then, and is put back first (`fp8.infinities.StepCasts`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import _get_qkv_split_shapes
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.config.derived import min_lr, shards_gradients
from gpt_pretrain.config.schedule import rate_phases
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import registered_choice
from gpt_pretrain.features.mup import SCALED_BY_WIDTH, width_overrides
from gpt_pretrain.launch.patches import GRADIENT_NORM, OPTIMIZER_STATES, OPTIMIZERS, patch
from gpt_pretrain.megatron.model import Model, translate_optimizer
from gpt_pretrain.megatron.muon import Muon, is_muons
from gpt_pretrain.megatron.muon_matrices import is_orthogonalized, mark_matrices, matrices_of
from gpt_pretrain.megatron.own_optimizer import SkippingOptimizer, build_own
from gpt_pretrain.megatron.precision_aware import PrecisionAwareAdam, PrecisionAwareOptimizer
from gpt_pretrain.megatron.qk_clip import clip_after_steps
from gpt_pretrain.megatron.sharded_gradients import reading_parts
from gpt_pretrain.megatron.stored_weights import install_weight_cast
from gpt_pretrain.megatron.weight_average import start_average
from gpt_pretrain.run.optimizers import optimizer_of


def build_optimizer(model: Model) -> MegatronOptimizer:
    """megatron-core's chain of optimizers, one for experts and one for the rest.

    BF16 parameters have masters, which a distributed optimizer shards. Biases and norm weights have no weight decay.
    """
    spec = model.spec
    # Transformer Engine may bring a kernel of its own.
    if GRADIENT_NORM.owner().multi_tensor_scale_tensor_impl is None:
        patch(GRADIENT_NORM, l2_norm_impl=_l2_norm, multi_tensor_scale_tensor_impl=_scale_by_tensor)
    if spec.model.fp8_params:
        install_weight_cast(of_te=spec.te_fp8 is not None)
    precision_aware = spec.model.optim.use_precision_aware_optimizer
    own = registered_choice("optimizer", spec.model.optim.name)
    sharded = PrecisionAwareOptimizer if precision_aware else DistributedOptimizer
    # Whatever else is installed.
    patch(
        OPTIMIZERS,
        USING_PYTORCH_OPTIMIZER=not precision_aware,
        Adam=PrecisionAwareAdam,
        SGD=torch.optim.SGD,
        DistributedOptimizer=reading_parts(sharded) if shards_gradients(spec.model) else sharded,
    )
    patch(OPTIMIZER_STATES, HAVE_APEX_OR_TE=False)
    name, options = spec.model.optim.name, translate_optimizer(spec)
    overrides = get_standard_config_overrides(options) | width_overrides(spec.model, options)
    if name is OptimizerName.muon:
        mark_matrices(model.chunks, _rows_of_heads(model, options))
        of_adam = ParamPredicate(name="of_adam", fn=lambda parameter: not is_orthogonalized(parameter))
        overrides[ParamKey(predicate=of_adam)] = {"optimizer": OptimizerName.adam.name}
    optimizer = get_megatron_optimizer(options, model.chunks, overrides, use_gloo_process_groups=False)
    if name is OptimizerName.muon:
        _exchange(optimizer, lambda part, groups: Muon(groups, *matrices_of(part, model.chunks), options))
    elif own is not None and own.value.build is not None:
        _exchange(optimizer, lambda _, groups: build_own(own, spec.config, groups))
    expected = PrecisionAwareAdam.__name__ if precision_aware else optimizer_of(name).class_name
    built = {type(inner).__name__ for inner in _inner_optimizers(optimizer)}
    if not built <= {expected}:
        raise TypeError(f"model.optim.name={name.name}: megatron-core built {', '.join(built)}, not {expected}")
    _make_conditional(optimizer)
    if spec.model.qk_clip:
        clip_after_steps(optimizer, model)
    if spec.model.optim.ema_decay is not None:
        for inner in _inner_optimizers(optimizer):
            # torch makes the states of a parameter only if it has none.
            allocate_states(inner)
        start_average(optimizer)
    return optimizer


def _rows_of_heads(model: Model, options: OptimizerConfig) -> tuple[int, ...] | None:
    return tuple(_get_qkv_split_shapes(model.transformer_config)) if options.muon_split_qkv else None


def _exchange(
    optimizer: MegatronOptimizer, build: Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]
) -> None:
    """Puts an optimizer of another class in Adam's place, for the same masters or shards of them.

    megatron-core 0.19.2 builds `adam` and `sgd` by name and others only through the package emerging-optimizers, but
    its wrappers shard, cast, save and load whatever torch optimizer they hold. `build` gets the wrapper, still around
    Adam, and torch's parameter groups.
    """
    for part in optimizer.chained_optimizers:
        if (adam := part.optimizer) is None:
            continue
        # Shards of fp32 weights are views, which torch's constructor refuses.
        given = {each: each if each.is_leaf else each.detach() for each in _masters(adam)}
        part.optimizer = build(
            part,
            [
                {key: value for key, value in group.items() if key not in adam.defaults}
                | {"params": [given[each] for each in group["params"]]}
                for group in adam.param_groups
            ],
        )
        masters = {leaf: each for each, leaf in given.items()}
        for group in part.optimizer.param_groups:
            group["params"] = [masters[leaf] for leaf in group["params"]]


def _masters(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the optimizer steps taken, or of the tokens trained on."""
    optim, sched, phases = config.model.optim, config.model.optim.sched, rate_phases(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=sched.init_lr,
        max_lr=optim.lr,
        min_lr=min_lr(optim),
        lr_warmup_steps=phases.warmup,
        lr_decay_steps=phases.decay,
        lr_decay_style=sched.name.value,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=phases.decay,
        wd_incr_style="constant",
        # On resume the configuration gives the schedule, and the checkpoint its position.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=phases.wsd_decay,
        lr_wsd_decay_style=sched.wsd_decay_style.value,
    )


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate of the newest step; NaN if megatron-core names none."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return math.nan if rate is None else float(rate)


def decoupled_learning_rate(optimizer: MegatronOptimizer) -> float | None:
    """That of word embeddings and LM head (`model.optim.decoupled_lr`); None if they have none of their own."""
    groups = (group for group in optimizer.param_groups if SCALED_BY_WIDTH not in group)
    return next((float(group["lr"]) for group in groups if not group["default_config"]), None)


def hidden_learning_rate(optimizer: MegatronOptimizer) -> float | None:
    """That of the layers' matrices with muP (`features.mup`); None if they have none of their own."""
    return next((float(group["lr"]) for group in optimizer.param_groups if SCALED_BY_WIDTH in group), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves on the device, the same on all ranks; reading it waits for the device."""

    loss_sum_and_tokens: torch.Tensor
    """[2], fp32: sum of the token losses, and number of tokens."""
    grad_norm: torch.Tensor
    """[1], fp32: L2 norm over all parameters before clipping."""
    skipped: torch.Tensor
    """[], bool: loss, norm or an FP8 tensor was not finite, and nothing was updated."""
    squared_lengths: torch.Tensor | None = None
    """[1], fp32: sum of the squared lengths of the step's documents; None if these see each other."""
    max_attention_logit: torch.Tensor | None = None
    """[], fp32: the largest of the step, before any clip; None if nobody asked."""
    norms: torch.Tensor | None = None
    """[2, layers + 3], fp32: norms of gradients and weights (`norms.norm_names`); None in steps that log none."""


@torch.no_grad()
def conditional_update(
    optimizer: MegatronOptimizer,
    report: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    before_clip: Callable[[], None] = lambda: None,
    before_update: Callable[[torch.Tensor], None],
) -> StepResult:
    """Clips the reduced gradients and updates the weights if loss and gradient norm are finite; all ranks call it.

    `report`, [2] or [3] (`training.step.compute_gradients`), and `found_inf`, bool [], are this rank's; the latter
    tells of an infinity that loss and norm do not show. `before_clip` is called when gradients are reduced, and
    `before_update` with `StepResult.skipped` before weights are written.
    """
    optimizer.prepare_grads()
    before_clip()
    grad_norm = _gradient_norm(optimizer)
    not_finite = (~torch.isfinite(grad_norm) | found_inf).float()
    # A sum that contains a NaN or an infinity is not finite, so one collective serves loss and norm.
    total = torch.cat([report, not_finite])
    torch.distributed.all_reduce(total)
    skipped = ~torch.isfinite(total[0]) | (total[-1] > 0)
    for part in optimizer.chained_optimizers:
        parameters, max_norm = part.get_parameters(), part.config.clip_grad
        if not parameters or max_norm <= 0:
            continue
        if isinstance(part.optimizer, PrecisionAwareAdam):
            # Clips like megatron-core, but leaves the gradients alone: BF16 would round them again.
            torch.clamp(max_norm / (grad_norm.view(()) + 1e-6), max=1, out=part.optimizer.grad_scale)
        else:
            clip_grad_by_total_norm_fp32(parameters, max_norm, grad_norm)
    for inner in _inner_optimizers(optimizer):
        inner.found_inf.copy_(skipped)
    before_update(skipped)
    optimizer.step_with_ready_grads()
    return StepResult(
        loss_sum_and_tokens=total[:2],
        grad_norm=grad_norm,
        skipped=skipped,
        squared_lengths=total[2:3] if len(report) > 2 else None,
    )


def _gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """L2 norm over all parameters, [1], computed on the device.

    Experts have an optimizer of their own. If other ranks share it than share the rest, megatron-core would combine the
    two norms on the host and wait for both.
    """
    parts = optimizer.chained_optimizers
    shared = len({id(part.get_grad_stats_parallel_group()) for part in parts}) == 1
    norms: list[torch.Tensor] = [owner.get_grad_norm() for owner in ([optimizer] if shared else parts)]
    return norms[0] if shared else torch.linalg.vector_norm(torch.cat(norms)).view(1)


def _inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers inside megatron-core's; a rank without parameters has none."""
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


def _make_conditional(optimizer: MegatronOptimizer) -> None:
    """Lets `conditional_update` decide on the device whether a fresh optimizer updates.

    Raises:
        TypeError: It is an optimizer that cannot skip an update.
    """
    found_inf = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    for inner in _inner_optimizers(optimizer):
        inner.found_inf = found_inf
        match inner:
            case PrecisionAwareAdam() | SkippingOptimizer() | Muon():
                pass
            case torch.optim.AdamW() | torch.optim.SGD():
                _fuse(inner)
            case _:
                raise TypeError(f"{type(inner).__name__} cannot skip an update on the device; teach megatron.optimizer")
        if not isinstance(inner, torch.optim.AdamW):
            # Others than Adam leave states undefined that they make in a first step which is skipped.
            allocate_states(inner)


def _fuse(inner: torch.optim.Optimizer) -> None:
    inner.defaults["fused"], inner.defaults["foreach"] = True, False
    for group in inner.param_groups:
        group["fused"], group["foreach"] = True, False


def allocate_states(inner: torch.optim.Optimizer) -> None:
    """Gives an optimizer the zero states that its first step would make, unless it has them.

    Raises:
        TypeError: It is an optimizer whose states are not known.
    """
    for group in inner.param_groups:
        names = _state_names(inner, group)
        for parameter in group["params"]:
            if names and not inner.state[parameter]:
                # Fused optimizers count steps on the parameter's device.
                inner.state[parameter] = {
                    name: torch.tensor(0.0, device=parameter.device) if name == "step" else torch.zeros_like(parameter)
                    for name in names
                }


def _state_names(inner: torch.optim.Optimizer, group: Mapping[str, Any]) -> Sequence[str]:
    match inner:
        case torch.optim.AdamW():
            return ["step", "exp_avg", "exp_avg_sq"]
        case Muon():
            return ["momentum_buffer"] if is_muons(group) else ["step", "exp_avg", "exp_avg_sq"]
        case torch.optim.SGD():
            return ["momentum_buffer"] if group["momentum"] else []
        case SkippingOptimizer():
            return inner.state_names
        case PrecisionAwareAdam():
            # It is built with its own.
            return []
    raise TypeError(f"{type(inner).__name__} has unknown states; teach megatron.optimizer")


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """L2 norm over the tensors of the one list, fp32 [1]; the arguments are those of apex's multi_tensor_l2norm."""
    norms = torch._foreach_norm(list(tensors[0]), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale_by_tensor(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: torch.Tensor
) -> None:
    """Multiplies tensors by a factor on the device; both lists hold the same tensors."""
    torch._foreach_mul_(list(tensors[0]), factor.squeeze())
