"""The first scales of delayed scaling, from passes over the first batch that update nothing.

Delayed scaling casts with the amaxes of earlier passes, and before the first there is none: Transformer Engine starts
with scales of 1. Of gradients, which shrink with the tokens of a batch, E5M2 then keeps little or nothing, its smallest
number being 2^-16. A first step of one microbatch would train on what is left of them: a seventh of the gradient's norm
with GPT-2 124M and 32,768 tokens, whose loss was 0.4 to 2.4% above BF16's over the next fifteen steps
(benchmarks/fp8_h200.md#until-scales-have-settled).

One pass does not show all. The first shows the gradients that come down the residual stream, which is in BF16. Those
inside of a layer come out of FP8 products of gradients that were flushed, and what they add on the way down is missing
further down: the next pass shows more, and saturates where it shows it. After two passes over 131,072 tokens, gradients
of the lowest of twelve layers were still ten times beyond what their scales take (same file).
"""

from collections.abc import Sequence

import torch

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.data.batches import BatchIterator
from gpt_pretrain.fp8.histories import gradient_scales
from gpt_pretrain.training.step import compute_gradients

# Scales follow each microbatch. Where they have not settled after so many, the steps to come go on with it.
_MOST_MICROBATCHES = 8
# A scale that falls no further has saturated a few values in 100,000 at the most (same file).
_SETTLED = 0.5


def find_first_scales(
    trainable: Trainable,
    iterators: Sequence[BatchIterator | None],
    config: ModelConfig,
    num_microbatches: int,
) -> int:
    """Passes over the batch of the next step, so that its gradients have scales; every rank calls it.

    They go on until one halves no scale, or eight microbatches have passed. Does nothing where there are scales, as in
    a run that was resumed. Of what a step changes, only scales and histories are, and random states where there is
    dropout.

    Args:
        trainable: Model and optimizer; gradients are left in their buffers, for the next step to clear.
        iterators: At the next step's batch, where they stay.
        config: The model's configuration; delayed scaling.
        num_microbatches: Of a step and data-parallel rank. A pass has as many, since they divide the gradients.

    Returns:
        How many passes it were.
    """
    chunks = trainable.model.gpt_chunks
    scales = gradient_scales(chunks)
    if _on_any_rank(scales != 1.0):
        return 0
    # Of all layers, those too for which Transformer Engine makes one in the first pass.
    before = scales.new_ones(())
    num_passes, settled = 0, False
    while not settled and num_passes * num_microbatches < _MOST_MICROBATCHES:
        batches = [None if each is None else iter(each.peek(num_microbatches)) for each in iterators]
        compute_gradients(trainable, batches, config, num_microbatches)
        num_passes += 1
        scales = gradient_scales(chunks)
        settled = not _on_any_rank((scales < before * _SETTLED) | ((before == 1.0) & (scales != 1.0)))
        before = scales
    return num_passes


def _on_any_rank(flags: torch.Tensor) -> bool:
    """Whether one of them is set on any rank; every rank calls it, and it waits for the device."""
    count = flags.sum()
    torch.distributed.all_reduce(count)
    return count.item() > 0
