"""A loss: cross entropy, and a penalty that keeps logits from drifting; `model.loss=lab_z_loss` chooses it."""

from gpt_pretrain import extend
from my_lab.settings import MyLab


@extend.loss("lab_z_loss")
def z_loss(logits, labels, config: extend.Config):
    """-log p + weight · (log z)², z being the sum of exp(logits) (Chowdhery et al. 2022, arXiv 2204.02311)."""
    log_z = logits.float().logsumexp(-1)
    cross_entropy = log_z - logits.float().gather(-1, labels[..., None])[..., 0]
    return cross_entropy + extend.own_keys(config, MyLab).z_weight * log_z.square()
