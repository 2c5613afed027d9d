"""The LM head and its cross entropy in one: hidden states to losses, without the logits of all tokens.

A chunk of tokens at a time goes through the head. Their logits are computed into one buffer, reduced to a loss each,
overwritten by their gradient, and multiplied at once into the gradients of the hidden states and of the head's weight.

The columns of the logits are shared out over ranks. Three numbers say everything about a row: its largest logit, the
sum of exponentials relative to it, and the logit of its label. Each rank finds them for its columns, the ranks merge
them, and each overwrites its logits by their gradient. On a GPU `cross_entropy_triton` does both, elsewhere torch's own
operations: the same arithmetic in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_gradient: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    chunk: int,
    accumulate: bool,
) -> torch.Tensor:
    """Cross entropy of each token, [tokens] in fp32; differentiable in hidden states and weight.

    With gradients enabled, this has already added the weight's gradient to the main gradient when it returns: the
    backward pass must follow.

    Args:
        hidden: [tokens, h], the same on all ranks of the group; so are labels and gradients.
        weight: [vocab / ranks, h], of the hidden states' type.
        labels: [tokens], in the whole vocabulary.
        loss_gradient: [tokens], fp32: what the backward pass will be given.
        group: The ranks that share the vocabulary, in its order.
        chunk: Tokens whose logits are held at once, at most `tokens`.
        accumulate: Add the weight's gradient to its main gradient, where it has one.
    """
    task = _Task(
        labels=labels - group.rank() * weight.size(0),
        loss_gradient=loss_gradient,
        group=group,
        chunk=chunk,
        accumulate=accumulate and hasattr(weight, "main_grad"),
        wants_gradient=torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad),
    )
    losses: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, task)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """What `_LinearCrossEntropy` does with hidden states and weight."""

    labels: torch.Tensor
    """[tokens], counted from the first column of this rank."""
    loss_gradient: torch.Tensor
    group: torch.distributed.ProcessGroup
    chunk: int
    """Tokens whose logits are held at once."""
    accumulate: bool
    """Add to the weight's main gradient."""
    wants_gradient: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, task: _Task) -> torch.Tensor:
        num_tokens, num_columns, chunk = hidden.size(0), weight.size(0), task.chunk
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
            "the gradient of the tokens' losses differs from the one that the LM head was given",
        )
        if weight_gradient is not None:
            return hidden_gradient, weight_gradient.to(weight.dtype), None
        # Data parallelism waits for some gradient of each weight. megatron-core's adds this one only where the gradient
        # of a tied embedding comes with it (`zero_out_wgrad`).
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        tied = getattr(weight, "zero_out_wgrad", False)
        return hidden_gradient, torch.zeros_like(weight) if tied else torch.empty_like(weight), None


def accumulate_weight_gradient(
    layer_input: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += output_gradientᵀ · layer_input, in the type of the main gradient.

    torch's `addmm`, whose result may be wider than its factors, is the product of cuBLAS that apex's
    `fused_weight_gradient_mlp_cuda` computes. Inputs [tokens, in] and gradients [tokens, out] have one type, the main
    gradient [out, in] has that or fp32.
    """
    transposed = output_gradient.t()
    if main_grad.dtype is layer_input.dtype:
        main_grad.addmm_(transposed, layer_input)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, transposed, layer_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # torch multiplies into a wider type on a GPU only.
        main_grad.addmm_(transposed.to(main_grad.dtype), layer_input.to(main_grad.dtype))


def _gradient_of(weight: Any, task: _Task, *, several: bool) -> torch.Tensor:
    """Where the weight's gradient is summed over the chunks.

    With several chunks that is never a BF16 main gradient, which is rounded once per microbatch, as without chunks.
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


def row_statistics(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the loss of each row needs from these columns.

    Args:
        logits: [rows, columns], rows contiguous.
        labels: [rows], counted from the first of these columns; outside of them where another rank holds the column.

    Returns:
        [3, rows], fp32: the largest logit, the sum of exp(logit - largest), and the label's logit or -inf.
    """
    if logits.is_cuda:
        from gpt_pretrain.kernels.cross_entropy_triton import launch_statistics

        return launch_statistics(logits, labels)
    values = logits.float()
    largest = values.amax(dim=1)
    exponentials = torch.exp(values - largest[:, None]).sum(dim=1)
    here = (labels >= 0) & (labels < logits.size(1))
    labelled = values.gather(1, torch.where(here, labels, 0)[:, None])[:, 0]
    return torch.stack([largest, exponentials, torch.where(here, labelled, -torch.inf)])


def merge_statistics(statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row and the logarithm of its sum of exponentials, both [rows] in fp32.

    `statistics` are [ranks, 3, rows], from all ranks that share the columns.
    """
    largest = statistics[:, 0].amax(dim=0)
    exponentials = (statistics[:, 1] * torch.exp(statistics[:, 0] - largest)).sum(dim=0)
    log_sum = largest + torch.log(exponentials)
    return log_sum - statistics[:, 2].amax(dim=0), log_sum


def turn_into_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_sum: torch.Tensor, loss_gradient: torch.Tensor
) -> None:
    """Overwrites logits with the gradient of the rows' losses: (softmax - 1 at the label) · gradient of the loss.

    Logits and labels are as for `row_statistics`; `log_sum`, fp32 [rows], is from `merge_statistics`, and
    `loss_gradient`, fp32 [rows], is that of each row's loss.
    """
    if logits.is_cuda:
        from gpt_pretrain.kernels.cross_entropy_triton import launch_gradient

        launch_gradient(logits, labels, log_sum, loss_gradient)
        return
    gradient = torch.exp(logits.float() - log_sum[:, None])
    columns = torch.arange(logits.size(1), device=logits.device)
    gradient -= (columns == labels[:, None]).float()
    logits.copy_(gradient * loss_gradient[:, None])
