"""Going back behind a loss spike, in the running processes, and on with the samples after those of the spike.

A spike is found where its loss is looked at, which is while the next step runs; what caused it may be older still: the
update that ruined the weights comes before the loss that shows it. So the run goes back to its newest checkpoint that
lies `trainer.spike_margin` steps before the spike or more, and passes over every sample from there to the end of the
spike's step (Chowdhery et al. 2022, PaLM, section 5.1, went back about 100 steps and passed over 200 to 500 batches:
the same batches made no spike from another state of the model). A spike that comes again sooner than that after the
rewind takes the run back one checkpoint more.

All ranks decide alike: they read the same sum of losses, and rank 0 looks for the checkpoint.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.checkpoint.load import load_checkpoint
from gpt_pretrain.checkpoint.start import Detour, checkpoints_away_from, resume_from, take_back
from gpt_pretrain.checkpoint.state import Progress, Trainable
from gpt_pretrain.config.schema import Config
from gpt_pretrain.report.records import LossSpikeRecord, RewindRecord
from gpt_pretrain.training.guards import BadStep, TooManySpikesError


class GoBack(Exception):
    """Ends the loop where it stands, on all ranks at the same step.

    Args:
        spike: Why.
        candidates: Checkpoints to go back to, newest first.
    """

    def __init__(self, spike: LossSpikeRecord, candidates: Sequence[Path]) -> None:
        self.spike = spike
        self.candidates = candidates
        super().__init__(f"step {spike.step}: loss {spike.loss:.4f} is a spike")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    """What came of going back."""

    progress: Progress
    """How far the run is now."""
    record: RewindRecord


class Rewinds:
    """Takes a run back; every rank has one.

    Args:
        checkpoints: The run's, `RUN_DIR/checkpoints`.
        trainable: What is trained.
        config: The run's; `trainer.max_spike_rewinds` is a number.
        data: Fingerprints of tokenizer and tokens (`data.corpus.Corpus.fingerprints`).
        num_samples: Training samples that there are.
    """

    def __init__(
        self, checkpoints: Path, trainable: Trainable, config: Config, data: Mapping[str, str], *, num_samples: int
    ) -> None:
        self._checkpoints = checkpoints
        self._trainable = trainable
        self._config = config
        self._data = data
        self._num_samples = num_samples

    def check(self, spike: LossSpikeRecord, progress: Progress, spikes: Sequence[int]) -> RewindRecord:
        """What a spike asks for; every rank calls it, while no save is being written.

        Args:
            spike: The newest one.
            progress: How far the run is.
            spikes: Steps with a spike, this one included: a checkpoint near to one of them is no place to go back to.

        Returns:
            Why the run goes on, where it cannot go back.

        Raises:
            GoBack: There is a checkpoint to go back to.
            TooManySpikesError: The run has gone back as often as it may.
        """
        trainer = self._config.trainer
        assert trainer.max_spike_rewinds is not None
        if progress.rewinds >= trainer.max_spike_rewinds:
            raise TooManySpikesError(
                _bad_step(spike),
                f"step {spike.step}: loss {spike.loss:.4f} is a spike, above {spike.limit:.4f}, and the run has gone "
                f"back {progress.rewinds} times already (trainer.max_spike_rewinds={trainer.max_spike_rewinds})",
            )
        margin = trainer.spike_margin
        candidates = checkpoints_away_from(self._checkpoints, spikes, progress, before=spike.step, margin=margin)
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

    def go_back(self, request: GoBack, progress: Progress) -> Rewound:
        """Restores a checkpoint; every rank calls it, with gathered parameters (`Model.gathered_parameters`).

        Args:
            request: What `check` has raised.
            progress: How far the run was.

        Raises:
            TooManySpikesError: What is left of the samples would not last to the end of the run.
            UserError: The checkpoint is damaged, and `checkpoint.fall_back` is off or no other one verifies.
        """
        began = time.monotonic()
        config, spike = self._config, request.spike
        start = resume_from(request.candidates, fall_back=config.checkpoint.fall_back)
        checkpoint = start.checkpoint
        detour = Detour(next_sample=spike.first_sample + spike.num_samples, given_up_at=progress)
        steps_left = config.trainer.max_steps - checkpoint.manifest.step
        missing = detour.next_sample + steps_left * config.model.global_batch_size - self._num_samples
        if missing > 0:
            raise TooManySpikesError(
                _bad_step(spike),
                f"step {spike.step}: loss {spike.loss:.4f} is a spike, and to pass over the samples since step "
                f"{checkpoint.manifest.step} would leave the run {missing} short: it sets aside those of "
                "checkpoint.save_interval + trainer.spike_margin steps for each of trainer.max_spike_rewinds="
                f"{config.trainer.max_spike_rewinds}",
            )
        progress = load_checkpoint(take_back(checkpoint, detour), self._trainable, config, self._data).progress
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
        return Rewound(progress=progress, record=record)


def _bad_step(spike: LossSpikeRecord) -> BadStep:
    return BadStep(step=spike.step, first_sample=spike.first_sample)
