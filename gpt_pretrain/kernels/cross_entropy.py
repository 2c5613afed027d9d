"""The LM head fused with its cross entropy: hidden states to losses, without the logits of all tokens at once.

The head computes the logits of one chunk of tokens into a buffer, reduces them to losses, overwrites them with their
gradient, and multiplies that into the gradients of the hidden states and of the head's weight.

Ranks split the columns of the logits. The loss of a row needs three numbers of each rank: the largest logit, the sum of
exponentials relative to it, and the logit of the label. On a GPU `layers_triton` computes them and the gradient,
elsewhere torch's own operations: the same arithmetic in fp32.
"""

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
    z_loss: float = 0.0,
    cap: float | None = None,
) -> torch.Tensor:
    """Cross entropy of each token, [tokens] in fp32; differentiable in hidden states and weight.

    Gradients are those of the cross entropy + z_loss · (log z)², z being the sum of the logits' exponentials, which
    keeps logits from drifting (Chowdhery et al. 2022, arXiv 2204.02311); the losses returned leave the penalty out.

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
        z_loss: Weight of the penalty.
        cap: What enters the softmax, and z, is `soft_cap` of the logits, in fp32; None: the logits.
    """
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    own_labels = labels - group.rank() * weight.size(0)
    accumulate = accumulate and hasattr(weight, "main_grad")
    losses: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, own_labels, loss_gradient, group, chunk, accumulate, z_loss, cap, wants_gradient
    )
    return losses


def score_labels(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    *,
    chunk: int,
    num_tokens: int,
    cap: float | None = None,
) -> torch.Tensor:
    """[tokens, 2], fp32: the cross entropy, and 1 where the label is not the likeliest token, else 0; no gradients.

    The arguments are those of `linear_cross_entropy`. Columns from `num_tokens` on pad the vocabulary and do not count.
    Among equal logits the first token is the likeliest.
    """
    first_column = group.rank() * weight.size(0)
    columns = max(0, min(weight.size(0), num_tokens - first_column))
    scores = torch.empty(hidden.size(0), 2, dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.size(0), chunk):
        here = slice(start, start + chunk)
        logits = hidden[here] @ weight.t()
        if cap is not None:
            # Before padding gets its value, which a cap would raise.
            logits = soft_cap(logits.float(), cap)
        # Not -inf: a rank may hold nothing but padding.
        logits[:, columns:] = torch.finfo(logits.dtype).min
        statistics = row_statistics(logits, labels[here] - first_column)
        likeliest = (logits.argmax(dim=1) + first_column).float()
        gathered = _of_all_ranks(torch.cat([statistics, likeliest[None]]), group)
        best_rank = gathered[:, 0].argmax(dim=0, keepdim=True)
        scores[here, 0], _ = merge_statistics(gathered[:, :3])
        scores[here, 1] = (gathered[:, 3].gather(0, best_rank)[0] != labels[here]).float()
    return scores


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes everything by position
        ctx: Any,
        hidden: torch.Tensor,
        weight: Any,
        labels: torch.Tensor,
        loss_gradient: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        chunk: int,
        accumulate: bool,
        z_loss: float,
        cap: float | None,
        wants_gradient: bool,
    ) -> torch.Tensor:
        num_tokens, num_columns = hidden.size(0), weight.size(0)
        buffer = hidden.new_empty(chunk, num_columns)
        losses = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        hidden_gradient = None
        weight_gradient: Any = None
        if wants_gradient:
            hidden_gradient = torch.empty_like(hidden)
            # A BF16 main gradient must be rounded once per microbatch, so it cannot take a sum over several chunks.
            in_place = accumulate and (chunk >= num_tokens or weight.main_grad.dtype is torch.float32)
            weight_gradient = weight.main_grad if in_place else torch.empty_like(weight, dtype=torch.float32)
        for start in range(0, num_tokens, chunk):
            here = slice(start, min(start + chunk, num_tokens))
            logits = buffer[: here.stop - start]
            torch.mm(hidden[here], weight.t(), out=logits)
            losses[here], log_sum = merge_statistics(_of_all_ranks(row_statistics(logits, labels[here], cap), group))
            if hidden_gradient is not None:
                # The penalty multiplies the softmax by 1 + 2 · z_loss · log z.
                reduced = log_sum - torch.log1p(2 * z_loss * log_sum) if z_loss else log_sum
                turn_into_gradient(logits, labels[here], reduced, loss_gradient[here], cap)
                torch.mm(logits, weight, out=hidden_gradient[here])
                overwrites = start == 0 and not in_place
                accumulate_weight_gradient(hidden[here], logits, weight_gradient, overwrites=overwrites)
        if wants_gradient and accumulate and not in_place:
            weight.main_grad.add_(weight_gradient)
        ctx.weight, ctx.loss_gradient = weight, loss_gradient
        ctx.save_for_backward(hidden_gradient, None if accumulate else weight_gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given,), (hidden_gradient, weight_gradient), weight = gradients, ctx.saved_tensors, ctx.weight
        torch._assert_async(
            torch.isclose(given, ctx.loss_gradient, rtol=1e-5, atol=0.0).all(),
            "the gradient of the tokens' losses differs from the one that the LM head was given",
        )
        if weight_gradient is not None:
            returned = weight_gradient.to(weight.dtype)
        else:
            # Data parallelism waits for some gradient of each weight. megatron-core's adds this one only where the
            # gradient of a tied embedding comes with it (`zero_out_wgrad`).
            weight.grad_added_to_main_grad = True
            tied = getattr(weight, "zero_out_wgrad", False)
            returned = torch.zeros_like(weight) if tied else torch.empty_like(weight)
        return hidden_gradient, returned, *[None] * 8


def accumulate_weight_gradient(
    layer_input: torch.Tensor, output_gradient: torch.Tensor, main_grad: torch.Tensor, *, overwrites: bool = False
) -> None:
    """main_grad += output_gradientᵀ · layer_input, in the type of the main gradient; = if it `overwrites`.

    Inputs [tokens, in] and gradients [tokens, out] have one type, the main gradient [out, in] has that or fp32. torch's
    `addmm` is the product of cuBLAS that apex's `fused_weight_gradient_mlp_cuda` computes.
    """
    transposed, beta = output_gradient.t(), 0 if overwrites else 1
    if main_grad.dtype is layer_input.dtype:
        main_grad.addmm_(transposed, layer_input, beta=beta)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, transposed, layer_input, out_dtype=main_grad.dtype, beta=beta, out=main_grad)
    else:
        # Only on a GPU can torch multiply into a wider type.
        main_grad.addmm_(transposed.to(main_grad.dtype), layer_input.to(main_grad.dtype), beta=beta)


def _of_all_ranks(statistics: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """[3, rows] of each rank as [ranks, 3, rows]."""
    if group.size() == 1:
        return statistics[None]
    numbers, rows = statistics.shape
    gathered = statistics.new_empty(group.size() * numbers, rows)
    torch.distributed.all_gather_into_tensor(gathered, statistics, group=group)
    return gathered.view(group.size(), numbers, rows)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """The logits c held within ±cap, of their type: cap · tanh(c / cap) in fp32 (Gemma 2, arXiv 2408.00118)."""
    return (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


def row_statistics(logits: torch.Tensor, labels: torch.Tensor, cap: float | None = None) -> torch.Tensor:
    """[3, rows], fp32: the largest logit, the sum of exp(logit - largest), and the label's logit or -inf.

    With a `cap` they are those of the capped logits (`soft_cap`).

    `logits` are [rows, columns], rows contiguous. `labels`, [rows], count from the first of these columns; they lie
    outside if another rank holds the column.
    """
    if logits.is_cuda:
        from gpt_pretrain.kernels.layers_triton import launch_statistics

        return launch_statistics(logits, labels, cap)
    values = logits.float() if cap is None else soft_cap(logits.float(), cap)
    largest = values.amax(dim=1)
    exponentials = torch.exp(values - largest[:, None]).sum(dim=1)
    here = (labels >= 0) & (labels < logits.size(1))
    labelled = values.gather(1, torch.where(here, labels, 0)[:, None])[:, 0]
    return torch.stack([largest, exponentials, torch.where(here, labelled, -torch.inf)])


def merge_statistics(statistics: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row and the logarithm of its sum of exponentials, both [rows] in fp32.

    `statistics` are [ranks, 3, rows].
    """
    largest = statistics[:, 0].amax(dim=0)
    exponentials = (statistics[:, 1] * torch.exp(statistics[:, 0] - largest)).sum(dim=0)
    log_sum = largest + torch.log(exponentials)
    return log_sum - statistics[:, 2].amax(dim=0), log_sum


def turn_into_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum: torch.Tensor,
    loss_gradient: torch.Tensor,
    cap: float | None = None,
) -> None:
    """Overwrites logits with the gradient of the rows' losses: (softmax - 1 at the label) · gradient of the loss.

    Logits, labels and cap are as for `row_statistics`; the slope of a cap, 1 - tanh²(logit / cap), multiplies the
    gradient. `log_sum` (from `merge_statistics`) and `loss_gradient` are fp32 [rows].
    """
    if logits.is_cuda:
        from gpt_pretrain.kernels.layers_triton import launch_gradient

        launch_gradient(logits, labels, log_sum, loss_gradient, cap)
        return
    values = logits.float() if cap is None else soft_cap(logits.float(), cap)
    gradient = torch.exp(values - log_sum[:, None])
    columns = torch.arange(logits.size(1), device=logits.device)
    gradient -= (columns == labels[:, None]).float()
    if cap is not None:
        gradient *= 1 - (values / cap).square()
    logits.copy_(gradient * loss_gradient[:, None])
