"""Lion (Chen et al. 2023, arXiv 2302.06675): steps of one size, in the direction of a smoothed gradient's sign."""

import torch


class Lion(torch.optim.Optimizer):
    """One moment, `exp_avg`; weight decay is decoupled."""

    def __init__(self, params, lr, betas, weight_decay) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One step of all parameters."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                moment = state.setdefault("exp_avg", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * torch.lerp(weight.grad, moment, beta1).sign())
                moment.lerp_(weight.grad, 1 - beta2)
