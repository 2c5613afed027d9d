"""Sharded gradients and weights of Transformer Engine's layers are those of ranks that have all."""

import json
from itertools import product

import pytest
import torch

from tests.launching import gpu_environment, run_ranks
from tests.rounding import gradient_tolerance
from tests.sharded_training import GPU_CASES, STRATEGIES, config_of

pytestmark = pytest.mark.gpu(count=2)


@pytest.mark.parametrize("case", GPU_CASES)
def test_gradients_are_those_of_ranks_that_have_all(case, tmp_path):
    program = ["tests/programs/sharded_gradients.py", str(tmp_path), case]
    done = run_ranks(2, program, env=gpu_environment(2))
    assert done.returncode == 0, done.stderr[-6000:]
    for strategy, rank in product(STRATEGIES, range(2)):
        seen = json.loads((tmp_path / f"{case}.{strategy}.{rank}.json").read_text())
        assert seen["has_gradients"]
        # Attention and embeddings add up in any order, and BF16 rounds what comes of it.
        model = config_of(case).model
        assert max(seen["gaps"]) < gradient_tolerance(model, torch.bfloat16)
        whole, sharded = seen["numbers"]["losses"]
        assert sharded == pytest.approx(whole, rel=1e-2)
