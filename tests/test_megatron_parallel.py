"""What is not sent: groups of one rank open no communicator, which would take memory of the GPU for nothing."""

from unittest.mock import Mock, patch

import torch

from gpt_pretrain.training.generation import generate_tokens
from tests.emulated_training import build_training, emulated_training


def test_a_model_is_counted_and_continued_without_groups_of_one_rank():
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
