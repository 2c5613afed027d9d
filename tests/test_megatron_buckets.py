"""How much data parallel ranks exchange at once."""

import pytest
import torch

from gpt_pretrain.megatron.model import default_bucket_size
from tests.emulated_training import emulated_training

OVERLAPPED = ("parallelism=dp",)


@pytest.mark.parametrize(
    ("values", "num_shards", "expected"),
    [
        (8_030_000_000, 4, 400_000_000),
        (3_200_000_000, 4, 200_000_000),
        (124_000_000, 4, 40_000_000),
        (124_000_000, 64, 64_000_000),
        (8_030_000_000, 512, 512_000_000),
    ],
)
def test_a_model_is_exchanged_in_some_sixteen_parts_of_a_size_that_pays(values, num_shards, expected):
    chunk = torch.nn.ParameterList([torch.empty(values, device="meta")])
    assert default_bucket_size(chunk, num_shards) == expected


@pytest.mark.parametrize(("overrides", "expected"), [((), 40_000_000), (("model.ddp_bucket_size=2000",), 2000)])
def test_the_key_reaches_the_buffers(overrides, expected):
    with emulated_training(*OVERLAPPED, *overrides) as training:
        (chunk,) = training.trainable.model.chunks
    assert chunk.bucket_size == expected
    (buffer,) = chunk.buffers
    assert (len(buffer.buckets) > 1) == (expected == 2000)
