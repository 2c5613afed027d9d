"""How far two computations of one number lie apart when only their roundings differ: tolerances from number formats.

n roundings, one behind the other, move a result by about √n·u of its magnitude, where u is half the distance from 1 to
the next number of the format: they are as good as independent, and add up like a random walk (N. J. Higham and T. Mary,
"A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019). Two computations differ by
twice that, √n·ε. No measured difference enters, so a tolerance holds on every processor and for every order of sums.
"""

import math

import torch

from gpt_pretrain.config.schema import ModelConfig

_FP32 = torch.finfo(torch.float32).eps
# Results of a layer that are rounded one behind the other: two norms, QKV, rotary positions, scores, softmax,
# attention, projection, residual, first linear layer, activation, second linear layer, residual.
_RESULTS = 13


def loss_tolerance(model: ModelConfig, dtype: torch.dtype, step: int = 1) -> float:
    """Relative difference of two losses of a step, the first being 1, that rounding explains.

    A loss is the mean of its tokens' losses. Their roundings are independent as well, so that they differ by 1/√tokens
    of one token's; the sum over tokens is rounded in fp32.

    Args:
        model: Its sizes say how many roundings follow each other, and how many tokens a step has.
        dtype: What results are rounded to; sums are kept in fp32.
        step: Each step before it was a forward pass and a backward pass of twice as many roundings.
    """
    tokens = model.global_batch_size * model.encoder_seq_length
    passes = 3 * (step - 1) + 1
    return math.sqrt(passes * _roundings(model, dtype) / tokens) * torch.finfo(dtype).eps + math.sqrt(tokens) * _FP32


def gradient_tolerance(model: ModelConfig, dtype: torch.dtype, step: int = 1) -> float:
    """The same of the norm of a gradient, whose elements sum up what tokens want, much of which cancels."""
    return math.sqrt(3 * step * _roundings(model, dtype)) * torch.finfo(dtype).eps


def fp8_loss_tolerance(model: ModelConfig) -> float:
    """Relative difference of two losses that are computed in fp32 from FP8 products.

    A value on the border of two codes falls to either, which of a step's values hardly more than one is. It is one of
    the features of one token: the mean loss changes by 1/√features of the distance between two codes, and by 1/tokens.
    """
    tokens = model.global_batch_size * model.encoder_seq_length
    return torch.finfo(torch.float8_e4m3fn).eps / math.sqrt(model.hidden_size) / tokens


def fp8_anew_tolerance(model: ModelConfig, step: int = 1) -> float:
    """The same where all values fall to other codes: independent errors of each feature of each token.

    Args:
        model: Its sizes.
        step: Each step before it was three passes.
    """
    values = model.hidden_size * model.global_batch_size * model.encoder_seq_length
    return math.sqrt(3 * (step - 1) + 1) * torch.finfo(torch.float8_e4m3fn).eps / math.sqrt(values)


def _roundings(model: ModelConfig, dtype: torch.dtype) -> int:
    """Roundings behind each other in a forward pass: small formats round each result, fp32 each addition."""
    roundings = model.num_layers * _RESULTS
    if dtype is torch.float32:
        # The sums of a layer's products, of its norms and of its attention, and those of the head.
        layer = 5 * model.hidden_size + model.ffn_hidden_size + 2 * model.encoder_seq_length
        roundings += model.num_layers * layer + model.hidden_size + model.vocab_size
    return roundings
