"""Process groups: what a rank does while it waits for others, and what groups of one rank do not send."""

import signal
from unittest.mock import Mock, patch

import pytest
import torch

from gpt_pretrain.launch.signals import INTERRUPTED, REQUEUE
from gpt_pretrain.training.generation import generate_tokens
from tests.emulated_training import build_training, emulated_training
from tests.forked_runs import fork_ranks


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, REQUEUE), (signal.SIGUSR1, REQUEUE)]
)
def test_signals_end_a_rank_whose_other_ranks_do_not_come(number, code):
    assert fork_ranks(1, ["tests/programs/waiting_rank.py", number.name], timeout_s=60).returncode == code


def test_a_model_is_counted_and_continued_without_groups_of_one_rank():
    """A communicator would take memory of the GPU for nothing."""
    with (
        emulated_training() as training,
        patch.object(torch.distributed, "all_reduce", Mock()) as all_reduce,
        patch.object(torch.distributed, "broadcast", Mock()) as broadcast,
    ):
        again = build_training().trainable.model
        tokens = generate_tokens(
            training.chunks,
            training.config.model,
            [3, 1, 4],
            vocab_size=128,
            max_new_tokens=2,
            temperature=0.0,
            end_token=None,
            seed=1,
        )
    assert again.num_parameters == sum(parameter.numel() for parameter in again.gpt_chunks[0].parameters())
    assert len(tokens) == 2
    all_reduce.assert_not_called()
    broadcast.assert_not_called()
