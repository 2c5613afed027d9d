"""Adam whose masters and moments take few bytes, in the place of Transformer Engine's FusedAdam.

megatron-core's precision-aware optimizer needs FusedAdam, which holds the states of all parameters in fp32 during a
step, updates whatever gradients it gets, and exists on GPUs only. This one updates block by block (`kernels.adam`). It
asks the device whether to update at all, and by how much to scale gradients: nothing waits, and a step that is skipped
changes no bit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.kernels.adam import AdamState, AdamStep, update
from gpt_pretrain.kernels.adam_states import Master, Moment


class PrecisionAwareAdam(torch.optim.Optimizer):
    """Takes what megatron-core hands to Transformer Engine's FusedAdam.

    Gradients are read from `decoupled_grad` of the parameters, in fp32 or BF16. The parameters are the masters;
    `allocate` says which weights they belong to.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        *,
        adam_w_mode: bool,
        capturable: bool,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        store_param_remainders: bool = False,
    ) -> None:
        """megatron-core names the arguments; the last is for `PrecisionAwareOptimizer`, which makes the masters.

        Raises:
            UserError: On a GPU, Triton is not installed.
        """
        assert adam_w_mode, "weight decay is decoupled"
        assert not capturable, "steps are not captured"
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._moment_dtypes = exp_avg_dtype, exp_avg_sq_dtype
        device = torch.cuda.current_device()
        # Not zero: leave everything as it is.
        self.found_inf = torch.zeros((), device=device)
        # What gradients are multiplied with.
        self.grad_scale = torch.ones((), device=device)
        self.steps_taken = torch.zeros((), dtype=torch.float64, device=device)
        self.states: dict[torch.Tensor, AdamState] = {}
        self._update = _kernel() if self.found_inf.is_cuda else update

    def allocate(self, master: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Gives a parameter its states: moments of zero.

        Args:
            master: One of the parameters, [n].
            weight: The BF16 weight that is to follow it, [n]; None where nothing does, or something else sees to it.
        """
        first, second = self._moment_dtypes
        self.states[master] = AdamState(
            master=Master(master.detach(), weight),
            exp_avg=Moment.zeros(master, first, keeps_positive=False),
            exp_avg_sq=Moment.zeros(master, second, keeps_positive=True),
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient, unless `found_inf`."""
        self.steps_taken += 1 - self.found_inf
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            corrections = [1 - beta**self.steps_taken for beta in (beta1, beta2)]
            step = AdamStep(
                device_values=torch.stack([self.found_inf, self.grad_scale, *corrections, self.steps_taken]).float(),
                lr=group["lr"],
                betas=(beta1, beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            for gradient, state in self._to_update(group["params"]):
                self._update(gradient, state, step)

    def _to_update(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, AdamState]]:
        for parameter in parameters:
            gradient = getattr(parameter, "decoupled_grad", None)
            if gradient is not None:
                yield gradient, self.states[parameter]


def _kernel() -> Callable[[torch.Tensor, AdamState, AdamStep], None]:
    """`update` on a GPU, imported before the first step: without Triton the run does not start."""
    try:
        from gpt_pretrain.kernels.adam_triton import update_on_gpu
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError(
            "model.optim.use_precision_aware_optimizer=true updates in a Triton kernel on a GPU, and Triton is not "
            "installed, which comes with torch for CUDA; install it (python -m pip install triton), or use false"
        ) from None
    return update_on_gpu
