"""A run's records in `metrics.jsonl`, and the history read back.

A run may be killed at any byte and resumed from a checkpoint older than the last line, so the file is only appended to.
Each process begins with a `start` record, which names the step it continues from. The reader drops what was written
earlier about later steps; a `rewind` record has the same effect.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import named, open_to_append, read_regular
from gpt_pretrain.report.records import (
    RECORD_KINDS,
    EvaluationRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Record,
    NormsRecord,
    RankTimesRecord,
    Record,
    RewindRecord,
    SkippedStepRecord,
    SourcesRecord,
    StartRecord,
    SummaryRecord,
    TrainRecord,
    ValidationRecord,
    ValidationTasksRecord,
)


def metrics_path(run_dir: str | Path) -> Path:
    """Where a run keeps its records."""
    return Path(run_dir) / "metrics.jsonl"


class MetricsFile:
    """Appends records, and flushes each at once so that a killed process loses none."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = metrics_path(run_dir)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(self.path)
        _mend_last_line(self.path)

    def write(self, record: Record) -> None:
        """Appends one record."""
        with named(self.path):
            self._file.write(record.to_line() + "\n")
            self._file.flush()

    def close(self) -> None:
        """Waits until the disk has the records and closes the file."""
        with named(self.path):
            os.fsync(self._file.fileno())
            self._file.close()


def _mend_last_line(path: Path) -> None:
    """Completes or removes a last line without a newline, to which the next record would be appended."""
    content = read_regular(path)
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
    except (ValueError, RecursionError):
        return False


@dataclass(kw_only=True, slots=True)
class Metrics:
    """The history of a run as if it had never been interrupted: steps rise, and each has its newest record."""

    starts: list[StartRecord] = field(default_factory=list)
    train: list[TrainRecord] = field(default_factory=list)
    validation: list[ValidationRecord] = field(default_factory=list)
    validation_tasks: list[ValidationTasksRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    skipped_steps: list[SkippedStepRecord] = field(default_factory=list)
    rewinds: list[RewindRecord] = field(default_factory=list)
    """Without those that failed."""
    fp8: list[Fp8Record] = field(default_factory=list)
    experts: list[ExpertsRecord] = field(default_factory=list)
    fp8_proofs: list[Fp8CoverageRecord] = field(default_factory=list)
    rank_times: list[RankTimesRecord] = field(default_factory=list)
    sources: list[SourcesRecord] = field(default_factory=list)
    norms: list[NormsRecord] = field(default_factory=list)
    fp8_coverage: Fp8CoverageRecord | None = None
    """Of the newest start; None without FP8 and before its first step is done."""
    summary: SummaryRecord | None = None
    """The newest summary; None during the run and after a crash."""

    def warm_up_steps(self) -> set[int]:
        """Steps of the first training record after each start and rewind, whose times are not typical.

        After a start they include compilation, autotuning and allocation, after a rewind the samples passed over.
        """
        restarts = [restart.step for restart in (*self.starts, *self.rewinds)]
        return {next((record.step for record in self.train if record.step > step), 0) for step in restarts}


# The kinds with at most one record per step, and their lists in `Metrics`.
_BY_STEP: Mapping[type[Record], str] = {
    TrainRecord: "train",
    ValidationRecord: "validation",
    ValidationTasksRecord: "validation_tasks",
    EvaluationRecord: "evaluations",
    SkippedStepRecord: "skipped_steps",
    Fp8Record: "fp8",
    Fp8CoverageRecord: "fp8_proofs",
    ExpertsRecord: "experts",
    RankTimesRecord: "rank_times",
    SourcesRecord: "sources",
    NormsRecord: "norms",
}


def load_metrics(run_dir: str | Path) -> Metrics:
    """Reads a run's records, also during the run: an incomplete last line is ignored.

    Raises `UserError` if `metrics.jsonl` is missing or another line is not a record.
    """
    return load_records(metrics_path(run_dir))


def load_records(path: Path) -> Metrics:
    """`load_metrics` for a file of any name."""
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the directory of a run (its run_dir)") from None
    if lines[-1] and not _is_json_object(lines[-1]):
        lines.pop()

    metrics = Metrics()
    by_step: dict[type[Record], dict[int, Record]] = {kind: {} for kind in _BY_STEP}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match _parse(line, f"{path}:{number}"):
            case StartRecord() | RewindRecord(problem=None) as restart:
                for records in by_step.values():
                    # Each process writes its steps in their order.
                    while records and next(reversed(records)) > restart.step:
                        records.popitem()
                _begin_again(metrics, restart)
            case Fp8CoverageRecord() as record:
                metrics.fp8_coverage = record
                by_step[Fp8CoverageRecord][record.step] = record
            case SummaryRecord() as record:
                metrics.summary = record
            case Record() as record if type(record) in by_step:
                by_step[type(record)][record.step] = record
    for kind, name in _BY_STEP.items():
        setattr(metrics, name, [by_step[kind][step] for step in sorted(by_step[kind])])
    return metrics


def _begin_again(metrics: Metrics, restart: StartRecord | RewindRecord) -> None:
    # Both are in the order of steps. A start followed by another at the same step logged nothing.
    kept_starts = restart.step + isinstance(restart, RewindRecord)
    while metrics.starts and metrics.starts[-1].step >= kept_starts:
        metrics.starts.pop()
    while metrics.rewinds and metrics.rewinds[-1].step > restart.step:
        metrics.rewinds.pop()
    if isinstance(restart, RewindRecord):
        metrics.rewinds.append(restart)
        return
    metrics.starts.append(restart)
    metrics.fp8_coverage, metrics.summary = None, None


def _parse(line: bytes, place: str) -> Record | None:
    """The record of a line; None for a kind from a newer version."""
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            raise ValueError('not a JSON object with a "kind"')
        record = RECORD_KINDS.get(values["kind"])
        return None if record is None else record.from_json(values)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not a record: {error}; remove the line, or restore the file") from None
