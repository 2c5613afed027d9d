"""Cross entropy of rows of logits that tensor parallel ranks share out by columns, and its gradient in their place.

Everything about a row is in three numbers: its largest logit, the sum of exponentials below it, and the logit of its
label. Each rank finds them for its columns, the ranks merge them, and each overwrites its logits by their gradient.
Triton computes both on a GPU (`loss_triton.py`), torch's own operations elsewhere: the same arithmetic in fp32.
"""

import torch


def row_statistics(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the loss of each row needs of these columns.

    Args:
        logits: [rows, columns], rows contiguous.
        labels: [rows], counted from the first of these columns; outside of them where another rank has the column.

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

    Args:
        statistics: [ranks, 3, rows] of all ranks that share the columns.
    """
    largest = statistics[:, 0].amax(dim=0)
    exponentials = (statistics[:, 1] * torch.exp(statistics[:, 0] - largest)).sum(dim=0)
    log_sum = largest + torch.log(exponentials)
    return log_sum - statistics[:, 2].amax(dim=0), log_sum


def turn_into_gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_sum: torch.Tensor, loss_gradient: torch.Tensor
) -> None:
    """Overwrites logits by the gradient of the rows' losses: (softmax - 1 at the label) · gradient of the loss.

    Args:
        logits: [rows, columns], rows contiguous.
        labels: [rows], as for `row_statistics`.
        log_sum: [rows], fp32, from `merge_statistics`.
        loss_gradient: [rows], fp32: of each row's loss.
    """
    if logits.is_cuda:
        from gpt_pretrain.kernels.cross_entropy_triton import launch_gradient

        launch_gradient(logits, labels, log_sum, loss_gradient)
        return
    gradient = torch.exp(logits.float() - log_sum[:, None])
    columns = torch.arange(logits.size(1), device=logits.device)
    gradient -= (columns == labels[:, None]).float()
    logits.copy_(gradient * loss_gradient[:, None])
