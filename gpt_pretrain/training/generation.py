"""Text from a model: a sample at the end of a run, in any tensor and pipeline parallel layout, or from a checkpoint.

There is no key/value cache: every token takes one forward pass over a buffer of fixed length, padded on the right,
where causal attention does not look. That is slow for long texts, but simple.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from gpt_pretrain.checkpoint.saved_model import open_checkpoint
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.data.corpus import Corpus
from gpt_pretrain.data.tokenizer import Tokenizer
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.parallel import context_parallel_slices, without_user_buffers
from gpt_pretrain.training.inference import buffer_length, forward_pass
from gpt_pretrain.training.loaded_model import inference_config, loaded_model

# What the last stage sends instead of a token.
_NOTHING = -1


@torch.no_grad()
def _next_token_logits(
    chunks: Sequence[torch.nn.Module], config: ModelConfig, tokens: torch.Tensor, position: int
) -> torch.Tensor | None:
    """Logits [vocab] after `position`, on the last pipeline stage; None elsewhere."""
    positions = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
    inputs = context_parallel_slices({"tokens": tokens, "positions": positions})

    logits_here = forward_pass(
        chunks, config, tokens.shape, lambda chunk: chunk(inputs["tokens"], inputs["positions"], None)
    )
    if logits_here is None:
        return None
    # [rows, s, v / TP] to [v]; under context parallelism the one rank that holds the position tells the others.
    here = (inputs["positions"][0] == position).to(logits_here.dtype)
    logits: torch.Tensor = gather_from_tensor_model_parallel_region(here @ logits_here[0]).float()
    if parallel_state.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(logits, group=parallel_state.get_context_parallel_group())
    return logits


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """One token id, [1], drawn among the `top_k` likeliest."""
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
    """Continues a prompt of at least one token; every rank calls it and gets the same tokens.

    `chunks` are this rank's model as the schedules take it, inside `Model.newest_parameters`.
    `vocab_size` counts the tokenizer's ids, without the rows that pad the embedding. The text ends after `end_token`,
    at the training sequence length, or when the logits of a diverged model are not finite.
    `generate.GenerateArguments` documents the other arguments.
    """
    limit = config.encoder_seq_length
    total = min(len(prompt) + max_new_tokens, limit)
    length = min(buffer_length(config, total), limit)
    # FP8 products are checked for the shapes of whole microbatches: all rows are copies, and only the first is read.
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
            # Replicas meet at their experts: if one rounds differently and ends earlier, the others wait forever.
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
    generated: list[int] = tokens[0, len(prompt) : end].tolist()
    return generated


def _encode_prompt(tokenizer: Tokenizer, prompt: str, model: ModelConfig, *, key: str, way_out: str) -> list[int]:
    tokens, limit = tokenizer.encode(prompt), model.encoder_seq_length
    if not 0 < len(tokens) < limit:
        raise UserError(
            f"{key}={prompt!r} is {len(tokens)} tokens, and the model continues 1 to {limit - 1} "
            f"(model.encoder_seq_length={limit}); {way_out}"
        )
    return tokens


def check_prompt(config: Config, corpus: Corpus) -> None:
    """Refuses at the start a `sample.prompt` that the sample at the end could not continue."""
    if corpus.tokenizer is not None and config.sample.max_new_tokens > 0:
        way_out = "give another, or sample.max_new_tokens=0"
        _encode_prompt(corpus.tokenizer, config.sample.prompt, config.model, key="sample.prompt", way_out=way_out)


def write_sample(config: Config, corpus: Corpus, model: Model) -> str | None:
    """What the model writes after `sample.prompt`; None without a sample or a tokenizer. Every rank calls it."""
    sample, tokenizer = config.sample, corpus.tokenizer
    if tokenizer is None or sample.max_new_tokens == 0:
        return None
    with model.newest_parameters(), without_user_buffers(model.gpt_chunks):
        tokens = generate_tokens(
            model.chunks,
            config.model,
            tokenizer.encode(sample.prompt),
            vocab_size=tokenizer.vocab_size,
            max_new_tokens=sample.max_new_tokens,
            temperature=sample.temperature,
            end_token=tokenizer.eod,
            seed=config.model.seed,
        )
    return tokenizer.decode(tokens)


def continuations(
    *,
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    num_samples: int,
    tokenizer: str | None,
) -> Iterator[str]:
    """The continuations of a prompt, one by one; `generate.GenerateArguments` documents the arguments.

    Raises:
        UserError: The checkpoint is damaged, has no tokenizer, or the prompt is empty or too long for it.
    """
    saved = open_checkpoint(Path(checkpoint), None if tokenizer is None else Path(tokenizer))
    saved_tokenizer, config = saved.tokenizer, inference_config(saved)
    if saved_tokenizer is None:
        raise UserError(f"{saved.path} is of a model without a tokenizer: it has token ids and no text")
    tokens = _encode_prompt(saved_tokenizer, prompt, config.model, key="prompt", way_out="give another")
    saved.check_files()
    with loaded_model(saved, config, read_launch({})) as model:
        for number in range(num_samples):
            generated = generate_tokens(
                model.chunks,
                config.model,
                tokens,
                vocab_size=saved_tokenizer.vocab_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                end_token=saved_tokenizer.eod,
                seed=seed + number,
            )
            yield saved_tokenizer.decode(generated)
