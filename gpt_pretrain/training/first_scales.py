"""The first scales of delayed scaling, from passes over the first batch that update nothing.

Delayed scaling casts with the amaxes of earlier passes, and before the first there is none: Transformer Engine starts
with scales of 1. Of gradients, which shrink with the tokens of a batch, E5M2 then keeps little or nothing, its smallest
number being 2^-16. A first step of one microbatch would train on what is left of them: a seventh of the gradient's norm
with GPT-2 124M and 32,768 tokens, whose loss was 0.4 to 2.4% above BF16's over the next fifteen steps
(benchmarks/fp8_h200_2026-11-22.md).
"""

import math
from collections.abc import Sequence

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.histories import has_gradient_scales
from gpt_pretrain.training.step import compute_gradients

# The first shows the gradients that come down the residual stream, which is in BF16. Those inside of a layer come out
# of FP8 products of gradients that were flushed; the second shows them.
_MICROBATCHES = 2


def find_first_scales(
    trainable: Trainable,
    iterators: Sequence[BatchIterator | None],
    config: ModelConfig,
    num_microbatches: int,
) -> int:
    """Passes over the batch of the next step, so that its gradients have scales; every rank calls it.

    Does nothing where there are some, as in a run that was resumed. Of what a step changes, only scales and histories
    are, and random states where there is dropout.

    Args:
        trainable: Model and optimizer; gradients are left in their buffers, for the next step to clear.
        iterators: At the next step's batch, where they stay.
        config: The model's configuration; delayed scaling.
        num_microbatches: Of a step and data-parallel rank. A pass has as many, since they divide the gradients.

    Returns:
        How many passes it were.
    """
    if has_gradient_scales(trainable.model.gpt_chunks):
        return 0
    num_passes = math.ceil(_MICROBATCHES / num_microbatches)
    for _ in range(num_passes):
        batches = [None if each is None else iter(each.peek(num_microbatches)) for each in iterators]
        compute_gradients(trainable, batches, config, num_microbatches)
    return num_passes
