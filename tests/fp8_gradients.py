"""How far the gradients of a first step in FP8 are from the emulated ones, in a measure that rounding sets.

Losses of later steps are no measure: they amplify any rounding, and faster the faster they fall. From the same weights
and batch, two engines differ in how they sum. A product that differs by δ, relative to its size, falls on another code
in a share δ/s of its values, where codes are s apart. What that changes, √(δ·s), is √(12·δ/s) of the rounding error of
FP8 itself, s/√12; codes of the weights do not change, which leaves √(6·δ/s). E4M3 has s of 0.09 on average, E5M2 twice
that, and Hopper's tensor cores leave δ of 3.3e-3 of 14,336 terms: 0.47, and less here, with at most 512 terms.

So distances are told in units of that error: the distance between the emulated gradients and those without FP8. An
engine that rounds nothing is 1 away, one with other scales about √2. With δ of 3.3e-3 in every product, all parameters
were within 0.40 on a CPU; with the 1e-2 that the proof allows, within 0.45.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from tests.emulated_training import Training, emulate, emulated_training

# Of that error: half of the way.
MOST = 0.5
# Dimensions that the kernels take.
SIZES = (
    "trainer.precision=bf16",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
)


def _gradients(building: AbstractContextManager[Training]) -> dict[str, torch.Tensor]:
    with building as training:
        return training.gradients()


def distances(recipe: str, gradients: Mapping[str, torch.Tensor], *overrides: str) -> dict[str, float]:
    """For each parameter, the distance from the gradients that are emulated here, 1: as far as those without FP8.

    Args:
        recipe: Its preset.
        gradients: Of the first step with `SIZES`, by the parameter's name.
        overrides: What else that step was computed with.
    """
    expected = _gradients(emulated_training(*emulate(recipe, *SIZES, *overrides)))
    plain = ("model.transformer_engine=false", "model.gradient_accumulation_fusion=false")
    without = _gradients(emulated_training(*SIZES, *overrides, *plain))
    assert expected.keys() == without.keys() == gradients.keys()

    def norm(x: torch.Tensor) -> float:
        return torch.linalg.vector_norm(x).item()

    return {name: norm(gradients[name] - each) / norm(without[name] - each) for name, each in expected.items()}
