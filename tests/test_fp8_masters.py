"""Whether FP8 weights follow their masters: which differences are found, and with how much memory."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_pretrain.fp8 import state_checks
from gpt_pretrain.fp8.comparisons import STORED_WEIGHT, Difference
from gpt_pretrain.fp8.gemms import spread_over_blocks
from gpt_pretrain.fp8.state_checks import weight_differences

SIZE = (96, 256)
INVERSE = 2.0**-10
NAME = "decoder.layers.0.mlp.linear_fc1"


class Weight:
    """What Transformer Engine's FP8 weight shows of itself: rounded to BF16 before its cast."""

    dtype = torch.bfloat16
    shape = SIZE


class Optimizer(DistributedOptimizer):
    """A chain of one distributed optimizer, of an FP8 weight whose master starts behind its first 1,000 values."""

    start = 1000

    def __init__(self, weight, master):
        self.row = [weight], [master], [self.start]
        self.chained_optimizers = [self]

    def _get_fp8_params_and_shard_fp32_from_fp8(self):
        return self.row


def encode(values, inverse):
    return (values.bfloat16().float() / inverse).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def one_scale(master_dtype=torch.float32):
    """A weight with one scale, its master, and its optimizer."""
    values = 0.02 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    weight = Weight()
    weight._data, weight._scale_inv = encode(values, INVERSE), torch.tensor([INVERSE])
    master = values.view(-1)[Optimizer.start :].to(master_dtype)
    return weight, master, Optimizer(weight, master)


def found(weight, optimizer):
    return list(weight_differences(optimizer, {NAME: weight}, 0.0))


def difference(num, size):
    planned, live = "every code that of its master", f"{num:,} of {size:,} are not"
    return Difference(comparison=STORED_WEIGHT, module=NAME, what="weight after the step", planned=planned, live=live)


def follow(weight, master):
    """What the optimizer writes after an update."""
    weight._data.view(-1)[Optimizer.start :] = encode(master.float(), INVERSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("piece", [2**24, 1000])
@pytest.mark.parametrize("update", [1e-2, 0.0])
def test_a_weight_that_follows_has_no_problem(monkeypatch, piece, dtype, update):
    """Not even if nothing changes, as without a gradient."""
    monkeypatch.setattr(state_checks, "_PIECE", piece)
    weight, master, optimizer = one_scale(dtype)
    master += update
    follow(weight, master)
    assert found(weight, optimizer) == []


@pytest.mark.parametrize("value", [0.0, 0.25, -448 * INVERSE])
def test_a_weight_of_one_value_has_no_problem(value):
    weight, master, optimizer = one_scale()
    master.fill_(value)
    follow(weight, master)
    assert found(weight, optimizer) == []


@pytest.mark.parametrize("piece", [2**24, 1000])
def test_codes_that_are_not_their_masters_are_counted_in_all_pieces(monkeypatch, piece):
    monkeypatch.setattr(state_checks, "_PIECE", piece)
    weight, master, optimizer = one_scale()
    follow(weight, master)
    for place in (0, 999, 1000, master.numel() - 1):
        master[place] += 0.1
    assert found(weight, optimizer) == [difference(4, master.numel())]


def test_one_step_beside_is_found():
    weight, master, optimizer = one_scale()
    follow(weight, master)
    # The next code of the same sign.
    weight._data.view(-1)[-1] += 1
    assert found(weight, optimizer) == [difference(1, master.numel())]


def test_codes_that_are_no_numbers_are_counted():
    weight, master, optimizer = one_scale()
    follow(weight, master)
    weight._data.view(-1)[-1] = 0x7F
    assert found(weight, optimizer) == [difference(1, master.numel())]


def test_a_weight_that_stayed_as_it_was_is_told_where_its_master_moved():
    weight, master, optimizer = one_scale()
    master += 1e-2
    (told,) = found(weight, optimizer)
    assert int(told.live.split()[0].replace(",", "")) > master.numel() / 2


def test_a_weight_that_the_optimizer_does_not_cast_is_told():
    weight, _, optimizer = one_scale()
    optimizer.row = [], [], []
    (told,) = found(weight, optimizer)
    assert (told.module, told.live) == (NAME, "unknown to it")


def test_what_a_scale_is_too_large_for_saturates():
    weight, master, optimizer = one_scale()
    master[0] = 2 * 448 * INVERSE
    follow(weight, master)
    assert found(weight, optimizer) == []


def test_blocks_have_scales_of_their_own(monkeypatch):
    monkeypatch.setattr(state_checks, "_PIECE", 1000)
    values = 0.02 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    inverses = torch.tensor([[INVERSE, INVERSE / 4]])
    weight = Weight()
    weight._rowwise_data = encode(values, spread_over_blocks(inverses, (128, 128), SIZE))
    weight._rowwise_scale_inv = inverses
    master = values.view(-1)[Optimizer.start :].clone()
    optimizer = Optimizer(weight, master)
    assert found(weight, optimizer) == []
    weight._rowwise_scale_inv = inverses.flip(1)
    (off,) = found(weight, optimizer)
    assert int(off.live.split()[0].replace(",", "")) > master.numel() / 2


def test_it_takes_the_memory_of_pieces_and_not_of_a_weight(monkeypatch):
    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = isinstance(out, torch.Tensor) and not any(
                isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
                for each in args
            )
            self.bytes = max(self.bytes, out.untyped_storage().nbytes() if made else 0)
            return out

    monkeypatch.setattr(state_checks, "_PIECE", 1000)
    weight, master, optimizer = one_scale(torch.float16)
    with Largest() as largest:
        found(weight, optimizer)
    assert 4000 == largest.bytes < 4 * master.numel()
