"""Transformer Engine's layers in a tiny GPT in this process, and ways in which one of them can be wrong."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpt_pretrain.fp8.gemms import Phase
from tests.emulated_training import Training, emulated_training

# Dimensions that the kernels take; a step is two microbatches of 256 tokens.
TE = (
    "model.transformer_engine=true",
    "trainer.precision=bf16",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
    # A replay reports none of its products.
    "model.cuda_graph_impl=none",
)


def te_training(*overrides: str) -> AbstractContextManager[Training]:
    """A training as of `emulated_training`, of Transformer Engine's layers."""
    return emulated_training(*TE, *overrides)


def quantizer(layer: Any, direction: str = "fwd", index: int = 0) -> Any:
    """What casts a tensor of a layer that has been called."""
    return layer.quantizers[f"scaling_{direction}"][index]


def after_updates(change: Callable[[], None]) -> Callable[[], None]:
    """Changes delayed scaling's state after each update of the forward pass; returns what ends that."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    update = FP8GlobalStateManager.reduce_and_update_fp8_tensors

    def changed(cls: Any, forward: bool = True) -> None:
        update(forward=forward)
        if forward:
            change()

    FP8GlobalStateManager.reduce_and_update_fp8_tensors = classmethod(changed)

    def end() -> None:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors = update

    return end


def leave_fp8(layer: Any) -> None:
    """The layer computes in BF16."""
    import transformer_engine.pytorch as te

    forward = layer.forward

    def plain(*args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=False):
            return forward(*args, **kwargs)

    layer.forward = plain


def change_recipe(layer: Any, name: str) -> None:
    """The layer computes with another of Transformer Engine's recipes."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    forward = layer.forward

    def other(*args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipe, name)()):
            return forward(*args, **kwargs)

    layer.forward = other


def change_values(layer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The layer's input is changed within its cast."""
    of_input = quantizer(layer)
    cast = of_input.quantize_impl
    of_input.quantize_impl = lambda values: cast(change(values))


def cast_weight_in_rows(layer: Any) -> None:
    """The weight's blocks are 1×128 like the input's."""
    quantizer(layer, index=1).block_scaling_dim = 1
    layer._fp8_workspaces.clear()


def keep_weight(layer: Any) -> None:
    """The weight is cast no more."""
    copy = layer.get_weight_workspace
    layer.get_weight_workspace = lambda **given: copy(**{**given, "update_workspace": False})


def change_product(monkeypatch: Any, place: str, phase: Phase, change: Callable[..., Any]) -> None:
    """A product of all layers of a kind: `change(gemm, a, b, given)` in place of the call.

    Args:
        monkeypatch: Takes it back.
        place: "linear" or "layernorm_linear".
        phase: The product.
        change: Receives the product's function, its operands and its named arguments.
    """
    import importlib

    module = importlib.import_module(f"transformer_engine.pytorch.module.{place}")
    layout = {Phase.forward: "TN", Phase.dgrad: "NN", Phase.wgrad: "NT"}[phase]
    gemm = module.general_gemm

    def changed(a: Any, b: Any, **given: Any) -> Any:
        if given.get("layout", "TN") != layout:
            return gemm(a, b, **given)
        return change(gemm, a, b, given)

    monkeypatch.setattr(module, "general_gemm", changed)
