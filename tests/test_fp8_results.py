"""The bounds of a result, held against simulated tensor cores: what they lose passes, and what is wrong is told."""

from functools import cache

import pytest
import torch

from gpt_pretrain.fp8.cast_checks import Checks
from gpt_pretrain.fp8.gemms import Fp8Operand, Phase, Product, Role, Sums
from gpt_pretrain.fp8.results import check_result
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.run.fp8 import Fp8Settings, resolve_fp8
from tests.refusals import compose_quickly
from tests.tensor_cores import multiply

ROWS, COLUMNS = 48, 32
# Relative 2-norm of the error of 1,024 and 4,096 terms on an H100, unsplit and split (benchmarks/fp8_h100.md).
MEASURED = {
    ("normal", 1024): (5.4e-4, 1.3e-4),
    ("normal", 4096): (1.3e-3, 1.3e-4),
    ("positive", 1024): (1.5e-2, 5.6e-4),
    ("positive", 4096): (7.5e-2, 5.6e-4),
    ("outlier", 1024): (3.4e-2, 3.4e-3),
    ("outlier", 4096): (1.16e-1, 2.7e-3),
    ("ones", 4096): (1.9e-2, 0.0),
}


def nearly_without_sum(values):
    """The values, of which every 1,024th takes away what the others add up to, but for an eighth."""
    is_spike = torch.arange(len(values)) % 1024 == 0
    values = torch.where(is_spike, 0.0, values)
    return torch.where(is_spike, -7 / 8 * values.sum() / is_spike.sum(), values)


def drawn(kind, num, terms, generator):
    def normal(*shape):
        return torch.randn(shape, generator=generator)

    values = {
        "normal": lambda: normal(num, terms),
        "positive": lambda: torch.rand(num, terms, generator=generator),
        "same": lambda: normal(num, 1).expand(num, terms),
        "ones": lambda: torch.ones(num, terms),
        "outlier": lambda: torch.rand(num, terms, generator=generator) * torch.where(torch.arange(terms) < 8, 1e3, 1.0),
        # A text of one word: the same row at every token, but a few.
        "alike": lambda: normal(num, 1) + torch.where(torch.rand(terms, generator=generator) < 0.01, 3.0, 0.0),
        # Gradients that a few tokens dominate, and whose sum nearly vanishes.
        "cancelling": lambda: (spikes := normal(num, terms) ** 5) - spikes.mean(1, keepdim=True),
        # The gradients of a text of one word: alike but for their size, and nearly without a sum.
        "cancelling together": lambda: normal(num, 1) * nearly_without_sum(torch.rand(terms, generator=generator)),
        "one": lambda: torch.eye(num, terms),
    }
    return values[kind]()


def cast(values):
    scale = (448 / values.abs().max()).view(1)
    return (values * scale).to(torch.float8_e4m3fn), scale


@cache
def settings() -> Fp8Settings:
    return resolve_fp8(compose_quickly(["fp8=tensorwise"]).model)


def checked(first, second, *, split, change=lambda result: result):
    """The differences of a forward product that simulated tensor cores computed, given values [n, k] and [m, k]."""
    install_cpu_device()
    (x, x_scale), (w, w_scale) = cast(first), cast(second)
    exact = multiply(x.float(), w.float(), split=split) / x_scale / w_scale
    operands = (
        Fp8Operand(role=Role.input, format="e4m3", codes=x, scale=x_scale, amax=None, values=first),
        Fp8Operand(role=Role.weight, format="e4m3", codes=w, scale=w_scale, amax=None, values=second),
    )
    output = change(exact).float()
    sums = Sums.split if split else Sums.unsplit
    product = Product(phase=Phase.forward, operands=operands, output=output, sums=sums)
    checks = Checks(settings(), 0)
    check_result(checks, "layer", product, output, 0)
    return list(checks.differences())


@pytest.mark.parametrize(("kind", "terms"), MEASURED)
def test_the_simulation_loses_what_an_h100_loses(kind, terms):
    generator = torch.Generator().manual_seed(5)
    # As measured: against terms of one sign, but for random ones.
    other = kind if kind in ("normal", "ones") else "positive"
    first, second = (cast(drawn(each, 24, terms, generator))[0].double() for each in (kind, other))
    exact = first @ second.t()
    for split, measured in zip((False, True), MEASURED[kind, terms], strict=True):
        lost = (multiply(first, second, split=split) - exact).norm() / exact.norm()
        assert float(lost) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("split", [False, True], ids=["unsplit", "split"])
@pytest.mark.parametrize("terms", [128, 2048])
@pytest.mark.parametrize(
    "first", ["normal", "positive", "ones", "outlier", "alike", "cancelling", "cancelling together", "one"]
)
@pytest.mark.parametrize("second", ["normal", "positive", "alike", "same", "cancelling"])
def test_what_tensor_cores_lose_is_neither_an_error_nor_unusual(first, second, terms, split):
    generator = torch.Generator().manual_seed(7)
    assert checked(drawn(first, ROWS, terms, generator), drawn(second, COLUMNS, terms, generator), split=split) == []


@pytest.mark.parametrize("split", [False, True], ids=["unsplit", "split"])
@pytest.mark.parametrize("terms", [128, 2048])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda result: result * 1.05, id="5% more"),
        pytest.param(lambda result: result * 0.95, id="5% less"),
        pytest.param(torch.zeros_like, id="zeros"),
        pytest.param(lambda result: result.flip(0), id="other rows"),
        pytest.param(lambda result: -result, id="another sign"),
    ],
)
def test_a_wrong_result_is_told(change, terms, split):
    generator = torch.Generator().manual_seed(7)
    first, second = drawn("normal", ROWS, terms, generator), drawn("normal", COLUMNS, terms, generator)
    assert "result of forward" in {each.what for each in checked(first, second, split=split, change=change)}


@pytest.mark.parametrize("split", [False, True], ids=["unsplit", "split"])
@pytest.mark.parametrize("terms", [128, 2048, 8192])
@pytest.mark.parametrize("which", ["input", "weight"])
def test_an_operand_that_was_not_rounded_is_told(which, terms, split):
    generator = torch.Generator().manual_seed(7)
    first, second = drawn("normal", ROWS, terms, generator), drawn("normal", COLUMNS, terms, generator)

    def unrounded(_):
        (x, x_scale), (w, w_scale) = cast(first), cast(second)
        read = (first, w.float() / w_scale) if which == "input" else (x.float() / x_scale, second)
        return read[0].double() @ read[1].double().t()

    told = {each.what for each in checked(first, second, split=split, change=unrounded)}
    assert f"rounding of the {which} in forward" in told
    other = "weight" if which == "input" else "input"
    assert f"rounding of the {other} in forward" not in told


@pytest.mark.parametrize("terms", [32, 4096, 131072])
def test_no_sum_loses_more_than_all_of_its_terms(terms):
    bounds = {sums: sums.most_lost(terms) for sums in Sums}
    assert bounds[Sums.fp32] < bounds[Sums.split] <= max(bounds[Sums.unsplit], 132 * 2.0**-13) <= 1.0
