"""Watches the matrix products of live linear layers, for the proof and for the statistics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel

from gpt_pretrain.fp8.gemms import Product
from gpt_pretrain.megatron.layers import whole_model_modules


@contextmanager
def observe_products(chunks: Sequence[GPTModel], listener: Callable[[str, Product], None]) -> Iterator[None]:
    """Tells the listener of every product that the linear layers of these model chunks compute inside.

    Args:
        chunks: This rank's GPTModels.
        listener: Receives the layer's name in the whole model ("decoder.layers.3.mlp.linear_fc1") and the product,
            right before it is computed. Must not wait for the device.
    """
    emulated = [
        (name, module)
        for chunk in chunks
        for name, module in whole_model_modules(chunk)
        if hasattr(module, "product_listener")
    ]
    for name, module in emulated:
        module.product_listener = partial(listener, name)
    try:
        yield
    finally:
        for _, module in emulated:
            module.product_listener = None
