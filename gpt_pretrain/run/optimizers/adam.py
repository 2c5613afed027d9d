"""AdamW, with the states of `features.small_states` if asked for."""

from gpt_pretrain.extend.optimizers import Optimizer
from gpt_pretrain.extend.registry import register

_ADAM = Optimizer(
    class_name="AdamW",
    has_distributed_form=True,
    has_small_states=True,
    state_bytes=lambda _: 8,
    # The norm reads the gradient (4); the update reads gradient, master and two moments (16) and writes the last three
    # and the weight (14).
    moved_bytes=34,
    unread={"momentum": "model.optim.name=adam, whose momentum is the first of model.optim.betas"},
)
register("optimizer", "adam", _ADAM, __name__)
