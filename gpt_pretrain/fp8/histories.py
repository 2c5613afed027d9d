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


def has_gradient_scales(chunks: Sequence[GPTModel]) -> bool:
    """Whether the gradient of any layer's output, on any rank, has a scale from an amax.

    Every rank calls it, and it waits for the device.
    """
    found = (delayed_scale(module, Role.output_gradient) for module in _modules(chunks))
    # They are 1 at first, and a largest code over an amax is not.
    known = [scale != 1.0 for scale in found if scale is not None]
    count = torch.zeros((), dtype=torch.int64, device=torch.cuda.current_device())
    if known:
        count += torch.stack(known).sum()
    torch.distributed.all_reduce(count)
    return count.item() > 0


def _modules(chunks: Sequence[GPTModel]) -> Iterator[torch.nn.Module]:
    return (module for chunk in chunks for module in chunk.modules())
