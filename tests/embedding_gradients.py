"""`add_rows` against torch; interpreted in a process of its own, and on a GPU."""

import torch

from gpt_pretrain.kernels.layers_triton import add_rows


def check_rows_are_added(device: str) -> None:
    """Rows that are met never, once, and more often than a program adds at a time; a width that no block divides."""
    num_rows, width = 40, 150
    generator = torch.Generator(device).manual_seed(5)
    often = torch.cat([torch.full((70,), 3), torch.full((33,), 0), torch.full((32,), 39), torch.arange(9, 20)])
    elsewhere = torch.full((50,), -1)
    rows = torch.cat([often, elsewhere])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(6))].to(device)
    # Interpreted, Triton rounds FP16 as GPUs do, and cuts BF16 off.
    short = torch.float16 if device == "cpu" else torch.bfloat16
    for dtype, table_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (short, short),
    ):
        table = torch.randn(num_rows, width, generator=generator, device=device).to(table_dtype)
        gradients = torch.randn(len(rows), width, generator=generator, device=device).to(dtype)
        here = rows >= 0
        expected = table.double().index_add(0, rows[here], gradients[here].double())
        met = torch.zeros(num_rows, dtype=torch.bool, device=device).index_fill_(0, rows[here], True)
        results = [table.clone(), table.clone()]
        for result in results:
            add_rows(result, rows, gradients)
        # Rounded once, however often a row is met.
        rounding = 1e-5 if table_dtype is torch.float32 else 0.501 * torch.finfo(table_dtype).eps
        torch.testing.assert_close(results[0].double(), expected, rtol=rounding, atol=1e-5)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0][~met], table[~met])
