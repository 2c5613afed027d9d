"""The rules about single values, and all cross-field rules in the order in which they are reported."""

from collections.abc import Callable, Iterator
from itertools import chain

from gpt_pretrain.config.keys import value_of
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.experts import expert_problems
from gpt_pretrain.rules.fp8 import fp8_problems
from gpt_pretrain.rules.model import (
    kernel_problems,
    pipeline,
    positions,
    recomputation,
    sizes_are_positive,
    world_and_batch,
)
from gpt_pretrain.rules.no_effect import no_effect_problems
from gpt_pretrain.rules.shapes import division_problems, fp8_shape_problems
from gpt_pretrain.rules.training import asked_launch, training_problems
from gpt_pretrain.run.products import Resolved, resolve

# A condition on a value, what a message says where it does not hold, and the keys that it is for.
_RANGES: tuple[tuple[Callable[[float], bool], str, str], ...] = (
    (
        lambda value: value >= 0,
        "is too small; use 0 or more",
        "model.seed model.optim.weight_decay model.optim.sched.warmup_steps model.data.num_workers "
        "trainer.limit_val_batches trainer.gc_interval trainer.gradient_clip_val sample.max_new_tokens "
        "sample.temperature",
    ),
    (
        lambda value: value >= 1,
        "is too small; use 1 or more",
        "model.optim.sched.decay_steps model.optim.sched.wsd_decay_steps model.data.num_dataset_builder_threads "
        "trainer.max_steps trainer.log_every_n_steps trainer.val_check_interval trainer.hang_timeout "
        "trainer.max_skipped_steps trainer.spike_threshold trainer.max_spike_rewinds trainer.spike_margin "
        "trainer.devices trainer.num_nodes checkpoint.save_interval checkpoint.keep_last checkpoint.keep_every",
    ),
    (
        lambda value: value >= 1,
        "is too small; use 1 or more, or null for none",
        "logging.fp8_proof_interval logging.fp8_statistics_interval",
    ),
    (lambda value: value > 0, "is not positive; use 1e-5 or another", "model.layernorm_epsilon"),
    (lambda value: value > 0, "is not positive; use 0.02 or another", "model.init_method_std"),
    (lambda value: value > 0, "is not positive; use 3e-4 or another", "model.optim.lr"),
    (lambda value: value > 0, "is not positive; use 1e-8 or another", "model.optim.eps"),
    (lambda value: value > 0, "is not positive; use 30, or null for no such saves", "checkpoint.save_interval_minutes"),
    (lambda value: value > 0, "is not positive; use null for the table's value", "logging.peak_tflops"),
    (
        lambda value: 0 <= value < 1,
        "is out of range; use 0 up to below 1",
        "model.hidden_dropout model.attention_dropout",
    ),
    (lambda value: 0 <= value < 1, "is not at least 0 and below 1; use 0.9 or another", "model.optim.momentum"),
    (lambda value: 0 < value <= 1, "is not a fraction; use above 0 up to 1", "logging.fp8_saturation_threshold"),
)


def config_problems(config: Config, launch: Launch | None) -> list[str]:
    """A message for every violated rule; without `launch`, none about the world size."""
    run = resolve(config, None if launch is None else asked_launch(config.trainer, launch))
    rules = (ranges(config), no_effect_problems(run), model_problems(run), training_problems(config, launch))
    return list(chain.from_iterable(rules))


def ranges(config: Config) -> Iterator[str]:
    """Single values out of their range; null is in every range."""
    for is_in_range, problem, keys in _RANGES:
        for key in keys.split():
            value = value_of(config, key)
            if value is not None and not is_in_range(value):
                yield f"{key}={value} {problem}"


def model_problems(run: Resolved) -> Iterator[str]:
    """All problems of `model.` except data and optimizer."""
    model = run.model
    sizes = list(sizes_are_positive(model))
    yield from sizes
    yield from kernel_problems(run, sizes_known=not sizes)
    yield from fp8_problems(run, sizes_known=not sizes)
    if sizes:
        return
    yield from positions(model)
    shapes = [*division_problems(model), *pipeline(model, run.launch), *expert_problems(run)]
    yield from shapes
    if not shapes:
        # A rank's shapes are known only if everything divides.
        yield from fp8_shape_problems(run)
    yield from recomputation(model)
    if run.launch is not None:
        yield from world_and_batch(model, run.launch)
