"""The callbacks of a run's extensions: one object of each, called by the training loop on every rank.

Each call counts as progress for the watchdog, whose limit for a step does not hold for it. What a callback takes after
a step is part of the step's time, because it is part of what the run costs.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from gpt_pretrain.config.derived import shards_weights
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.keys import did_you_mean, nearest_name
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import Registered, registered
from gpt_pretrain.extend.training import Callback, Run
from gpt_pretrain.report.records import EndReason, Record
from gpt_pretrain.report.sinks import scalars
from gpt_pretrain.training.setup import Setup
from gpt_pretrain.training.watchdog import Watchdog


class _NotLoggedError(KeyError):
    """A number that is not logged yet, or never."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Metrics(dict[str, float]):
    """The newest logged numbers; says when those come that are not known."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.step, trainer = 0, config.trainer
        self._intervals = {
            "train": ("numbers are logged", "trainer.log_every_n_steps", trainer.log_every_n_steps),
            "validation": ("the run validates", "trainer.val_check_interval", trainer.val_check_interval),
            "evaluation": ("the run evaluates", "evaluation.interval", config.evaluation.interval),
        }

    def __missing__(self, name: str) -> float:
        what, key, every = self._intervals.get(name.partition("/")[0], self._intervals["train"])
        nearest = did_you_mean(nearest_name(name, list(self)))
        if "/" not in name:
            nearest += "; names begin with train/ or validation/"
        raise _NotLoggedError(
            f"run.metrics[{name!r}] is not known at step {self.step}: {what} every {every} steps ({key}){nearest}"
        )


class _NoWholeWeights(list[torch.nn.Module]):
    """In place of the model's chunks after a step with sharded weights, whose parameters have no memory then."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UserError(
            "run.model has no whole weights in after_step with "
            "model.data_parallel_sharding_strategy=optim_grads_params; use it in start, validation, save or end, read "
            "this rank's masters in run.optimizer.param_groups, or train with parallelism=zero2"
        )

    __getitem__ = __iter__ = __len__ = _refuse


class Callbacks:
    """All callbacks of a run; without any, its methods do nothing."""

    def __init__(
        self,
        setup: Setup,
        watchdog: Watchdog,
        *,
        read_loss: Callable[[], float],
        read_grad_norm: Callable[[], float],
    ) -> None:
        self._watchdog = watchdog
        self._model = setup.trainable.model
        self._callbacks: list[tuple[Registered, Callback]] = []
        for each in registered("callback"):
            with each.named("__init__"):
                self._callbacks.append((each, each.value()))
        self._metrics = _Metrics(setup.config)
        self._metrics.step = setup.progress.step
        self._run = Run(
            config=setup.config,
            run_dir=setup.run_dir,
            rank=setup.spec.launch.rank,
            model=list(self._model.gpt_chunks),
            optimizer=setup.trainable.optimizer,
            step=setup.progress.step,
            metrics=self._metrics,
            read_loss=read_loss,
            read_grad_norm=read_grad_norm,
            stop=self._stop,
        )
        self._calling: Registered | None = None
        self.asks_to_stop = False
        """Whether one has ended the run, on this rank."""

    def logged(self, record: Record) -> None:
        """Keeps the numbers of a record for the calls that follow."""
        if self._callbacks:
            self._metrics.update(scalars(record))

    def run_at(self, step: int) -> Run:
        """What a callback would get at this step."""
        return replace(self._run, step=step)

    def start(self) -> None:
        """Before the first step of this process."""
        self._call("start", lambda callback, run: callback.start(run))

    def after_step(self, step: int) -> None:
        """After a step, with its number from the start of the whole run."""
        self._at(step)
        self._call("after_step", lambda callback, run: callback.after_step(run))

    def validation(self, step: int) -> None:
        """After a validation."""
        self._at(step)
        self._call("validation", lambda callback, run: callback.validation(run))

    def save(self, step: int, checkpoint: Path) -> None:
        """After a checkpoint has been completed."""
        self._at(step)
        self._run.checkpoint = checkpoint
        self._call("save", lambda callback, run: callback.save(run))

    def end(self, step: int, reason: EndReason) -> None:
        """After the last step and save."""
        self._at(step)
        self._run.end_reason = reason
        self._call("end", lambda callback, run: callback.end(run))

    def _stop(self, reason: str) -> None:
        if not self.asks_to_stop and self._run.rank == 0:
            print(f"stopping: {self._calling}: {reason}", file=sys.stderr)
        self.asks_to_stop = True

    def _at(self, step: int) -> None:
        self._run.step = self._metrics.step = step

    def _call(self, hook: str, call: Callable[[Callback, Run], None]) -> None:
        for each, callback in self._callbacks:
            # Only those that override it: a step should not wait for calls of nothing.
            if getattr(type(callback), hook) is getattr(Callback, hook):
                continue
            # After a step, the next forward pass gathers the weights that this one left in shards.
            gathered = nullcontext() if hook == "after_step" else self._model.gathered_parameters()
            # A copy: what one callback does to it does not reach the next one.
            run = replace(self._run)
            self._calling = each
            if hook == "after_step" and shards_weights(self._run.config.model):
                run.model = _NoWholeWeights()
            with self._watchdog.busy(f"{hook} of {each}"), gathered, each.named(hook):
                call(callback, run)
