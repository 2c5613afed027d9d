"""A validation: losses over the first batches of each validation set, bits per byte, and extensions' tasks."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.data.text_bytes import count_tokens_and_bytes, token_bytes, why_unknown
from gpt_pretrain.extend.registry import registered
from gpt_pretrain.extend.training import Run
from gpt_pretrain.fp8.delayed import present_amaxes_kept
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.megatron.weight_average import averaged_weights
from gpt_pretrain.report.records import Record, ValidationTasksRecord, validation_record
from gpt_pretrain.training.inference import token_losses
from gpt_pretrain.training.setup import Setup
from gpt_pretrain.training.step import validate
from gpt_pretrain.training.watchdog import Watchdog


class Validation:
    """Validates a run on its validation sets; every rank calls it inside `Model.newest_parameters`."""

    def __init__(
        self,
        setup: Setup,
        batches: Sequence[BatchIterator | None],
        *,
        watchdog: Watchdog,
        log: Callable[[Record], None],
    ) -> None:
        self._setup = setup
        self._batches = batches
        self._watchdog = watchdog
        self._log = log

    def run(self, step: int, run: Run) -> float:
        """Logs the losses and what the tasks measure, and returns the mean of the losses; tasks get `run`."""
        config, model = self._setup.config, self._setup.trainable.model
        began = time.monotonic()
        num_batches = config.trainer.limit_val_batches
        on_batch = partial(self._watchdog.progress, "a batch of the validation")
        weights = self._setup.corpus.validation_weights or {"": 1.0}
        losses, averaged_losses = self._losses(len(weights), on_batch), None
        if config.model.optim.ema_decay is not None:
            optimizer = self._setup.trainable.optimizer
            with present_amaxes_kept(model.gpt_chunks), averaged_weights(optimizer, model):
                averaged_losses = dict(zip(weights, self._losses(len(weights), on_batch), strict=True))
        self._watchdog.progress("what follows the validation")
        record = validation_record(
            step,
            dict(zip(weights, losses, strict=True)),
            weights,
            self._bytes_per_token,
            averaged_losses=averaged_losses,
            num_samples=len(losses) * num_batches * config.model.global_batch_size,
            time_s=time.monotonic() - began,
        )
        self._log(record)
        began = time.monotonic()
        if numbers := _task_numbers(run, model, self._watchdog):
            self._log(ValidationTasksRecord(step=step, numbers=numbers, time_s=time.monotonic() - began))
        return record.loss

    def _losses(self, num_sets: int, on_batch: Callable[[], None]) -> list[float]:
        model, num_batches = self._setup.trainable.model, self._setup.config.trainer.limit_val_batches
        return [validate(model, self._batches, num_batches, on_batch=on_batch) for _ in range(num_sets)]

    @cached_property
    def _bytes_per_token(self) -> list[float] | None:
        """Of each validation set's samples, which are always the same; None if unknown. Every rank asks."""
        config, data, tokenizer = self._setup.config, self._setup.valid_data, self._setup.corpus.tokenizer
        if data is None or tokenizer is None or why_unknown(tokenizer) is not None:
            return None
        num_samples = config.trainer.limit_val_batches * config.model.global_batch_size
        sets = [range(first, first + num_samples) for first in range(0, data.num_samples, num_samples)]
        with self._watchdog.busy("counting the validation's bytes"):
            counts = on_rank_zero(
                lambda: [count_tokens_and_bytes(data, samples, token_bytes(tokenizer)) for samples in sets]
            )
        return [num_bytes / tokens for tokens, num_bytes in counts] if all(map(all, counts)) else None


def _task_numbers(run: Run, model: Model, watchdog: Watchdog) -> dict[str, float]:
    """What all validation tasks of extensions return, as "TASK/NAME"."""
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
