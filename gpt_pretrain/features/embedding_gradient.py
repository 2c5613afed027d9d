"""`model.embedding_gradient_fusion`: gradients of looked-up embeddings go to their rows of the main gradient.

Otherwise each microbatch writes the gradient of the whole table in BF16, mostly zeros, reads it again and adds it to
the main gradient: 12 bytes per weight of the table, 2.8 ms for Llama 3's on an H200. `kernels.embedding` adds the rows.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, override

from gpt_pretrain.features.feature import FusedKernel, Kernels, Lack, Obstacle, Platform, Resolved, RunSpec


class EmbeddingGradient(FusedKernel):
    """Add embedding gradients only to the rows of their tokens; null: on a GPU, for few tokens and a large table."""

    key = "embedding_gradient_fusion"

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if model.gradient_accumulation_fusion is False:
            yield "model.gradient_accumulation_fusion=false", "a tied LM head must also add its gradient in the product"

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        model = run.model
        tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
        rows = model.vocab_size // model.tensor_model_parallel_size
        # Larger microbatches outweigh the table: 16,384 tokens with 51,200 rows gain, 131,072 with 50,304 lose, and
        # nothing in between was measured (benchmarks/fused_kernels_h200.md).
        return platform.cuda and kernels.gradient_accumulation_fusion and 3 * tokens <= rows

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        if not spec.kernels.gradient_accumulation_fusion:
            yield "model.gradient_accumulation_fusion=true", "null leaves that out here"

    @override
    def build_into_model(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            if chunk.pre_process:
                is_tied = chunk.post_process and chunk.share_embeddings_and_output_weights
                chunk.embedding.word_embeddings = embedding_class()(chunk.embedding.word_embeddings, is_tied=is_tied)


@cache
def embedding_class() -> Any:
    """megatron-core's embedding, whose backward pass adds to the main gradient."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
    from torch import is_grad_enabled
    from torch.nn import Module

    from gpt_pretrain.kernels.embedding import look_up

    class AccumulatingEmbedding(VocabParallelEmbedding):  # type: ignore[misc]  # megatron-core has no types
        def __init__(self, plain: VocabParallelEmbedding, *, is_tied: bool) -> None:
            """Takes the place of `plain`, with its weight.

            If `is_tied`, the LM head of the same chunk shares the weight, and reports its gradient to data parallelism.
            """
            assert type(plain) is VocabParallelEmbedding, "it was written for this very class"
            # megatron-core's constructor would allocate and draw another weight, and change what dropout draws later.
            Module.__init__(self)
            own = self.__dict__
            own.update({name: value for name, value in vars(plain).items() if name not in own})
            self.weight = plain.weight
            self.is_tied = is_tied
            if is_tied:
                # What the head returns beside its main gradient must not be added to that.
                self.weight.zero_out_wgrad = False

        @override
        def forward(self, input_: Any) -> Any:
            if not is_grad_enabled():
                return super().forward(input_)
            shared = self.tp_group.size() > 1
            embeddings = look_up(input_ - self.vocab_start_index, self.weight, is_tied=self.is_tied, is_shared=shared)
            if self.reduce_scatter_embeddings:
                scattered = embeddings.transpose(0, 1).contiguous()
                return mappings.reduce_scatter_to_sequence_parallel_region(scattered, group=self.tp_group)
            return mappings.reduce_from_tensor_model_parallel_region(embeddings, group=self.tp_group)

    return AccumulatingEmbedding
