"""How long a run is, how its batch grows over ranks, and the phases of its learning rate."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import ScheduleName
from gpt_pretrain.config.derived import min_lr, model_parallel_size
from gpt_pretrain.config.errors import multiples_near, one_of, refusal, written
from gpt_pretrain.config.schedule import batch_problems, batch_schedule, has_length, last_step, rate_phases
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.ranks import Launch

_SCHED = "model.optim.sched"
_MOST_STEPS = 2**31 - 1


def schedule_problems(config: Config) -> Iterator[str]:
    """All problems that do not depend on ranks."""
    yield from batch_problems(config.model)
    yield from _length(config)
    yield from _rates(config)
    for name in ("warmup", "decay", "wsd_decay"):
        steps, tokens = (getattr(config.model.optim.sched, f"{name}_{unit}") for unit in ("steps", "tokens"))
        if steps is not None and tokens is not None:
            keys = [f"{_SCHED}.{name}_{unit}" for unit in ("steps", "tokens")]
            asked, setting = f"{keys[1]}={tokens}", f"{keys[0]}={steps}"
            yield refusal(asked, setting, "both are the length of one phase", *(f"{key}=null" for key in keys))
    if has_length(config):
        yield from _phases(config)


def _length(config: Config) -> Iterator[str]:
    steps, tokens = config.trainer.max_steps, config.trainer.max_tokens
    if steps is None and tokens is None:
        ways = "trainer.max_steps=500, or trainer.max_tokens=1e9"
        yield f"trainer.max_steps=null and trainer.max_tokens=null leave the run without an end; use {ways}"
    elif steps is not None and tokens is not None:
        off = "trainer.max_steps=null", "trainer.max_tokens=null"
        yield refusal(f"trainer.max_tokens={tokens}", f"trainer.max_steps={steps}", "either ends the run", *off)
    elif has_length(config) and last_step(config) > _MOST_STEPS:
        found = f"trainer.max_tokens={tokens} takes {last_step(config):,} steps"
        yield f"{found}, beyond any run; use tokens of {_MOST_STEPS:,} steps or fewer"


def _rates(config: Config) -> Iterator[str]:
    """What OptimizerParamScheduler asserts of rates."""
    optim, sched = config.model.optim, config.model.optim.sched
    for name, value in (("min_lr", min_lr(optim)), ("init_lr", sched.init_lr)):
        if not 0 <= value <= optim.lr:
            yield f"{_SCHED}.{name}={value} is not between 0 and model.optim.lr={optim.lr}; set both together"
    if optim.decoupled_lr is not None and sched.init_lr > optim.decoupled_lr:
        yield (
            f"{_SCHED}.init_lr={sched.init_lr} is above model.optim.decoupled_lr={optim.decoupled_lr}; use "
            f"0 to {optim.decoupled_lr}, or model.optim.decoupled_lr=null"
        )


def _phases(config: Config) -> Iterator[str]:
    """What OptimizerParamScheduler asserts of phases."""
    sched, phases = config.model.optim.sched, rate_phases(config)
    unit, decay, warmup = "tokens" if phases.in_tokens else "steps", phases.decay, phases.warmup
    decay_key = _phase(config, "decay", decay)
    if 0 < decay <= warmup:
        yield (
            f"{_phase(config, 'warmup', warmup)} is not below {decay_key}; "
            f"use {_range(config, 'warmup', 0, decay - 1)}, or set a longer decay_{unit}"
        )
    wsd, phase = sched.name is ScheduleName.wsd, phases.wsd_decay
    if wsd and phase is None:
        yield (
            f"{_SCHED}.name=wsd needs {_SCHED}.wsd_decay_{unit}, the length of its last phase; "
            f"use {_range(config, 'wsd_decay', 1, max(1, decay - warmup))}"
        )
    if wsd and phase is not None and phase > decay - warmup > 0:
        yield (
            f"{_phase(config, 'wsd_decay', phase)} is longer than the {unit} that warmup leaves of {decay_key}; "
            f"use {_range(config, 'wsd_decay', 1, decay - warmup)}"
        )


def _range(config: Config, name: str, first: int, last: int) -> str:
    """Lengths of a phase as a way out."""
    unit = "tokens" if rate_phases(config).in_tokens else "steps"
    also = ""
    if unit == "tokens" and getattr(config.model.optim.sched, f"{name}_steps") is not None:
        also = f" with {_SCHED}.{name}_steps=null"
    return f"{_SCHED}.{name}_{unit}={first if first == last else f'{first} to {last}'}{also}"


def _phase(config: Config, name: str, length: int) -> str:
    """The key that gives a phase its length, in steps or tokens as the rate goes."""
    sched, trainer = config.model.optim.sched, config.trainer
    unit = "tokens" if rate_phases(config).in_tokens else "steps"
    steps = getattr(sched, f"{name}_steps")
    key = f"{_SCHED}.{name}_{unit}={length}"
    if unit == "tokens" and steps is not None:
        return f"{_SCHED}.{name}_steps={steps} ({length} tokens)"
    if name != "decay" or getattr(sched, f"decay_{unit}") is not None:
        return key
    if trainer.max_tokens is not None:
        return f"trainer.max_tokens={length} (decay_tokens=null)"
    tokens = f", {length} tokens" if unit == "tokens" else ""
    return f"trainer.max_steps={trainer.max_steps} (decay_{unit}=null{tokens})"


def batches(model: ModelConfig) -> dict[int, str]:
    """The sizes that a step's batch has in the run, rising, each as messages say it."""
    sizes = {model.global_batch_size: f"model.global_batch_size={model.global_batch_size}"}
    if any(batch_problems(model)):
        return sizes
    key = "step_batch_size_schedule" if model.rampup_batch_size is None else "rampup_batch_size"
    asked = f"model.{key}={written(getattr(model, key))}"
    return {
        stage.batch: f"{asked}: its batch of {stage.batch} samples" for stage in batch_schedule(model).stages
    } | sizes


def other_batches(model: ModelConfig, batch: int, multiple: int) -> str:
    """What a message offers instead of a batch that must be a multiple."""
    if batch == model.global_batch_size:
        return f"model.global_batch_size={one_of(multiples_near(batch, multiple))}"
    return f"batches that are multiples of {multiple}"


def batch_fits(model: ModelConfig, launch: Launch) -> bool:
    """Whether a whole number of microbatches makes each global batch."""
    ranks, rest = divmod(launch.world_size, model_parallel_size(model))
    return rest == 0 and not any(batch % (model.micro_batch_size * ranks) for batch in batches(model))
