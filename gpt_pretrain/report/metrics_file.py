"""`metrics.jsonl` on disk: appending to it through crashes and resumes, and reading it back as one history.

A run may be killed at any byte and resumed from a checkpoint that is older than the last line. So the file is only
ever appended to. Each process begins with a `start` record that names the step it continues from, and the reader drops
what an earlier process wrote about later steps. It does the same where a `rewind` names an earlier step.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.report.records import (
    RECORD_KINDS,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Record,
    LossSpikeRecord,
    Record,
    RewindRecord,
    SkippedStepRecord,
    StartRecord,
    SummaryRecord,
    TrainRecord,
    ValidationRecord,
)

FILE_NAME = "metrics.jsonl"


def metrics_path(run_dir: str | Path) -> Path:
    """Where a run keeps its records."""
    return Path(run_dir) / FILE_NAME


class MetricsFile:
    """Appends records and hands each to the operating system at once: a killed process loses none it has written.

    Args:
        run_dir: The run directory; made if it is missing.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = metrics_path(run_dir)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends one record."""
        self._file.write(record.to_line() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Forces what was written to the disk and closes the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mend_last_line(path: Path) -> None:
    """Completes or removes a last line that a killed process left without its newline.

    Appending after a fragment would glue the next record to it, and both would be lost.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    end_of_lines = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _is_json_object(content[end_of_lines:]):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(end_of_lines)


def _is_json_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@dataclass(kw_only=True, slots=True)
class Metrics:
    """The history of a run, as if it had never been interrupted: steps rise, each has its newest record."""

    starts: list[StartRecord] = field(default_factory=list)
    train: list[TrainRecord] = field(default_factory=list)
    validation: list[ValidationRecord] = field(default_factory=list)
    skipped_steps: list[SkippedStepRecord] = field(default_factory=list)
    loss_spikes: list[LossSpikeRecord] = field(default_factory=list)
    rewinds: list[RewindRecord] = field(default_factory=list)
    """Those that did go back."""
    fp8: list[Fp8Record] = field(default_factory=list)
    experts: list[ExpertsRecord] = field(default_factory=list)
    fp8_coverage: Fp8CoverageRecord | None = None
    """Of the newest start; None without FP8, and until its first step is done."""
    summary: SummaryRecord | None = None
    """The newest summary; None while the run goes on and after a crash."""


# Kinds of which a step has at most one record, and their lists in `Metrics`.
_BY_STEP: Mapping[type[Record], str] = {
    TrainRecord: "train",
    ValidationRecord: "validation",
    SkippedStepRecord: "skipped_steps",
    LossSpikeRecord: "loss_spikes",
    Fp8Record: "fp8",
    ExpertsRecord: "experts",
}


def load_metrics(run_dir: str | Path) -> Metrics:
    """Reads a run's records; works while the run goes on.

    Args:
        run_dir: The run directory.

    Raises:
        UserError: `metrics.jsonl` is missing, or one of its lines is not a record. A torn last line is ignored.
    """
    path = metrics_path(run_dir)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the directory of a run (its run_dir)") from None
    if lines[-1] and not _is_json_object(lines[-1]):
        lines.pop()

    metrics = Metrics()
    by_step: dict[type[Record], dict[int, Any]] = {kind: {} for kind in _BY_STEP}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match _parse(line, f"{path}:{number}"):
            case StartRecord() | RewindRecord(problem=None) as restart:
                for records in by_step.values():
                    for step in [step for step in records if step > restart.step]:
                        del records[step]
                _begin_again(metrics, restart)
            case Fp8CoverageRecord() as record:
                metrics.fp8_coverage = record
            case SummaryRecord() as record:
                metrics.summary = record
            case Record() as record if type(record) in by_step:
                by_step[type(record)][record.step] = record
    for kind, name in _BY_STEP.items():
        setattr(metrics, name, [by_step[kind][step] for step in sorted(by_step[kind])])
    return metrics


def _begin_again(metrics: Metrics, restart: StartRecord | RewindRecord) -> None:
    metrics.starts = [start for start in metrics.starts if start.step <= restart.step]
    metrics.rewinds = [rewind for rewind in metrics.rewinds if rewind.step <= restart.step]
    if isinstance(restart, RewindRecord):
        metrics.rewinds.append(restart)
        return
    # A start that another one followed at the same step got nowhere.
    metrics.starts = [start for start in metrics.starts if start.step < restart.step] + [restart]
    metrics.fp8_coverage, metrics.summary = None, None


def _parse(line: bytes, place: str) -> Record | None:
    """The record of a line; None for a kind of a newer version."""
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise ValueError('not a JSON object with a "kind"')
        record = RECORD_KINDS.get(values["kind"])
        return None if record is None else record.from_json(values)
    except ValueError as error:
        raise UserError(f"{place} is not a record: {error}; remove the line, or restore the file") from None
