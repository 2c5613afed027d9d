"""Keys that a run does not read, given on its command line all the same.

`conf/` has a value for every key, so that a value alone does not say that somebody wants it; the command line does.
Where null is the value of a key that nobody has set, its rule stands beside the others.
"""

from collections.abc import Iterator
from functools import reduce

from gpt_pretrain.config.choices import MainParamsDtype, OptimizerName, ScheduleName
from gpt_pretrain.config.derived import warmup_steps
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.typed import show


def _inert(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that nothing of this run reads, and why."""
    optim = config.model.optim
    sched = optim.sched
    if optim.name is OptimizerName.adam:
        yield "model.optim.momentum", "model.optim.name=adam, whose momentum is the first of model.optim.betas"
    else:
        for key in ("betas", "eps"):
            yield f"model.optim.{key}", f"model.optim.name={optim.name.name}: it is Adam's"
    if not optim.use_precision_aware_optimizer:
        yield "model.optim.store_param_remainders", "model.optim.use_precision_aware_optimizer=false"
    elif optim.main_params_dtype is MainParamsDtype.fp16:
        yield "model.optim.store_param_remainders", "model.optim.main_params_dtype=fp16, which is stored whole"
    if sched.name is not ScheduleName.wsd:
        yield "model.optim.sched.wsd_decay_style", f"model.optim.sched.name={sched.name.name}: it is that of wsd"
    if sched.name is ScheduleName.constant and sched.warmup_steps is not None:
        yield "model.optim.sched.decay_steps", "model.optim.sched.name=constant, and the warmup has steps of its own"
    if warmup_steps(config) == 0:
        yield "model.optim.sched.init_lr", "no warmup (model.optim.sched.warmup_steps)"


def inert_problems(config: Config, given: frozenset[str]) -> list[str]:
    """A message for each key that was given and has no effect.

    Args:
        config: The run.
        given: Dotted keys that the command line sets, elements of lists included.
    """
    return [
        f"{key}={show(reduce(getattr, key.split('.'), config))} has no effect with {why}; leave it out"
        for key, why in _inert(config)
        if any(path == key or path.startswith(f"{key}.") for path in given)
    ]
