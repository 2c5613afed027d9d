"""One optimizer update that happens on all ranks or on none: not where the loss or a gradient is NaN or infinite.

megatron-core 0.19 clips by the gradient norm and updates whatever it is: one infinite gradient makes all weights NaN.
Its own check (`check_for_nan_in_grad`) waits for the GPU and ends the run. Here the decision stays on the device: the
ranks add up one number, and torch's fused Adam and SGD take the sum as `found_inf`, which automatic mixed precision
made for them; `PrecisionAwareAdam` does the same. Where it is not zero they leave masters, moments and step counts as
they are, and BF16 weights with them. The host goes on without waiting, and what it launches behind the update (the cast
of masters, the gathering of weights) repeats what was there; but with delayed scaling the histories and scales of FP8
have gone on with the step, and weights stored in FP8 are cast with them anew: the same masters, in other codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.megatron.adam import PrecisionAwareAdam
from gpt_pretrain.megatron.precision_aware import PrecisionAwareOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves on the device; reading it waits for the device."""

    loss_sum_and_tokens: torch.Tensor
    """[2], fp32: sum of the token losses and number of tokens, over all ranks."""
    grad_norm: torch.Tensor
    """[1], fp32: L2 norm over all parameters before clipping."""
    skipped: torch.Tensor
    """[], bool: loss or norm was not finite, and nothing was updated; the same on all ranks."""


def choose_optimizers(*, precision_aware: bool) -> None:
    """Makes megatron-core build torch's or our optimizers also where it finds those of Transformer Engine or apex.

    Those update by what the host tells them; torch's fused ones and ours ask the device.

    Args:
        precision_aware: Whether Adam is ours.
    """
    core_optimizer.USING_PYTORCH_OPTIMIZER = not precision_aware
    core_optimizer.Adam = PrecisionAwareAdam
    core_optimizer.SGD = torch.optim.SGD
    core_optimizer.DistributedOptimizer = PrecisionAwareOptimizer if precision_aware else DistributedOptimizer
    distrib_optimizer.HAVE_APEX_OR_TE = False


def make_conditional(optimizer: MegatronOptimizer) -> None:
    """Lets `conditional_update` decide on the device whether a fresh optimizer updates."""
    found_inf = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    for inner in _inner_optimizers(optimizer):
        inner.found_inf = found_inf
        if isinstance(inner, PrecisionAwareAdam):
            continue
        inner.defaults["fused"], inner.defaults["foreach"] = True, False
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False
            if isinstance(inner, torch.optim.SGD) and group["momentum"]:
                # SGD would make them at its first step, and leave them undefined where that is skipped.
                for parameter in group["params"]:
                    inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@torch.no_grad()
def conditional_update(optimizer: MegatronOptimizer, loss_sum_and_tokens: torch.Tensor) -> StepResult:
    """Clips the gradients and updates the weights, unless loss or gradient norm are not finite; all ranks call it.

    Args:
        optimizer: megatron-core's, its gradients reduced.
        loss_sum_and_tokens: [2], this rank's sum of losses and number of tokens.
    """
    optimizer.prepare_grads()
    grad_norm = _gradient_norm(optimizer)
    not_finite = (~torch.isfinite(grad_norm)).float()
    # A sum with a NaN or an infinity is none that is finite: one collective tells both of loss and of norm.
    total = torch.cat([loss_sum_and_tokens, not_finite])
    torch.distributed.all_reduce(total)
    skipped = ~torch.isfinite(total[0]) | (total[2] > 0)
    for part in _parts(optimizer):
        parameters, max_norm = part.get_parameters(), part.config.clip_grad
        if not parameters or max_norm <= 0:
            continue
        if isinstance(part.optimizer, PrecisionAwareAdam):
            # As megatron-core would, but not in the gradients themselves, which BF16 would round once more.
            torch.clamp(max_norm / (grad_norm.view(()) + 1e-6), max=1, out=part.optimizer.grad_scale)
        else:
            clip_grad_by_total_norm_fp32(parameters, max_norm, grad_norm)
    for inner in _inner_optimizers(optimizer):
        inner.found_inf.copy_(skipped)
    optimizer.step_with_ready_grads()
    return StepResult(loss_sum_and_tokens=total[:2], grad_norm=grad_norm, skipped=skipped)


def _gradient_norm(optimizer: MegatronOptimizer) -> torch.Tensor:
    """L2 norm over all parameters, [1], computed on the device (`kernels.install_gradient_norm`).

    Expert parameters have an optimizer of their own. Where ranks other than those of the rest share them,
    megatron-core adds the two norms up on the host, and waits for both.
    """
    parts = list(_parts(optimizer))
    shared = len({id(part.get_grad_stats_parallel_group()) for part in parts}) == 1
    norms: list[torch.Tensor] = [owner.get_grad_norm() for owner in ([optimizer] if shared else parts)]
    return norms[0] if shared else torch.linalg.vector_norm(torch.cat(norms)).view(1)


def _parts(optimizer: MegatronOptimizer) -> Iterator[Any]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def _inner_optimizers(optimizer: MegatronOptimizer) -> Iterator[Any]:
    """The optimizers that megatron-core's are made around; a rank without parameters has none."""
    for part in _parts(optimizer):
        if part.optimizer is not None:
            yield part.optimizer
