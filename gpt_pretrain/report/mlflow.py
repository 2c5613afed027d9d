"""MLflow as a sink (`logging.mlflow`), through the same registry as an extension's own.

A thread sends the numbers, so that training waits for no server. What cannot be sent waits for the next try; only what
is left at the end of the process is lost to MLflow, and the run says so: `metrics.jsonl` has it. MLflow changes and
deletes nothing that was logged: parameters are those of the first start, and after a resume or a rewind an earlier
start's numbers about later steps stay.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from itertools import batched
from pathlib import Path
from typing import Any

from gpt_pretrain.config.errors import UserError, reason, written
from gpt_pretrain.config.files import read_foreign_text, write_file
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.training import sink

# Of one request (mlflow.utils.validation).
_MOST_PARAMS, _MOST_METRICS, _LONGEST_NAME = 100, 1000, 250
_SEND_EVERY_S = 5.0
# Seconds, not the library's minutes: this thread tries again, and a run that ends waits for it.
_RETRIES = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
# By the run's exit code; a run without a summary has failed, and another code is that of a signal or the clock.
_STATUS: Mapping[float | None, str] = {None: "FAILED", 0: "FINISHED", 1: "FAILED"}


def metric_name(plot: str) -> str:
    """A plot's name as MLflow allows it: letters, digits and `_-. :` in parts between slashes."""
    parts = (re.sub(r"[^\w. :-]", "_", part) for part in plot.split("/"))
    return "/".join(part for part in parts if part.strip("."))[:_LONGEST_NAME]


@sink("mlflow")
class MlflowSink:
    """A run of MLflow, the same one after a resume: its id is in RUN_DIR/mlflow_run_id.txt.

    Raises `UserError` if MLflow cannot be reached, or does not know the run.
    """

    def __init__(self, run_dir: Path, config: Config, start_step: int) -> None:
        os.environ.setdefault(*_RETRIES)
        # It would tell each of them.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._error = Metric, MlflowException
        # Without a value the library reads MLFLOW_TRACKING_URI.
        uri = config.logging.mlflow_tracking_uri
        id_file = run_dir / "mlflow_run_id.txt"
        doing = "cannot begin a run"
        try:
            self._client = MlflowClient(uri)
            if os.path.lexists(id_file):
                self._run_id = read_foreign_text(id_file).strip()
                doing = f"cannot continue the run {self._run_id} of {id_file}, which a new run does not need"
                self._client.update_run(self._run_id, "RUNNING")
            else:
                self._run_id = self._begin(run_dir, config)
                write_file(id_file, self._run_id)
        except MlflowException as error:
            raise UserError(
                f"MLflow {doing} at logging.mlflow_tracking_uri={written(uri)}: {reason(error)}; start the tracking "
                "server, name another one, or use logging.mlflow=false"
            ) from error
        self._exit_code: float | None = None
        self._waiting: list[Any] = []
        self._warned = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._send_now_and_then, name="MLflow", daemon=True)
        self._thread.start()

    def _begin(self, run_dir: Path, config: Config) -> str:
        """The id of a new run with the configuration as its parameters."""
        from mlflow.entities import Param
        from mlflow.tracking.context.registry import resolve_tags

        name = config.logging.mlflow_experiment_name
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        # User, command and Git commit, as for every run of MLflow.
        tags = resolve_tags({"run_dir": str(run_dir)})
        run_id: str = self._client.create_run(number, run_name=config.name, tags=tags).info.run_id
        params = [Param(key, written(value)) for key, value in flatten(config_to_dict(config))]
        for some in batched(params, _MOST_PARAMS):
            self._client.log_batch(run_id, params=list(some))
        return run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Leaves the numbers for the thread."""
        self._exit_code = values.get("summary/exit_code")
        now = round(1000 * time.time())
        self._waiting += [self._metric(metric_name(plot), value, now, step) for plot, value in values.items()]

    def _send_now_and_then(self) -> None:
        while not self._leaving.wait(_SEND_EVERY_S):
            self._send()

    def _send(self) -> None:
        """Sends what waits, or says that it cannot."""
        try:
            while some := self._waiting[:_MOST_METRICS]:
                self._client.log_batch(self._run_id, metrics=some)
                # A number that is sent twice, with its time, is one to MLflow.
                del self._waiting[: len(some)]
            self._warned = False
        except self._error as error:
            if not self._warned:
                self._warn(f"cannot be told the metrics, which wait: {reason(error)}")
            self._warned = True

    def close(self) -> None:
        """Sends the rest and ends the run: FINISHED, KILLED with steps left, or FAILED."""
        self._leaving.set()
        self._thread.join()
        self._send()
        try:
            self._client.set_terminated(self._run_id, _STATUS.get(self._exit_code, "KILLED"))
        except self._error as error:
            self._warn(f"was not told that the run has ended: {reason(error)}")
        if self._waiting:
            self._warn(f"lacks the last {len(self._waiting)} numbers; metrics.jsonl in the run directory has them")

    def _warn(self, text: str) -> None:
        sys.stderr.write(f"warning: MLflow (run {self._run_id}) {text}\n")
        sys.stderr.flush()
