"""An optimizer: `model.optim.name=lab_lion`."""

from gpt_pretrain import extend


@extend.optimizer("lab_lion", states=["exp_avg"], elementwise=True, reads=["betas"])
def build(params: list[dict], config: extend.Config):
    """Lion with the configuration's rate, betas and weight decay."""
    # It needs torch, which loads after the configuration has been checked.
    from my_lab.lion import Lion

    optim = config.model.optim
    return Lion(params, lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay)
