"""Machines for tests, as `spec.platform.detect_platform` would describe them."""

from dataclasses import replace

from gpt_pretrain.spec.platform import Platform

CPU = Platform(
    cuda=False,
    num_gpus=0,
    device_name="CPU",
    compute_capability=None,
    torch_cuda=None,
    transformer_engine=None,
    transformer_engine_problem=None,
    recipe_variables={},
    multicast_variables={},
    flash_attention=None,
    flash_attention_problem=None,
    apex_layer_norm=False,
    apex_optimizer=False,
    apex_softmax=False,
    apex_weight_gradient=False,
)
H200_WITHOUT_TE = replace(
    CPU, cuda=True, num_gpus=8, device_name="NVIDIA H200", compute_capability=(9, 0), torch_cuda="13.0"
)
H200 = replace(H200_WITHOUT_TE, transformer_engine="2.12.0")
INSTALL_FLASH = "install it from the checkout with python -m pip install -c constraints.txt -e '.[flash]'"
# What a message about missing Transformer Engine ends with.
INSTALL_TE = (
    "install it from the checkout with python -m pip install --no-build-isolation -c constraints.txt -e '.[te]'"
)
