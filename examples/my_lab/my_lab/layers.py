"""A layer: its MLP squares a ReLU, as in Primer; `model.layer=lab_primer` with `model.activation=gelu` chooses it."""

from functools import partial

from gpt_pretrain import extend


@extend.layer("lab_primer")
def primer(run, layer):
    """The program's own layer, built with another MLP from the same linear layers."""
    # It needs megatron-core, which loads after the configuration has been checked.
    from my_lab.primer import SquaredReluMLP

    if (activation := run.model.activation.name) != "gelu":
        raise extend.UserError(f"model.activation={activation} is not what it squares; use model.activation=gelu")
    layer.submodules.mlp = partial(SquaredReluMLP.as_mlp_submodule, **layer.submodules.mlp.keywords)
    return layer
