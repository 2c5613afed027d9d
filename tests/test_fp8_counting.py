"""Counting codes, on the CPU and by the kernel."""

import pytest
import torch

from gpt_pretrain.fp8.gemms import count_codes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (4096, 17), (70_001,), (300, 1024)])
def test_zeros_and_the_largest_codes_of_both_signs_are_counted(device, dtype, shape):
    largest_code = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[dtype]
    limit = torch.finfo(dtype).max
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5)).mul(limit).clamp(-limit, limit)
    values[values.abs() < 0.3 * limit] = 0.0
    codes = values.to(dtype)
    # Rounding makes more of both than there were: counted are the codes.
    back = codes.float().abs()
    expected = [int((back == 0).sum()), int((back == limit).sum()), int((codes.view(torch.uint8) & 0x7F).max())]
    assert count_codes(codes.to(device), largest_code).tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_a_nan_is_beyond_the_largest_code(device, value):
    codes = torch.tensor([0.0, -0.0, 448.0, value, 1.0]).to(torch.float8_e4m3fn).to(device)
    zeros, largest, highest = count_codes(codes, 0x7E).tolist()
    assert (zeros, largest) == (2, 1)
    assert highest > 0x7E
