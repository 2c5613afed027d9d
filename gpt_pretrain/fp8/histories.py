"""Scales and amax histories of delayed scaling: before a model's first step, and after one that was skipped."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.fp8.gemms import Role
from gpt_pretrain.fp8.statistics import amax_history, delayed_scale


@torch.no_grad()
def forget_non_finite_amaxes(chunks: Sequence[GPTModel]) -> None:
    """Takes NaN and infinity out of all amax histories; recipes without histories have none.

    Nothing was updated in such a step, but its amaxes would stay for `model.fp8_amax_history_len` steps, in which
    Transformer Engine would leave the scales where they are: no scale follows from an infinite amax.
    """
    for module in _modules(chunks):
        for role in Role:
            history = amax_history(module, role)
            if history is not None:
                history.masked_fill_(~torch.isfinite(history), 0.0)


def gradient_scales(chunks: Sequence[GPTModel]) -> torch.Tensor:
    """Scales that the gradients of layers' outputs are cast with next, fp32 [FP8 layers of this rank].

    1 where no pass has shown an amax: a largest code over an amax is not.
    """
    found = (delayed_scale(module, Role.output_gradient) for module in _modules(chunks))
    scales = [scale for scale in found if scale is not None]
    # What is stacked stays when Transformer Engine writes the next ones in place.
    return torch.stack(scales) if scales else torch.empty(0, device=torch.cuda.current_device())


def _modules(chunks: Sequence[GPTModel]) -> Iterator[torch.nn.Module]:
    return (module for chunk in chunks for module in chunk.modules())
