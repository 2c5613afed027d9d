"""Sinks: TensorBoard events that TensorBoard reads, a resume that hides the cut part, W&B that is missing."""

import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gpt_pretrain.config.choices import Fp8ProofMode
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.mixtures import ConsumedSource
from gpt_pretrain.config.schema import LoggingConfig
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.report.records import (
    Fp8CoverageRecord,
    Fp8Record,
    Fp8Tensor,
    NormsRecord,
    RewindRecord,
    SourcesRecord,
    ValidationRecord,
)
from gpt_pretrain.report.sinks import MetricsSinks, scalars
from gpt_pretrain.report.summary import build_summary
from tests.test_compare_logs import train_record


def logging_config(*, tensorboard=True, wandb=False):
    return LoggingConfig(
        tensorboard=tensorboard,
        wandb=wandb,
        wandb_project="test",
        wandb_entity=None,
        mlflow=False,
        mlflow_tracking_uri=None,
        mlflow_experiment_name="",
        fp8_proof=Fp8ProofMode.stop,
        fp8_proof_interval=None,
        fp8_statistics_interval=None,
        fp8_saturation_threshold=1e-3,
        norms=False,
        peak_tflops=None,
    )


def wait_for_another_second():
    """TensorBoard reads a directory's files in the order of their names: second, process, number in the process.

    The tenth file of a process sorts before the ninth of the same second.
    """
    time.sleep(1 - time.time() % 1)


def run(run_dir, start_step, losses, **choices):
    if (run_dir / "tensorboard").exists():
        wait_for_another_second()
    with MetricsSinks(run_dir, logging_config(**choices), "test", start_step=start_step) as sinks:
        for step, loss in losses.items():
            sinks.write(train_record(step, loss))
        last = max(losses)
        sinks.write(ValidationRecord(step=last, loss=1.5, perplexity=4.5, num_samples=8, time_s=0.1))
        sinks.write(
            build_summary(
                load_metrics(run_dir),
                step=last,
                consumed_samples=last,
                consumed_tokens=8 * last,
                num_gpus=1,
                end_reason="max_steps",
                exit_code=0,
                wall_time_s=1.0,
                checkpoint=None,
            )
        )


def tensorboard_scalars(run_dir, tag):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars(tag)
    steps = [event.step for event in events]
    assert steps == sorted(set(steps)), "a curve that goes back"
    return {event.step: event.value for event in events}


def test_tensorboard_reads_what_was_measured_and_nothing_else(tmp_path):
    run(tmp_path, 0, {10: 4.0, 20: 3.0})

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 20: 3.0}
    assert tensorboard_scalars(tmp_path, "validation/perplexity") == {20: 4.5}
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert "train/mfu" not in tags
    assert "train/step" not in tags


def test_tensorboard_shows_the_configuration_as_hyperparameters(tmp_path):
    config = {"model": {"hidden_size": 64, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "fp8": False}, "name": "gpt"}
    with MetricsSinks(tmp_path, logging_config(), "test", start_step=0, config=config):
        pass
    data = EventAccumulator(str(tmp_path / "tensorboard")).Reload().PluginTagToContent("hparams")
    found = HParamsPluginData.FromString(data["_hparams_/session_start_info"]).session_start_info.hparams
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}
    assert values == {
        "model.hidden_size": 64,
        "model.optim.lr": 1e-3,
        "model.optim.betas": "[0.9,0.95]",
        "model.fp8": False,
        "name": "gpt",
    }


def test_tensorboard_shows_each_fp8_tensor(tmp_path):
    fc1 = Fp8Tensor(
        layer="decoder.layers.0.mlp.linear_fc1",
        tensor="input",
        amax=3.5,
        scale_min=64.0,
        scale_max=128.0,
        saturated=0.125,
        flushed=0.25,
        amax_history_used=3,
    )
    weight = replace(fc1, tensor="weight", amax=None, saturated=None, amax_history_used=7)
    with MetricsSinks(tmp_path, logging_config(), "test", start_step=0) as sinks:
        proven = {"gemm_flops_share": 0.75, "parameter_bytes_share": 0.5, "time_s": 0.25, "first_scale_passes": 2}
        sinks.write(Fp8CoverageRecord(step=1, **proven))
        sinks.write(Fp8Record(step=10, tensors=(fc1, weight), warnings=("it saturates",)))

    layer = "decoder.layers.0.mlp.linear_fc1"
    expected = {
        "fp8_coverage/gemm_flops_share": {1: 0.75},
        "fp8_coverage/parameter_bytes_share": {1: 0.5},
        "fp8_coverage/time_s": {1: 0.25},
        "fp8_coverage/first_scale_passes": {1: 2.0},
        f"fp8/amax/{layer}/input": {10: 3.5},
        f"fp8/scale/{layer}/input": {10: 128.0},
        f"fp8/saturated/{layer}/input": {10: 0.125},
        f"fp8/flushed/{layer}/input": {10: 0.25},
        f"fp8/scale/{layer}/weight": {10: 128.0},
        f"fp8/flushed/{layer}/weight": {10: 0.25},
        "fp8/amax_history_used_min": {10: 3.0},
        "fp8/amax_history_used_max": {10: 7.0},
    }
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert {tag: tensorboard_scalars(tmp_path, tag) for tag in tags} == expected


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path):
    run(tmp_path, 0, {10: 4.0, 20: 3.0, 30: 2.5, 40: 2.4})
    run(tmp_path, 20, {35: 2.0})

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 20: 3.0, 35: 2.0}
    assert [record.step for record in load_metrics(tmp_path).train] == [10, 20, 35]


def test_tensorboard_shows_a_run_that_went_back_as_one_curve(tmp_path):
    went = {"spike_step": 21, "first_sample": 10, "num_samples": 11, "rewinds": 1, "time_s": 0.1, "warnings": ()}
    with MetricsSinks(tmp_path, logging_config(), "test", start_step=0) as sinks:
        for step, loss in ((10, 4.0), (15, 3.5), (20, 3.0)):
            sinks.write(train_record(step, loss))
        sinks.write(RewindRecord(step=20, **{**went, "num_samples": 0}, problem="there is no checkpoint"))
        assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 15: 3.5, 20: 3.0}
        sinks.write(RewindRecord(step=10, **went, problem=None))
        sinks.write(train_record(20, 2.0))

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 20: 2.0}
    assert [record.step for record in load_metrics(tmp_path).train] == [10, 20]


def test_wandb_that_is_not_installed_is_refused_and_leaves_the_history_alone(tmp_path, monkeypatch):
    run(tmp_path, 0, {10: 4.0})
    before = metrics_path(tmp_path).read_bytes()
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(
        UserError, match=r"logging\.wandb=true needs the package wandb.*\[wandb\].*logging\.wandb=false"
    ):
        MetricsSinks(tmp_path, logging_config(wandb=True), "test", start_step=0)

    assert metrics_path(tmp_path).read_bytes() == before


def test_a_damaged_history_is_refused_before_the_run_trains(tmp_path):
    run(tmp_path, 0, {10: 4.0})
    lines = metrics_path(tmp_path).read_text().splitlines(keepends=True)
    metrics_path(tmp_path).write_text(lines[0] + "damaged\n" + "".join(lines[1:]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    with pytest.raises(UserError, match=r"metrics\.jsonl:2 "):
        MetricsSinks(tmp_path, logging_config(), "test", start_step=10)

    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


@contextmanager
def full_beyond(num_bytes):
    """A disk on which no file grows further."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_every_sink_is_closed_where_one_of_them_cannot_be(tmp_path):
    run(tmp_path, 0, dict.fromkeys(range(40), 4.0))
    wait_for_another_second()
    threads = threading.active_count()
    # Room for a start, and not for a record of training; TensorBoard begins a file of its own.
    with full_beyond(metrics_path(tmp_path).stat().st_size + 200):
        sinks = MetricsSinks(tmp_path, logging_config(), "test", start_step=40)
        assert threading.active_count() == threads + 1
        with pytest.raises(OSError, match="File too large"):
            sinks.write(train_record(41, 3.0))
        with pytest.raises(OSError, match="File too large"):
            sinks.close()
    assert threading.active_count() == threads, "of TensorBoard's writer"
    assert tensorboard_scalars(tmp_path, "train/loss")[41] == 3.0


def test_a_full_disk_leaves_no_wandb_run_without_its_name(tmp_path, monkeypatch):
    # It cannot write the name, and so never asks the package for a run.
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with full_beyond(0), pytest.raises(OSError, match="File too large"):
        MetricsSinks(tmp_path, logging_config(wandb=True), "test", start_step=0)

    assert list(tmp_path.iterdir()) == []


def test_the_sinks_and_the_console_need_neither_torch_nor_megatron(tmp_path):
    program = f"""
import sys
from pathlib import Path
from gpt_pretrain.config.mixtures import ConsumedSource
from gpt_pretrain.config.schema import LoggingConfig
from gpt_pretrain.report import console
from gpt_pretrain.report.sinks import MetricsSinks, scalars
logging = LoggingConfig(tensorboard=True, wandb=False, wandb_project="", wandb_entity=None, mlflow=False,
    mlflow_tracking_uri=None, mlflow_experiment_name="",
    fp8_proof=None, fp8_proof_interval=None, fp8_statistics_interval=None, fp8_saturation_threshold=1e-3,
    norms=False, peak_tflops=None)
with MetricsSinks(Path({str(tmp_path)!r}), logging, "test", start_step=0):
    print(sorted(name for name in ("torch", "megatron", "tensorflow") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_averaged_weights_have_a_plot_of_their_own():
    validation = ValidationRecord(step=9, loss=4.5, perplexity=90.0, num_samples=16, time_s=1.0, ema_loss=4.25)
    assert scalars(validation)["validation/ema_loss"] == 4.25


def test_validation_sets_and_sources_have_plots_of_their_own():
    by_set = {"losses": {"web": 5.0, "code": 4.0}, "set_bits_per_byte": {"web": 1.5, "code": 1.25}}
    validation = ValidationRecord(step=9, loss=4.5, perplexity=90.0, num_samples=16, time_s=1.0, **by_set)
    assert {name: value for name, value in scalars(validation).items() if name.count("/") == 2} == {
        "validation/web/loss": 5.0,
        "validation/code/loss": 4.0,
        "validation/web/bits_per_byte": 1.5,
        "validation/code/bits_per_byte": 1.25,
    }
    norms = {"gradients": {"layers.0": 0.5}, "weights": {"layers.0": 3.0}}
    assert scalars(NormsRecord(step=9, **norms, weight_norm=3.0)) == {
        "norms/gradients/layers.0": 0.5,
        "norms/weights/layers.0": 3.0,
        "norms/weight_norm": 3.0,
    }
    consumed = {"web": ConsumedSource(tokens=3000, epochs=0.75, documents=30)}
    assert scalars(SourcesRecord(step=9, sources=consumed)) == {
        "sources/web/tokens": 3000,
        "sources/web/epochs": 0.75,
        "sources/web/documents": 30,
    }
