"""The training loop: step, log, validate, save, until the last step or a reason to stop."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from gpt_pretrain.checkpoint.save import CheckpointSaver, PlaceProblem, SaveOutcome
from gpt_pretrain.config.choices import OnSaveError
from gpt_pretrain.config.derived import masks_tokens
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.schedule import Trained, batch_grows, batch_schedule, last_step
from gpt_pretrain.data.batches import BatchIterator, build_batch_iterator
from gpt_pretrain.extend.code import code_digests
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.megatron.norms import norm_names
from gpt_pretrain.megatron.optimizer import StepResult, decoupled_learning_rate, hidden_learning_rate, learning_rate
from gpt_pretrain.megatron.parallel import data_parallel_rank
from gpt_pretrain.plan.forecast import describe_saves
from gpt_pretrain.report.records import CheckpointRecord, EndReason, LossSpikeRecord, NormsRecord, Record, SourcesRecord
from gpt_pretrain.training.callbacks import Callbacks
from gpt_pretrain.training.dump import weights_are_finite, write_dump
from gpt_pretrain.training.garbage import GarbageCollection
from gpt_pretrain.training.meter import Meter
from gpt_pretrain.training.proofs import Proofs
from gpt_pretrain.training.rewind import GoBack, check_spike, go_back
from gpt_pretrain.training.setup import Setup
from gpt_pretrain.training.step import data_iterators, mean_loss, train_step
from gpt_pretrain.training.stop import BadStep, GivesUpError, NotFiniteError, StepGuard, StopRequest
from gpt_pretrain.training.stragglers import Stragglers
from gpt_pretrain.training.validation import Validation
from gpt_pretrain.training.watchdog import Watchdog
from gpt_pretrain.training.watches import ExpertWatch, Fp8Watch

type AfterStep = Callable[[int, StepResult], None]


class Trainer:
    """Trains a run from its last step on; `after_step` is called at the end of each step, for a benchmark's clock."""

    def __init__(
        self,
        setup: Setup,
        *,
        log: Callable[[Record], None],
        watchdog: Watchdog,
        after_step: AfterStep | None = None,
        place_problem: PlaceProblem = lambda: None,
    ) -> None:
        trainable, config = setup.trainable, setup.config
        self.config = config
        self.progress = setup.progress
        self.problem: str | None = None
        """Why the run gave up, for the user."""
        self._setup = setup
        self._trainable = trainable
        self._newest: StepResult | None = None
        self._callbacks = Callbacks(setup, watchdog, read_loss=self._read_loss, read_grad_norm=self._read_grad_norm)
        self._write = log
        self._watchdog = watchdog
        self._after_step = after_step
        self._batches = batch_schedule(config.model)
        self._num_samples = self._sequence_length = 0
        """Of the newest step."""
        self._meter = Meter(setup.spec)
        self._saver = CheckpointSaver(
            setup.checkpoints,
            trainable,
            config,
            setup.corpus.fingerprints,
            extensions=code_digests(),
            place_problem=place_problem,
        )
        self._saved_step: int | None = None
        self._save_problem: str | None = None
        """Why the newest save failed; None if it was written."""
        self._garbage = GarbageCollection(config.trainer.gc_interval)
        self._guard = self._new_guard()
        self._proofs = Proofs(
            trainable,
            number=self.progress.fp8_proofs,
            saved=setup.fp8_digests,
            log=self._log,
            watchdog=watchdog,
            meter=self._meter,
        )
        self._fp8_watch = Fp8Watch(trainable.model)
        self._expert_watch = ExpertWatch(trainable.model, step=self.progress.step)
        self._stragglers = Stragglers(trainable.model)
        share: dict[str, Any] = {
            "config": config,
            "data_parallel_rank": data_parallel_rank(),
            "data_parallel_size": setup.spec.layout.dp,
            "device": setup.spec.platform.device,
        }
        self._build_train_batches = partial(build_batch_iterator, setup.train_data, **share)
        self._train_batches = self._batches_from(self.progress.consumed_samples)
        self._validation = None
        if setup.valid_data is not None:
            build_valid_batches = partial(build_batch_iterator, setup.valid_data, is_validation=True, **share)
            batches = data_iterators(trainable.model, build_valid_batches)
            self._validation = Validation(setup, batches, watchdog=watchdog, log=self._log)

    def _batches_from(self, consumed_samples: int) -> list[BatchIterator | None]:
        """This rank's training batches from a sample on."""
        build = partial(self._build_train_batches, consumed_samples=consumed_samples)
        return data_iterators(self._trainable.model, build)

    def _read_loss(self) -> float:
        """Waits for the newest step's loss."""
        return math.nan if self._newest is None else mean_loss(self._newest.loss_sum_and_tokens)

    def _read_grad_norm(self) -> float:
        """Waits for the newest step's gradient norm."""
        return math.nan if self._newest is None else float(self._newest.grad_norm)

    def _log(self, record: Record) -> None:
        self._callbacks.logged(record)
        self._write(record)

    def train(self, stop: StopRequest) -> EndReason:
        """Trains to the last step or the first reason to stop, the same on all ranks; every rank calls it."""
        with self._saver, self._garbage.scheduled():
            self._callbacks.start()
            if self.config.checkpoint.async_save and self.config.checkpoint.save_interval is not None:
                # The first save need not wait for host memory then. A run that saves only by the clock may end before.
                with self._watchdog.busy("reserving host memory"), self._trainable.model.newest_parameters():
                    self._saver.reserve()
            if self.config.trainer.validate_at_start and self.progress.step == 0:
                self.validate()
            self._trainable.model.train()
            length = self._setup.train_data.sequence_length_at(self.progress.consumed_samples)
            self._proofs.find_scales(self._train_batches, self._batches.next_batch(self._trained), length)
            try:
                reason = self._steps_and_rewinds(stop)
                self._log_fp8()
                if reason == "max_steps" and not self._is_due(self.config.trainer.val_check_interval):
                    self.validate()
                if reason == "max_steps" and not self._is_due(self.config.evaluation.interval):
                    self.evaluate()
                if self.config.checkpoint.save_at_end and self._saved_step != self.progress.step:
                    self.save()
            except GivesUpError as error:
                reason, self.problem = error.reason, self._dump(error)
            self._wait_for_save()
            self._callbacks.end(self.progress.step, reason)
            # No later save can make up for one that failed. A run that gave up has a message that says more.
            if self._save_problem is not None and self.problem is None:
                raise RunError(self._save_problem)
        return reason

    def _steps_and_rewinds(self, stop: StopRequest) -> EndReason:
        reason: EndReason | None = None
        while reason is None:
            try:
                reason = self._steps(stop)
                self._watchdog.progress("the end of the run")
                self._log_guarded(self._guard.read())
            except GoBack as request:
                # If somebody has asked to stop, the run stops at that checkpoint.
                self._go_back(request)
        return reason

    def _steps(self, stop: StopRequest) -> EndReason:
        trainer = self.config.trainer
        end = last_step(self.config, self._trained)
        while self.progress.step < end:
            step = self.progress.step + 1
            is_logged = step % trainer.log_every_n_steps == 0 or step == end
            result = self._step(norms=is_logged and self.config.logging.norms)
            # While the device computes: the logger waits for the device.
            self._garbage.after_step(self.progress.step)
            if is_logged:
                self._log_step(result)
            if self._is_due(trainer.val_check_interval):
                self.validate()
            if self._is_due(self.config.evaluation.interval):
                self.evaluate()
            by_steps = self._is_due(self.config.checkpoint.save_interval)
            if by_steps or stop.save_is_due:
                self.save(by_clock=not by_steps)
                stop.saved()
            self._callbacks.after_step(self.progress.step)
            if self._callbacks.asks_to_stop:
                stop.ask()
            if self._after_step is not None:
                self._after_step(self.progress.step, result)
            reason = stop.poll()
            if reason is not None and self.progress.step < end:
                return reason
        return "max_steps"

    @property
    def _trained(self) -> Trained:
        """What the run has trained on."""
        return self.progress.trained(self.config.model.encoder_seq_length)

    def _step(self, *, norms: bool) -> StepResult:
        """Trains on the next global batch; logs the guard's records of the step before, and a finished save."""
        step, first_sample = self.progress.step + 1, self.progress.consumed_samples
        num_samples = self._batches.next_batch(self._trained)
        length = self._setup.train_data.sequence_length_at(first_sample)
        self._watchdog.step_begins(step)
        if num_samples > self._num_samples or length != self._sequence_length:
            self._watchdog.steps_grow()
        with self._fp8_watch.step(step), self._stragglers.step(step):
            with self._proofs.watching(step, num_samples):
                result = train_step(self._trainable, self._train_batches, num_samples, length, norms=norms)
            self._proofs.judge(step, result)
        consumed_samples = first_sample + num_samples
        self.progress = replace(self.progress, step=step, consumed_samples=consumed_samples, validation_loss=None)
        self._newest, self._num_samples, self._sequence_length = result, num_samples, length
        self._meter.add(result, num_samples)
        self._log_guarded(self._guard.add(step, first_sample, num_samples, result))
        self._log_saves(self._saver.poll())
        if self._proofs.problem is not None:
            self._end_unproven(self._proofs.problem)
        return result

    def _end_unproven(self, problem: ProofError) -> NoReturn:
        """Ends a run whose FP8 is not as planned, after a checkpoint if the run saves any and has steps to lose.

        Raises:
            ProofError: Always.
        """
        if self._proofs.has_more_to_lose and describe_saves(self.config):
            try:
                self.save()
                self._wait_for_save()
            except (RunError, GivesUpError) as error:
                problem.saved = f"its weights are not saved: {error}"
            else:
                problem.saved = f"step {self.progress.step} is saved"
        raise problem

    def validate(self) -> None:
        """Logs the loss over the first `trainer.limit_val_batches` batches of the validation split, if there is one."""
        if self._validation is None:
            return
        self._log_fp8()
        with self._meter.paused(), self._trainable.model.newest_parameters():
            loss = self._validation.run(self.progress.step, self._callbacks.run_at(self.progress.step))
            self.progress = replace(self.progress, validation_loss=loss if math.isfinite(loss) else None)
            self._callbacks.validation(self.progress.step)

    def evaluate(self) -> None:
        """Logs the scores of the tasks of `evaluation.tasks`, if there are any."""
        if self._setup.evaluation is None:
            return
        self._log_fp8()
        model, log = self._trainable.model, self._log
        with self._meter.paused(), model.newest_parameters():
            self._setup.evaluation.log(model, self.progress.step, self._setup.run_dir, watchdog=self._watchdog, log=log)

    def save(self, *, by_clock: bool = False) -> None:
        """Begins a checkpoint of this step. Logs earlier steps' statistics first, as a resumed run will not.

        Raises:
            NotFiniteError: The weights are not finite.
            GoBack: The loss is a spike.
            RunError: The save before failed, or this one, and `checkpoint.on_save_error` is stop.
        """
        # A state with a spike is not saved, and a resumed run needs the losses up to here to find spikes.
        self._log_guarded(self._guard.read())
        self._log_fp8()
        if not weights_are_finite(self._trainable.model):
            first_sample = self.progress.consumed_samples - self._num_samples
            raise NotFiniteError(
                BadStep(step=self.progress.step, first_sample=first_sample, num_samples=self._num_samples),
                f"the weights are not finite any more after step {self.progress.step}",
            )
        self._saved_step = self.progress.step
        progress = replace(
            self.progress,
            losses=tuple(self._guard.losses),
            spikes=tuple(self._guard.spikes),
            fp8_proofs=self._proofs.number,
            sources=self._setup.train_data.consumed(self.progress.consumed_samples),
        )
        newest = self._trainable.model.newest_parameters()
        with self._watchdog.busy("saving a checkpoint"), self._meter.paused(), newest:
            self._log_saves(self._saver.wait())
            outcomes = self._saver.save(progress, by_clock=by_clock)
        self._log_saves(outcomes)

    def _log_saves(self, outcomes: Sequence[SaveOutcome]) -> None:
        """Logs saves that have ended; raises a RunError if one failed and `checkpoint.on_save_error` is stop."""
        for outcome in outcomes:
            self._save_problem = outcome.problem
            self._log(
                CheckpointRecord(
                    step=self.progress.step,
                    saved_step=outcome.step,
                    num_bytes=outcome.num_bytes,
                    stall_s=outcome.stall_s,
                    time_s=outcome.time_s,
                    problem=outcome.problem,
                )
            )
            if outcome.problem is None:
                self._callbacks.save(self.progress.step, outcome.path)
            elif self.config.checkpoint.on_save_error is OnSaveError.stop:
                raise RunError(outcome.problem)

    def _wait_for_save(self) -> None:
        with self._watchdog.busy("waiting for a checkpoint"):
            outcomes = self._saver.wait()
        self._log_saves(outcomes)

    def _log_step(self, result: StepResult) -> None:
        # Measured before the statistics, which wait, and logged after them, so that the log's steps only increase.
        optimizer = self._trainable.optimizer
        rates = learning_rate(optimizer), decoupled_learning_rate(optimizer), hidden_learning_rate(optimizer)
        num_samples = self._meter.num_samples
        steps_left = last_step(self.config, self._trained) - self.progress.step
        record = self._meter.read(
            result,
            self.progress,
            *rates,
            global_batch_size=self._num_samples if batch_grows(self.config.model) else None,
            samples_left=self._batches.samples_of(steps_left, self._trained),
        )
        guarded = self._guard.read()
        self._log_fp8()
        self._log_guarded(guarded)
        self._log(record)
        experts = self._expert_watch.records(self.progress.step, num_samples)
        for each in (*experts, *self._stragglers.records(self.progress.step)):
            self._log(each)
        if result.norms is not None:
            names, (gradients, weights) = norm_names(self.config.model.num_layers), result.norms.tolist()
            self._log(
                NormsRecord(
                    step=self.progress.step,
                    gradients=dict(zip(names, gradients, strict=True)),
                    weights=dict(zip(names, weights, strict=True)),
                    weight_norm=math.hypot(*weights),
                )
            )
        if len(self._setup.corpus.training.sources) > 1:
            consumed = self._setup.train_data.consumed(self.progress.consumed_samples)
            self._log(SourcesRecord(step=self.progress.step, sources=consumed))

    def _log_guarded(self, records: Sequence[Record]) -> None:
        """Logs what the guard has found.

        Raises:
            GivesUpError: Too many steps went wrong.
            GoBack: A spike, and a checkpoint to go back to.
        """
        for record in records:
            self._log(record)
        self._guard.check()
        for record in records:
            if isinstance(record, LossSpikeRecord) and self.config.trainer.max_spike_rewinds is not None:
                # The save in progress may be the one to go back to, and must not become the newest one afterwards.
                self._wait_for_save()
                self._log(check_spike(self._setup, record, self.progress, self._guard.spikes))

    def _go_back(self, request: GoBack) -> None:
        """Restores a checkpoint, to continue with the samples after the spike."""
        self._log_fp8()
        with self._watchdog.busy("going back behind a loss spike"), self._trainable.model.newest_parameters():
            restored, record = go_back(self._setup, request, self.progress)
        self.progress = restored.progress
        self._proofs.restored(restored.fp8_digests)
        self._saved_step = self.progress.step
        self._guard = self._new_guard()
        for iterator in self._train_batches:
            if iterator is not None:
                iterator.close()
        self._train_batches = self._batches_from(self.progress.consumed_samples)
        self._meter.restart()
        self._expert_watch.restart(self.progress.step)
        self._log(record)

    def _new_guard(self) -> StepGuard:
        """A guard that knows the run's losses and spikes so far."""
        model = self.config.model
        return StepGuard(
            self.config.trainer,
            num_tokens=None if masks_tokens(model) else model.encoder_seq_length,
            losses=self.progress.losses,
            spikes=self.progress.spikes,
        )

    def _dump(self, error: GivesUpError) -> str:
        """Looks for the first bad tensor; returns the message for the user."""
        self._log_fp8()
        with self._watchdog.busy("looking for the first bad tensor"):
            finding = write_dump(
                self._setup.run_dir / "dumps",
                error.bad_step,
                trainable=self._trainable,
                iterators=self._batches_from(error.bad_step.first_sample),
                sequence_length=self._setup.train_data.sequence_length_at(error.bad_step.first_sample),
            )
        return f"{error}; {finding}"

    def _log_fp8(self) -> None:
        """Statistics of the steps observed since the last logged one."""
        for record in self._fp8_watch.records():
            self._log(record)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.progress.step % interval == 0
