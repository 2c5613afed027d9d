"""Adam whose masters and moments take few bytes, inside megatron-core's distributed optimizer.

megatron-core 0.19 treats masters in two ways. Its plain optimizer makes them in fp32, copies gradients to fp32 for each
step, and casts FP8 weights of every recipe. Its precision-aware one leaves masters to Transformer Engine's FusedAdam
and reads gradients in place, but knows FP8 weights under delayed scaling only (for the others it hands over None).
FusedAdam in turn holds the states of all parameters in fp32 during a step, updates with whatever gradients it gets, and
exists on GPUs only.

`PrecisionAwareOptimizer` has everything built the plain way. Then masters take the type that was asked for, gradients
are read in place, and `PrecisionAwareAdam` writes BF16 weights itself, block by block (`kernels.adam`). It asks the
device whether to update at all and by how much to scale gradients: nothing waits, and a skipped step changes no bit.
FP8 weights are cast from the masters, as they are without all this.
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

    It reads gradients, fp32 or BF16, from the parameters' `decoupled_grad`. The parameters are the masters; `allocate`
    says which weights they belong to.
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
        """megatron-core names the arguments. The last one is for `PrecisionAwareOptimizer`, which makes the masters.

        Raises:
            UserError: The run is on a GPU, and Triton is not installed.
        """
        assert adam_w_mode, "the update decouples weight decay"
        assert not capturable, "steps are never captured in a graph"
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._moment_dtypes = exp_avg_dtype, exp_avg_sq_dtype
        device = torch.cuda.current_device()
        # Other than zero: leave everything as it is.
        self.found_inf = torch.zeros((), device=device)
        # The factor that gradients are multiplied by.
        self.grad_scale = torch.ones((), device=device)
        self.steps_taken = torch.zeros((), dtype=torch.float64, device=device)
        self.states: dict[torch.Tensor, AdamState] = {}
        self._update = _kernel() if self.found_inf.is_cuda else update

    def allocate(self, master: torch.Tensor, weight: torch.Tensor | None) -> None:
        """Gives a parameter, which is the master [n], its states, with moments of zero.

        `weight` is the BF16 weight [n] that the update writes with it; None where there is none to write here.
        """
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
    """`update` for a GPU, imported before the first step, so that a run without Triton does not start."""
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


class PrecisionAwareOptimizer(DistributedOptimizer):  # type: ignore[misc]  # megatron-core has no types
    """A distributed optimizer around `PrecisionAwareAdam`; arguments are megatron-core's."""

    optimizer: PrecisionAwareAdam
    config: OptimizerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # From here on, norms and zeroing treat gradients as of another type than the masters. This must follow the
        # making of the masters, and other optimizers are made of the same config.
        self.config = copy.copy(self.config)
        self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        if self.is_stub_optimizer:
            return
        for weight, master in self._weights_and_masters():
            # The kernel reads and writes the weight, unless it is cast to FP8 later.
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
        # Frees the memory of the fp32 masters, which nothing else fits.
        torch.cuda.empty_cache()

    def _weights_and_masters(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """This rank's parts of parameters with their masters; None for FP8 weights, which have no flat form."""
        for weights, masters in zip(self.shard_float16_groups, self.shard_fp32_from_float16_groups, strict=True):
            yield from zip(weights, masters, strict=True)

    def _parameters_and_masters(self) -> Iterator[tuple[Any, Any]]:
        """Parameters of which this rank holds a part, with the masters of these parts."""
        for parameter_groups, master_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for parameters, masters in zip(parameter_groups, master_groups, strict=True):
                yield from zip(parameters, masters, strict=True)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Lets Adam read gradients where they were reduced, without a copy."""
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            master.decoupled_grad = parameter.main_grad.view(-1)[part.start : part.end]

    def _copy_main_params_to_model_params(self) -> None:
        """Casts FP8 weights from their masters; Adam has written the others with theirs."""
        if not self.is_stub_optimizer and self.ddp_config.fp8_param_gather:
            distrib_optimizer.quantize_param_shard(
                *self._get_fp8_params_and_shard_fp32_from_fp8(), self.data_parallel_group
            )

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any]) -> None:
        """Sets the masters to weights that were loaded without them: by chunk, in high precision."""
        loaded = self._build_model_param_to_state_dict_param_map(state_dict)
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            values = loaded[parameter].detach().view(-1)[part.start : part.end]
            self.optimizer.states[master].master.write(0, values.float())

    def states(self, parameter: torch.nn.Parameter) -> Mapping[str, Master | Moment]:
        """This rank's states of a parameter, by their names in a checkpoint."""
        group, index = self.model_param_group_index_map[parameter]
        return self.optimizer.states[self.optimizer.param_groups[group]["params"][index]].by_name
