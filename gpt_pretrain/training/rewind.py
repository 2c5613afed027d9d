"""How a run goes back behind a loss spike, to one of its checkpoints.

A spike is found when its loss is read, while the next step runs, and the update that ruined the weights precedes the
loss that shows it. So the run goes back to its newest checkpoint at least `trainer.spike_margin` steps before the
spike, and passes over every sample from there to the end of the spike's step (Chowdhery et al. 2022, PaLM, section 5.1,
went back about 100 steps and passed over 200 to 500 batches: the same batches made no spike from another state of the
model). A spike that returns within the margin takes the run back one checkpoint more. All ranks decide alike: they read
the same sum of losses, and rank 0 looks for the checkpoint.

A rewind is on the disk before anything is loaded, in three atomic steps: `latest` names the checkpoint, those of the
steps given up are removed, and the checkpoint's manifest says with which sample training continues. A process killed
before the last of them leaves a checkpoint to resume with the samples that it was saved with.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gpt_pretrain.checkpoint.directory import POINTER, complete_checkpoints, is_given_up, out_of_the_way, step_of
from gpt_pretrain.checkpoint.load import Restored, VerifiedCheckpoint, load_checkpoint, resume_from
from gpt_pretrain.checkpoint.manifest import TrainingProgress, write_manifest
from gpt_pretrain.config.files import fsync, write_file
from gpt_pretrain.config.schedule import batch_schedule, last_step
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.report.records import LossSpikeRecord, RewindRecord
from gpt_pretrain.training.setup import Setup
from gpt_pretrain.training.stop import TooManySpikesError


class GoBack(Exception):
    """Leaves the loop, on all ranks at the same step, to go back to one of the candidates."""

    def __init__(self, spike: LossSpikeRecord, candidates: Sequence[Path]) -> None:
        super().__init__(spike, candidates)
        self.spike = spike
        self.candidates = candidates


def check_spike(
    setup: Setup, spike: LossSpikeRecord, progress: TrainingProgress, spikes: Sequence[int]
) -> RewindRecord:
    """Decides what follows a spike; every rank calls it, while no save is in progress.

    `spikes` are the steps with a spike, this one included: the run does not go back to a checkpoint near one of them.
    The record says why the run continues without going back.

    Raises:
        GoBack: There is a checkpoint to go back to.
        TooManySpikesError: The run has gone back as often as it may.
    """
    trainer = setup.config.trainer
    assert trainer.max_spike_rewinds is not None
    if progress.rewinds >= trainer.max_spike_rewinds:
        raise TooManySpikesError(
            spike,
            f"above {spike.limit:.4f}, and the run has gone back {progress.rewinds} times already "
            f"(trainer.max_spike_rewinds={trainer.max_spike_rewinds})",
        )
    margin = trainer.spike_margin
    candidates = checkpoints_away_from(setup.checkpoints, spikes, progress, before=spike.step, margin=margin)
    if candidates:
        raise GoBack(spike, candidates)
    return RewindRecord(
        step=progress.step,
        spike_step=spike.step,
        first_sample=spike.first_sample,
        num_samples=0,
        rewinds=progress.rewinds,
        time_s=0.0,
        problem=f"there is no checkpoint {margin} steps away from every spike (trainer.spike_margin={margin})",
        warnings=(),
    )


def checkpoints_away_from(
    directory: Path, steps: Iterable[int], progress: TrainingProgress, *, before: int, margin: int
) -> list[Path]:
    """The checkpoints that a run may go back to, newest first; every rank calls it, while no save is in progress.

    They are at least `margin` steps before the step `before`, and at least as far from each of `steps`. Checkpoints of
    attempts that were given up do not count.
    """

    def find() -> list[Path]:
        return [
            path
            for path in complete_checkpoints(directory)[::-1]
            if step_of(path) <= before - margin
            and all(abs(step - step_of(path)) >= margin for step in steps)
            and not is_given_up(path, progress.given_up)
        ]

    return on_rank_zero(find)


def take_back(checkpoint: VerifiedCheckpoint, *, next_sample: int, given_up_at: TrainingProgress) -> VerifiedCheckpoint:
    """Makes one of the run's checkpoints its newest, to continue at `next_sample`; every rank calls it.

    `given_up_at` is how far the run was: it has no checkpoint of a later step. Of the returned checkpoint only the
    manifest is new.
    """
    path, saved = checkpoint.path, checkpoint.manifest
    manifest = replace(
        saved,
        consumed_samples=next_sample,
        rewinds=given_up_at.rewinds + 1,
        given_up=given_up_at.given_up,
        resumed_from=given_up_at.resumed_from,
        passed_over=(*saved.passed_over, (saved.consumed_samples, next_sample - saved.consumed_samples)),
    )

    def write() -> None:
        write_file(path.parent / POINTER, path.name + "\n")
        given_up = range(step_of(path) + 1, given_up_at.step + 1)
        others = [other for other in complete_checkpoints(path.parent) if step_of(other) in given_up]
        renamed = [out_of_the_way(other) for other in others]
        fsync(path.parent)
        for left in renamed:
            # The next save removes what cannot be removed now.
            shutil.rmtree(left, ignore_errors=True)
        write_manifest(path, manifest)

    on_rank_zero(write)
    return replace(checkpoint, manifest=manifest)


def go_back(setup: Setup, request: GoBack, progress: TrainingProgress) -> tuple[Restored, RewindRecord]:
    """Restores a checkpoint; every rank calls it inside `Model.newest_parameters`.

    Raises:
        TooManySpikesError: The remaining samples would not last to the end of the run.
        UserError: The checkpoint is damaged, and `checkpoint.fall_back` is off or no other one verifies.
    """
    began = time.monotonic()
    config, spike = setup.config, request.spike
    start = resume_from(request.candidates, fall_back=config.checkpoint.fall_back)
    checkpoint = start.checkpoint
    next_sample = spike.first_sample + spike.num_samples
    length = config.model.encoder_seq_length
    trained = checkpoint.manifest.progress_at(length).trained(length)
    steps_left = last_step(config, trained) - trained.steps
    missing = next_sample + batch_schedule(config.model).samples_of(steps_left, trained) - len(setup.train_data)
    if missing > 0:
        raise TooManySpikesError(
            spike,
            f"and to pass over the samples since step {checkpoint.manifest.step} would leave the run {missing} short: "
            "it sets aside those of checkpoint.save_interval + trainer.spike_margin steps for each of "
            f"trainer.max_spike_rewinds={config.trainer.max_spike_rewinds}",
        )
    taken_back = take_back(checkpoint, next_sample=next_sample, given_up_at=progress)
    restored = load_checkpoint(taken_back, setup.trainable, config, setup.corpus.fingerprints)
    progress = restored.progress
    first_sample, num_samples = progress.passed_over[-1]
    record = RewindRecord(
        step=progress.step,
        spike_step=spike.step,
        first_sample=first_sample,
        num_samples=num_samples,
        rewinds=progress.rewinds,
        time_s=time.monotonic() - began,
        problem=None,
        warnings=tuple(start.warnings),
    )
    return restored, record
