"""Scores of token ids are the losses of training's own head, in every layout; FP8 and random states stay."""

import pytest

from tests.emulated_training import TINY, emulate
from tests.forked_runs import fork_ranks


@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=tp2_sp"],
        ["parallelism=fsdp"],
        ["parallelism=pp2_vp2", "model.num_layers=4"],
        ["parallelism=ep2", "model.num_moe_experts=4", "model.moe_ffn_hidden_size=64"],
        ["parallelism=tp2_sp", *emulate("delayed")],
        ["parallelism=fsdp", *emulate("tensorwise")],
    ],
)
def test_scores_are_losses_in_every_layout(layout):
    arguments = [*TINY, "model.global_batch_size=8", *layout]
    done = fork_ranks(2, ["tests/programs/score_tokens.py", *arguments], timeout_s=120)
    assert done.returncode == 0, done.stderr[-4000:]
