"""Amax histories of delayed scaling after a step that was skipped."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.fp8.gemms import Role
from gpt_pretrain.fp8.statistics import amax_history


@torch.no_grad()
def forget_non_finite_amaxes(chunks: Sequence[GPTModel]) -> None:
    """Takes NaN and infinity out of all amax histories; recipes without histories have none.

    Nothing was updated in such a step, but its amaxes would stay for `model.fp8_amax_history_len` steps, in which
    Transformer Engine would leave the scales where they are: no scale follows from an infinite amax.
    """
    for chunk in chunks:
        for module in chunk.modules():
            for role in Role:
                history = amax_history(module, role)
                if history is not None:
                    history.masked_fill_(~torch.isfinite(history), 0.0)
