"""How much data parallel ranks exchange at once."""

import pytest

from gpt_pretrain.config.derived import ddp_bucket_size
from tests.emulated_training import emulated_training
from tests.refusals import compose_quickly


@pytest.mark.parametrize(
    ("overrides", "num_shards", "expected"),
    [
        (("model=llama3_8b",), 4, 400_000_000),
        (("model=llama3_8b", "model.tensor_model_parallel_size=2"), 2, 218_103_808),
        (("model=llama3_8b", "model.pipeline_model_parallel_size=4"), 2, 109_051_904),
        (("model=gpt2_124m",), 4, 40_000_000),
        (("model=gpt2_124m",), 64, 64_000_000),
        (("model=llama3_8b",), 512, 512_000_000),
        (("model=llama3_8b", "model.ddp_bucket_size=7"), 4, 7),
        (("model=llama3_8b", "model.overlap_param_gather=false", "model.overlap_grad_reduce=false"), 4, None),
    ],
)
def test_a_model_is_exchanged_in_some_sixteen_parts_of_a_size_that_pays(overrides, num_shards, expected):
    assert ddp_bucket_size(compose_quickly(["data=mock", "parallelism=dp", *overrides]).model, num_shards) == expected


@pytest.mark.parametrize(("overrides", "expected"), [((), 40_000_000), (("model.ddp_bucket_size=2000",), 2000)])
def test_the_size_reaches_the_buffers(overrides, expected):
    with emulated_training("parallelism=dp", *overrides) as training:
        (chunk,) = training.trainable.model.chunks
    assert chunk.bucket_size == expected
    (buffer,) = chunk.buffers
    assert (len(buffer.buckets) > 1) == (expected == 2000)
