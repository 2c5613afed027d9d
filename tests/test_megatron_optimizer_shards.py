"""What a rank holds of a parameter, cut into boxes: they are what the stretch is, in order and whole."""

import numpy
import pytest

from gpt_pretrain.megatron.checkpoint_boxes import boxes


@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 1), (1, 6), (2, 3, 4), ()])
def test_boxes_are_the_stretch_in_its_order(shape):
    size = int(numpy.prod(shape))
    tensor = numpy.arange(size).reshape(shape)
    for start in range(size + 1):
        for end in range(start, size + 1):
            found = list(boxes(shape, start, end))
            values = [
                tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
                for offsets, sizes in found
            ]
            assert numpy.concatenate([[], *values]).tolist() == list(range(start, end))
            assert all(len(offsets) == len(sizes) == len(shape) for offsets, sizes in found)
            if len(shape) == 2:
                assert len(found) <= 3
