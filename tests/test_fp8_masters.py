"""Whether FP8 weights follow their masters: which differences are found, and with how much memory."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_pretrain.fp8 import state_checks
from gpt_pretrain.fp8.gemms import spread_over_blocks
from gpt_pretrain.fp8.observer import Difference
from gpt_pretrain.fp8.state_checks import MasterCheck

SIZE = (96, 256)
LR = 1e-2
INVERSE = 2.0**-10
NAME = "decoder.layers.0.mlp.linear_fc1"


class Optimizer(DistributedOptimizer):
    """A chain of one distributed optimizer, of an FP8 weight whose master starts behind its first 1,000 values."""

    start = 1000

    def __init__(self, weight, master):
        self.row = [weight], [master], [self.start]
        self.chained_optimizers = [self]

    def _get_fp8_params_and_shard_fp32_from_fp8(self):
        return self.row


def encode(values, inverse):
    return (values / inverse).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def one_scale(master_dtype=torch.float32):
    """A weight with one scale, its optimizer, and the check of it."""
    values = 0.02 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    weight = SimpleNamespace(shape=SIZE, _data=encode(values, INVERSE), _scale_inv=torch.tensor([INVERSE]))
    master = values.view(-1)[Optimizer.start :].to(master_dtype)
    return weight, master, MasterCheck(Optimizer(weight, master), {id(weight): NAME})


def difference(planned, live):
    return Difference(module=NAME, what="weight after the step", planned=planned, live=live)


def follow(weight, master):
    """What the optimizer writes after an update."""
    weight._data.view(-1)[Optimizer.start :] = encode(master.float(), INVERSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("piece", [2**24, 1000])
def test_a_weight_that_follows_has_no_problem(monkeypatch, piece, dtype):
    monkeypatch.setattr(state_checks, "_PIECE", piece)
    weight, master, check = one_scale(dtype)
    master += LR
    follow(weight, master)
    assert list(check.problems(LR)) == []


@pytest.mark.parametrize("piece", [2**24, 1000])
def test_values_off_their_masters_are_counted_in_all_pieces(monkeypatch, piece):
    monkeypatch.setattr(state_checks, "_PIECE", piece)
    weight, master, check = one_scale()
    master += LR
    follow(weight, master)
    for place in (0, 999, 1000, master.numel() - 1):
        master[place] += 0.1
    planned, live = "every value within one FP8 step of its master", f"4 of {master.numel():,} values are not"
    assert list(check.problems(LR)) == [difference(planned, live)]


def test_codes_that_are_no_numbers_are_counted():
    weight, master, check = one_scale()
    master += LR
    follow(weight, master)
    weight._data.view(-1)[-1] = 0x7F
    planned, live = "every value within one FP8 step of its master", f"1 of {master.numel():,} values are not"
    assert list(check.problems(LR)) == [difference(planned, live)]


def test_a_weight_that_stayed_as_it_was_is_told_where_it_must_have_changed():
    _, _, check = one_scale()
    assert list(check.problems(LR)) == [difference("changed", "the same codes as before")]
    assert list(check.problems(0.0)) == []


def test_what_a_scale_is_too_large_for_saturates():
    weight, master, check = one_scale()
    master[0] = 2 * 448 * INVERSE
    master += LR
    follow(weight, master)
    assert list(check.problems(LR)) == []


def test_blocks_have_scales_of_their_own(monkeypatch):
    monkeypatch.setattr(state_checks, "_PIECE", 1000)
    values = 0.02 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    inverses = torch.tensor([[INVERSE, INVERSE / 4]])
    each = spread_over_blocks(inverses, (128, 128), SIZE)
    weight = SimpleNamespace(shape=SIZE, _rowwise_data=encode(values, each), _rowwise_scale_inv=inverses)
    master = values.view(-1)[Optimizer.start :].clone()
    check = MasterCheck(Optimizer(weight, master), {})
    assert list(check.problems(0.0)) == []
    weight._rowwise_scale_inv = inverses.flip(1)
    (off,) = check.problems(0.0)
    assert off.module == "a weight"
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
    _, master, check = one_scale(torch.float16)
    with Largest() as largest:
        list(check.problems(LR))
    assert 4000 == largest.bytes < 4 * master.numel()
