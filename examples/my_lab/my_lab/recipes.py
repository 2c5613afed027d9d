"""An FP8 recipe: tensorwise with scales that are powers of two; `model.fp8_recipe=lab_tensorwise_pow2` chooses it."""

from gpt_pretrain import extend


@extend.fp8_recipe("lab_tensorwise_pow2", of="tensorwise", powers_of_two=True)
def powers_of_two(recipe):
    """Transformer Engine's Float8CurrentScaling; multiplying by a power of two rounds nothing."""
    from transformer_engine.common.recipe import QParams

    recipe.use_power_2_scales = True
    exact = QParams(power_2_scale=True)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = exact
    return recipe
