"""One update of Adam on states that take as few bytes as they are told to (`adam_states`).

A block of gradient, master and moments is read, computed in fp32 and written back: no state is ever copied whole. The
arithmetic is that of Transformer Engine's FusedAdam, with decoupled weight decay (Loshchilov and Hutter 2019).
`adam_triton` does the same in one kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpt_pretrain.kernels import SCALED_BLOCK
from gpt_pretrain.kernels.adam_states import Master, Moment, rounded_to_fp16

# Values updated at once: what bounds the memory of a step.
_CHUNK = 4096 * SCALED_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """What one update depends on besides the states."""

    device_values: torch.Tensor
    """fp32 [5], on the device: 1 to skip the update or 0, what gradients are multiplied with, the two bias corrections
    1 - beta^step, and the number of the step."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamState:
    """Everything Adam has of one parameter."""

    master: Master
    exp_avg: Moment
    exp_avg_sq: Moment

    @property
    def by_name(self) -> Mapping[str, Master | Moment]:
        """The states by their names in a checkpoint."""
        return {"fp32_param": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def update(gradient: torch.Tensor, state: AdamState, step: AdamStep) -> None:
    """One parameter's update, a chunk at a time.

    Args:
        gradient: [n], fp32 or BF16.
        state: Its states.
        step: The step.
    """
    skip, scale, correction1, correction2, number = step.device_values.tolist()
    if skip:
        return
    beta1, beta2 = step.betas
    for start in range(0, gradient.numel(), _CHUNK):
        end = min(start + _CHUNK, gradient.numel())
        grad = gradient[start:end].float() * scale
        exp_avg = state.exp_avg.read(start, end) * beta1 + grad * (1 - beta1)
        exp_avg_sq = state.exp_avg_sq.read(start, end) * beta2 + grad * grad * (1 - beta2)
        master = state.master.read(start, end)
        direction = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + step.eps)
        master -= step.lr * (direction + step.weight_decay * master)
        if state.master.values.dtype is torch.float16:
            master = rounded_to_fp16(master, start, int(number))
        state.master.write(start, master)
        state.exp_avg.write(start, exp_avg)
        state.exp_avg_sq.write(start, exp_avg_sq)
