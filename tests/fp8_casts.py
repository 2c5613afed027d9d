"""The kernels of `fp8_codes_triton` beside torch's own operations, interpreted: FP16 takes the place of FP8."""

import torch

from gpt_pretrain.kernels import fp8_codes_triton

# Neither is a multiple of a tile.
ROWS, COLUMNS = 136, 144


def _drawn() -> torch.Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    x[7] = 0
    return x


def check_amaxes() -> None:
    """Of a matrix, its rows and its columns; infinity and NaN among the values."""
    x = _drawn()
    for place, value in (((3, 5), 9.0), ((4, 4), -torch.inf), ((1, 2), torch.nan)):
        x[place] = value
        whole, of_rows, of_columns = fp8_codes_triton.measure(x, of_rows=True, of_columns=True)
        for got, expected in (
            (whole, x.abs().amax().reshape(1)),
            (of_rows, x.abs().amax(dim=1, keepdim=True)),
            (of_columns, x.abs().amax(dim=0, keepdim=True)),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert fp8_codes_triton.measure(x, of_rows=False, of_columns=False)[1:] == (None, None)


def check_codes() -> None:
    """In one direction and in both, with scales of the whole and of rows and columns."""
    x, generator = _drawn(), torch.Generator().manual_seed(1)
    whole = torch.tensor([0.3])
    of_rows, of_columns = torch.rand(ROWS, 1, generator=generator), torch.rand(1, COLUMNS, generator=generator)
    for scales in ((whole,), (of_rows,), (whole, whole), (of_rows, of_columns), (of_rows, whole)):
        codes = fp8_codes_triton.cast(x, torch.float16, *scales)
        for got, scale in zip(codes, scales, strict=True):
            assert torch.equal(got, (x * scale).half())
        assert all(each.t().is_contiguous() for each in codes[1:])
