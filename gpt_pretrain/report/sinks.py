"""Where a run's records go: `metrics.jsonl` always, TensorBoard, W&B, MLflow (`mlflow.py`) and others on request.

Only rank 0 creates the sinks, once it knows the step that the run continues from. TensorBoard's sink hides what was
written about later steps; W&B's cannot.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Self

from gpt_pretrain.config.errors import UserError, how_to_install, written
from gpt_pretrain.config.files import read_foreign_text, write_file
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.schema import Config, LoggingConfig
from gpt_pretrain.extend.registry import Registered
from gpt_pretrain.extend.training import Sink
from gpt_pretrain.report.metrics_file import MetricsFile, load_metrics, metrics_path
from gpt_pretrain.report.records import (
    EvaluationRecord,
    Fp8Record,
    NormsRecord,
    Record,
    RewindRecord,
    SourcesRecord,
    StartRecord,
    SummaryRecord,
    ValidationRecord,
    ValidationTasksRecord,
)

# Positions on the time axis and of what was looked at, not measurements.
_NOT_PLOTTED = {"step", "time_unix", "proof", "microbatch", "part"}
# Fields of an FP8 tensor and the names of their plots; of many scales it has the largest.
_FP8_PLOTS = {"saturated": "saturated", "flushed": "flushed", "amax": "amax", "scale_max": "scale"}


def scalars(record: Record) -> dict[str, float]:
    """A record's measurements by plot: `train/loss`, `validation/perplexity`."""
    if isinstance(record, Fp8Record):
        return _fp8_scalars(record)
    if isinstance(record, ValidationTasksRecord):
        return {f"validation/{name}": value for name, value in record.numbers.items()}
    if isinstance(record, EvaluationRecord):
        errors = {f"{name}_stderr": value for name, value in record.standard_errors.items()}
        return {f"evaluation/{name}": value for name, value in {**record.numbers, **errors}.items()}
    if isinstance(record, NormsRecord):
        norms = {"gradients": record.gradients, "weights": record.weights}
        of_layers = {f"norms/{what}/{name}": norm for what, each in norms.items() for name, norm in each.items()}
        return {**of_layers, "norms/weight_norm": record.weight_norm}
    if isinstance(record, SourcesRecord):
        return {
            f"sources/{name}/{what}": value
            for name, each in record.sources.items()
            for what, value in asdict(each).items()
        }
    values: dict[str, Any] = {
        each.name: getattr(record, each.name) for each in fields(record) if each.name not in _NOT_PLOTTED
    }
    if isinstance(record, ValidationRecord):
        values |= {f"{name}/loss": loss for name, loss in (record.losses or {}).items()}
        values |= {f"{name}/bits_per_byte": bits for name, bits in (record.set_bits_per_byte or {}).items()}
    return {f"{record.kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}


def _fp8_scalars(record: Fp8Record) -> dict[str, float]:
    """`fp8/amax/decoder.layers.0.mlp.linear_fc1/input`, …, and the lengths of the amax histories."""
    values: dict[str, float] = {
        f"{record.kind}/{plot}/{tensor.layer}/{tensor.tensor}": value
        for tensor in record.tensors
        for field, plot in _FP8_PLOTS.items()
        if (value := getattr(tensor, field)) is not None
    }
    histories = [tensor.amax_history_used for tensor in record.tensors if tensor.amax_history_used is not None]
    if histories:
        values[f"{record.kind}/amax_history_used_min"] = min(histories)
        values[f"{record.kind}/amax_history_used_max"] = max(histories)
    return values


class TensorBoardSink:
    """TensorBoard events through tensorboard's own writer, which needs no torch.

    It hides what was written about steps after `start_step`. The configuration goes to its page of hyperparameters.
    """

    def __init__(self, directory: Path, *, start_step: int, config: Mapping[str, object] | None = None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        self._hide_from(start_step + 1 if start_step else 0)
        if config is not None:
            self._write_hyperparameters(config)

    def _write_hyperparameters(self, config: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        values = {
            path: value if isinstance(value, bool | int | float | str) else written(value)
            for path, value in flatten(config)
        }
        self._writer.add_event(Event(step=0, wall_time=time.time(), summary=hparams_pb(values)))

    def _hide_from(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        purge = Event(step=step, wall_time=time.time())
        purge.session_log.CopyFrom(SessionLog(status=SessionLog.START))
        self._writer.add_event(purge)

    def write(self, record: Record) -> None:
        """Writes each number of a record as a scalar."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if isinstance(record, StartRecord | SummaryRecord):
            return
        if isinstance(record, RewindRecord):
            self._hide_from(record.step + 1)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        self._writer.add_event(Event(step=record.step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, continued under the same id after a resume; raises `UserError` without wandb."""

    def __init__(self, run_dir: Path, logging: LoggingConfig, run_name: str, config: dict[str, object] | None) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "logging.wandb=true needs the package wandb, which is not installed; "
                f"{how_to_install('wandb')}, or use logging.wandb=false"
            ) from None
        id_file = run_dir / "wandb_run_id.txt"
        if not os.path.lexists(id_file):
            write_file(id_file, uuid.uuid4().hex[:8])
        self._run: Any = wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            name=run_name,
            id=read_foreign_text(id_file).strip(),
            resume="allow",
            dir=str(run_dir),
            config=config,
        )
        # W&B's own step can only rise, but a resumed run goes back: our step is a metric and the x axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Logs the numbers of a record; the summary record becomes W&B's summary."""
        if isinstance(record, SummaryRecord):
            self._run.summary.update(asdict(record))
        elif not isinstance(record, StartRecord):
            self._run.log({"step": record.step, **scalars(record)})

    def close(self) -> None:
        """Uploads the rest and ends the W&B run."""
        self._run.finish()


class RegisteredSink:
    """A sink of an extension, or our own, behind `extend.Sink`; its errors end the run and say whose they are."""

    def __init__(self, registered: Registered, run_dir: Path, config: Config, *, start_step: int) -> None:
        self._registered = registered
        with registered.named("__init__"):
            self._sink: Sink = registered.value(run_dir, config, start_step)

    def write(self, record: Record) -> None:
        """Gives it a record's measurements."""
        if values := {} if isinstance(record, StartRecord) else scalars(record):
            with self._registered.named("write"):
                self._sink.write(record.step, values)

    def close(self) -> None:
        """Closes it."""
        with self._registered.named("close"):
            self._sink.close()


class MetricsSinks:
    """All sinks of a run as one; a context manager, so that an interrupted run keeps what it logged.

    `start_step` is 0, or the step of the checkpoint that this process resumes from; `more` opens those that are
    registered. Raises `UserError` if W&B is requested but not installed, or earlier records are damaged.
    """

    def __init__(
        self,
        run_dir: Path,
        logging: LoggingConfig,
        run_name: str,
        *,
        start_step: int,
        config: dict[str, object] | None = None,
        command: str | None = None,
        versions: str | None = None,
        more: Sequence[Callable[[], RegisteredSink]] = (),
    ) -> None:
        # The summary needs all earlier records; after training it would be too late to find them damaged.
        if metrics_path(run_dir).exists():
            load_metrics(run_dir)
        self._sinks: list[MetricsFile | TensorBoardSink | WandbSink | RegisteredSink] = []
        with ExitStack() as opened:
            # Sinks that may fail come first: a failed start must not mark earlier records as superseded.
            for open_sink in more:
                self._sinks.append(opened.enter_context(closing(open_sink())))
            if logging.wandb:
                self._sinks.append(opened.enter_context(closing(WandbSink(run_dir, logging, run_name, config))))
            if logging.tensorboard:
                events = TensorBoardSink(run_dir / "tensorboard", start_step=start_step, config=config)
                self._sinks.append(opened.enter_context(closing(events)))
            self._sinks.append(opened.enter_context(closing(MetricsFile(run_dir))))
            self.write(StartRecord(step=start_step, time_unix=time.time(), command=command, versions=versions))
            self._opened = opened.pop_all()

    def write(self, record: Record) -> None:
        """Writes a record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes every sink, even if one of them fails; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
