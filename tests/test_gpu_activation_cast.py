"""An MLP's activation computed with its cast, on a GPU: the codes of separate kernels, and layers that train on it."""

import pytest
import torch

from gpt_pretrain.fp8.observer import observe_products
from tests.activation_casts import share_of_codes_that_differ
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = pytest.mark.gpu

FUSED, SEPARATE = (f"model.activation_cast_fusion={fused}" for fused in ("true", "false"))


@pytest.mark.parametrize("scale", [3.0, None], ids=["delayed", "from the amax"])
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_are_those_of_an_activation_and_a_cast(codes, gated, biased, scale):
    """But where the activation itself is rounded to the other side: exponentials are no exact ones."""
    share = share_of_codes_that_differ("cuda", torch.bfloat16, codes, gated=gated, biased=biased, scale=scale)
    assert share < 1e-3


@pytest.mark.parametrize("precision", ["delayed", "tensorwise"])
@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_layers_train_as_with_separate_kernels(name, precision):
    case = CASES[name]
    weights = te_names(map_weights(build_reference(case), case))
    curves, formats = {}, {}
    for fusion in (SEPARATE, FUSED):
        with built_training(case, weights, *TE_BF16, f"fp8={precision}", fusion, "model.optim.lr=2e-4") as training:
            curves[fusion] = train_ours(training, 10)
            seen = set()
            with observe_products(
                training.trainable.model.gpt_chunks,
                lambda layer, product, seen=seen: seen.add((layer, product.phase, product.formats)),
            ):
                training.step()
            formats[fusion] = seen
    assert formats[FUSED] == formats[SEPARATE]
    # By the tenth step the batch is nearly known by heart.
    assert curves[FUSED][0] == pytest.approx(curves[SEPARATE][0], rel=5e-3, abs=5e-3)
    assert curves[FUSED][1] == pytest.approx(curves[SEPARATE][1], rel=5e-2)
    # The first step has seen no update yet: nothing has come apart.
    assert curves[FUSED][0][0] == pytest.approx(curves[SEPARATE][0][0], rel=1e-4)
