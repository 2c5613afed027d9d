"""Optimizer and schedule of this rank."""

import math

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from gpt_pretrain.config.derived import decay_steps, min_lr, warmup_steps
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.fp8_weights import install_weight_cast
from gpt_pretrain.megatron.initialization import forget_first_values
from gpt_pretrain.megatron.kernels import install_gradient_norm
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.translate import translate_optimizer
from gpt_pretrain.megatron.update import choose_optimizers, make_conditional


def build_optimizer(model: Model) -> MegatronOptimizer:
    """megatron-core's optimizer: masters where parameters are bf16, sharded where the optimizer is distributed.

    Biases and norm weights are in a group without weight decay, as in megatron-core.
    """
    spec = model.spec
    install_gradient_norm()
    if spec.model.fp8_params:
        install_weight_cast()
    choose_optimizers(precision_aware=spec.model.optim.use_precision_aware_optimizer)
    optimizer = get_megatron_optimizer(translate_optimizer(spec), model.chunks, use_gloo_process_groups=False)
    forget_first_values(model.chunks)
    make_conditional(optimizer)
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
