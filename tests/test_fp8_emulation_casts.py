"""Casts to FP8 against the grids written out: every code, every tie, saturation, blocks and their scales."""

import bisect
import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch

from gpt_pretrain.fp8.casts import (
    cast_blocks,
    cast_tensor,
    e8m0_scale,
    power_of_two_scale,
    scale_from_amax,
    tensor_amax,
)

# (bits of mantissa, bias of the exponent, largest finite value); E4M3 has no infinity, so its top exponent counts.
LAYOUTS = {"e4m3": (3, 7, 448.0), "e5m2": (2, 15, 57344.0)}
FP32_MAX = struct.unpack("f", struct.pack("I", 0x7F7FFFFF))[0]


def grid(format):
    """(value, code) of all finite non-negative numbers of a format, by the definition of its bits, ascending."""
    mantissa_bits, bias, largest = LAYOUTS[format]
    found = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if value <= largest:
            found.append((value, code))
    return found


GRIDS = {format: grid(format) for format in LAYOUTS}


def nearest(value, format):
    """The nearest value of the grid, ties to the even code, by exact arithmetic; saturated."""
    if math.isnan(value):
        return value
    magnitude = min(abs(value), LAYOUTS[format][2])
    above = bisect.bisect_left(GRIDS[format], (magnitude, 0))
    neighbours = GRIDS[format][max(above - 1, 0) : above + 1]
    best = min(neighbours, key=lambda entry: (abs(Fraction(magnitude) - Fraction(entry[0])), entry[1] % 2))
    return math.copysign(best[0], value)


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def cast_values(values, format, scale=1.0):
    x = torch.tensor([values], dtype=torch.float32)
    quantized = cast_tensor(x, format, torch.tensor([scale]), tensor_amax(x))
    return quantized.codes.float()[0].tolist()


@pytest.mark.parametrize(("format", "largest_code"), [("e4m3", 0x7E), ("e5m2", 0x7B)])
def test_the_grid_written_out_is_that_of_torch(format, largest_code):
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]
    codes = torch.tensor([code for _, code in GRIDS[format]], dtype=torch.uint8).view(dtype)
    assert codes.float().tolist() == [value for value, _ in GRIDS[format]]
    assert GRIDS[format][-1] == (LAYOUTS[format][2], largest_code)


@pytest.mark.parametrize("format", LAYOUTS)
def test_every_code_every_tie_and_their_neighbours_round_to_the_nearest(format):
    values = [value for value, _ in GRIDS[format]]
    ties = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    points = torch.tensor([*values, *ties], dtype=torch.float32)
    around = torch.cat([points, points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(-math.inf))])
    given = torch.cat([around, -around]).tolist()
    assert cast_values(given, format) == [nearest(value, format) for value in given]


@pytest.mark.parametrize(
    ("format", "given", "expected"),
    [
        ("e4m3", [449.0, 1e30, math.inf, -math.inf], [448.0, 448.0, 448.0, -448.0]),
        ("e5m2", [57345.0, 1e30, math.inf, -math.inf], [57344.0, 57344.0, 57344.0, -57344.0]),
        # The smallest subnormal number, its half (a tie with zero, which is even) and a little more.
        ("e4m3", [2.0**-9, 2.0**-10, 1.0001 * 2**-10, -(2.0**-10)], [2.0**-9, 0.0, 2.0**-9, 0.0]),
        ("e5m2", [2.0**-16, 2.0**-17, 1.0001 * 2**-17], [2.0**-16, 0.0, 2.0**-16]),
        # Subnormal in fp32.
        ("e4m3", [1e-40, 0.0], [0.0, 0.0]),
        # Between 16 and 18, and between 18 and 20: both ties go to the even mantissa.
        ("e4m3", [17.0, 19.0], [16.0, 20.0]),
        ("e5m2", [9.0, 11.0], [8.0, 12.0]),
    ],
)
def test_edges_by_hand(format, given, expected):
    assert cast_values(given, format) == expected


@pytest.mark.parametrize("format", LAYOUTS)
def test_nan_stays_nan_and_does_not_hide_the_largest_magnitude(format):
    x = torch.tensor([[1.0, math.nan, -3.0]])
    assert tensor_amax(x).tolist() == [3.0]
    assert math.isnan(cast_values([math.nan], format)[0])
    assert tensor_amax(torch.tensor([[1.0, -math.inf]])).item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", LAYOUTS)
def test_values_are_scaled_in_fp32_before_they_are_rounded(format, dtype):
    x = (torch.randn(8, 40, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    scale = scale_from_amax(tensor_amax(x), format)
    quantized = cast_tensor(x, format, scale, tensor_amax(x))
    expected = [nearest(fp32(value * scale.item()), format) for value in x.float().flatten().tolist()]
    assert quantized.codes.float().flatten().tolist() == expected
    inverse = fp32(1 / scale.item())
    assert quantized.values().flatten().tolist() == [fp32(code * inverse) for code in expected]


@pytest.mark.parametrize(
    ("format", "amax", "expected"),
    [
        ("e4m3", 448.0, 1.0),
        ("e4m3", 3.0, fp32(448 / 3)),
        ("e5m2", 0.7, fp32(57344 / fp32(0.7))),
        ("e4m3", 0.0, 1.0),
        ("e4m3", math.inf, 1.0),
        # The quotient is beyond fp32.
        ("e4m3", 1e-38, FP32_MAX),
        ("e5m2", 1e-40, FP32_MAX),
    ],
)
def test_scale_of_a_tensor(format, amax, expected):
    assert scale_from_amax(torch.tensor([amax]), format).tolist() == [expected]


def test_scale_of_a_tensor_is_one_division_rounded_once():
    amaxes = torch.rand(1000, generator=torch.Generator().manual_seed(2)) + 1e-3
    expected = [fp32(448 / amax) for amax in amaxes.tolist()]
    assert scale_from_amax(amaxes, "e4m3").tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "amax", "expected"),
    [
        (torch.float32, 448.0, 1.0),
        # 448 / 449 is a little less than 1, and down goes to 1/2.
        (torch.float32, 449.0, 0.5),
        (torch.float32, 1.0, 256.0),
        (torch.float32, 0.0, 1.0),
        (torch.float32, math.inf, 1.0),
        # The largest finite numbers of the types, without their mantissas.
        (torch.float32, 1e-38, 2.0**127),
        (torch.bfloat16, 1e-38, 2.0**127),
    ],
)
def test_scale_of_a_block_is_the_quotient_rounded_down_to_a_power_of_two(dtype, amax, expected):
    assert power_of_two_scale(torch.tensor([amax]), "e4m3", dtype).tolist() == [expected]


@pytest.mark.parametrize(
    ("format", "amax", "expected"),
    [
        ("e4m3", 448.0, 1.0),
        # 449 / 448 is a little more than 1: the exponent goes up.
        ("e4m3", 449.0, 0.5),
        ("e4m3", 1.0, 256.0),
        ("e4m3", 0.875, 512.0),
        ("e5m2", 57344.0, 1.0),
        ("e5m2", 1.0, 32768.0),
        ("e4m3", 0.0, 1.0),
    ],
)
def test_scale_of_32_values_is_the_exponent_rounded_up(format, amax, expected):
    assert e8m0_scale(torch.tensor([amax]), format, torch.float32).tolist() == [expected]


def test_scales_of_blocks_use_the_range_and_never_leave_it():
    amaxes = torch.logspace(-30, 30, 4001)
    for rule in (power_of_two_scale, e8m0_scale):
        largest = amaxes * rule(amaxes, "e4m3", torch.float32)
        assert largest.max() <= 448.0, rule
        assert largest.min() > 448.0 / 2 * (1 - 1e-6), rule
        assert set(torch.frexp(rule(amaxes, "e4m3", torch.float32)).mantissa.tolist()) == {0.5}, rule


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)])
@pytest.mark.parametrize("shape", [(128, 128), (130, 70), (5, 300), (1, 1)])
def test_blocks_are_cast_each_by_itself_also_at_the_edges(block, shape):
    generator = torch.Generator().manual_seed(3)
    # Magnitudes that differ from place to place, so that a wrong block gives a wrong scale.
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 4)
    x[0, 0] = 0.0
    quantized = cast_blocks(x, "e4m3", block, power_of_two_scale)
    (rows, columns), (height, width) = shape, block
    assert quantized.scale.shape == (math.ceil(rows / height), math.ceil(columns / width))
    assert quantized.codes.shape == x.shape
    values = quantized.values()
    for i in range(0, rows, height):
        for j in range(0, columns, width):
            part = x[i : i + height, j : j + width]
            amax = max(abs(value) for value in part.flatten().tolist())
            scale = 2.0 ** math.floor(math.log2(448 / amax)) if amax else 1.0
            assert quantized.scale[i // height, j // width] == scale
            codes = torch.tensor([nearest(value * scale, "e4m3") for value in part.flatten()[:50].tolist()])
            assert torch.equal(values[i : i + height, j : j + width].flatten()[:50], codes / scale)
    assert quantized.amax.item() == x.abs().max().item()
