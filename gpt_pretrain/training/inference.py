"""Forward passes without gradients over tokens of any length, in any tensor, pipeline and context parallel layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.loss import scores_from_head
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.parallel import context_parallel_slices, data_parallel_rank, without_user_buffers


def buffer_length(model: ModelConfig, num_tokens: int) -> int:
    """Tokens of the padded buffer, divisible for sequence and context parallelism and for FP8 products.

    FP8 products take multiples of 16 and 32 tokens, blockwise ones gathered over the TP ranks multiples of 128.
    """
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    multiple = lcm((128 if model.fp8 else 16) * tp * cp, 2 * cp)
    return -(-num_tokens // multiple) * multiple


def forward_pass(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, shape: torch.Size, compute: Callable[[Any], torch.Tensor]
) -> torch.Tensor | None:
    """What `compute` returns for the chunk on the last pipeline stage; None on other stages. All ranks call it.

    `compute` calls a model chunk with this rank's parts of tokens of this shape, [rows, s].
    """

    def forward_step(_: Iterator[Any] | None, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return compute(chunk), lambda output, non_loss_data: output

    # Interleaved schedules take as many microbatches as stages; the copies cost what one would.
    interleaved = len(chunks) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if interleaved else None,
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=config.pipeline_model_parallel_size if interleaved else 1,
        seq_length=shape[1],
        micro_batch_size=shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs[-1] if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None


@torch.no_grad()
def token_losses(model: Model, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The cross entropy in nats of each token but the first, given those before it, for each sequence of token ids.

    Every rank calls it with the same sequences and gets the same numbers; data-parallel ranks share the work.
    Call it inside `Model.newest_parameters`.

    Raises:
        UserError: A sequence has no second token, is longer than the model's, or has an id that is none.
    """
    config = model.spec.model
    limit, vocabulary = config.encoder_seq_length, config.vocab_size
    for each in sequences:
        if not 2 <= len(each) <= limit or not all(0 <= token < vocabulary for token in each):
            raise UserError(
                f"a sequence of {len(each)} token ids cannot be evaluated; give 2 to {limit} "
                f"(model.encoder_seq_length), each from 0 up to {vocabulary - 1} (model.vocab_size)"
            )
    if not sequences:
        return []
    length = min(buffer_length(config, max(map(len, sequences))), limit)
    rows, ranks = config.micro_batch_size, model.spec.layout.dp
    losses = torch.zeros(len(sequences), length, device=torch.cuda.current_device())
    model.eval()
    with without_user_buffers(model.gpt_chunks):
        for first in range(0, len(sequences), rows * ranks):
            begin = first + rows * data_parallel_rank()
            # Ranks without sequences compute beside the others, which they meet at experts.
            _add_losses(losses, begin, model, _padded(sequences[begin : begin + rows], rows, length))
    model.train()
    torch.distributed.all_reduce(losses, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        torch.distributed.broadcast(losses, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
    return [row[: len(each) - 1] for row, each in zip(losses.tolist(), sequences, strict=True)]


def _padded(sequences: Sequence[Sequence[int]], rows: int, length: int) -> torch.Tensor:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = torch.tensor(list(sequence))
    return tokens.to(torch.cuda.current_device())


def _add_losses(losses: torch.Tensor, begin: int, model: Model, tokens: torch.Tensor) -> None:
    """Writes this rank's losses of tokens [rows, s] to the rows from `begin` on, as far as there are any."""
    processing: dict[str, Any] = {}
    if model.output_processor is not None:
        gradient = context_parallel_slices({"gradient": torch.ones_like(tokens, dtype=torch.float32)})["gradient"]
        processing = {"output_processor": model.output_processor, "output_processor_context": gradient}
    found, places = _outputs(model, tokens, tokens.roll(-1, dims=1), processing)
    if found is not None:
        present = losses[begin : begin + len(tokens)]
        present.scatter_(1, places[: len(present)], found[: len(present)].float())


def _outputs(
    model: Model, tokens: torch.Tensor, labels: torch.Tensor, processing: Mapping[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What this rank's part of the model makes of tokens and labels [rows, s], and their places in the sequences.

    Off the last pipeline stage it makes nothing.
    """
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    here = context_parallel_slices({"tokens": tokens, "labels": labels, "positions": positions})

    def compute(chunk: Any) -> torch.Tensor:
        computed: torch.Tensor = chunk(here["tokens"], here["positions"], None, labels=here["labels"], **processing)
        return computed

    return forward_pass(model.chunks, model.spec.model, tokens.shape, compute), here["positions"]


class Continuation(NamedTuple):
    """Token ids of which the last ones are scored, given all before them."""

    tokens: Sequence[int]
    """2 to `model.encoder_seq_length` + 1; the last one is only a label."""
    num_scored: int
    """1 up to all but the first."""


class Score(NamedTuple):
    """What a model makes of the scored tokens of a continuation."""

    log_likelihood: float
    """Sum of their logarithms of probability, in nats."""
    is_greedy: bool
    """Whether each is the likeliest token."""


@torch.no_grad()
def score_continuations(
    model: Model, continuations: Sequence[Continuation], on_batch: Callable[[], None]
) -> list[Score]:
    """Scores by the cross entropy of the model's vocabulary, whatever the run trains with.

    Every rank calls it with the same continuations and gets the same scores; data-parallel ranks share the work.
    Call it inside `Model.newest_parameters`. `on_batch` is called before each batch. A rank computes as many tokens at
    once as in a microbatch.
    """
    config, ranks = model.spec.model, model.spec.layout.dp
    # Loss, and tokens that are not the likeliest.
    sums = torch.zeros(len(continuations), 2, dtype=torch.float64, device=torch.cuda.current_device())
    longest_first = sorted(range(len(continuations)), key=lambda index: -len(continuations[index].tokens))
    model.eval()
    with without_user_buffers(model.gpt_chunks):
        done = 0
        while done < len(longest_first):
            on_batch()
            length = _bucket(config, len(continuations[longest_first[done]].tokens) - 1)
            rows = config.micro_batch_size * (config.encoder_seq_length // length)
            begin = done + rows * data_parallel_rank()
            _add_scores(sums, model, longest_first[begin : begin + rows], continuations, (rows, length))
            done += rows * ranks
    model.train()
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        torch.distributed.broadcast(sums, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
    return [Score(-loss, unlikely == 0) for loss, unlikely in sums.tolist()]


def _bucket(model: ModelConfig, num_tokens: int) -> int:
    """Length of the buffer: few different ones, as some kernels are compiled or tuned for each."""
    length = buffer_length(model, 1)
    while length < num_tokens:
        length *= 2
    return min(length, model.encoder_seq_length)


def _add_scores(
    sums: torch.Tensor,
    model: Model,
    indices: Sequence[int],
    continuations: Sequence[Continuation],
    shape: tuple[int, int],
) -> None:
    """Adds what this rank finds of some continuations, as many as rows or fewer, to their sums."""
    rows, length = shape
    chosen = [continuations[index] for index in indices]
    # Ranks without continuations compute beside the others, which they meet at experts.
    inputs = _padded([each.tokens[:-1] for each in chosen], rows, length)
    labels = _padded([each.tokens[1:] for each in chosen], rows, length)
    found, places = _outputs(model, inputs, labels, {"output_processor": scores_from_head})
    if found is None or not chosen:
        return
    device = found.device
    ends = torch.tensor([len(each.tokens) - 1 for each in chosen], device=device)[:, None]
    starts = ends - torch.tensor([each.num_scored for each in chosen], device=device)[:, None]
    places = places[: len(chosen)]
    counts = ((places >= starts) & (places < ends))[..., None]
    own = torch.where(counts, found[: len(chosen)].double(), 0.0).sum(dim=1)
    sums.index_add_(0, torch.tensor(indices, device=device), own)
