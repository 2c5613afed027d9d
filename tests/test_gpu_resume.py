"""Resumed on GPUs: bit for bit the uncut run in every precision, and FP8 from one layout into another."""

import pytest

from tests.resharded_training import differing, saved_state
from tests.runs import SMALL_GPU_RUN, run_small

pytestmark = pytest.mark.gpu

CUT, END = 4, 54
# Dropout, so that random states matter; kernels that do not vary, so that equal means equal.
DETERMINISTIC = (
    *SMALL_GPU_RUN,
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    f"model.optim.sched.decay_steps={END}",
)
DISTRIBUTED = "model.use_distributed_optimizer=true"


def curve(metrics):
    return [(record.step, record.loss, record.grad_norm) for record in metrics.train]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param([], id="bf16"),
        pytest.param([DISTRIBUTED], id="bf16 distributed"),
        *(
            pytest.param([f"fp8={recipe}", f"model.fp8_params={params}", DISTRIBUTED], id=f"{recipe} params={params}")
            for recipe in ("delayed", "tensorwise", "blockwise")
            for params in ("false", "true")
        ),
    ],
)
def test_fifty_steps_after_a_resume_are_those_of_the_uncut_run(precision, tmp_path, cache_dir):
    check_resume(tmp_path, cache_dir, [*DETERMINISTIC, *precision], cut=CUT, end=END)


def check_resume(tmp_path, cache_dir, overrides, *, cut, end):
    """A run that stops at step `cut` and goes on to `end` is the uncut run, whose metrics it returns."""
    uncut = run_small(1, tmp_path / "uncut", cache_dir, [*overrides, f"trainer.max_steps={end}"], on_gpus=True)
    run_small(1, tmp_path / "cut", cache_dir, [*overrides, f"trainer.max_steps={cut}"], on_gpus=True)
    resumed = run_small(1, tmp_path / "cut", cache_dir, [*overrides, f"trainer.max_steps={end}"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, cut]
    assert curve(resumed) == curve(uncut)
    expected, state = (saved_state(tmp_path / name / "checkpoints" / f"step_{end:08d}") for name in ("uncut", "cut"))
    assert differing(state, expected) == set()
    return uncut


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("params", ["false", "true"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_saved_with_tensor_parallelism_goes_on_with_data_parallelism(recipe, params, tmp_path, cache_dir):
    overrides = [
        *SMALL_GPU_RUN,
        "checkpoint.save_at_end=true",
        "model.optim.sched.decay_steps=16",
        f"fp8={recipe}",
        f"model.fp8_params={params}",
    ]
    layouts = "parallelism=tp2", "parallelism=dp"
    uncut = run_small(2, tmp_path / "uncut", cache_dir, [*overrides, layouts[0], "trainer.max_steps=16"], on_gpus=True)
    run_small(2, tmp_path / "cut", cache_dir, [*overrides, layouts[0], "trainer.max_steps=8"], on_gpus=True)
    resumed = run_small(2, tmp_path / "cut", cache_dir, [*overrides, layouts[1], "trainer.max_steps=16"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, 8]
    losses, expected = ([record.loss for record in metrics.train[8:]] for metrics in (resumed, uncut))
    # A layer's whole weight may have another scale than its halves; sums come in another order.
    assert losses == pytest.approx(expected, rel=5e-3)
