"""Optimizer and schedule of this rank."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gpt_pretrain.config.derived import decay_steps, min_lr, warmup_steps
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.kernels import install_gradient_norm
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.platform import Platform
from gpt_pretrain.megatron.translate import translate_optimizer


def build_optimizer(config: Config, model: Model, platform: Platform) -> MegatronOptimizer:
    """megatron-core's optimizer: fp32 masters where parameters are bf16, sharded where the optimizer is distributed.

    Biases and norm weights are in a group without weight decay, as in megatron-core.
    """
    install_gradient_norm()
    return get_megatron_optimizer(translate_optimizer(config, platform), model.chunks, use_gloo_process_groups=False)


def prepare_for_loading(optimizer: MegatronOptimizer) -> None:
    """Makes a fresh optimizer able to load a checkpoint; call it before the sharded state to load into is built.

    megatron-core 0.19's distributed optimizer was written for TE's and apex's Adam, which keep one step count per
    parameter group. torch's keeps one beside each moment and allocates both at its first step: the moments have to be
    there before they are loaded, and the step count, which comes with the groups, must not be looked for among them.
    """
    for part in _distributed_over_torch_adam(optimizer):
        # A step with zero gradients; what it changes is loaded over.
        part._init_optimizer_states_with_dummy_values()
        load = part._set_main_param_and_optimizer_states
        part._set_main_param_and_optimizer_states = partial(_load_all_but_step, load)


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Restores what `MegatronOptimizer.sharded_state_dict` described and megatron-core has read.

    Moments and step counts come from the checkpoint, rates, betas and decay from the configuration: megatron-core would
    restore the saved ones, and find no group to restore where the learning rate is another.
    """
    _keep_configured_values(
        optimizer.param_groups, (state if "param_groups" in state else state["optimizer"])["param_groups"]
    )
    optimizer.load_state_dict(state)
    for part in _distributed_over_torch_adam(optimizer):
        # megatron-core hands one step tensor to all parameters, and each of them would count it up.
        for moments in part.optimizer.state.values():
            moments["step"] = moments["step"].clone()


@torch.no_grad()
def cast_masters_to_fp8_weights(optimizer: MegatronOptimizer, model: Model) -> None:
    """Makes weights stored in FP8 what their masters say, on all ranks; call it after masters and scales were loaded.

    megatron-core writes them into a checkpoint as BF16. Cast from there, each would take the scale that it happens to
    have in a fresh model (delayed), or one from an amax that was rounded (tensorwise), and the run would go on from
    other weights than it was saved with.
    """
    parts = [
        part
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if isinstance(part, DistributedOptimizer) and part.ddp_config.fp8_param_gather
    ]
    for part in parts:
        part._copy_main_params_to_model_params()
    if parts:
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)


# What tells the groups of one optimizer apart: with and without weight decay, and MoE's experts.
_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def _keep_configured_values(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    configured = {tuple(group.get(key) for key in _GROUP_IDENTITY): group for group in current}
    for group in saved:
        values = configured[tuple(group.get(key) for key in _GROUP_IDENTITY)]
        group.update({key: value for key, value in values.items() if key not in ("params", "step")})


def _distributed_over_torch_adam(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part


def _load_all_but_step(load: Callable[..., None], parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
    load(parameter, {"step": None, **tensors})


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
