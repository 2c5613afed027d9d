"""The LM head and its cross entropy in one: hidden states to losses, without the logits of all tokens.

megatron-core writes the logits of a microbatch, keeps them as an fp32 softmax and passes over them some ten times. Here
a few thousand tokens at a time go through the head: their logits are computed into one buffer, reduced to a loss each,
overwritten by their gradient, and multiplied into the gradients of hidden states and of the head's weight at once. The
forward pass does all of it, so that logits are computed once. What it has to know for that is the gradient of each
token's loss: the caller gives it beforehand, and the backward pass holds the one that arrives against it.

Under tensor parallelism each rank has a part of the vocabulary. Three numbers per token are exchanged for the loss; the
gradients of the hidden states are summed over the ranks by megatron-core's mappings, as those of its own head are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from gpt_pretrain.kernels.cross_entropy import merge_statistics, row_statistics, turn_into_gradient
from gpt_pretrain.megatron.weight_gradient import accumulate_weight_gradient
from gpt_pretrain.spec.products import chunk_tokens


class LossHead(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's LM head, which goes on to the losses where it is given labels.

    The one module whose forward pass reads the head's weight either way: what waits for gathered weights, or looks at
    results, hangs on it.
    """

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: torch.Tensor | None = None,
        loss_gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Losses in nats, [b, s] in fp32, and no bias; without labels megatron-core's logits.

        Args:
            input_: [s, b, h] (s / TP under sequence parallelism).
            weight: The embedding's where it is tied, [vocab / TP, h]; None: the head's own.
            runtime_gather_output: Of logits.
            labels: [b, s].
            loss_gradient: [b, s], fp32: the gradient of the step's loss with respect to each token's loss.
        """
        if labels is None or loss_gradient is None:
            return super().forward(input_, weight, runtime_gather_output)  # type: ignore[no-any-return]
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight if weight is None else weight,
            labels.t().reshape(-1),
            loss_gradient.t().reshape(-1),
            self.tp_group,
            accumulate=self.gradient_accumulation_fusion,
        )
        return losses.view(labels.size(1), labels.size(0)).t().contiguous(), None


def install_loss_heads(chunks: Sequence[GPTModel]) -> None:
    """Makes the LM head of these models a `LossHead`; its weights and whatever else it has stay."""
    for chunk in chunks:
        if chunk.post_process:
            assert type(chunk.output_layer) is ColumnParallelLinear, "the head that was read"
            chunk.output_layer.__class__ = LossHead


def losses_from_head(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    context: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """GPTModel's `output_processor`: losses [b, s] from a `LossHead`; the context is its `loss_gradient`."""
    losses: torch.Tensor
    losses, _bias = output_layer(hidden_states, output_weight, labels=labels, loss_gradient=context)
    return losses


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_gradient: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    accumulate: bool,
) -> torch.Tensor:
    """Cross entropy of each token, [tokens] in fp32; differentiable in hidden states and weight.

    Where gradients are wanted, the main gradient has grown by the weight's when this returns: the backward pass must
    follow.

    Args:
        hidden: [tokens, h], the same on all ranks of the group; so are labels and gradients.
        weight: [vocab / ranks, h], of the hidden states' type.
        labels: [tokens], in the whole vocabulary.
        loss_gradient: [tokens], fp32: what the backward pass will be given.
        group: The ranks that share the vocabulary, in its order.
        accumulate: Add the weight's gradient to its main gradient, where it has one.
    """
    task = _Task(
        labels=labels - group.rank() * weight.size(0),
        loss_gradient=loss_gradient,
        group=group,
        accumulate=accumulate and hasattr(weight, "main_grad"),
        wants_gradient=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
    )
    losses: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, task)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What `_LinearCrossEntropy` is to do with hidden states and weight."""

    labels: torch.Tensor
    """[tokens], counted from the first column of this rank."""
    loss_gradient: torch.Tensor
    group: torch.distributed.ProcessGroup
    accumulate: bool
    """Add to the weight's main gradient."""
    wants_gradient: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, task: _Task) -> torch.Tensor:
        num_tokens, num_columns = hidden.size(0), weight.size(0)
        chunk = chunk_tokens(num_tokens, num_columns)
        buffer = hidden.new_empty(chunk, num_columns)
        losses = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if task.wants_gradient else None
        weight_gradient = _gradient_of(weight, task, several=chunk < num_tokens) if task.wants_gradient else None
        for start in range(0, num_tokens, chunk):
            here = slice(start, min(start + chunk, num_tokens))
            logits, labels = buffer[: here.stop - start], task.labels[here]
            torch.mm(hidden[here], weight.t(), out=logits)
            losses[here], log_sum = merge_statistics(_of_all_ranks(row_statistics(logits, labels), task.group))
            if hidden_gradient is not None and weight_gradient is not None:
                turn_into_gradient(logits, labels, log_sum, task.loss_gradient[here])
                torch.mm(logits, weight, out=hidden_gradient[here])
                accumulate_weight_gradient(hidden[here], logits, weight_gradient)
        if weight_gradient is not None and task.accumulate and weight_gradient is not weight.main_grad:
            weight.main_grad.add_(weight_gradient)
        ctx.weight, ctx.task = weight, task
        ctx.save_for_backward(hidden_gradient, None if task.accumulate else weight_gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given,), (hidden_gradient, weight_gradient) = gradients, ctx.saved_tensors
        weight: torch.Tensor = ctx.weight
        torch._assert_async(
            torch.isclose(given, ctx.task.loss_gradient, rtol=1e-5, atol=0.0).all(),
            "the gradient of the tokens' losses is another than the LM head was told",
        )
        if weight_gradient is not None:
            return hidden_gradient, weight_gradient.to(weight.dtype), None
        # megatron-core's data parallelism waits for some gradient of each weight, and adds this one only where a tied
        # embedding's own comes with it (`zero_out_wgrad`).
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        tied = getattr(weight, "zero_out_wgrad", False)
        return hidden_gradient, torch.zeros_like(weight) if tied else torch.empty_like(weight), None


def _gradient_of(weight: Any, task: _Task, *, several: bool) -> torch.Tensor:
    """Where the weight's gradient is summed up over the chunks.

    A main gradient in BF16 is not where several are: it is rounded once for each microbatch, as without chunks.
    """
    if task.accumulate and not (several and weight.main_grad.dtype is not torch.float32):
        main_grad: torch.Tensor = weight.main_grad
        return main_grad
    return torch.zeros_like(weight, dtype=torch.float32)


def _of_all_ranks(statistics: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[3, rows] of each rank as [ranks, 3, rows]."""
    if group.size() == 1:
        return statistics[None]
    numbers, rows = statistics.shape
    gathered = statistics.new_empty(group.size() * numbers, rows)
    torch.distributed.all_gather_into_tensor(gathered, statistics, group=group)
    return gathered.view(group.size(), numbers, rows)
