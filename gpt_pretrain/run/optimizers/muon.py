"""Muon, which takes Adam's place (`megatron.muon`)."""

from gpt_pretrain.extend.optimizers import Optimizer
from gpt_pretrain.extend.registry import register

# Values of whole matrices that Muon orthogonalizes at once on a rank, unless one matrix has more.
MUON_VALUES_AT_ONCE = 2**26

_MUON = Optimizer(
    class_name="Muon",
    has_distributed_form=True,
    state_bytes=lambda _: 8,
    matrix_state_bytes=4,
    moved_bytes=34,
    unread={"momentum": "model.optim.name=muon, whose momentum is model.optim.muon_momentum"},
)
register("optimizer", "muon", _MUON, __name__)
