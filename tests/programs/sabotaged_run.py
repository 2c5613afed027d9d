"""A training run in which something below the configuration does not do what it is told: SABOTAGE OVERRIDE…

Each sabotage is a fault that another stack shipped, or that a change of a library could bring: FP8 silently off,
weights that do not follow their masters, a recipe from somewhere else.
"""

import dataclasses
import os
import sys

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.recipes import RECIPES
from gpt_pretrain.megatron.cpu import install_cpu_device


def replace_te_layers():
    """megatron-core's local layers where Transformer Engine's were planned."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from gpt_pretrain.megatron import layers

    layers.get_gpt_layer_with_transformer_engine_spec = lambda **experts: get_gpt_layer_local_spec(
        normalization="RMSNorm", **experts
    )


def drop_gather():
    """FP8 parameters that the optimizer passes over."""
    from gpt_pretrain.megatron import model

    translate = model.translate_ddp
    model.translate_ddp = lambda *given: dataclasses.replace(translate(*given), fp8_param_gather=False)


def swap_te_recipe():
    """Another recipe than the one that was planned."""
    from megatron.core import fp8_utils
    from transformer_engine.common.recipe import Float8CurrentScaling

    fp8_utils.get_fp8_recipe = lambda config: Float8CurrentScaling()


def replace_emulated_layers():
    """Plain local layers where emulated ones were planned."""
    from gpt_pretrain.training import setup

    setup.fp8_layers = lambda *arguments: None


def _change_emulated(**changes):
    from gpt_pretrain.training import setup

    build = setup.fp8_layers
    setup.fp8_layers = lambda spec: build(dataclasses.replace(spec, fp8=dataclasses.replace(spec.fp8, **changes)))


def swap_emulated_recipe():
    """Another recipe than the one that was planned."""
    _change_emulated(recipe=RECIPES["tensorwise"])


def change_margin_of_rank_1():
    """Ranks that do not agree."""
    if os.environ["RANK"] == "1":
        _change_emulated(margin=3)


def leave_fp8_after_the_first_step():
    """Layers that compute in FP8 while they are watched at the start, and no more."""
    import torch

    from gpt_pretrain.fp8 import local_layers as layers
    from gpt_pretrain.training import trainer

    steps, emulated, train_step = [], layers.Fp8Linear._forward_impl, trainer.train_step

    def compute(layer, input, weight, bias, **more):
        if len(steps) == 1:
            return emulated(layer, input, weight, bias, **more)
        return torch.nn.functional.linear(input, weight, bias)

    def step(*given, **named):
        steps.append(1)
        return train_step(*given, **named)

    layers.Fp8Linear._forward_impl, trainer.train_step = compute, step


def _change_restored(change):
    """Changes the state of delayed scaling of the loaded layers, by name, right after a checkpoint was loaded."""
    from gpt_pretrain.fp8.local_layers import Fp8Linear
    from gpt_pretrain.megatron.layers import whole_model_modules
    from gpt_pretrain.training import setup

    load = setup.load_checkpoint

    def loaded(checkpoint, trainable, *given):
        restored = load(checkpoint, trainable, *given)
        modules = (pair for chunk in trainable.model.gpt_chunks for pair in whole_model_modules(chunk))
        change({name: module for name, module in modules if isinstance(module, Fp8Linear)})
        return restored

    setup.load_checkpoint = loaded


FC1 = "decoder.layers.{}.mlp.linear_fc1"


def lose_scales_of_a_layer():
    """A layer whose part of a checkpoint was not restored."""

    def lose(layers):
        for scaling in layers[FC1.format(1)].fp8_meta.values():
            scaling.scale.fill_(1.0)
            scaling.amax_history.zero_()

    _change_restored(lose)


def swap_scales_of_two_layers():
    """Layers that got each other's part of a checkpoint."""

    def swap(layers):
        for name, one in layers[FC1.format(0)].fp8_meta.items():
            other = layers[FC1.format(1)].fp8_meta[name]
            for mine, theirs in ((one.scale, other.scale), (one.amax_history, other.amax_history)):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)

    _change_restored(swap)


def shift_a_layer_from_the_second_step():
    """One layer's products are off by 1% once the first step has been watched."""
    from gpt_pretrain.fp8 import local_layers as layers
    from gpt_pretrain.training import trainer

    steps, train_step, build = [], trainer.train_step, layers.Fp8Linear.__init__

    def built(layer, *given, name, **more):
        build(layer, *given, name=name, **more)
        if name == FC1.format(1):
            multiply = layer._products.multiply
            layer._products.multiply = lambda *of: multiply(*of) * (1.01 if len(steps) > 1 else 1.0)

    def step(*given, **named):
        steps.append(1)
        return train_step(*given, **named)

    layers.Fp8Linear.__init__, trainer.train_step = built, step


SABOTAGES = {
    sabotage.__name__: sabotage
    for sabotage in (
        replace_te_layers,
        drop_gather,
        swap_te_recipe,
        replace_emulated_layers,
        swap_emulated_recipe,
        change_margin_of_rank_1,
        leave_fp8_after_the_first_step,
        lose_scales_of_a_layer,
        swap_scales_of_two_layers,
        shift_a_layer_from_the_second_step,
    )
}

if __name__ == "__main__":
    install_cpu_device()
    SABOTAGES[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
