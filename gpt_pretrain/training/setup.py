"""Builds a run once its ranks are connected: model, optimizer, schedule, data, and the state that it starts from."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.checkpoint.directory import remove_unfinished
from gpt_pretrain.checkpoint.load import Restored, Start, choose_start, load_checkpoint, load_weights
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.checkpoint.state import keeps_fp8_state
from gpt_pretrain.config import own
from gpt_pretrain.config.choices import OnSaveError
from gpt_pretrain.config.errors import UserError, format_bytes, list_argument, one_of, show
from gpt_pretrain.config.schedule import NOTHING, last_step, num_train_samples
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import Corpus
from gpt_pretrain.data.datasets import SampleDataset, build_datasets
from gpt_pretrain.extend.code import code_digests
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.launch.run_dir import nearest_existing
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.plan.forecast import forecast_checkpoint
from gpt_pretrain.plan.stages import count_parameters
from gpt_pretrain.rules.no_effect import READ_BY_SAVES
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.evaluation import Evaluation

# Keys of `checkpoint.` with which a run saves nothing.
_NO_SAVES = {"save_at_end": False, "save_interval_minutes": None, "save_interval": None, **READ_BY_SAVES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run that is ready to train, on this rank."""

    spec: RunSpec
    corpus: Corpus
    run_dir: Path
    start: Start | None
    """The checkpoint that the run resumes or takes its weights from; None for a fresh start."""
    trainable: Trainable
    progress: TrainingProgress
    notes: Sequence[str]
    """Differences from the checkpoint, for the user."""
    fp8_digests: Mapping[str, str] | None
    """Digests of the FP8 state that was restored, by layer; None without (`fp8.delayed.state_digests`)."""
    train_data: SampleDataset
    valid_data: SampleDataset | None
    evaluation: Evaluation | None

    @property
    def config(self) -> Config:
        """The whole configuration."""
        return self.spec.config

    @property
    def checkpoints(self) -> Path:
        """Where the run saves."""
        return self.run_dir / "checkpoints"

    @property
    def last_step(self) -> int:
        """Steps of the whole run."""
        return last_step(self.config, self.progress.trained(self.config.model.encoder_seq_length))


def set_up(spec: RunSpec, corpus: Corpus, run_dir: Path) -> Setup:
    """Builds a run and restores its checkpoint, if any; a UserError if that cannot be used. Every rank calls it."""
    config = spec.config
    start = choose_start(config.checkpoint, run_dir / "checkpoints")
    notes = []
    if start is not None and not start.weights_only:
        notes += _extension_notes(start)
    _check_fp8_state(start, spec)
    on_rank_zero(lambda: _check_disk(start, spec, run_dir / "checkpoints"))
    evaluation = _load_evaluation(config, corpus)
    model = build_model(spec, fp8_layers(spec))
    optimizer = build_optimizer(model)
    trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
    restored = Restored(progress=TrainingProgress(step=0, consumed_samples=0), notes=())
    if start is not None:
        load = load_weights if start.weights_only else load_checkpoint
        restored = load(start.checkpoint, trainable, config, corpus.fingerprints)
    progress = restored.progress
    train_data, valid_data = build_datasets(
        config,
        corpus,
        num_train_samples=num_train_samples(
            config,
            progress.trained(config.model.encoder_seq_length),
            passed_over=sum(num_samples for _, num_samples in progress.passed_over),
        ),
    )
    return Setup(
        spec=spec,
        corpus=corpus,
        run_dir=run_dir,
        start=start,
        trainable=trainable,
        progress=progress,
        notes=[*notes, *restored.notes],
        fp8_digests=restored.fp8_digests,
        train_data=train_data,
        valid_data=valid_data,
        evaluation=evaluation,
    )


def _load_evaluation(config: Config, corpus: Corpus) -> Evaluation | None:
    """The tasks of `evaluation.tasks`, if any; every rank calls it."""
    if not config.evaluation.tasks:
        return None
    if corpus.tokenizer is None:
        raise UserError(
            f"{list_argument('evaluation.tasks', config.evaluation.tasks)} score texts, and nobody knows the tokenizer "
            "of the run's data; name it with model.tokenizer.library=file, or use evaluation.tasks=[]"
        )
    return Evaluation(config.evaluation, corpus.tokenizer)


def _extension_notes(start: Start) -> list[str]:
    """Which extensions the run drops, and which have changed; refuses to drop any unless the command line says so."""
    path, manifest = start.checkpoint.path, start.checkpoint.manifest
    had = manifest.config.get("extensions")
    if problem := own.missing_problem(had):
        raise UserError(f"{path} was saved with {problem}")
    saved, now = manifest.extensions or {}, code_digests()
    changed = [package for package, digest in now.items() if saved.get(package, digest) != digest]
    return [
        *(f"the run goes on without the extension {name}, which {path.name} had" for name in own.dropped_modules(had)),
        *(f"the code of the extension {package} has changed since {path.name} was saved" for package in changed),
    ]


def _check_fp8_state(start: Start | None, spec: RunSpec) -> None:
    """Refuses, before a model is built, to drop FP8 scales unasked, and to drop them without a checkpoint."""
    reset = spec.config.checkpoint.reset_fp8_state
    if start is not None and not start.weights_only:
        # Only to refuse: `load_checkpoint` asks again.
        keeps_fp8_state(start.checkpoint.path, spec.fp8, start.checkpoint.manifest.fp8, reset=reset)
    elif reset:
        raise UserError(
            "checkpoint.reset_fp8_state=true has no effect: the run resumes from no checkpoint, and its FP8 scales are "
            "new; use reset_fp8_state=false"
        )


def _check_disk(start: Start | None, spec: RunSpec, checkpoints: Path) -> None:
    """Refuses, before a model is built, a run whose disk cannot hold the checkpoint that it will save."""
    saves, length, trained = spec.config.checkpoint, spec.model.encoder_seq_length, NOTHING
    if start is not None and not start.weights_only:
        trained = start.checkpoint.manifest.progress_at(length).trained(length)
    step, last = trained.steps, last_step(spec.config, trained)
    by_steps = saves.save_interval is not None and step // saves.save_interval < last // saves.save_interval
    if step >= last or not (saves.save_at_end or by_steps) or saves.on_save_error is not OnSaveError.stop:
        return
    needed = int(forecast_checkpoint(spec, count_parameters(spec.model)).num_bytes)
    remove_unfinished(checkpoints)
    free = shutil.disk_usage(nearest_existing(checkpoints.absolute())).free
    if free < needed:
        ways = ["make room", "use a run_dir on another disk"]
        # Rewinds need checkpoints.
        if spec.config.trainer.max_spike_rewinds is None:
            off = [
                f"checkpoint.{key}={show(value)}" for key, value in _NO_SAVES.items() if getattr(saves, key) != value
            ]
            ways.append(f"save nothing with {' '.join(off)}")
        raise UserError(
            f"run_dir={checkpoints.parent}: a checkpoint takes {format_bytes(needed)}, and this disk has "
            f"{format_bytes(free)} free; {one_of(ways)}"
        )
