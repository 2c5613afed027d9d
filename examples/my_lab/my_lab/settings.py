"""Keys of the lab's own: the group `my_lab`, with a key for each field."""

from dataclasses import dataclass, field

from gpt_pretrain import extend


@extend.keys("my_lab")
@dataclass
class MyLab:
    """`my_lab`: the smoothed loss, the penalty of logits, and the corpus of mails."""

    beta: float = 0.9
    """Weight of the past in the mean, from 0 up to below 1."""
    z_weight: float = 1e-4
    """Weight of the squared logarithm of z, for model.loss=lab_z_loss."""
    mails: list[str] = field(default_factory=list)
    """Paths of mbox files, for model.data.data_impl=lab_mails."""
