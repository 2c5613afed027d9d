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
    for dtype in (torch.float32, torch.bfloat16):
        table = torch.randn(num_rows, width, generator=generator, device=device)
        gradients = torch.randn(len(rows), width, generator=generator, device=device).to(dtype)
        here = rows >= 0
        expected = table.double().index_add(0, rows[here], gradients[here].double())
        met = torch.zeros(num_rows, dtype=torch.bool, device=device).index_fill_(0, rows[here], True)
        results = [table.clone(), table.clone()]
        for result in results:
            add_rows(result, rows, gradients)
        torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0][~met], table[~met])
