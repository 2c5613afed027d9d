"""One optimizer step and one validation, through megatron-core's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt_pretrain.config.mixtures import own_lengths
from gpt_pretrain.config.schedule import rates_in_tokens
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.fp8.infinities import StepCasts
from gpt_pretrain.megatron.loss import loss_gradient, summed_loss
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.norms import gradient_norms, weight_norms
from gpt_pretrain.megatron.optimizer import StepResult, conditional_update
from gpt_pretrain.megatron.parallel import context_parallel_slices, is_last_stage_writer
from gpt_pretrain.megatron.qk_clip import LargestLogits
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.megatron.weight_average import update_average


def data_iterators[Batches: Iterator[Batch]](model: Model, build: Callable[[], Batches]) -> list[Batches | None]:
    """One iterator for each model chunk that sees tokens, labels or the borders of documents.

    Chunks without embedding and loss see borders alone, if documents do not see each other.
    """
    all_see = model.spec.model.data.inter_document_masking
    return [build() if all_see or chunk.pre_process or chunk.post_process else None for chunk in model.gpt_chunks]


def _forward_step(
    iterator: Iterator[Batch] | None,
    chunk: Any,
    return_schedule_plan: bool = False,
    *,
    model: Model,
    num_microbatches: int,
    sequence_length: int,
    reports_lengths: bool,
    before_pass: Callable[[], None],
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Runs one microbatch through one model chunk, when a schedule asks for it.

    With `model.overlap_moe_expert_parallel_comm` it asks for a plan of the forward pass instead, to run it beside the
    backward pass of the microbatch before.
    """
    before_pass()
    if iterator is None:
        output = chunk(None, None, None, labels=None)
        _before_backward(output, before_pass)
        return output, lambda _: None
    batch = next(iterator).cut(sequence_length)
    borders, tensors = batch.document_borders, context_parallel_slices(batch.sequences())
    computes_loss: dict[str, Any] = {}
    if model.output_processor is not None:
        per_token = model.transformer_config.calculate_per_token_loss
        gradient = loss_gradient(tensors["loss_mask"], num_microbatches, per_token=per_token)
        computes_loss = {"output_processor": model.output_processor, "output_processor_context": gradient}
    # Causal attention is part of the layer spec; in the mask's place are the borders of documents, if any.
    compute = chunk.build_schedule_plan if return_schedule_plan else chunk
    output = compute(tensors["tokens"], tensors["position_ids"], borders, labels=tensors["labels"], **computes_loss)
    if not return_schedule_plan:
        _before_backward(output, before_pass)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if return_schedule_plan:
            _before_backward(losses, before_pass)
        loss_sum, num_tokens, report = summed_loss(tensors["loss_mask"], losses)
        if reports_lengths:
            # A tensor of a number known here would be copied to the GPU, for which the host waits.
            whole = float(batch.tokens.numel() * sequence_length)
            squares = report.new_full((1,), whole) if borders is None else squared_lengths(borders)
            report = torch.cat([report, squares / model.spec.layout.cp])
        return loss_sum, num_tokens, report

    return output, loss


def squared_lengths(borders: torch.Tensor) -> torch.Tensor:
    """Sum of the squared lengths of the documents between borders, fp32 [1]: what attention's operations grow with."""
    return borders.diff().float().square().sum().view(1)


def _before_backward(output: torch.Tensor, call: Callable[[], None]) -> None:
    """Calls a function when the backward pass of a model chunk begins."""
    if output.requires_grad:
        output.register_hook(lambda _: call())


def _run_schedule(
    model: Model,
    iterators: Sequence[Iterator[Batch] | None],
    num_microbatches: int,
    *,
    forward_only: bool,
    sequence_length: int | None = None,
    before_pass: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    config = model.spec.model
    cut = config.encoder_seq_length if sequence_length is None else sequence_length
    num_tokens = config.micro_batch_size * config.encoder_seq_length
    # With documents that do not see each other, all samples are one sequence.
    length = num_tokens if config.data.inter_document_masking else cut
    reports_lengths = config.data.inter_document_masking or bool(own_lengths(config.data))
    reports = get_forward_backward_func()(
        forward_step_func=partial(
            _forward_step,
            model=model,
            num_microbatches=num_microbatches,
            sequence_length=cut,
            reports_lengths=reports_lengths,
            before_pass=before_pass,
        ),
        data_iterator=list(iterators) if len(iterators) > 1 else iterators[0],
        model=model.chunks if len(model.chunks) > 1 else model.chunks[0],
        num_microbatches=num_microbatches,
        seq_length=length,
        micro_batch_size=num_tokens // length,
        forward_only=forward_only,
    )
    if not is_last_stage_writer():
        return torch.zeros(3 if reports_lengths else 2, device=torch.cuda.current_device())
    return torch.stack(reports).sum(dim=0)


def train_step(
    trainable: Trainable,
    iterators: Sequence[Iterator[Batch] | None],
    num_samples: int | None = None,
    sequence_length: int | None = None,
    *,
    norms: bool = False,
) -> StepResult:
    """Forward and backward over all microbatches of this rank, and one optimizer update if everything is finite.

    All ranks together train on `num_samples`; None: model.global_batch_size. These are cut into pieces of
    `sequence_length` tokens; None: not cut. The schedule advances first, so that step
    n trains with the learning rate of n, and the first step not with zero. It also advances in a step that updates
    nothing: the learning rate is a function of the step, or of the tokens up to its end. `norms`: measure those too.
    """
    spec, casts, logits = trainable.model.spec, StepCasts(trainable.model.gpt_chunks), LargestLogits(trainable.model)
    num_samples = spec.model.global_batch_size if num_samples is None else num_samples
    with casts.watching():
        report = compute_gradients(trainable, iterators, num_samples, sequence_length, before_pass=casts.look)
    largest = logits.share()
    trainable.scheduler.step(num_samples * spec.model.encoder_seq_length if rates_in_tokens(spec.config) else 1)
    optimizer, of_layers = trainable.optimizer, []

    def take_norms(of: Callable[[MegatronOptimizer, Model], torch.Tensor]) -> None:
        if norms:
            of_layers.append(of(optimizer, trainable.model))

    result = conditional_update(
        optimizer,
        report,
        casts.met_infinity(),
        before_clip=lambda: take_norms(gradient_norms),
        before_update=casts.restore_if_skipped,
    )
    take_norms(weight_norms)
    if (decay := spec.model.optim.ema_decay) is not None:
        update_average(optimizer, decay, result.skipped)
    return replace(result, max_attention_logit=largest, norms=torch.stack(of_layers) if norms else None)


def compute_gradients(
    trainable: Trainable,
    iterators: Sequence[Iterator[Batch] | None],
    num_samples: int | None = None,
    sequence_length: int | None = None,
    *,
    before_pass: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Forward and backward over all microbatches of this rank; gradients accumulate from zero.

    `iterators` come from `data_iterators`; `num_samples` and `sequence_length` are those of `train_step`.
    `before_pass` is called before the forward and the backward pass of each microbatch through each model chunk.

    Returns:
        fp32: sum of the token losses and number of tokens on this rank, [2]; with documents that do not see each other
        or stages of other sequence lengths also the sum of squared lengths, [3]. Zeros off the last pipeline stage.
    """
    for chunk in trainable.model.chunks:
        chunk.zero_grad_buffer()
    trainable.optimizer.zero_grad()
    spec = trainable.model.spec
    passes = spec.layout.num_microbatches if num_samples is None else spec.microbatches_of(num_samples)
    return _run_schedule(
        trainable.model,
        iterators,
        passes,
        forward_only=False,
        sequence_length=sequence_length,
        before_pass=before_pass,
    )


@torch.no_grad()
def validate(
    model: Model, iterators: Sequence[Iterator[Batch] | None], num_batches: int, *, on_batch: Callable[[], None]
) -> float:
    """Mean loss in nats per token over `num_batches` global batches; the same number on all ranks.

    Call it inside `Model.newest_parameters`. `on_batch` is called before each batch.
    """
    model.eval()
    total = torch.zeros(2, device=torch.cuda.current_device())
    for _ in range(num_batches):
        on_batch()
        total += _run_schedule(model, iterators, model.spec.layout.num_microbatches, forward_only=True)[:2]
    model.train()
    torch.distributed.all_reduce(total)
    return mean_loss(total)


def mean_loss(loss_sum_and_tokens: torch.Tensor) -> float:
    """Loss per token from the sum of losses and the number of tokens, [2]; NaN without tokens. Waits for the device."""
    loss_sum, num_tokens = loss_sum_and_tokens.tolist()
    return float(loss_sum / num_tokens) if num_tokens else float("nan")
