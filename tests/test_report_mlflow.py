"""MLflow as a sink, with the library itself and a SQLite database in place of a server."""

import math
import sqlite3
import sys

import pytest
from mlflow.tracking import MlflowClient

from gpt_pretrain.config.errors import UserError, how_to_install
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.report.mlflow import MlflowSink, metric_name
from gpt_pretrain.rules.jobs import load_config
from tests.hosts import free_port
from tests.runs import small_run_arguments


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def open_sink(uri, tmp_path, monkeypatch):
    """Opens a sink of the same run; what it has to send goes out when it is closed."""
    monkeypatch.setattr("gpt_pretrain.report.mlflow._SEND_EVERY_S", 1e6)

    def open_one(start_step=0, where=uri):
        config = load_config(["logging=mlflow", f"logging.mlflow_tracking_uri={where}", "name=mine"])
        return MlflowSink(tmp_path, config, start_step)

    return open_one


def only_run(uri, experiment="gpt_pretrain"):
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def history(uri, name):
    return [(each.step, each.value) for each in MlflowClient(uri).get_metric_history(only_run(uri).info.run_id, name)]


def test_a_run_that_is_resumed_is_one_run_of_mlflow(uri, parent, tmp_path, cache_dir):
    logging = ["logging=mlflow", f"logging.mlflow_tracking_uri={uri}", "name=mine"]
    ends = ["trainer.max_steps=4", "checkpoint.save_at_end=true", "trainer.limit_val_batches=1"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*logging, *ends])
    for faults, code, status in (([["signal_at_step", 2, "SIGTERM"]], 75, "KILLED"), ([], 0, "FINISHED")):
        codes, text = parent.run(arguments[2:], tmp_path / "output", faults={0: faults})
        assert codes == [code], text
        assert only_run(uri).info.status == status
    run = only_run(uri)
    assert run.info.run_id == (tmp_path / "run/mlflow_run_id.txt").read_text()
    assert run.info.run_name == "mine"
    assert run.data.tags["run_dir"] == str(tmp_path / "run")
    assert run.data.params["model.optim.lr"] == "0.002"
    assert run.data.params["model.fp8"] == "false"
    metrics = load_metrics(tmp_path / "run")
    assert history(uri, "train/loss") == [(each.step, each.loss) for each in metrics.train]
    assert run.data.metrics["summary/best_validation_loss"] == metrics.summary.best_validation_loss


def test_what_cannot_be_sent_waits_for_the_next_try(open_sink, uri, tmp_path, capsys):
    sink = open_sink()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("ALTER TABLE metrics RENAME TO away")
    sink.write(1, {"train/loss": 3.0})
    for _ in range(2):
        sink._send()
    assert capsys.readouterr().err.count("warning: MLflow") == 1
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("ALTER TABLE away RENAME TO metrics")
    sink.write(2, {"train/loss": 2.0})
    sink.close()
    assert history(uri, "train/loss") == [(1, 3.0), (2, 2.0)]
    assert capsys.readouterr().err == ""


def test_what_is_left_at_the_end_is_told(open_sink, tmp_path, capsys):
    sink = open_sink()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("DROP TABLE metrics")
    sink.write(1, {"train/loss": 3.0, "train/lr": 1e-3})
    sink.close()
    assert "last 2 numbers" in capsys.readouterr().err


def test_a_run_that_crashes_has_failed(open_sink, uri):
    open_sink().close()
    assert only_run(uri).info.status == "FAILED"


def test_more_numbers_than_a_request_takes_and_numbers_that_are_not_finite(open_sink, uri):
    sink = open_sink()
    values = {f"fp8/amax/layer{number}": float(number) for number in range(2500)}
    sink.write(1, {**values, "train/loss": math.nan, "train/grad_norm": math.inf})
    sink.close()
    found = only_run(uri).data.metrics
    assert len(found) == 2502
    assert found["fp8/amax/layer2499"] == 2499
    assert math.isnan(found["train/loss"])


def test_every_plot_has_a_name_that_mlflow_takes(open_sink, uri):
    names = {
        "train/loss": "train/loss",
        "norms/weights/layers.0": "norms/weights/layers.0",
        "sources//data/web/*.jsonl/epochs": "sources/data/web/_.jsonl/epochs",
        "sources/../x/loss": "sources/x/loss",
        "evaluation/a,b=c/acc": "evaluation/a_b_c/acc",
        f"sources/{'x' * 300}/epochs": f"sources/{'x' * 242}",
    }
    assert {plot: metric_name(plot) for plot in names} == names
    sink = open_sink()
    sink.write(1, dict.fromkeys(names, 1.0))
    sink.close()
    assert only_run(uri).data.metrics == dict.fromkeys(names.values(), 1.0)


def test_a_run_that_mlflow_does_not_know_is_refused(open_sink, tmp_path):
    open_sink().close()
    other = f"sqlite:///{tmp_path}/other.db"
    with pytest.raises(UserError) as refused:
        open_sink(2, other)
    for part in ("mlflow_run_id.txt", (tmp_path / "mlflow_run_id.txt").read_text(), other):
        assert part in str(refused.value)


def test_a_server_that_does_not_answer_is_refused(open_sink, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    where = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"logging.mlflow_tracking_uri={where}"):
        open_sink(where=where)
    assert not (tmp_path / "mlflow_run_id.txt").exists()


def test_a_run_without_a_server_or_the_library_is_refused(broken_rules, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (problem,) = broken_rules("logging=mlflow")
    assert "logging.mlflow_tracking_uri" in problem
    assert "MLFLOW_TRACKING_URI" in problem
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert broken_rules("logging=mlflow") == []
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    (problem,) = broken_rules("logging=mlflow")
    assert problem.endswith(f"{how_to_install('mlflow')}, or use logging.mlflow=false")
