"""Sinks: TensorBoard events that TensorBoard reads, a resume that hides the cut part, W&B that is missing."""

import json
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import LoggingConfig
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.report.records import TrainRecord, ValidationRecord
from gpt_pretrain.report.sinks import MetricsSinks
from gpt_pretrain.report.summary import build_summary


def logging_config(*, tensorboard=True, wandb=False):
    return LoggingConfig(
        tensorboard=tensorboard, wandb=wandb, wandb_project="test", wandb_entity=None, peak_tflops=None
    )


def train(step, loss):
    return TrainRecord(
        step=step,
        consumed_samples=step,
        consumed_tokens=8 * step,
        loss=loss,
        lr=3e-4,
        grad_norm=None,
        step_time_s=1.0,
        tokens_per_s=8.0,
        tokens_per_s_per_gpu=8.0,
        tflops_per_gpu=None,
        mfu=None,
        memory_gib=None,
        eta_s=None,
        time_unix=0.0,
    )


def run(run_dir, start_step, losses, **choices):
    with MetricsSinks(run_dir, logging_config(**choices), "test", start_step=start_step) as sinks:
        for step, loss in losses.items():
            sinks.write(train(step, loss))
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
                wall_time_s=1.0,
                checkpoint=None,
            )
        )


def tensorboard_scalars(run_dir, tag):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_reads_what_was_measured_and_nothing_else(tmp_path):
    run(tmp_path, 0, {10: 4.0, 20: 3.0})

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 20: 3.0}
    assert tensorboard_scalars(tmp_path, "validation/perplexity") == {20: 4.5}
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    assert "train/mfu" not in tags
    assert "train/step" not in tags


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path):
    run(tmp_path, 0, {10: 4.0, 20: 3.0, 30: 2.5, 40: 2.4})
    run(tmp_path, 20, {35: 2.0})

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0, 20: 3.0, 35: 2.0}
    assert [record.step for record in load_metrics(tmp_path).train] == [10, 20, 35]


def test_the_lines_are_the_records_in_order(tmp_path):
    run(tmp_path, 0, {10: 4.0}, tensorboard=False)

    lines = [json.loads(line) for line in metrics_path(tmp_path).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "train", "validation", "summary"]
    assert not (tmp_path / "tensorboard").exists()


def test_what_was_logged_is_on_disk_when_the_run_is_interrupted(tmp_path):
    def interrupted_run():
        with MetricsSinks(tmp_path, logging_config(), "test", start_step=0) as sinks:
            sinks.write(train(10, 4.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()

    assert tensorboard_scalars(tmp_path, "train/loss") == {10: 4.0}
    assert [record.step for record in load_metrics(tmp_path).train] == [10]


def test_wandb_that_is_not_installed_is_refused_and_leaves_the_history_alone(tmp_path, monkeypatch):
    run(tmp_path, 0, {10: 4.0})
    before = metrics_path(tmp_path).read_bytes()
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(
        UserError, match=r"logging\.wandb=true needs the package wandb.*\[wandb\].*logging\.wandb=false"
    ):
        MetricsSinks(tmp_path, logging_config(wandb=True), "test", start_step=0)

    assert metrics_path(tmp_path).read_bytes() == before


def test_the_sinks_and_the_console_need_neither_torch_nor_megatron(tmp_path):
    program = f"""
import sys
from pathlib import Path
from gpt_pretrain.config.schema import LoggingConfig
from gpt_pretrain.report import console
from gpt_pretrain.report.sinks import MetricsSinks
logging = LoggingConfig(tensorboard=True, wandb=False, wandb_project="", wandb_entity=None, peak_tflops=None)
with MetricsSinks(Path({str(tmp_path)!r}), logging, "test", start_step=0):
    print(sorted(name for name in ("torch", "megatron", "tensorflow") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
