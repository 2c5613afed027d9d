"""Emulated FP8 against Transformer Engine's in a GPT of four layers, each linear layer given the same tensors."""

import json

import pytest

from tests.launching import gpu_environment, run_ranks

TWO_GPUS = pytest.mark.gpu(count=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_gpus", "layout", "num_roundings"),
    [
        pytest.param(1, (), 1, id="one GPU"),
        pytest.param(2, ("parallelism=tp2_sp",), 2, id="TP2+SP", marks=TWO_GPUS),
        # Four samples of each rank.
        pytest.param(2, ("parallelism=dp", "model.global_batch_size=8"), 1, id="DP2", marks=TWO_GPUS),
    ],
)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_linear_layers_of_a_gpt_cast_and_compute_what_transformer_engine_does(recipe, num_gpus, layout, num_roundings):
    arguments = ["tests/programs/engine_and_emulation.py", f"fp8={recipe}", *layout]
    done = run_ranks(num_gpus, arguments, env=gpu_environment(num_gpus))
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    print(recipe, {key: f"{error:.1e}" for key, error in errors.items()})
    assert len(errors) == 4 * 3
    # A result is rounded to BF16 (2^-9); where two ranks have parts of it, so is each part.
    assert max(errors.values()) < 2.0**-9 * num_roundings
