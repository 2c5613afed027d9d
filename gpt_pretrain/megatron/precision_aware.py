"""Optimizer states in few bytes (`use_precision_aware_optimizer`).

megatron-core's precision-aware optimizer leaves masters to Transformer Engine's FusedAdam and reads gradients in place,
but supports FP8 weights under delayed scaling only. FusedAdam needs a GPU, holds all states in fp32 during a step, and
never skips one. `PrecisionAwareOptimizer` is built like the plain optimizer, which casts FP8 weights for every recipe.
Then masters change to the type asked for, gradients are read in place, and `PrecisionAwareAdam` also writes the BF16
weights, block by block (`kernels.adam`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.kernels.adam import AdamState, AdamStep, Master, Moment, update


class PrecisionAwareAdam(torch.optim.Optimizer):
    """Adam with the arguments that megatron-core passes to Transformer Engine's FusedAdam.

    Its parameters are the masters, with gradients, fp32 or BF16, in their `decoupled_grad`. `allocate` says which
    weights they belong to.
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
        store_param_remainders: bool = False,  # for `PrecisionAwareOptimizer`, which makes the masters
    ) -> None:
        assert adam_w_mode, "the update decouples weight decay"
        assert not capturable, "steps are never captured in a graph"
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._moment_dtypes = exp_avg_dtype, exp_avg_sq_dtype
        device = torch.cuda.current_device()
        # Other than zero: nothing is updated.
        self.found_inf = torch.zeros((), device=device)
        # Gradients are multiplied by this.
        self.grad_scale = torch.ones((), device=device)
        self.steps_taken = torch.zeros((), dtype=torch.float64, device=device)
        self.states: dict[torch.Tensor, AdamState] = {}
        self._update = _kernel() if self.found_inf.is_cuda else update

    def allocate(self, master: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Gives a parameter, the master [n], moments of zero, and the BF16 `weight` [n] that updates also write."""
        first, second = self._moment_dtypes
        self.states[master] = AdamState(
            master=Master(master.detach(), weight),
            exp_avg=Moment.zeros(master, first, keeps_positive=False),
            exp_avg_sq=Moment.zeros(master, second, keeps_positive=True),
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient, unless `found_inf` is set."""
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
            for parameter in group["params"]:
                if getattr(parameter, "decoupled_grad", None) is not None:
                    self._update(parameter.decoupled_grad, self.states[parameter], step)


def _kernel() -> Callable[[torch.Tensor, AdamState, AdamStep], None]:
    """`update` for a GPU, imported early so that a run without Triton does not start."""
    try:
        from gpt_pretrain.kernels.adam_triton import update_on_gpu
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError(
            "model.optim.use_precision_aware_optimizer=true needs Triton on a GPU, and Triton is not installed. It "
            "comes with torch for CUDA; install it (python -m pip install triton), or use false"
        ) from None
    return update_on_gpu


def pairs_of_groups(groups: Iterable[Any], master_groups: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Parameters of megatron-core's groups with what other groups have in their places: masters, or parts."""
    for group, masters in zip(groups, master_groups, strict=True):
        yield from zip(group, masters, strict=True)


class PrecisionAwareOptimizer(DistributedOptimizer):  # type: ignore[misc]  # megatron-core has no types
    """A distributed optimizer around `PrecisionAwareAdam`; arguments are megatron-core's."""

    optimizer: PrecisionAwareAdam
    config: OptimizerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Norms and zeroing now expect gradients of another type than the masters'. Masters must exist already, and
        # other optimizers share the config.
        self.config = copy.copy(self.config)
        self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        if self.is_stub_optimizer:
            return
        # FP8 weights have no flat form; None stands for them.
        for weight, master in pairs_of_groups(self.shard_float16_groups, self.shard_fp32_from_float16_groups):
            # The kernel writes the weight, unless it is cast to FP8 later.
            follows = weight is not None and not self._is_distopt_quantized_param(weight)
            remainders = follows and self.config.store_param_remainders
            if remainders and self.config.main_params_dtype is torch.float32:
                master.data = torch.zeros_like(master, dtype=torch.int16)
            else:
                master.data = master.to(self.config.main_params_dtype)
            self.optimizer.allocate(master, weight if follows else None)
        for group in self.shard_fp32_groups:
            for parameter in group:
                self.optimizer.allocate(parameter, None)
        # The memory of the fp32 masters fits nothing else.
        torch.cuda.empty_cache()

    def _parameters_and_masters(self) -> Iterator[tuple[Any, Any]]:
        """Parameters that this rank holds a part of, with the masters of the parts."""
        yield from pairs_of_groups(self.model_float16_groups, self.shard_fp32_from_float16_groups)
        yield from pairs_of_groups(self.model_fp32_groups, self.shard_fp32_groups)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Lets Adam read gradients where they were reduced, without a copy."""
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            master.decoupled_grad = parameter.main_grad.view(-1)[part.start : part.end]

    def _copy_main_params_to_model_params(self) -> None:
        """Casts FP8 weights from their masters; Adam wrote the others."""
        if not self.is_stub_optimizer and self.ddp_config.fp8_param_gather:
            distrib_optimizer.quantize_param_shard(
                *self._get_fp8_params_and_shard_fp32_from_fp8(), self.data_parallel_group
            )

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any]) -> None:
        """Sets the masters from weights, by chunk and in high precision, that were loaded without masters."""
        loaded = self._build_model_param_to_state_dict_param_map(state_dict)
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            values = loaded[parameter].detach().view(-1)[part.start : part.end]
            self.optimizer.states[master].master.write(0, values.to(master.device).float())

    def states(self, parameter: torch.nn.Parameter) -> Mapping[str, Master | Moment]:
        """This rank's states of a parameter, by their names in a checkpoint."""
        group, index = self.model_param_group_index_map[parameter]
        return self.optimizer.states[self.optimizer.param_groups[group]["params"][index]].by_name
