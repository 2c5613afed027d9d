"""Transformer Engine's layers in BF16, and the training step on a GPU, against `transformers` in FP32 on the CPU."""

import pytest
import torch

from tests.transformers_reference import (
    build_reference,
    built_model,
    built_training,
    gpt2,
    llama,
    make_tokens,
    map_weights,
    reference_logits,
    round_to_bf16,
    run_model,
    smollm3,
    te_names,
    train_ours,
    train_reference,
    windowed,
    yarn,
)

pytestmark = pytest.mark.gpu

# Heads of 64. Matrices narrower than on the CPU: the wide ones blow BF16's rounding up, which is not what is tested.
SHAPE = {"width": 256, "head_width": 64, "inner_width": 512, "length": 64, "weight_scale": 1.0}
CASES = {
    "gpt2": gpt2("gpt2_124m", **SHAPE),
    "llama3": llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, **SHAPE),
    "smollm3": smollm3(**SHAPE),
    "windows": windowed(16, **SHAPE),
    "yarn": yarn(**SHAPE),
}
TE_BF16 = ("model.transformer_engine=true", "trainer.precision=bf16")


@pytest.mark.parametrize("name", CASES)
def test_te_layers_in_bf16_give_the_logits_of_transformers(name):
    case = CASES[name]
    reference = build_reference(case)
    round_to_bf16(reference)
    expected = reference_logits(reference, case)
    with built_model(case, te_names(map_weights(reference, case)), *TE_BF16) as model:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert any(type(module).__module__.startswith("transformer_engine") for module in model.modules())
        logits = run_model(model, case).float()
    error = torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)
    assert error < 2e-2
    # Where two tokens are nearly as likely, rounding decides.
    assert (logits.argmax(dim=-1) == expected.argmax(dim=-1)).float().mean() > 0.95


@pytest.mark.parametrize("name", CASES)
def test_te_layers_in_bf16_give_the_loss_of_transformers(name):
    case = CASES[name]
    reference = build_reference(case)
    round_to_bf16(reference)
    labels = make_tokens(case).roll(-1, dims=1)
    expected = torch.nn.functional.cross_entropy(reference_logits(reference, case).flatten(0, 1), labels.flatten())
    with built_model(case, te_names(map_weights(reference, case)), *TE_BF16) as model:
        loss = run_model(model, case, labels=labels).float().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_training_in_fp32_follows_transformers_and_torch(name):
    """Fused kernels, Transformer Engine's Adam and the norm on the device, without BF16's rounding over them.

    On local layers: TE multiplies fp32 matrices in TF32, which is why the application refuses TE layers in fp32.
    """
    case = CASES[name]
    reference = build_reference(case)
    with built_training(
        case, map_weights(reference, case), "model.optim.lr=2e-4", "model.transformer_engine=false"
    ) as training:
        losses, norms = train_ours(training, 10)
        expected_losses, expected_norms = train_reference(reference, case, training.config, 10)
    assert expected_losses[-1] < expected_losses[0] - 3.0
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
