"""What a rank saves of its part of FP8 weights that Transformer Engine stores; resharding tests have TorchAO's."""

import pytest
import torch

from gpt_pretrain.fp8.gemms import spread_over_blocks
from gpt_pretrain.kernels.adam import StoredValues
from gpt_pretrain.megatron.own_parts import _OwnCodes

SHAPE = (300, 260)


class Weight:
    """What Transformer Engine's FP8 weight shows of itself, and this rank's part of it."""

    dtype = torch.bfloat16
    shape = torch.Size(SHAPE)


@pytest.mark.parametrize(("start", "size"), [(0, 78000), (0, 100), (259, 2), (33_333, 20_001), (77_999, 1), (500, 0)])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_part_has_the_values_of_the_whole(in_blocks, start, size):
    generator = torch.Generator().manual_seed(1)
    codes = (100 * torch.randn(SHAPE, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = Weight()
    weight.own_start, weight.own_part = start, codes.view(torch.uint8).flatten()[start : start + size]
    if in_blocks:
        # Transformer Engine pads the columns of scales to a multiple of four.
        weight._rowwise_scale_inv = torch.rand(3, 4, generator=generator) + 0.5
        inverse = spread_over_blocks(weight._rowwise_scale_inv[:, :3], (128, 128), SHAPE)
    else:
        weight._scale_inv = inverse = torch.tensor([0.37])
    whole = (codes.float() * inverse).bfloat16().flatten()
    values = StoredValues(_OwnCodes(weight))
    assert torch.equal(values.dequantize(), whole[start : start + size])
    # As boxes are cut out of it.
    if size > 10:
        assert torch.equal(values[3:9].view(2, 3).dequantize(), whole[start + 3 : start + 9].view(2, 3))
