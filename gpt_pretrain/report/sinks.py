"""Where a run's records go besides the screen: `metrics.jsonl` always, TensorBoard and Weights & Biases when asked.

Only rank 0 creates the sinks, once it knows the step it starts from: a resumed run tells each sink that what was
written about later steps is superseded.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, Self

from gpt_pretrain.config.errors import UserError, how_to_install
from gpt_pretrain.config.schema import LoggingConfig
from gpt_pretrain.report.columns import COLUMNS
from gpt_pretrain.report.metrics_file import MetricsFile
from gpt_pretrain.report.records import Fp8Record, Fp8Tensor, Record, RewindRecord, StartRecord, SummaryRecord

# Positions on the time axis rather than measurements.
_NOT_PLOTTED = {"step", "time_unix"}


def scalars(record: Record) -> dict[str, float]:
    """A record's measured numbers under the names of the plots: `train/loss`, `validation/perplexity`."""
    if isinstance(record, Fp8Record):
        return _fp8_scalars(record)
    named: dict[str, float] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float) and field.name not in _NOT_PLOTTED:
            named[f"{record.kind}/{field.name}"] = value
    return named


def _fp8_scalars(record: Fp8Record) -> dict[str, float]:
    """`fp8/amax/decoder.layers.0.mlp.linear_fc1/input`, …, and how full the amax histories are."""
    named: dict[str, float] = {
        f"{record.kind}/{column.curve}/{tensor.layer}/{tensor.tensor}": value
        for tensor in record.tensors
        for column in COLUMNS[Fp8Tensor]
        if column.curve and (value := getattr(tensor, column.field)) is not None
    }
    histories = [tensor.amax_history_used for tensor in record.tensors if tensor.amax_history_used is not None]
    if histories:
        named[f"{record.kind}/amax_history_used_min"] = min(histories)
        named[f"{record.kind}/amax_history_used_max"] = max(histories)
    return named


class _Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """TensorBoard events through tensorboard's own writer, which needs no torch.

    Args:
        directory: Where the events go.
        start_step: Optimizer steps done before this start; TensorBoard hides what it has of later ones.
    """

    def __init__(self, directory: Path, *, start_step: int) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        if start_step > 0:
            self._hide_after(start_step)

    def _hide_after(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        purge = Event(step=step + 1, wall_time=time.time())
        purge.session_log.CopyFrom(SessionLog(status=SessionLog.START))
        self._writer.add_event(purge)

    def write(self, record: Record) -> None:
        """Writes the numbers of a record, each as a scalar."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if isinstance(record, StartRecord | SummaryRecord):
            return
        if isinstance(record, RewindRecord):
            self._hide_after(record.step)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        self._writer.add_event(Event(step=record.step, wall_time=time.time(), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run, continued under the same id when the run is resumed.

    Args:
        run_dir: The run directory; keeps the id of the W&B run.
        logging: Project and entity.
        run_name: Name of the W&B run.
        config: What W&B shows as the run's configuration.

    Raises:
        UserError: The package wandb is not installed.
    """

    ID_FILE = "wandb_run_id.txt"

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, run_name: str, config: Mapping[str, object] | None
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "logging.wandb=true needs the package wandb, which is not installed; "
                f"{how_to_install('wandb')}, or use logging.wandb=false"
            ) from None
        id_file = run_dir / self.ID_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self._run: Any = wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            name=run_name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run_dir),
            config=None if config is None else dict(config),
        )
        # W&B's own step only ever rises; a resumed run goes back, so the step is a metric and the x axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Logs the numbers of a record; the summary becomes the run's summary."""
        if isinstance(record, SummaryRecord):
            self._run.summary.update({field.name: getattr(record, field.name) for field in fields(record)})
        elif not isinstance(record, StartRecord):
            self._run.log({"step": record.step, **scalars(record)})

    def close(self) -> None:
        """Uploads what is left and ends the W&B run."""
        self._run.finish()


class MetricsSinks:
    """All sinks of a run as one; a context manager, so that an interrupted run keeps what it logged.

    Args:
        run_dir: The run directory.
        logging: Which sinks besides `metrics.jsonl`.
        run_name: Name of the run, for W&B.
        start_step: Optimizer steps done before this start: 0, or the step of the checkpoint it resumes from.
        config: The resolved configuration, for W&B.

    Raises:
        UserError: W&B is asked for and not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        logging: LoggingConfig,
        run_name: str,
        *,
        start_step: int,
        config: Mapping[str, object] | None = None,
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[_Sink] = []
        # Sinks that may refuse to start come first: a refused start must not mark an earlier history as superseded.
        if logging.wandb:
            self._sinks.append(WandbSink(run_dir, logging, run_name, config))
        if logging.tensorboard:
            self._sinks.append(TensorBoardSink(run_dir / "tensorboard", start_step=start_step))
        self._sinks.append(MetricsFile(run_dir))
        self.write(StartRecord(step=start_step, time_unix=time.time()))

    def write(self, record: Record) -> None:
        """Writes a record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes every sink; a second call does nothing."""
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
