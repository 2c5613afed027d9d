"""Tiny models trained with megatron-core's LM head and loss, and with both in one: losses, and every main gradient."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from gpt_pretrain.config.choices import CrossEntropyFusion
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.loss import LossHead
from tests.emulated_training import Training, build_training_of

_LINEAR = {"cross_entropy_fusion_impl": CrossEntropyFusion.linear}
_ACCUMULATE = {"gradient_accumulation_fusion": True}
_EMBEDDING = _ACCUMULATE | {"embedding_gradient_fusion": True}
_VARIANTS = {
    "plain": {},
    "accumulate": _ACCUMULATE,
    "linear": _LINEAR,
    "linear accumulate": _LINEAR | _ACCUMULATE,
    "embedding": _EMBEDDING,
    "linear embedding": _LINEAR | _EMBEDDING,
}
# Of the 64 tokens of a microbatch that go through the head together.
_TOKENS_AT_ONCE = 16


def compare_variants(
    config: Config, variants: Iterable[str] = tuple(_VARIANTS), *, masked: bool
) -> dict[str, dict[str, Any]]:
    """Trains each variant in the open process groups, in the layout that they are for.

    Args:
        config: What the variants have in common.
        variants: Names of those to train, plain first.
        masked: A third of the tokens do not count, other numbers of them in each microbatch.

    Returns:
        By variant: losses of three steps and of a validation, and main gradients as the first step left them here.
    """
    return {name: _trained(config, name, masked=masked) for name in variants}


def _trained(config: Config, name: str, *, masked: bool) -> dict[str, Any]:
    training = build_training_of(replace(config, model=replace(config.model, **_VARIANTS[name])))
    if masked:
        training = _Masked(config=training.config, trainable=training.trainable)
    for chunk in training.trainable.model.gpt_chunks:
        if isinstance(getattr(chunk, "output_layer", None), LossHead):
            chunk.output_layer.tokens_at_once = _TOKENS_AT_ONCE
    losses = [training.step()]
    gradients = _main_gradients(training)
    losses += [training.step(), training.step()]
    after = _main_gradients(training)
    with training.trainable.model.gathered_parameters():
        losses.append(training.validate())
    # Validation wants no gradient, and leaves none.
    assert all(torch.equal(gradient, after[key]) for key, gradient in _main_gradients(training).items())
    return {"losses": losses, "gradients": gradients}


class _Masked(Training):
    def iterators(self, first_sample: int) -> Any:
        return [
            None if iterator is None else map(_without_some_tokens, iterator)
            for iterator in super().iterators(first_sample)
        ]


def _without_some_tokens(batch: Batch) -> Batch:
    return replace(batch, loss_mask=((batch.tokens + batch.position_ids) % 3 > 0).float())


def _main_gradients(training: Training) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{weight}": parameter.main_grad.clone()
        for chunk in training.chunks
        for name, module in whole_model_modules(chunk)
        for weight, parameter in module.named_parameters(recurse=False)
    }


def differences(seen: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each variant from plain: the largest relative difference of losses, and of any gradient's L2 norm."""
    plain = seen["plain"]
    return {
        name: {
            "losses": max(
                abs(ours - expected) / expected
                for ours, expected in zip(variant["losses"], plain["losses"], strict=True)
            ),
            "gradients": max(
                float((gradient - plain["gradients"][key]).norm() / plain["gradients"][key].norm())
                for key, gradient in variant["gradients"].items()
            ),
        }
        for name, variant in seen.items()
    }
