"""Text from a model, at any tensor and pipeline parallel layout: at the end of a run, and from a checkpoint.

There is no key/value cache: every token is one forward pass over a buffer of fixed length, padded on the right, which
causal attention cannot see. That is slow for long texts and simple for a sample at the end of a run.
"""

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.parallel import context_parallel_slices

# What the last stage tells the others instead of a token.
_NOTHING = -1


def _buffer_length(model: ModelConfig, num_tokens: int) -> int:
    """Tokens of the padded buffer: a multiple of what sequence and context parallelism and FP8 products divide by.

    FP8 products take multiples of 16 and 32 tokens, and blockwise ones that are gathered over the TP ranks, of 128.
    """
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    multiple = lcm((128 if model.fp8 else 16) * tp * cp, 2 * cp)
    return -(-num_tokens // multiple) * multiple


@torch.no_grad()
def _next_token_logits(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, tokens: torch.Tensor, position: int
) -> torch.Tensor | None:
    """Logits [vocab] after `position`, on the last pipeline stage; None elsewhere."""
    positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
    inputs = context_parallel_slices({"tokens": tokens, "positions": positions})

    def forward_step(_: Iterator[Any] | None, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return chunk(inputs["tokens"], inputs["positions"], None), lambda output, non_loss_data: output

    # Interleaved schedules take microbatches by the pipeline's size; the copies cost what one would.
    interleaved = len(chunks) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if interleaved else None,
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=config.pipeline_model_parallel_size if interleaved else 1,
        seq_length=tokens.size(1),
        micro_batch_size=tokens.size(0),
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    # [rows, s, v / TP] to [v]; under context parallelism the one rank that holds the position tells the others.
    here = (inputs["positions"][0] == position).to(outputs[-1].dtype)
    logits: torch.Tensor = gather_from_tensor_model_parallel_region(here @ outputs[-1][0]).float()
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(logits, group=parallel_state.get_context_parallel_group())
    return logits


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """One token id, [1], by its probability among the likeliest."""
    if top_k is not None and top_k < logits.numel():
        smallest = torch.topk(logits, top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator)


def generate_tokens(
    chunks: Sequence[torch.nn.Module],
    config: ModelConfig,
    prompt: Sequence[int],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    end_token: int | None,
    seed: int,
) -> list[int]:
    """Continues a prompt; every rank calls it and gets the same tokens.

    Args:
        chunks: This rank's model as the schedules take it, its parameters gathered (`Model.gathered_parameters`).
        config: Its configuration.
        prompt: Token ids, at least one.
        vocab_size: Ids to choose from: the tokenizer's, without the rows that pad the embedding.
        max_new_tokens: Most tokens to add; fewer where the training sequence length ends first.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
        top_k: Draw among so many likeliest tokens; None: among all.
        end_token: Stop after this id, if it is given.
        seed: Of the draws.

    Returns:
        The new token ids; they end early where the logits of a diverged model are not finite.
    """
    limit = config.encoder_seq_length
    total = min(len(prompt) + max_new_tokens, limit)
    length = min(_buffer_length(config, total), limit)
    # Rows enough for FP8 products, whose shapes have been checked for whole microbatches: copies, of which one is read.
    rows = config.micro_batch_size if config.fp8 and length == limit else 1
    device = torch.cuda.current_device()
    tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
    tokens[:, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
    for chunk in chunks:
        chunk.eval()
    end = len(prompt)
    while end < total:
        logits = _next_token_logits(chunks, config, tokens, end - 1)
        choice = torch.zeros(1, dtype=torch.int64, device=device)
        if logits is not None:
            logits = logits[:vocab_size]
            if not bool(logits.isfinite().all()):
                choice.fill_(_NOTHING)
            elif temperature == 0.0:
                choice = logits.argmax(keepdim=True)
            else:
                choice.copy_(_draw(logits, temperature, top_k, generator))
        if pipeline_group.size() > 1:
            torch.distributed.broadcast(choice, src=last_stage, group=pipeline_group)
        if config.num_moe_experts is not None:
            # Replicas meet at their experts: one that rounds otherwise and ends earlier would leave the others waiting.
            torch.distributed.broadcast(choice, src=0)
        token = int(choice.item())
        if token == _NOTHING:
            break
        tokens[:, end] = token
        end += 1
        if token == end_token:
            break
    for chunk in chunks:
        chunk.train()
    return [int(token) for token in tokens[0, len(prompt) : end].tolist()]
