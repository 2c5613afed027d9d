"""metrics.jsonl: the documented schema, and a history that survives kills and resumes."""

import json
import math
from contextlib import closing
from dataclasses import fields, replace

import pytest

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.report.metrics_file import Metrics, MetricsFile, load_metrics, metrics_path
from gpt_pretrain.report.records import (
    Fp8CoverageRecord,
    Fp8Record,
    Fp8Tensor,
    LossSpikeRecord,
    RankTime,
    RankTimesRecord,
    RewindRecord,
    SkippedStepRecord,
    StartRecord,
    TrainRecord,
    ValidationRecord,
)
from gpt_pretrain.report.summary import build_summary, mean_tokens_per_s


def train(step, **changes):
    record = TrainRecord(
        step=step,
        consumed_samples=16 * step,
        consumed_tokens=4096 * step,
        loss=8.0 - 0.1 * step,
        lr=3e-4,
        grad_norm=1.5,
        skipped_steps=0,
        step_time_s=0.5,
        tokens_per_s=8192.0,
        tokens_per_s_per_gpu=4096.0,
        tflops_per_gpu=None,
        mfu=None,
        memory_gib=1.25,
        eta_s=60.0,
        time_unix=1.7e9,
    )
    return replace(record, **changes)


TENSOR = Fp8Tensor(
    layer="decoder.layers.0.mlp.linear_fc1",
    tensor="input",
    amax=3.5,
    scale_min=128.0,
    scale_max=128.0,
    saturated=0.0,
    flushed=0.25,
    amax_history_used=16,
)


def fp8(step, **changes):
    return Fp8Record(step=step, tensors=(TENSOR, replace(TENSOR, **changes)), warnings=("it saturates",))


def validation(step, loss):
    return ValidationRecord(step=step, loss=loss, perplexity=math.exp(loss), num_samples=128, time_s=1.0)


def summary(**changes):
    values = {
        "step": 20,
        "consumed_samples": 320,
        "consumed_tokens": 81920,
        "num_gpus": 2,
        "end_reason": "max_steps",
        "exit_code": 0,
        "wall_time_s": 10.0,
        "checkpoint": None,
    }
    return build_summary(records_of(train(10), train(20)), **(values | changes))


def records_of(*written):
    """The metrics a run with these records has, as a reader of the file sees them."""
    return Metrics(
        starts=[record for record in written if isinstance(record, StartRecord)],
        train=[record for record in written if isinstance(record, TrainRecord)],
        validation=[record for record in written if isinstance(record, ValidationRecord)],
    )


def rank_times(step, slow=None, **changes):
    """Of two ranks, of which the second is the slowest; `slow` says which one has been found to be."""
    ranks = [
        RankTime(rank=rank, host=f"node{rank}", time_s=1.0 + rank, over_median=1.0 + rank, is_slow=rank == slow)
        for rank in (1, 0)
    ]
    return replace(RankTimesRecord(step=step, slowest_over_median=2.0, slowest=tuple(ranks), warnings=()), **changes)


def write(run_dir, *written):
    with closing(MetricsFile(run_dir)) as file:
        for record in written:
            file.write(record)


SKIPPED = SkippedStepRecord(step=12, loss=math.inf, grad_norm=1.0, in_a_row=2, first_sample=96, num_samples=8)
SPIKE = LossSpikeRecord(step=13, loss=9.0, median=3.0, limit=4.0, first_sample=104, num_samples=8)
REWIND = RewindRecord(
    step=20, spike_step=31, first_sample=320, num_samples=176, rewinds=1, time_s=0.5, problem=None, warnings=()
)


@pytest.mark.parametrize(
    "record",
    [
        StartRecord(step=0, time_unix=1.0),
        StartRecord(step=0, time_unix=1.0, command="python -m gpt_pretrain 'a b'", versions="Python 3.12"),
        train(10),
        train(10, grad_norm=None, loss=math.inf),
        validation(100, 4.25),
        summary(sample_prompt="def ", sample_text="f():\n    return 'ü'\u2028"),
        Fp8CoverageRecord(step=1, gemm_flops_share=0.75, parameter_bytes_share=0.0, time_s=0.1),
        SKIPPED,
        SPIKE,
        REWIND,
        replace(REWIND, num_samples=0, problem="there is no checkpoint"),
        Fp8Record(step=1, tensors=(), warnings=()),
        fp8(10, tensor="weight", amax=math.inf, saturated=None, amax_history_used=None),
        rank_times(10),
        rank_times(10, slow=1, warnings=("slowest: rank 1",)),
    ],
)
def test_a_record_is_one_line_of_strict_json_and_comes_back(record):
    line = record.to_line()
    values = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    assert "\n" not in line
    assert list(values) == ["kind", *(field.name for field in fields(record))]
    assert type(record).from_json(values) == record


@pytest.mark.parametrize(("value", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_diverged_loss_is_written_as_a_string_and_read_as_a_number(tmp_path, value, written):
    write(tmp_path, train(10, loss=value))

    assert json.loads(metrics_path(tmp_path).read_text())["loss"] == written
    assert load_metrics(tmp_path).train[0].loss == pytest.approx(value, nan_ok=True)


def test_a_record_is_on_disk_before_the_next_one(tmp_path):
    with closing(MetricsFile(tmp_path)) as file:
        file.write(train(10))
        assert [record.step for record in load_metrics(tmp_path).train] == [10]


def test_a_resumed_run_supersedes_what_the_cut_one_wrote_after_the_checkpoint(tmp_path):
    write(tmp_path, StartRecord(step=0, time_unix=1.0), train(10), train(20), validation(20, 5.0), train(25), train(30))
    write(tmp_path, StartRecord(step=20, time_unix=2.0), train(30, loss=1.0), validation(30, 4.0), train(40))

    metrics = load_metrics(tmp_path)

    # 25 was logged after the checkpoint of step 20 and never again: it belongs to a history that did not happen.
    assert [record.step for record in metrics.train] == [10, 20, 30, 40]
    assert metrics.train[2].loss == 1.0
    assert [record.step for record in metrics.validation] == [20, 30]
    assert [start.step for start in metrics.starts] == [0, 20]


def test_a_rewind_supersedes_what_was_written_of_the_steps_it_gave_up(tmp_path):
    write(tmp_path, StartRecord(step=0, time_unix=1.0), train(10), train(20), validation(20, 5.0))
    write(tmp_path, StartRecord(step=25, time_unix=2.0), train(30), validation(30, 9.0), replace(SPIKE, step=31))
    not_gone_back = replace(REWIND, step=15, spike_step=15, problem="there is no checkpoint")
    write(tmp_path, not_gone_back, REWIND, train(30, loss=1.0), train(40, loss=0.5))

    metrics = load_metrics(tmp_path)

    assert [(record.step, record.loss) for record in metrics.train] == [(10, 7.0), (20, 6.0), (30, 1.0), (40, 0.5)]
    assert [record.step for record in metrics.validation] == [20]
    assert metrics.rewinds == [REWIND]
    assert [start.step for start in metrics.starts] == [0], "step 25 is one that was given up"
    # The record of step 30 counts samples that nothing was trained on.
    fast = [replace(record, tokens_per_s=1.0) if record.step == 30 else record for record in metrics.train]
    assert mean_tokens_per_s(replace(metrics, train=fast)) == pytest.approx(8192.0)

    write(tmp_path, StartRecord(step=15, time_unix=3.0))
    assert load_metrics(tmp_path).rewinds == [], "of a history that was cut off"


def test_fp8_records_follow_the_history_of_their_run(tmp_path):
    coverage = [
        Fp8CoverageRecord(step=step, gemm_flops_share=0.5, parameter_bytes_share=0.0, time_s=0.1) for step in (1, 21)
    ]
    write(tmp_path, StartRecord(step=0, time_unix=1.0), coverage[0], fp8(10), fp8(20), fp8(30))
    assert load_metrics(tmp_path).fp8_coverage == coverage[0]
    write(tmp_path, StartRecord(step=20, time_unix=2.0))
    assert load_metrics(tmp_path).fp8_coverage is None, "this start has not proven anything yet"
    write(tmp_path, coverage[1], fp8(40))

    metrics = load_metrics(tmp_path)

    assert metrics.fp8 == [fp8(10), fp8(20), fp8(40)]
    assert metrics.fp8_coverage == coverage[1]


@pytest.mark.parametrize("kept_bytes", [1, 40, -1])
def test_a_torn_last_line_is_ignored_and_does_not_damage_the_next_append(tmp_path, kept_bytes):
    write(tmp_path, train(10))
    torn = train(20).to_line()[:kept_bytes]
    with metrics_path(tmp_path).open("a") as file:
        file.write(torn)

    assert [record.step for record in load_metrics(tmp_path).train] == [10]
    write(tmp_path, train(20, loss=1.0))
    assert [(record.step, record.loss) for record in load_metrics(tmp_path).train] == [(10, 7.0), (20, 1.0)]


def test_kinds_and_fields_of_a_newer_version_are_ignored(tmp_path):
    newer = json.loads(train(10).to_line()) | {"experts": {"used": 12}}
    metrics_path(tmp_path).write_text(f'{{"kind": "moe", "load": [1.0]}}\n{json.dumps(newer)}\n')

    assert load_metrics(tmp_path).train == [train(10)]


# As version 0.1.0 first wrote them. What a class has gained since then has a default.
OLD = (
    '{"kind": "start", "step": 0, "time_unix": 1.7e9}',
    '{"kind": "fp8_coverage", "step": 1, "gemm_flops_share": 0.6, "parameter_bytes_share": 0.0, "time_s": 0.3}',
    '{"kind": "train", "step": 5, "consumed_samples": 320, "consumed_tokens": 327680, "loss": 10.68, "lr": 1.5e-05, '
    '"grad_norm": 5.95, "skipped_steps": 0, "step_time_s": 4.3, "tokens_per_s": 15166.3, "tokens_per_s_per_gpu": '
    '15166.3, "tflops_per_gpu": 12.1, "mfu": 0.01, "memory_gib": 21.3, "eta_s": 842.6, "time_unix": 1.7e9}',
    '{"kind": "validation", "step": 50, "loss": 6.15, "perplexity": 469.9, "num_samples": 64, "time_s": 0.08}',
    '{"kind": "fp8", "step": 50, "tensors": [], "warnings": ["a scale is 1"]}',
    '{"kind": "experts", "step": 50, "load_balancing_loss": 1.2, "z_loss": null, "busiest_expert": 2.0, '
    '"idlest_expert": 0.5}',
)


def test_records_of_earlier_versions_are_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in OLD))
    metrics = load_metrics(tmp_path)
    assert metrics.fp8_coverage.layers_kept_out == ()
    assert [record.loss for record in metrics.train] == [10.68]
    assert len(metrics.validation) == len(metrics.fp8) == len(metrics.experts) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"kind": "train", "step": 10', ""),
        ('["kind"]', '"kind"'),
        ('{"kind": "start", "step": 1}', '"start" .*"time_unix"'),
        ('{"kind": "start", "step": "1", "time_unix": 1}', '"step" .*"start": \'1\' .*int'),
        ('{"kind": "start", "step": 1.5, "time_unix": 1}', r"1\.5 .*int"),
        ('{"kind": "start", "step": -1, "time_unix": 1}', '"step" .*-1'),
        ('{"kind": "start", "step": 1, "time_unix": true}', "True .*float"),
        ('{"kind": "start", "step": 1, "time_unix": 1' + "0" * 400 + "}", "too large"),
        ("[" * 100_000, ""),
        ('{"kind": "fp8", "step": 1, "tensors": {}, "warnings": []}', '"tensors" .*: {} .*list'),
        ('{"kind": "fp8", "step": 1, "tensors": [1], "warnings": []}', '"tensors" .*: 1 .*object'),
        ('{"kind": "fp8", "step": 1, "tensors": [{}], "warnings": []}', 'Fp8Tensor .*"layer"'),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, named):
    metrics_path(tmp_path).write_text(f"{line}\n{train(10).to_line()}\n")

    with pytest.raises(UserError, match=rf"metrics\.jsonl:1 .*{named}.*; remove the line, or restore the file"):
        load_metrics(tmp_path)


def test_a_last_line_too_deep_to_be_read_is_a_torn_one(tmp_path):
    metrics_path(tmp_path).write_text(train(10).to_line() + "\n" + "[" * 100_000)

    assert [record.step for record in load_metrics(tmp_path).train] == [10]
    write(tmp_path, train(20))
    assert [record.step for record in load_metrics(tmp_path).train] == [10, 20]


def test_a_directory_without_records_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl .*run_dir"):
        load_metrics(tmp_path)


def test_the_speed_leaves_out_the_warm_up_of_every_start_and_averages_by_time():
    metrics = records_of(
        StartRecord(step=0, time_unix=0.0),
        StartRecord(step=25, time_unix=1.0),
        train(10, tokens_per_s=1.0),
        train(20, tokens_per_s=4096.0),
        train(30, tokens_per_s=1.0),
        train(40, tokens_per_s=8192.0),
    )
    # 40,960 tokens at 4,096/s take 10 s, as many at 8,192/s 5 s: 81,920 tokens in 15 s.
    assert mean_tokens_per_s(metrics) == pytest.approx(81920 / 15)
    assert mean_tokens_per_s(records_of(StartRecord(step=0, time_unix=0.0), train(10))) is None


def test_the_summary_finds_first_last_and_best_past_a_nan():
    metrics = records_of(
        StartRecord(step=0, time_unix=0.0),
        train(10, loss=math.nan),
        train(20, loss=2.0),
        train(30, loss=3.0),
        validation(20, 5.0),
        validation(30, 4.0),
    )
    record = build_summary(
        metrics,
        step=30,
        consumed_samples=480,
        consumed_tokens=122880,
        num_gpus=2,
        end_reason="interrupted",
        exit_code=130,
        wall_time_s=1.0,
        checkpoint="checkpoints/step_30",
    )

    assert math.isnan(record.first_loss)
    assert (record.last_loss, record.best_loss) == (3.0, 2.0)
    assert (record.first_validation_loss, record.last_validation_loss, record.best_validation_loss) == (5.0, 4.0, 4.0)
    assert (record.tokens_per_s, record.tokens_per_s_per_gpu) == (8192.0, 4096.0)


def test_the_summary_names_the_host_that_was_slow_most_often():
    def summed_up(*slow):
        metrics = replace(records_of(train(10)), rank_times=[rank_times(step, each) for step, each in enumerate(slow)])
        ended = build_summary(
            metrics,
            step=10,
            consumed_samples=160,
            consumed_tokens=40960,
            num_gpus=2,
            end_reason="max_steps",
            exit_code=0,
            wall_time_s=10.0,
            checkpoint=None,
        )
        return ended.slow_host, ended.slow_host_share

    assert summed_up() == (None, None)
    assert summed_up(None, None) == (None, None), "somebody is always the slowest"
    assert summed_up(None, 1, 0, 1) == ("node1", 0.5)
