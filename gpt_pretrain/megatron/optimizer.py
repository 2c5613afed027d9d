"""Optimizer and schedule of this rank, and one update that happens on all ranks or on none.

**Skipped updates.** An update is skipped if the loss or a gradient is NaN or infinite, or if a cast to FP8 met an
infinity. megatron-core 0.19 would update with any gradient norm; its own check (`check_for_nan_in_grad`) waits for the
GPU and ends the run. Here the ranks sum one number on the device. torch's fused Adam and SGD take it as the `found_inf`
of automatic mixed precision, and `PrecisionAwareAdam` does the same: unless it is zero they keep masters, moments, step
counts and BF16 weights. The host does not wait, and what it launches next (casting masters, gathering weights) repeats
what was there. Delayed scaling's state has moved on by then, and is put back first (`fp8.infinities.StepCasts`).

**States in few bytes** (`use_precision_aware_optimizer`). megatron-core's precision-aware optimizer leaves masters to
Transformer Engine's FusedAdam and reads gradients in place, but supports FP8 weights under delayed scaling only.
FusedAdam needs a GPU, holds all states in fp32 during a step, and never skips one. `PrecisionAwareOptimizer` is built
like the plain optimizer, which casts FP8 weights for every recipe. Then masters change to the type asked for, gradients
are read in place, and `PrecisionAwareAdam` also writes the BF16 weights, block by block (`kernels.adam`).
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from gpt_pretrain.config.derived import decay_steps, min_lr, warmup_steps
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.kernels.adam import AdamState, AdamStep, Master, Moment, update
from gpt_pretrain.megatron.model import Model, translate_optimizer
from gpt_pretrain.megatron.patches import GRADIENT_NORM, OPTIMIZER_STATES, OPTIMIZERS, patch
from gpt_pretrain.megatron.stored_weights import install_weight_cast
from gpt_pretrain.megatron.weights import forget_first_values
from gpt_pretrain.spec import optimizers


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
    # Whatever else is installed.
    patch(
        OPTIMIZERS,
        USING_PYTORCH_OPTIMIZER=not precision_aware,
        Adam=PrecisionAwareAdam,
        SGD=torch.optim.SGD,
        DistributedOptimizer=PrecisionAwareOptimizer if precision_aware else DistributedOptimizer,
    )
    patch(OPTIMIZER_STATES, HAVE_APEX_OR_TE=False)
    optimizer = get_megatron_optimizer(translate_optimizer(spec), model.chunks, use_gloo_process_groups=False)
    forget_first_values(model.chunks)
    name = spec.model.optim.name
    expected = PrecisionAwareAdam.__name__ if precision_aware else optimizers.OPTIMIZERS[name].class_name
    built = {type(inner).__name__ for inner in _inner_optimizers(optimizer)}
    if not built <= {expected}:
        raise TypeError(f"model.optim.name={name.name}: megatron-core built {', '.join(built)}, not {expected}")
    _make_conditional(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay as functions of the optimizer steps taken."""
    optim, sched = config.model.optim, config.model.optim.sched
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
        # On resume the configuration gives the schedule, and the checkpoint its position.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=sched.wsd_decay_steps,
        lr_wsd_decay_style=sched.wsd_decay_style.value,
    )


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate of the newest step; NaN if megatron-core names none."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return math.nan if rate is None else float(rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step leaves on the device, the same on all ranks; reading it waits for the device."""

    loss_sum_and_tokens: torch.Tensor
    """[2], fp32: sum of the token losses, and number of tokens."""
    grad_norm: torch.Tensor
    """[1], fp32: L2 norm over all parameters before clipping."""
    skipped: torch.Tensor
    """[], bool: loss, norm or an FP8 tensor was not finite, and nothing was updated."""


@torch.no_grad()
def conditional_update(
    optimizer: MegatronOptimizer,
    loss_sum_and_tokens: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    settle: Callable[[torch.Tensor], None],
) -> StepResult:
    """Clips the reduced gradients and updates the weights if loss and gradient norm are finite; all ranks call it.

    `loss_sum_and_tokens`, [2], and `found_inf`, bool [], are this rank's; the latter tells of an infinity that loss and
    norm do not show. `settle` is called with `StepResult.skipped` before weights are written.
    """
    optimizer.prepare_grads()
    grad_norm = _gradient_norm(optimizer)
    not_finite = (~torch.isfinite(grad_norm) | found_inf).float()
    # A sum that contains a NaN or an infinity is not finite, so one collective serves loss and norm.
    total = torch.cat([loss_sum_and_tokens, not_finite])
    torch.distributed.all_reduce(total)
    skipped = ~torch.isfinite(total[0]) | (total[2] > 0)
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
    settle(skipped)
    optimizer.step_with_ready_grads()
    return StepResult(loss_sum_and_tokens=total[:2], grad_norm=grad_norm, skipped=skipped)


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
            case PrecisionAwareAdam():
                pass
            case torch.optim.AdamW():
                _fuse(inner)
            case torch.optim.SGD():
                _fuse(inner)
                # It would make them in the first step, and leave them undefined if that is skipped.
                allocate_states(inner)
            case _:
                raise TypeError(f"{type(inner).__name__} cannot skip an update on the device; teach megatron.optimizer")


def _fuse(inner: torch.optim.Optimizer) -> None:
    inner.defaults["fused"], inner.defaults["foreach"] = True, False
    for group in inner.param_groups:
        group["fused"], group["foreach"] = True, False


def allocate_states(inner: torch.optim.Optimizer) -> None:
    """Gives an optimizer the zero states that its first step would make."""
    for group in inner.param_groups:
        match inner:
            case torch.optim.AdamW():
                names = ["step", "exp_avg", "exp_avg_sq"]
            case torch.optim.SGD():
                names = ["momentum_buffer"] if group["momentum"] else []
            case _:
                # `PrecisionAwareAdam` is built with its own.
                names = []
        for parameter in group["params"] if names else []:
            if not inner.state[parameter]:
                # Fused optimizers count steps on the parameter's device.
                inner.state[parameter] = {
                    name: torch.tensor(0.0, device=parameter.device) if name == "step" else torch.zeros_like(parameter)
                    for name in names
                }


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


def _pairs(groups: Iterable[Any], master_groups: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
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
        for weight, master in _pairs(self.shard_float16_groups, self.shard_fp32_from_float16_groups):
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
        yield from _pairs(self.model_float16_groups, self.shard_fp32_from_float16_groups)
        yield from _pairs(self.model_fp32_groups, self.shard_fp32_groups)

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
            self.optimizer.states[master].master.write(0, values.float())

    def states(self, parameter: torch.nn.Parameter) -> Mapping[str, Master | Moment]:
        """This rank's states of a parameter, by their names in a checkpoint."""
        group, index = self.model_param_group_index_map[parameter]
        return self.optimizer.states[self.optimizer.param_groups[group]["params"][index]].by_name
