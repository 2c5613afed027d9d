"""Ranks score token ids in each layout of a small model, and compare with the losses of the same tokens.

    CONTEXT OVERRIDE…

Losses come from the head that trains. States of FP8 and random numbers must be those from before.
"""

import sys
from random import Random

import torch

from gpt_pretrain.checkpoint.state import random_states
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.delayed import state_digest
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.training.inference import Continuation, score_continuations, token_losses
from tests.saved_models import build_trainable


def states(model):
    """Everything that an evaluation must leave alone, as text."""
    torch.set_printoptions(profile="full")
    modules = [module for chunk in model.gpt_chunks for module in chunk.modules()]
    return str([random_states(), [state_digest(module) for module in modules]])


if __name__ == "__main__":
    install_cpu_device()
    config = load_config(sys.argv[1:])
    limit, vocabulary = config.model.encoder_seq_length, config.model.vocab_size
    draw = Random(3)
    sequences = [
        [draw.randrange(vocabulary) for _ in range(length)] for length in (2, limit, 5, 17, limit - 1, 9, 3, limit)
    ]
    with process_groups(config.model, read_launch(), detect_platform()):
        model = build_trainable(config).model
        with model.newest_parameters():
            losses = token_losses(model, sequences)
            before = states(model)
            for num_scored in (1, limit):
                asked = [Continuation(each, min(num_scored, len(each) - 1)) for each in sequences]
                scores = score_continuations(model, asked, lambda: None)
                expected = [-sum(each[-num_scored:]) for each in losses]
                torch.testing.assert_close([score for score, _ in scores], expected, rtol=2e-3, atol=2e-3)
            # The likeliest token by asking for each.
            start = sequences[2]
            each = score_continuations(
                model, [Continuation([*start, token], 1) for token in range(vocabulary)], lambda: None
            )
        assert states(model) == before
    best = max(score for score, _ in each)
    assert [score == best for score, _ in each] == [greedy for _, greedy in each], each
    assert sum(greedy for _, greedy in each) == 1
    total = sum(torch.tensor([score for score, _ in each]).exp().tolist())
    assert abs(total - 1) < 1e-3, total
