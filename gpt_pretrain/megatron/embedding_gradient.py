"""Gradients of looked up embeddings, added to the rows of the main gradient that they belong to.

Otherwise each microbatch's gradient of the whole table is written in BF16, zeros for all tokens that did not occur,
read again and added to the fp32 main gradient: 12 bytes for each weight of the table, 2.8 ms for Llama 3's on an H200.
Here a microbatch's tokens are added, in fp32. `model.embedding_gradient_fusion`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class AccumulatingEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """megatron-core's embedding, its backward pass adding to the main gradient."""

    is_tied: bool
    """The LM head of the same model chunk has the same weight, and tells data parallelism of its gradient."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Tokens [b, s] to embeddings [b, s, h], or [s / TP, b, h] where they are scattered at once."""
        if not torch.is_grad_enabled():
            return super().forward(input_)  # type: ignore[no-any-return]
        rows = input_ - self.vocab_start_index
        shared = self.tp_group.size() > 1
        if shared:
            elsewhere = (rows < 0) | (rows >= self.num_embeddings_per_partition)
            rows = rows.masked_fill(elsewhere, -1)
        embeddings: torch.Tensor = _Lookup.apply(rows, self.weight, self.is_tied, shared)  # type: ignore[no-untyped-call]
        if shared:
            embeddings = embeddings.masked_fill(elsewhere[..., None], 0.0)
        if self.reduce_scatter_embeddings:
            scattered = embeddings.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(scattered, group=self.tp_group)  # type: ignore[no-any-return]
        return reduce_from_tensor_model_parallel_region(embeddings, group=self.tp_group)  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    """Rows of a weight, the first for -1 where it is shared out; their gradients go to its main gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Any, is_tied: bool, is_shared: bool) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.is_tied = weight, is_tied
        return torch.nn.functional.embedding(rows.clamp(min=0) if is_shared else rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        (given,), (rows,), weight = gradients, ctx.saved_tensors, ctx.weight
        tokens, of_tokens = rows.flatten(), given.flatten(0, 1)
        if given.is_cuda:
            from gpt_pretrain.kernels.embedding_triton import add_rows

            add_rows(weight.main_grad, tokens, of_tokens.contiguous())
        else:
            # What other ranks have is zero here.
            weight.main_grad.index_add_(0, tokens.clamp(min=0), of_tokens.float())
        weight.grad_added_to_main_grad = True
        # megatron-core's data parallelism waits for some gradient of each weight, and does not read this one.
        return None, None if ctx.is_tied else torch.empty_like(weight), None, None


def install_embeddings(chunks: Sequence[GPTModel]) -> None:
    """Makes the token embedding of these models an `AccumulatingEmbedding`; its weight stays.

    Main gradients must be fp32: BF16 would round every single token's.
    """
    for chunk in chunks:
        if not chunk.pre_process:
            continue
        embedding = chunk.embedding.word_embeddings
        assert type(embedding) is VocabParallelEmbedding, "the embedding that was read"
        embedding.__class__ = AccumulatingEmbedding
        embedding.is_tied = chunk.post_process and chunk.share_embeddings_and_output_weights
        if embedding.is_tied:
            # What is left of the head's gradient beside the main one is not to be added to it.
            embedding.weight.zero_out_wgrad = False
