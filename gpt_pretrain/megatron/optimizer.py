"""Optimizer and schedule of this rank, and one update that happens on all ranks or on none.

An update is skipped where the loss or a gradient is NaN or infinite, or where a cast to FP8 met an infinity.
megatron-core 0.19 clips by the gradient norm and updates whatever it is, so that one infinite gradient makes all
weights NaN; its own check (`check_for_nan_in_grad`) waits for the GPU and ends the run. Here the decision stays on the
device: the ranks add up one number, and torch's fused Adam and SGD take the sum as `found_inf`, which they have for
automatic mixed precision. `PrecisionAwareAdam` does the same. Where the sum is not zero they leave masters, moments and
step counts as they are, and BF16 weights with them.

The host continues without waiting. What it launches after the update (the cast of masters, the gathering of weights)
repeats what was there. Delayed scaling's histories and scales have moved on with the step by then; they are put back
before weights that are stored in FP8 are cast again (`fp8.infinities.StepCasts`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from gpt_pretrain.config.derived import decay_steps, min_lr, warmup_steps
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.model import Model, translate_optimizer
from gpt_pretrain.megatron.patches import GRADIENT_NORM, OPTIMIZER_STATES, OPTIMIZERS, patch
from gpt_pretrain.megatron.precision_aware import PrecisionAwareAdam, PrecisionAwareOptimizer
from gpt_pretrain.megatron.weights import forget_first_values, install_weight_cast


def build_optimizer(model: Model) -> MegatronOptimizer:
    """megatron-core's chain of optimizers, one for experts and one for the rest.

    They hold masters where parameters are BF16, sharded where the optimizer is distributed. Biases and norm weights are
    in a group without weight decay, as in megatron-core.
    """
    spec = model.spec
    _install_gradient_norm()
    if spec.model.fp8_params:
        install_weight_cast(of_te=spec.te_fp8 is not None)
    _choose_optimizers(precision_aware=spec.model.optim.use_precision_aware_optimizer)
    optimizer = get_megatron_optimizer(translate_optimizer(spec), model.chunks, use_gloo_process_groups=False)
    forget_first_values(model.chunks)
    _make_conditional(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the optimizer steps taken."""
    optim = config.model.optim
    sched = optim.sched
    return OptimizerParamScheduler(
        optimizer,
        init_lr=sched.init_lr,
        max_lr=optim.lr,
        min_lr=min_lr(optim),
        lr_warmup_steps=warmup_steps(config),
        lr_decay_steps=decay_steps(config),
        lr_decay_style=sched.name.value,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=config.trainer.max_steps,
        wd_incr_style="constant",
        # On resume the configuration says the schedule, and the checkpoint says how far it is.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=sched.wsd_decay_steps,
        lr_wsd_decay_style=sched.wsd_decay_style.value,
    )


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate of the newest step; NaN where megatron-core names none."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return math.nan if rate is None else float(rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves on the device; reading it waits for the device."""

    loss_sum_and_tokens: torch.Tensor
    """[2], fp32: sum of the token losses and number of tokens, over all ranks."""
    grad_norm: torch.Tensor
    """[1], fp32: L2 norm over all parameters before clipping."""
    skipped: torch.Tensor
    """[], bool: loss, norm or an FP8 tensor was not finite, and nothing was updated; the same on all ranks."""


@torch.no_grad()
def conditional_update(
    optimizer: MegatronOptimizer,
    loss_sum_and_tokens: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    settle: Callable[[torch.Tensor], None],
) -> StepResult:
    """Clips the gradients and updates the weights if loss and gradient norm are finite; all ranks call it.

    Args:
        optimizer: megatron-core's, its gradients reduced.
        loss_sum_and_tokens: [2], this rank's sum of losses and number of tokens.
        found_inf: bool [], whether this rank has met an infinity that loss and norm do not show.
        settle: Called with `StepResult.skipped` before weights are written.
    """
    optimizer.prepare_grads()
    grad_norm = _gradient_norm(optimizer)
    not_finite = (~torch.isfinite(grad_norm) | found_inf).float()
    # A sum with a NaN or an infinity in it is not finite: one collective serves loss and norm.
    total = torch.cat([loss_sum_and_tokens, not_finite])
    torch.distributed.all_reduce(total)
    skipped = ~torch.isfinite(total[0]) | (total[2] > 0)
    for part in optimizer.chained_optimizers:
        parameters, max_norm = part.get_parameters(), part.config.clip_grad
        if not parameters or max_norm <= 0:
            continue
        if isinstance(part.optimizer, PrecisionAwareAdam):
            # As megatron-core clips, but without touching the gradients, which BF16 would round once more.
            torch.clamp(max_norm / (grad_norm.view(()) + 1e-6), max=1, out=part.optimizer.grad_scale)
        else:
            clip_grad_by_total_norm_fp32(parameters, max_norm, grad_norm)
    for inner in _inner_optimizers(optimizer):
        inner.found_inf.copy_(skipped)
    settle(skipped)
    optimizer.step_with_ready_grads()
    return StepResult(loss_sum_and_tokens=total[:2], grad_norm=grad_norm, skipped=skipped)


def _gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """L2 norm over all parameters, [1], computed on the device (`_install_gradient_norm`).

    Expert parameters have an optimizer of their own. Where other ranks share them than share the rest, megatron-core
    adds the two norms up on the host, and waits for both.
    """
    parts = optimizer.chained_optimizers
    shared = len({id(part.get_grad_stats_parallel_group()) for part in parts}) == 1
    norms: list[torch.Tensor] = [owner.get_grad_norm() for owner in ([optimizer] if shared else parts)]
    return norms[0] if shared else torch.linalg.vector_norm(torch.cat(norms)).view(1)


def _inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """The optimizers inside megatron-core's; a rank without parameters has none."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            yield part.optimizer


def _choose_optimizers(*, precision_aware: bool) -> None:
    """Makes megatron-core build torch's optimizers, or if `precision_aware` ours, whatever else is installed."""
    patch(
        OPTIMIZERS,
        USING_PYTORCH_OPTIMIZER=not precision_aware,
        Adam=PrecisionAwareAdam,
        SGD=torch.optim.SGD,
        DistributedOptimizer=PrecisionAwareOptimizer if precision_aware else DistributedOptimizer,
    )
    patch(OPTIMIZER_STATES, HAVE_APEX_OR_TE=False)


def _make_conditional(optimizer: MegatronOptimizer) -> None:
    """Lets `conditional_update` decide on the device whether a fresh optimizer updates.

    Raises:
        TypeError: It is an optimizer that cannot skip an update.
    """
    found_inf = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    for inner in _inner_optimizers(optimizer):
        inner.found_inf = found_inf
        match inner:
            case PrecisionAwareAdam():
                pass
            case torch.optim.Adam() | torch.optim.AdamW():
                _fuse(inner)
            case torch.optim.SGD():
                _fuse(inner)
                _allocate_momentum(inner)
            case _:
                raise TypeError(f"{type(inner).__name__} cannot skip an update on the device; teach megatron.optimizer")


def _fuse(inner: torch.optim.Optimizer) -> None:
    inner.defaults["fused"], inner.defaults["foreach"] = True, False
    for group in inner.param_groups:
        group["fused"], group["foreach"] = True, False


def _allocate_momentum(inner: torch.optim.SGD) -> None:
    """SGD would make its states at the first step, and leave them undefined where that is skipped."""
    for group in inner.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _l2_norm(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """L2 norm over all tensors of the one list, [1] in fp32; the arguments are those of apex's multi_tensor_l2norm."""
    norms = torch._foreach_norm(list(tensors[0]), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _scale_by_tensor(
    chunk_size: int, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: torch.Tensor
) -> None:
    """Multiplies the first list's tensors by a factor that lives on the device; both lists are the same tensors."""
    torch._foreach_mul_(list(tensors[0]), factor.squeeze())


def _install_gradient_norm() -> None:
    """Computes gradient norm and clipping without a wait, unless Transformer Engine brought its own kernels."""
    if GRADIENT_NORM.owner().multi_tensor_scale_tensor_impl is None:
        patch(GRADIENT_NORM, l2_norm_impl=_l2_norm, multi_tensor_scale_tensor_impl=_scale_by_tensor)
