"""Validation tasks that extensions register: numbers of the model, logged at each validation."""

from collections.abc import Mapping
from functools import partial

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.extend.registry import registered
from gpt_pretrain.extend.training import Run
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.training.inference import token_losses
from gpt_pretrain.training.watchdog import Watchdog


def task_numbers(run: Run, model: Model, watchdog: Watchdog) -> dict[str, float]:
    """What all tasks return, as "TASK/NAME"; every rank calls it, with gathered parameters."""
    numbers: dict[str, float] = {}
    for each in registered("validation_task"):
        with watchdog.busy(str(each)), each.named("a validation"):
            found = each.value(run, partial(token_losses, model))
            if not isinstance(found, Mapping) or not all(
                isinstance(name, str) and isinstance(value, int | float) for name, value in found.items()
            ):
                raise UserError(f"it returned {found!r:.100}; return numbers by name")
            numbers |= {f"{each.name}/{name}": float(value) for name, value in found.items()}
    return numbers
