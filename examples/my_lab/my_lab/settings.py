"""Keys of the lab's own: the group `my_lab`, of which one key is the field `beta`."""

from dataclasses import dataclass

from gpt_pretrain import extend


@extend.keys("my_lab")
@dataclass
class MyLab:
    """`my_lab`: the smoothed loss."""

    beta: float = 0.9
    """Weight of the past in the mean, from 0 up to below 1."""
