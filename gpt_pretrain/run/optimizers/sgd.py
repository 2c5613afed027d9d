"""Stochastic gradient descent with momentum."""

from gpt_pretrain.extend.optimizers import Optimizer
from gpt_pretrain.extend.registry import register

_SGD = Optimizer(
    core_name="sgd",
    class_name="SGD",
    decoupled_weight_decay=False,
    has_distributed_form=False,
    state_bytes=lambda optim: 4 if optim.momentum > 0 else 0,
    moved_bytes=26,
    unread=dict.fromkeys(("betas", "eps"), "model.optim.name=sgd: it is Adam's"),
)
register("optimizer", "sgd", _SGD, __name__)
