"""Checkpoints written beside the training loop on GPUs: what is copied while steps are queued is what was there."""

import json

import pytest

from gpt_pretrain.report.metrics_file import metrics_path
from tests.runs import SMALL_GPU_RUN, run_small

pytestmark = pytest.mark.gpu

RUN = (
    *SMALL_GPU_RUN,
    "trainer.deterministic=true",
    "model.hidden_dropout=0.1",
    "model.optim.sched.decay_steps=10",
    "trainer.max_steps=10",
    # Saves follow each other closely, and the loop reads nothing from the GPU between them.
    "trainer.log_every_n_steps=5",
    "checkpoint.save_interval=2",
)
RECIPES = {
    "bf16": (),
    "delayed": ("fp8=delayed",),
    "delayed, weights in FP8": ("fp8=delayed", "model.fp8_params=true", "model.use_distributed_optimizer=true"),
    "tensorwise, weights in FP8": ("fp8=tensorwise", "model.fp8_params=true", "model.use_distributed_optimizer=true"),
}


def curve(metrics):
    return [(record.step, record.loss, record.grad_norm) for record in metrics.train]


@pytest.mark.parametrize(
    ("num_gpus", "layout"),
    [
        pytest.param(1, (), id="one GPU"),
        pytest.param(2, ("parallelism=dp",), id="DP2", marks=pytest.mark.gpu(count=2)),
        pytest.param(2, ("parallelism=fsdp",), id="FSDP2", marks=pytest.mark.gpu(count=2)),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_goes_on_from_what_was_written_beside_it(recipe, num_gpus, layout, tmp_path):
    overrides = [*RUN, *RECIPES[recipe], *layout]
    plain = [*overrides, "checkpoint.save_interval=null"]
    undisturbed = run_small(num_gpus, tmp_path / "plain", tmp_path, plain, on_gpus=True)
    saved = run_small(num_gpus, tmp_path / "saved", tmp_path, overrides, on_gpus=True)
    assert curve(saved) == curve(undisturbed), "a save changed what was trained"
    lines = map(json.loads, metrics_path(tmp_path / "saved").read_text().splitlines())
    records = [record for record in lines if record["kind"] == "checkpoint"]
    told = [(record["saved_step"], record["problem"]) for record in records]
    assert told == [(step, None) for step in (2, 4, 6, 8, 10)]
    middle = tmp_path / "saved" / "checkpoints" / "step_00000004"
    resumed = run_small(
        num_gpus, tmp_path / "resumed", tmp_path, [*overrides, f"checkpoint.resume={middle}"], on_gpus=True
    )
    # The record of step 5 is of the mean over the steps since the start; step 10's are the same five.
    assert curve(resumed)[-1] == curve(saved)[-1]
