"""Logs of other codes, with lines as they printed them, and our own runs' directories."""

import json
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from gpt_pretrain.compare import series
from gpt_pretrain.compare.comparison import Curve
from gpt_pretrain.compare.series import Point, Series, thinned
from gpt_pretrain.compare.sources import read_runs
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.launch.process import this_process
from gpt_pretrain.launch.run_dir import lock_path
from gpt_pretrain.report.records import (
    Fp8CoverageRecord,
    SkippedStepRecord,
    StartRecord,
    SummaryRecord,
    TrainRecord,
    ValidationRecord,
)
from gpt_pretrain.report.sinks import TensorBoardSink


def log(name):
    """Lines as these codes' users posted them."""
    return (Path(__file__).parent / "logs" / name).read_bytes().decode()


MEGATRON, TITAN = log("megatron_lm.txt"), log("torchtitan.txt")


def read(tmp_path, content, name="log"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_runs([str(path)])


def test_megatron_lms_lines(tmp_path):
    (run,) = read(tmp_path, MEGATRON)
    training = run.training

    assert (run.format, run.num_gpus, run.skipped_steps, run.seed, run.state) == ("megatron", 8, 1, 1234, "end unknown")
    assert (training.steps, training.losses) == ((1, 2, 3), (10.43863, 10.44022, 10.435))
    assert training.tokens == tuple(128 * 4096 * step for step in (1, 2, 3))
    # The first step's compilation counts as the median of the others, on eight GPUs.
    assert training.gpu_seconds == pytest.approx([8 * 12.46805, 8 * (12.46805 + 12.9361), 8 * (12.46805 + 24.9361)])
    assert run.memory_gib == pytest.approx(15754.88818359375 / 1024)
    assert run.configuration["model.num_layers"] == "32"
    assert run.configuration["model.encoder_seq_length"] == "4096"
    assert (run.validation.steps, run.validation.losses) == ((3,), (10.4,))
    assert run.tokens_per_s == pytest.approx(128 * 4096 / 12.46805, rel=0.03)


def test_torchtitans_lines_with_and_without_colors(tmp_path):
    (run,) = read(tmp_path, TITAN)
    assert (run.format, run.num_gpus, run.memory_gib, run.state) == ("torchtitan", 8, 1.34, "finished")
    assert (run.training.steps, run.training.losses) == ((1, 10, 20), (8.0277, 7.7082, 6.9532))
    assert run.training.tokens == tuple(64 * 2048 * step for step in (1, 10, 20))
    assert run.validation.tokens == tuple(64 * 2048 * step for step in run.validation.steps)
    # Tokens per second and GPU: the GPU-seconds of a step are its tokens over them; the first step is a warm-up.
    first, second = (64 * 2048 / rate for rate in (301_092, 359_546))
    pace = (first + second) / 2
    assert run.training.gpu_seconds == pytest.approx([pace, pace + 9 * first, pace + 9 * first + 10 * second])
    assert run.validation.losses == (7.71,)


def test_a_resumed_log_goes_back(tmp_path):
    again = MEGATRON.splitlines()[-3].replace("1.044022E+01", "9.0")
    (run,) = read(tmp_path, MEGATRON + again + "\n")
    assert (run.training.steps, run.training.losses) == ((1, 2), (10.43863, 9.0))


def test_of_several_ranks_that_print_each_step_the_first_counts(tmp_path):
    steps = [line for line in TITAN.splitlines() if "step:" in line and "loss:" in line and "validate" not in line]
    others = [line.replace("[rank0]", "[rank1]").replace("loss:  ", "loss:  9") for line in steps]
    (run,) = read(tmp_path, "\n".join(line for pair in zip(steps, others, strict=True) for line in pair))
    assert (run.training.steps, run.training.losses) == ((1, 10, 20), (8.0277, 7.7082, 6.9532))


def write_events(directory, steps, **columns):
    """An event file with a value of each tag at each step."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(directory) as writer:
        for index, step in enumerate(steps):
            for tag, values in columns.items():
                writer.add_scalar(tag.replace("__", "/"), values[index], step)
    return str(directory)


def test_events_may_count_their_steps_from_zero(tmp_path):
    rates = {"train__tokens_per_s_per_gpu": (1, 100, 200, 100), "train__consumed_tokens": (0, 1000, 2000, 3000)}
    (run,) = read_runs([write_events(tmp_path, range(4), train__loss=(5, 4, 3, 2), **rates)])
    assert run.training.tokens == (0, 1000, 2000, 3000)
    # The first rate is a warm-up's; it counts as the median of the others.
    assert run.training.gpu_seconds == pytest.approx([10, 20, 25, 35])


def train_record(step, loss=4.0, **fields):
    given = {"consumed_samples": 8 * step, "consumed_tokens": 512 * step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0}
    given |= {"skipped_steps": 0, "step_time_s": 2.0, "tokens_per_s": 256.0, "tokens_per_s_per_gpu": 128.0}
    given |= {"tflops_per_gpu": None, "mfu": None, "memory_gib": 1.5, "eta_s": None, "time_unix": 0.0}
    return TrainRecord(step=step, **(given | fields))


def summary(reason="max_steps"):
    open_fields = dict.fromkeys(field for field in SummaryRecord.__dataclass_fields__ if field != "kind")
    numbers = {"step": 3, "consumed_samples": 24, "consumed_tokens": 1536, "end_reason": reason, "wall_time_s": 6.0}
    return SummaryRecord(**(open_fields | numbers))


def write_run(directory, *records, config="model:\n  seed: 1\n"):
    directory.mkdir(parents=True)
    start = StartRecord(step=0, time_unix=0.0, command="python -m gpt_pretrain", versions="Python 3.12, torch 2.11")
    lines = [start, *records]
    (directory / "metrics.jsonl").write_text("".join(record.to_line() + "\n" for record in lines))
    if config is not None:
        (directory / "config.yaml").write_text(config)
    return str(directory)


CONFIG = """\
run_dir: {name}
model:
  seed: {seed}
  micro_batch_size: {micro}
  fp8: {fp8}
  fp8_recipe: null
  hidden_size: 64
  num_attention_heads: 4
  ffn_hidden_size: null
  data: {{data_prefix: [/a/web, /b/code]}}
trainer: {{precision: bf16}}
"""


def config(name, *, seed=1, micro=2, fp8="false"):
    return CONFIG.format(name=name, seed=seed, micro=micro, fp8=fp8)


def test_our_own_runs(tmp_path):
    records = [
        # The first step of a start compiles: it counts as the others.
        train_record(1, 5.0, step_time_s=50.0, tokens_per_s=10.24, tokens_per_s_per_gpu=5.12),
        Fp8CoverageRecord(step=1, gemm_flops_share=0.8, parameter_bytes_share=0.7, time_s=0.1),
        train_record(2, 4.5, memory_gib=2.5),
        SkippedStepRecord(step=2, loss=math.inf, grad_norm=1.0, in_a_row=1, first_sample=9, num_samples=8),
        *(ValidationRecord(step=step, loss=4.2, perplexity=66.7, num_samples=8, time_s=1.0) for step in (0, 3)),
        train_record(3, 4.0),
        summary(),
    ]
    (run,) = read_runs([write_run(tmp_path / "a", *records, config=config("a", fp8="true"))])

    assert (run.name, run.variant, run.seed) == ("fp8_delayed", "fp8_delayed", 1)
    assert (run.format, run.state, run.num_gpus, run.memory_gib) == ("gpt_pretrain", "finished", 2, 2.5)
    assert (run.skipped_steps, run.fp8_share) == (1, 0.8)
    assert (run.command, run.versions) == ("python -m gpt_pretrain", "Python 3.12, torch 2.11")
    assert run.training == Curve(
        steps=(1, 2, 3), losses=(5.0, 4.5, 4.0), tokens=(512, 1024, 1536), gpu_seconds=(4.0, 8.0, 12.0)
    )
    assert run.validation == Curve(steps=(0, 3), losses=(4.2, 4.2), tokens=(0, 1536), gpu_seconds=(0.0, 12.0))
    assert run.tokens_per_s == pytest.approx(256)
    assert run.configuration.get("model.ffn_hidden_size") == "256"
    assert run.configuration.get("model.data.data_prefix") == "['/a/web', '/b/code']"


@pytest.mark.parametrize(
    ("records", "lock", "state"),
    [
        ([], "{}", "running"),
        ([], this_process().to_json(), "running"),
        # It was killed, and its lock is left over.
        ([], replace(this_process(), process=2**22 + 1).to_json(), "ended without a summary"),
        ([], None, "ended without a summary"),
        ([summary("interrupted")], None, "ended early: interrupted"),
    ],
)
def test_a_run_need_not_be_finished(tmp_path, records, lock, state):
    place = write_run(tmp_path / "a", train_record(1), train_record(2), *records)
    if lock is not None:
        lock_path(tmp_path / "a").write_text(lock)
    (run,) = read_runs([place])
    assert run.state == state


def test_runs_that_differ_in_seeds_are_one_variant(tmp_path):
    places = [
        write_run(tmp_path / name, train_record(1), config=config(name, **fields))
        for name, fields in {"a": {"seed": 1}, "b": {"seed": 2}, "d": {"seed": 1, "fp8": "true"}}.items()
    ]
    runs = read_runs(places)
    assert [(run.name, run.variant) for run in runs] == [
        ("bf16 seed 1", "bf16"),
        ("bf16 seed 2", "bf16"),
        ("fp8_delayed", "fp8_delayed"),
    ]
    again = write_run(tmp_path / "again", train_record(1), config=config("again", seed=2))
    with pytest.raises(UserError, match=r"model\.seed=2") as refused:
        read_runs([*places, again])
    assert all(place in str(refused.value) for place in (places[1], again))


def test_namesakes_are_told_apart_by_their_places(tmp_path):
    def run(folder, setting):
        return write_run(tmp_path / folder, train_record(1), config=config("x") + f"extra: {{{setting}}}\n")

    def names(*places):
        return [each.variant for each in read_runs(list(places))]

    places = [run(folder, f"lr: {number}") for number, folder in enumerate(("p/first", "p/second", "q/second"))]
    assert names(*places[:2]) == ["first", "second"]
    assert names(*places[1:]) == places[1:]
    logs = [tmp_path / place / "log.txt" for place in "xy"] + [tmp_path / "log 2.txt"]
    for log in logs:
        log.parent.mkdir(exist_ok=True)
        log.write_text(TITAN)
    assert names(*map(str, logs)) == [str(logs[0]), str(logs[1]), "log 2"]


def test_tensorboards_files_of_our_runs(tmp_path):
    sink = TensorBoardSink(tmp_path / "tensorboard", start_step=0)
    for step in (1, 2, 3):
        sink.write(train_record(step, 5 - step / 2))
    sink.close()
    (event_file,) = (tmp_path / "tensorboard").iterdir()
    for place in (tmp_path, tmp_path / "tensorboard", event_file):
        (run,) = read_runs([str(place)])
        assert (run.format, run.num_gpus) == ("tensorboard", 2)
        assert (run.training.steps, run.training.losses) == ((1, 2, 3), (4.5, 4.0, 3.5))
        assert run.training.tokens == (512, 1024, 1536)
        assert run.training.gpu_seconds == pytest.approx([4, 8, 12])


def test_a_real_file_of_torchs_summary_writer(tmp_path):
    writers = pytest.importorskip("torch.utils.tensorboard")
    for name, tag in (("bf16", "lm loss"), ("fp8", "loss_metrics/global_avg_loss")):
        with writers.SummaryWriter(tmp_path / name) as writer:
            for step in range(100):
                writer.add_scalar(tag, 5 - step / 100, step)
                # Megatron-LM's other scalars.
                writer.add_scalar("iteration-time", 0.5, step)
                writer.add_scalar("world-size", 8, step)
                writer.add_histogram("weights", numpy.ones(2), step)
    bf16, fp8 = read_runs([str(tmp_path)])
    assert [run.variant for run in (bf16, fp8)] == ["bf16", "fp8"]
    # None of them is left out, as TensorBoard's own page does.
    assert bf16.training.steps == fp8.training.steps == tuple(range(100))
    assert bf16.training.losses[50] == pytest.approx(4.5)
    assert (bf16.num_gpus, bf16.training.gpu_seconds[:2]) == (8, (4.0, 8.0))


def lines_of(text, number, old, new):
    lines = text.splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    return "".join(lines)


BROKEN = {
    "no log": ("hello\nworld\n", ":1:", "Megatron-LM"),
    "empty": ("", " is empty", "metrics.jsonl"),
    "megatron's loss": (lines_of(MEGATRON, 12, "1.044022E+01", "1.04x"), ":12:", "lm loss: N"),
    "only a torn line": (TITAN.splitlines()[4][:120], "torchtitan", "tps: N"),
    "a line of ours": (StartRecord(step=0, time_unix=0.0).to_line() + "\nnonsense\n{}\n", ":2 ", "record"),
    "none of our steps": (StartRecord(step=0, time_unix=0.0).to_line() + "\n", " has no record", "train"),
    "deep JSON": ('{"kind": "start", "step": 0, "time_unix": 0.0}\n' + "[" * 200_000 + "\n{}\n", "log", "record"),
    "events without an end": (
        struct.pack("<QI", 24, 0) + b"\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2",
        "log",
        "lm loss",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_named_with_its_line_and_what_was_expected(tmp_path, case):
    content, place, expected = BROKEN[case]
    with pytest.raises(UserError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert f"{tmp_path / 'log'}" in message
    assert place in message
    assert expected in message


def test_the_last_line_of_a_running_log_may_be_torn(tmp_path):
    lines = MEGATRON.splitlines()
    (run,) = read(tmp_path, "\n".join([*lines[:12], lines[12][:150]]))
    assert run.training.steps == (1, 2)


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("a: &a [" + "1, " * 1000 + "]\nb: [" + "*a, " * 17 + "]\n", "repeats"),
        ("- 1\n", "no keys"),
        ("a: [\n", "flow"),
        ("[" * 5000, "config.yaml"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path, yaml, expected):
    place = write_run(tmp_path / "a", train_record(1), config=yaml)
    with pytest.raises(UserError, match=r"a/config\.yaml") as caught:
        read_runs([place])
    assert expected in str(caught.value)


def test_places_without_runs_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "sweep").mkdir()
    with pytest.raises(UserError, match=r"sweep holds neither metrics\.jsonl"):
        read_runs([str(tmp_path / "sweep")])
    with pytest.raises(UserError, match="missing"):
        read_runs([str(tmp_path / "missing")])


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log")
    with pytest.raises(UserError, match="not a regular file"):
        read_runs([str(tmp_path / "log")])


def test_what_is_too_large_is_refused_unread(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(series.MAX_BYTES + 1)
    with pytest.raises(UserError, match="512 MiB"):
        read_runs([str(path)])


def test_a_log_steers_no_terminal(tmp_path):
    evil = MEGATRON.replace(
        "seq_length ...................................... 4096", "data_path ... \x1b[2J" + "x" * 5000
    )
    (run,) = read(tmp_path, evil)
    assert run.configuration.get("model.data.data_prefix").isprintable()
    assert len(run.configuration.get("model.data.data_prefix")) < 1100


def test_long_curves_are_thinned_by_means():
    steps = tuple(range(1, 12_001))
    curve = thinned(Curve(steps=steps, losses=tuple(map(float, steps)), tokens=steps, gpu_seconds=()), 5000)
    assert len(curve.steps) == 4000
    assert (curve.steps[0], curve.losses[0], curve.steps[-1], curve.losses[-1]) == (3, 2.0, 12_000, 11_999.0)


def test_times_need_a_number_of_gpus_or_a_rate():
    run = Series(
        source="", format="tensorboard", settings={"model.encoder_seq_length": "10", "model.global_batch_size": "5"}
    )
    for step in (2, 4, 6):
        run.add(Point(step=step, loss=1.0, step_s=3.0))
    assert run.build().training.gpu_seconds == ()
    run.num_gpus = 2
    record = run.build()
    assert record.training.tokens == (100, 200, 300)
    assert record.training.gpu_seconds == pytest.approx([12, 24, 36])
    assert record.tokens_per_s == pytest.approx(50 / 3)
    assert replace(record, num_gpus=None).tokens_per_s_per_gpu is None


def test_every_record_is_json(tmp_path):
    for name, content in {"m": MEGATRON, "t": TITAN}.items():
        for run in read(tmp_path, content, name):
            json.dumps(run.to_json(), allow_nan=False)
