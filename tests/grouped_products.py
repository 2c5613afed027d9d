"""What the kernels of `grouped_products_triton` compute, against single products; interpreted, and on a GPU."""

import torch

from gpt_pretrain.kernels import grouped_products_triton
from gpt_pretrain.kernels.grouped_products_triton import ROWS, Addresses, GroupedWeights, RowPlaces, multiply_by_experts

# Experts without rows at either end and between, one row, whole tiles, and parts of tiles.
UNEVEN = (0, ROWS + 2, 1, 0, 2 * ROWS, 60, 0)
ONE_HAS_ALL = (0, ROWS + 72, 0)
# BF16 keeps 8 bits: a result is rounded to half of its last one; Triton's interpreter cuts the rest off. Sums are taken
# in fp32.
ROUNDED, CUT = 2.0**-8, 2.0**-7
OF_SUMS = 2.0**-20


def _close(result, expected, terms):
    """Whether a BF16 or fp32 result is what fp64 says, up to rounding; `terms`: the sums of its terms' magnitudes."""
    rounding = 2.0**-23
    if result.dtype is torch.bfloat16:
        rounding = ROUNDED if result.is_cuda else CUT
    return bool(((result.double() - expected).abs() <= rounding * expected.abs() + OF_SUMS * terms).all())


def check_products(device, counts=UNEVEN, *, out_features=96, in_features=80, sum_error=1.0):
    """Two microbatches through one layer: products, gradients of inputs, and main gradients on top of what is there.

    Args:
        device: Where to compute.
        counts: Rows of each expert.
        out_features: Of a weight.
        in_features: Of a weight.
        sum_error: Errors of the device's sums, in those of fp32.
    """
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    weights = [torch.nn.Parameter(draw(out_features, in_features)) for _ in counts]
    expected = []
    for weight in weights:
        weight.main_grad = torch.randn(out_features, in_features, generator=generator).to(device)
        expected.append((weight.main_grad.double(), weight.main_grad.double().abs()))
    kept, announced = GroupedWeights(RowPlaces()), []
    kept.gradients_added = announced.append
    for _ in range(2):
        inputs, gradient = draw(sum(counts), in_features).requires_grad_(), draw(sum(counts), out_features)
        product = multiply_by_experts(inputs, counts, weights, kept)
        product.backward(gradient)
        parts = zip(inputs.detach().double().split(counts), gradient.double().split(counts), strict=True)
        results = zip(product.detach().split(counts), inputs.grad.split(counts), strict=True)
        for expert, ((given, back), (forward, input_gradient)) in enumerate(zip(parts, results, strict=True)):
            weight = weights[expert].detach().double()
            assert _close(forward, given @ weight.T, sum_error * (given.abs() @ weight.abs().T))
            assert _close(input_gradient, back @ weight, sum_error * (back.abs() @ weight.abs()))
            total, terms = expected[expert]
            expected[expert] = total + back.T @ given, terms + sum_error * (back.abs().T @ given.abs())
    for weight, count, (total, terms) in zip(weights, counts, expected, strict=True):
        assert _close(weight.main_grad, total, terms)
        # Without a row nothing is added, not even a rounding.
        assert count or torch.equal(weight.main_grad.double(), total)
        assert weight.grad is None
    assert announced == [weights, weights]


def check_sabotages_are_caught(device):
    """A row computed by the expert before its own, and gradients added to the main gradient of another weight."""
    place_rows, of = grouped_products_triton.place_rows, Addresses.of

    def shifted(counts, where):
        moved = list(counts)
        moved[1], moved[2] = moved[1] + 1, moved[2] - 1
        return place_rows(moved, where)

    for name, owner, sabotage in (
        ("place_rows", grouped_products_triton, shifted),
        ("of", Addresses, lambda self, tensors: of(self, list(tensors)[::-1])),
    ):
        kept = getattr(owner, name)
        setattr(owner, name, sabotage)
        try:
            check_products(device)
        except AssertionError:
            continue
        finally:
            setattr(owner, name, kept)
        raise RuntimeError(f"the sabotage of {name} was not caught")


def check_moved_tensors_are_found(device):
    """A weight that gets other memory, as a loaded checkpoint may do, is read from there."""
    weights = [torch.nn.Parameter(torch.eye(32, device=device, dtype=torch.bfloat16)) for _ in range(2)]
    kept, inputs = GroupedWeights(RowPlaces()), torch.ones(3, 32, device=device, dtype=torch.bfloat16)
    for factor in (1, 2, 4):
        before = weights[1].data
        weights[1].data = factor * torch.eye(32, device=device, dtype=torch.bfloat16)
        assert before.data_ptr() != weights[1].data_ptr()
        product = multiply_by_experts(inputs, [1, 2], weights, kept)
        assert product.tolist() == [[1.0] * 32, [factor] * 32, [factor] * 32]


def check_no_rows(device):
    """A rank whose experts got no token computes nothing, and its gradients are as complete as any."""
    weights = [torch.nn.Parameter(torch.ones(32, 16, device=device, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.ones(32, 16, device=device)
    inputs = torch.empty(0, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    kept, announced = GroupedWeights(RowPlaces()), []
    kept.gradients_added = announced.append
    product = multiply_by_experts(inputs, [0, 0], weights, kept)
    assert product.shape == (0, 32)
    product.sum().backward()
    assert inputs.grad.shape == (0, 16)
    assert all(weight.main_grad.eq(1).all() for weight in weights)
    assert announced == [weights]


def check_frozen_weights(device):
    """Weights that are not trained leave their main gradients alone, and the inputs get gradients all the same."""
    weights = [torch.eye(32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    inputs = torch.ones(3, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    multiply_by_experts(inputs, [1, 2], weights, GroupedWeights(RowPlaces())).sum().backward()
    assert inputs.grad.eq(1).all()


def check_weights_are_trained_on_inputs_that_are_not(device):
    """Inputs that need no gradient, as those of a frozen embedding, do not keep the weights from theirs."""
    weights = [torch.nn.Parameter(torch.eye(32, device=device, dtype=torch.bfloat16)) for _ in range(2)]
    for weight in weights:
        weight.main_grad = torch.zeros(32, 32, device=device)
    inputs = torch.ones(3, 32, device=device, dtype=torch.bfloat16)
    multiply_by_experts(inputs, [1, 2], weights, GroupedWeights(RowPlaces())).sum().backward()
    assert [weight.main_grad.unique().tolist() for weight in weights] == [[1.0], [2.0]]


def check_rows_are_placed_once(device):
    """Products of the same counts share their places; other counts get others."""
    rows = RowPlaces()
    first, again, other = (rows.of(counts, torch.device(device)) for counts in ([3, 1], [3, 1], [1, 3]))
    assert again is first
    assert other.starts.tolist() == [0, 1, 4]
