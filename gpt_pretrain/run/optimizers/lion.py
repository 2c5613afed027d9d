"""Lion (Chen et al. 2023, arXiv 2302.06675): a step of one size for every value, by the sign of a mean of gradients.

    weight   ← weight · (1 − rate · decay) − rate · sign(β₁ · mean + (1 − β₁) · gradient)
    mean     ← β₂ · mean + (1 − β₂) · gradient

It keeps one state where Adam keeps two.
"""

from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.optimizers import optimizer

if TYPE_CHECKING:
    import torch


@optimizer("lion", states=["exp_avg"], elementwise=True, reads=["betas"])
def build_lion(params: list[dict[str, Any]], config: Config) -> "torch.optim.Optimizer":
    """Lion with the configuration's rate, betas and weight decay."""
    import torch

    class Lion(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                rate, (beta1, beta2) = group["lr"], group["betas"]
                for weight in group["params"]:
                    state = self.state[weight]
                    mean = state.setdefault("exp_avg", torch.zeros_like(weight))
                    direction = mean.lerp(weight.grad, 1 - beta1).sign_()
                    weight.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
                    mean.lerp_(weight.grad, 1 - beta2)

    optim = config.model.optim
    return Lion(params, {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay})
