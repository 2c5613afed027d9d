"""The documents of a microbatch, for `model.data.inter_document_masking`.

megatron-core's data set restarts positions where a document begins, at the index's borders, not at tokens: text may
hold the end-of-document token itself. Attention takes the samples of a microbatch as one sequence, which the borders
of documents divide; a sample begins one, since nothing before it is there.
"""

from collections.abc import Sequence

import numpy
import torch
from torch.utils.data import default_collate

BORDERS = "document_borders"
# Documents of a microbatch, with empty ones; fewer are one number to cuDNN (Transformer Engine's `get_max_batch_size`).
_FEWEST = 32
# Documents whose lengths stand for those of a file.
_MOST_LENGTHS = 2**20


def document_borders(position_ids: torch.Tensor) -> torch.Tensor:
    """Where each document of the samples [b, s] begins, and the end b · s; int32 [documents + 1].

    Positions are 0 at the first token of a document and nowhere else. Empty documents at the end make their number a
    power of two: cuDNN plans anew for each number above 512 that it meets, and Transformer Engine chooses its kernels
    anew for each number.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    num_documents = max(_FEWEST, 1 << (len(starts) - 1).bit_length())
    borders = torch.full((num_documents + 1,), position_ids.numel(), dtype=torch.int32, device=starts.device)
    borders[: len(starts)] = starts
    return borders


def expected_attended(lengths: numpy.ndarray, sequence_length: int) -> float:
    """The length of document that a token is in on average (`config.derived.attended_length`), before samples are cut.

    A sample's border falls anywhere in a document: two of its tokens at distance d are in one sample with probability
    1 - d / sequence_length.
    """
    of_documents = lengths[:: -(-len(lengths) // _MOST_LENGTHS)].astype(numpy.float64)
    reach = numpy.minimum(of_documents, sequence_length)
    # Twice the integral of (length - d) · (1 - d / sequence_length) over d from 0 to `reach`.
    squares = 2 * reach * of_documents - reach**2 * (1 + of_documents / sequence_length)
    squares += 2 * reach**3 / (3 * sequence_length)
    return float(squares.sum() / of_documents.sum())


def collate_documents(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stacks samples to [b, s] and adds the borders of their documents, before anything is on the GPU."""
    fields: dict[str, torch.Tensor] = default_collate(list(samples))
    return {**fields, BORDERS: document_borders(fields["position_ids"])}
