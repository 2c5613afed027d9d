"""The benchmark on GPUs: products of both precisions, FP8 variants, kernels of the device, several processes."""

import json

import pytest

from gpt_pretrain.benchmark.results import Row
from tests.launching import gpu_environment, run_ranks

STEPS = ("benchmark.warmup_steps=3", "benchmark.steps=4", "benchmark.interval=2", "logging.tensorboard=false")


def measure(num_gpus, run_dir, *overrides):
    arguments = ["-m", "gpt_pretrain.benchmark", "data=mock", *STEPS, f"run_dir={run_dir}", *overrides]
    # One plain process, which starts the others itself.
    done = run_ranks(1, arguments, timeout_s=280, env=gpu_environment(num_gpus))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    document = json.loads((run_dir / "benchmark.json").read_text())
    return document["machine"], [Row.from_json(values) for values in document["variants"]]


@pytest.mark.gpu
def test_bf16_and_fp8_are_measured_against_the_products_of_this_gpu(tmp_path):
    model = ("model=gpt2_124m", "model.num_layers=2", "model.global_batch_size=32")
    variants = "benchmark.variants=[bf16,fp8_delayed,bare]"
    machine, rows = measure(1, tmp_path / "run", *model, variants, "benchmark.profile=true")

    ceilings = {ceiling["dtype"]: ceiling["tflops"] for ceiling in machine["gemms"]}
    # Tensor cores multiply FP8 at twice BF16's rate; under the power limit of a GPU it is less.
    assert 1.2 < ceilings["fp8"] / ceilings["bfloat16"] < 2.2
    for row in rows:
        assert 0 < row.figures.mfu < 1
    # Kernels of the GPU, and not the operations that launch them.
    assert "nvjet" in (tmp_path / "run" / "1_bf16" / "round_1" / "kernels.txt").read_text()
    bf16, fp8, bare = (row.figures for row in rows)
    assert (bf16.fp8_flops_share, bare.fp8_flops_share) == (0, 0)
    assert 0 < fp8.fp8_flops_share < 1
    assert bf16.loss == pytest.approx(fp8.loss, rel=0.01)


@pytest.mark.gpu(count=2)
def test_two_gpus_are_measured_through_torchrun(tmp_path):
    model = ("model=gpt2_124m", "model.num_layers=2", "model.global_batch_size=64", "parallelism=dp")
    _, (row,) = measure(2, tmp_path / "run", *model, "trainer.devices=2", "benchmark.variants=[app]")

    assert row.num_gpus == 2
    assert row.figures.tokens_per_s_per_gpu == pytest.approx(64 * 1024 / row.figures.step_time_s / 2)
