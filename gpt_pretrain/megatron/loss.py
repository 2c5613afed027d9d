"""The loss: from hidden states to the loss of each token, and from there to that of a microbatch.

megatron-core writes the logits of a microbatch, keeps them as an fp32 softmax and passes over them some ten times. With
`model.cross_entropy_loss_fusion` and `cross_entropy_fusion_impl=linear` the model's head, `LossHead`, goes on to the
losses instead: `kernels.cross_entropy` sends a few thousand tokens at a time through the head and never holds all
logits. It computes gradients in the forward pass, so each logit is computed once. That needs the gradient of each
token's loss in advance: `loss_gradient` predicts it, and the backward pass checks the one that arrives.

With other losses megatron-core computes logits and token losses itself. Either way `summed_loss` reduces token losses
to what its schedules expect.

Under tensor parallelism each rank holds a part of the vocabulary. The ranks exchange three numbers per token for the
loss; megatron-core's mappings sum the hidden states' gradients over the ranks, as they do for its own head.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from gpt_pretrain.kernels.cross_entropy import linear_cross_entropy, score_labels, soft_cap
from gpt_pretrain.run.products import chunk_tokens


def summed_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of a microbatch as the schedules take it, from token losses [b, s] in nats.

    `loss_mask`, [b, s], is 1 for tokens that count. The result is the sum over these tokens, their number, and both as
    a report, fp32 [2].
    """
    mask = loss_mask.reshape(-1).float()
    loss_sum = torch.dot(losses.reshape(-1).float(), mask)
    num_tokens = mask.sum()
    report = torch.stack([loss_sum.detach(), num_tokens])
    return loss_sum, num_tokens.to(torch.int), report


def loss_gradient(loss_mask: torch.Tensor, num_microbatches: int, *, per_token: bool) -> torch.Tensor:
    """The gradient of each token's loss that the schedules will hand back, fp32 [b, s].

    megatron-core's `forward_step_calc_loss` divides `summed_loss` by the number of tokens, at least 1, and by the
    number of microbatches. With `calculate_per_token_loss` it divides the summed gradients instead.
    """
    mask = loss_mask.float()
    return mask if per_token else mask / num_microbatches / mask.sum().clamp(min=1)


class LossHead(ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's LM head, which goes on to the losses if it gets labels.

    Logits and losses both come from its forward pass, which hooks can wait for or look at.
    """

    tokens_at_once: int | None = None
    """Tokens that go through the head together; None: `run.products.chunk_tokens`."""
    z_loss_coeff: float = 0.0
    output_mult: float = 1.0
    """What logits are multiplied by (`features.mup`), before the cap."""
    cap: float | None = None
    """`model.final_logit_softcapping`: logits are capped wherever they come from."""
    num_tokens: int
    """Of the vocabulary, without its padding."""

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: torch.Tensor | None = None,
        loss_gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Losses in nats, fp32 [b, s], and no bias; without labels megatron-core's logits, without gradient scores.

        `input_` is [s, b, h] (s / TP under sequence parallelism), `weight` [vocab / TP, h] a tied embedding's or None.
        `labels` are [b, s]; `loss_gradient`, fp32 [b, s], is the gradient of the step's loss by each token's loss.
        Scores are those of `kernels.cross_entropy.score_labels`, [b, s, 2].
        """
        if self.output_mult != 1.0:
            # On this side of the head, gradients are scaled like logits whatever computes the loss.
            input_ = input_ * self.output_mult
        if labels is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            return (logits if self.cap is None else soft_cap(logits, self.cap)), bias
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        rows, weight = hidden.flatten(0, 1), self.weight if weight is None else weight
        chunk = self.tokens_at_once or chunk_tokens(rows.size(0), weight.size(0))
        if loss_gradient is None:
            scores = score_labels(
                rows,
                weight,
                labels.t().reshape(-1),
                self.tp_group,
                chunk=chunk,
                num_tokens=self.num_tokens,
                cap=self.cap,
            )
            return scores.view(*labels.t().shape, 2).transpose(0, 1).contiguous(), None
        losses = linear_cross_entropy(
            rows,
            weight,
            labels.t().reshape(-1),
            loss_gradient.t().reshape(-1),
            self.tp_group,
            chunk=chunk,
            accumulate=self.gradient_accumulation_fusion,
            z_loss=self.z_loss_coeff,
            cap=self.cap,
        )
        return losses.view(labels.size(1), labels.size(0)).t().contiguous(), None


def losses_from_head(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    context: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """megatron-core's `output_processor`: losses [b, s] from a `LossHead`; the context is its `loss_gradient`."""
    losses: torch.Tensor
    losses, _bias = output_layer(hidden_states, output_weight, labels=labels, loss_gradient=context)
    return losses


def scores_from_head(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """megatron-core's `output_processor`: scores [b, s, 2] from a `LossHead`."""
    scores: torch.Tensor
    scores, _bias = output_layer(hidden_states, output_weight, labels=labels)
    return scores
