"""The kernels of `activation_triton` beside torch's own operations: an activation and its gradient, then a cast."""

import torch
import torch.nn.functional as F

from gpt_pretrain.kernels.activation_triton import launch_activation, launch_gradient
from gpt_pretrain.kernels.fp8_codes_triton import CastInto

# Neither is a multiple of a tile.
ROWS, WIDTH = 200, 208
# Spacing of codes over their value, at most.
_SPACING = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.float16: 2**-10}


def destination(
    shape: tuple[int, int], dtype: torch.dtype, device: str, scale: float | None, *, columnwise: bool = True
) -> CastInto:
    """Where a kernel casts to; a scale of None is found from the largest value."""
    return CastInto(
        codes=torch.zeros(shape, dtype=dtype, device=device),
        transposed=torch.zeros(shape[::-1], dtype=dtype, device=device) if columnwise else None,
        scale=torch.tensor([scale or 1.0], device=device),
        inverse_scale=torch.zeros(1, device=device),
        amax=torch.zeros(1, device=device),
        scale_from_amax=scale is None,
        amax_epsilon=0.0,
    )


def share_that_differs(into: CastInto, values: torch.Tensor, scale: float | None) -> float:
    """Of codes; none is farther from what torch casts than the next one, and the transposed are the same."""
    amax = values.abs().max().float()
    torch.testing.assert_close(into.amax[0], amax, rtol=2**-7, atol=0)
    # Of tensors both, as Transformer Engine divides: of a number torch takes the reciprocal, and codes in the middle
    # between two fall to the other side for the last bit of it.
    largest = into.amax.new_tensor(torch.finfo(into.codes.dtype).max)
    used = largest / into.amax[0] if scale is None else torch.tensor(scale)
    torch.testing.assert_close(into.inverse_scale[0].cpu(), 1 / used.cpu(), rtol=1e-6, atol=0)
    expected = (values.float() * used.to(values.device)).to(into.codes.dtype).float()
    codes = into.codes.float()
    assert into.transposed is not None
    assert torch.equal(into.transposed.t().float(), codes)
    torch.testing.assert_close(codes, expected, rtol=_SPACING[into.codes.dtype], atol=2**-9)
    return float((codes != expected).float().mean())


def share_of_codes_that_differ(
    device: str, dtype: torch.dtype, code_dtype: torch.dtype, *, activation: str, biased: bool, scale: float | None
) -> float:
    """Of an activation and its gradient; asserts that whatever differs is rounded to the neighbour.

    Args:
        device: Where to compute.
        dtype: Of what is read: values are rounded to it before they are cast.
        code_dtype: float8_e4m3fn or float8_e5m2; float16 where those are not rounded as GPUs round.
        activation: swiglu, gelu_tanh or squared_relu.
        biased: With a bias before the activation.
        scale: What values are multiplied by; None finds it from the largest.
    """
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inputs, gradients = drawn(ROWS, 2 * WIDTH if activation == "swiglu" else WIDTH), drawn(ROWS, WIDTH)
    # The exponentials of both are beyond what fp32 holds, or their inverse is no normal number.
    inputs[:, :3] = torch.tensor([-88.5, -200, -10])
    bias = drawn(WIDTH) if biased else None
    # In fp32, torch's 1 + tanh of a large negative number is 0.
    exact = inputs.double().requires_grad_()
    summed = exact if bias is None else exact + bias.double()
    if activation == "swiglu":
        activated = F.silu(exact[:, :WIDTH]) * exact[:, WIDTH:]
    elif activation == "squared_relu":
        activated = F.relu(summed).square()
    else:
        activated = F.gelu(summed, approximate="tanh")
    activated.backward(gradients.double())
    assert exact.grad is not None

    forward = destination((ROWS, WIDTH), code_dtype, device, scale)
    launch_activation(activation, inputs, bias, forward)
    backward = destination((ROWS, inputs.size(1)), code_dtype, device, scale)
    of_bias = launch_gradient(activation, gradients, inputs, bias, backward)
    if bias is None:
        assert of_bias is None
    else:
        # Of the summands as they are cast: rounding each moves the sum by more than the kernel may.
        summed_up = exact.grad.to(dtype).double().sum(0)
        torch.testing.assert_close(of_bias.double(), summed_up, rtol=2**-7, atol=0.05)
    return max(
        share_that_differs(forward, activated.detach().to(dtype), scale),
        share_that_differs(backward, exact.grad.to(dtype), scale),
    )


def check_that_nan_leaves_amax_and_codes_alone(
    device: str, dtype: torch.dtype, code_dtype: torch.dtype, *, activation: str, biased: bool, scale: float | None
) -> None:
    """Rows of NaN, a whole tile of them, beside the other rows by themselves, which are written without a transpose."""
    tile = 64
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(ROWS, 2 * WIDTH if activation == "swiglu" else WIDTH, generator=generator).to(device, dtype)
    gradients = torch.randn(ROWS, WIDTH, generator=generator).to(device, dtype)
    bias = torch.randn(WIDTH, generator=generator).to(device, dtype) if biased else None
    inputs[:tile] = torch.nan

    def cast(first_row: int) -> list[CastInto]:
        rows, columnwise = ROWS - first_row, first_row == 0
        forward = destination((rows, WIDTH), code_dtype, device, scale, columnwise=columnwise)
        backward = destination((rows, inputs.size(1)), code_dtype, device, scale, columnwise=columnwise)
        launch_activation(activation, inputs[first_row:], bias, forward)
        launch_gradient(activation, gradients[first_row:], inputs[first_row:], bias, backward)
        return [forward, backward]

    for whole, rest in zip(cast(0), cast(tile), strict=True):
        assert rest.amax[0] > 0
        assert torch.equal(whole.amax, rest.amax)
        assert torch.equal(whole.inverse_scale, rest.inverse_scale)
        assert whole.codes[:tile].float().isnan().all()
        assert torch.equal(whole.codes[tile:].float(), rest.codes.float())
        assert whole.transposed is not None
        assert torch.equal(whole.transposed.t()[tile:].float(), rest.codes.float())
