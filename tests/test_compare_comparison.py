"""compare.json: everything that is shown of a comparison, written and read back."""

import json
import math
from dataclasses import replace

import pytest

from gpt_pretrain.compare.comparison import (
    VERSION,
    Answer,
    Comparison,
    Curve,
    Figures,
    GapCurve,
    Gate,
    Interval,
    RunRecord,
    TimeToLoss,
    save_comparison,
)


def saved_comparison(directory):
    """The comparison in a directory's compare.json."""
    return Comparison.from_json(json.loads((directory / "compare.json").read_text()))


RUN = RunRecord(
    name="bf16 seed 1",
    variant="bf16",
    seed=1,
    source="outputs/a",
    format="gpt_pretrain",
    state="finished",
    num_gpus=2,
    training=Curve(steps=(1, 2), losses=(3.5, math.inf), tokens=(512, 1024), gpu_seconds=(0.5, 1.0)),
    validation=Curve(steps=(), losses=(), tokens=(), gpu_seconds=()),
    tokens_per_s=2048.0,
    memory_gib=None,
    skipped_steps=1,
    fp8_share=0.8,
    configuration={"model.seed": "1"},
    versions=None,
    command="python -m gpt_pretrain",
)
ANSWER = Answer(
    variant="fp8",
    judgement="as_good",
    sentence="ä",
    reasons=("r",),
    final_losses=(2.99, 3.0),
    loss_gap=Interval(value=-0.002, low=-0.005, high=None),
    noise_from="paired seeds",
    gap_curve=GapCurve(steps=(1,), gaps=(0.1,), lows=(), highs=()),
    time_to_loss=TimeToLoss(loss=3, baseline_gpu_s=6, gpu_s=2, speedup=Interval(value=3.0, low=2.5, high=3.5)),
    throughput_ratio=1.3,
)
COMPARISON = Comparison(
    version=VERSION,
    date="2026-11-23",
    command="python -m gpt_pretrain.compare runs=[a,b]",
    confidence=0.95,
    baseline="bf16",
    runs=(RUN, replace(RUN, name="fp8 seed 1", variant="fp8")),
    obstacles=(),
    differences=(),
    unchecked=("u",),
    figures=(
        Figures(
            variant="fp8",
            num_runs=1,
            last_loss=3.0,
            tokens_per_s_per_gpu=1024.0,
            memory_gib=None,
            skipped_steps=1,
            fp8_share=0.8,
        ),
    ),
    answers=(ANSWER,),
    methods=("m",),
    gate=Gate(max_loss_gap=0.005, min_speedup=None, missed=()),
)


def test_a_comparison_is_read_back_as_it_was_written(tmp_path):
    path = save_comparison(COMPARISON, tmp_path)

    assert path == tmp_path / "compare.json"
    assert saved_comparison(tmp_path) == COMPARISON
    # Any program's JSON, not Python's alone.
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["runs"][0]["training"]["losses"] == [3.5, "inf"]
