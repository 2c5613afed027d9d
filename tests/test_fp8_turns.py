"""Which parts of a step a proof looks at: all come round, in the number of proofs that docs/fp8.md states."""

import pytest
import torch

from gpt_pretrain.fp8.results import Sample
from gpt_pretrain.fp8.turns import Turn


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("first", [0, 5000])
def test_each_rank_looks_at_each_part_in_each_microbatch(num_microbatches, num_parts, first):
    pairs = num_microbatches * num_parts
    for rank in range(5):
        turns = [Turn(number=first + number, rank=rank, num_microbatches=num_microbatches) for number in range(pairs)]
        assert len({(turn.microbatch, turn.part % num_parts) for turn in turns}) == pairs
        assert {turn.microbatch for turn in turns[:num_microbatches]} == set(range(num_microbatches))


def test_ranks_look_at_different_microbatches():
    turns = [Turn(number=7, rank=rank, num_microbatches=4) for rank in range(4)]
    assert sorted(turn.microbatch for turn in turns) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(1, 1), (16, 384), (129, 128), (300, 1000)])
def test_a_sample_is_spread_over_a_result_and_each_value_has_its_turn(shape):
    strides = [-(-size // 128) for size in shape]
    seen = torch.zeros(shape, dtype=torch.int64)
    for turn in range(strides[0] * strides[1]):
        sample = Sample.of_turn(torch.Size(shape), turn, torch.device("cpu"))
        assert len(sample.rows) <= 128
        assert len(sample.columns) <= 128
        seen[sample.rows[:, None], sample.columns] += 1
    assert bool((seen == 1).all())
