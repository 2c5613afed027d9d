"""The documents of a microbatch, for `model.data.inter_document_masking`.

megatron-core's data set restarts positions where a document begins, at the index's borders, not at tokens: text may
hold the end-of-document token itself. Attention takes the samples of a microbatch as one sequence, which the borders
of documents divide; a sample begins one, since nothing before it is there.
"""

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

BORDERS = "document_borders"


def document_borders(position_ids: torch.Tensor) -> torch.Tensor:
    """Where each document of the samples [b, s] begins, and the end b · s; int32 [documents + 1].

    Positions are 0 at the first token of a document and nowhere else.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([position_ids.numel()])]).to(torch.int32)


def collate_documents(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stacks samples to [b, s] and adds the borders of their documents, before anything is on the GPU."""
    fields: dict[str, torch.Tensor] = default_collate(list(samples))
    return {**fields, BORDERS: document_borders(fields["position_ids"])}
