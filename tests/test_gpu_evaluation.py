"""Scores of token ids on GPUs are the losses of training's own head, with Transformer Engine and in every layout."""

import pytest

from tests.emulated_training import TINY
from tests.launching import gpu_environment, run_ranks

pytestmark = pytest.mark.gpu

LARGER = (
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, []),
        (1, ["fp8=delayed"]),
        (2, ["parallelism=cp2"]),
        (2, ["parallelism=tp2_sp", "fp8=delayed"]),
        (2, ["parallelism=fsdp", "fp8=tensorwise"]),
        (2, ["parallelism=pp2_vp2", "model.num_layers=4"]),
    ],
)
def test_scores_are_losses_in_every_layout(num_ranks, layout):
    arguments = [*TINY, *LARGER, "model.global_batch_size=8", *layout]
    done = run_ranks(num_ranks, ["tests/programs/score_tokens.py", *arguments], env=gpu_environment(num_ranks))
    assert done.returncode == 0, done.stderr[-4000:]
