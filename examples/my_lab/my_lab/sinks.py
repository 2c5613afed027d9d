"""A sink: the numbers of the log as a table, RUN_DIR/metrics.csv."""

import csv
from collections.abc import Mapping
from pathlib import Path

from gpt_pretrain import extend


@extend.sink("csv")
class CsvSink:
    """Appends rows of step, name and value."""

    def __init__(self, run_dir: Path, config: extend.Config, start_step: int) -> None:
        self.file = (run_dir / "metrics.csv").open("a", newline="")
        self.rows = csv.writer(self.file)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row for each number."""
        self.rows.writerows([step, name, value] for name, value in values.items())
        self.file.flush()

    def close(self) -> None:
        """Nothing is written after this."""
        self.file.close()
