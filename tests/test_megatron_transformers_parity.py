"""The presets are the architectures they name: same weights, same logits, losses and updates as `transformers`."""

from pathlib import Path

import pytest
import torch

from tests.forked_runs import fork_ranks
from tests.transformers_reference import (
    RESCALED_ROPE,
    build_reference,
    built_model,
    built_training,
    gpt2,
    llama,
    make_tokens,
    map_weights,
    reference_logits,
    run_model,
    smollm3,
    train_ours,
    train_reference,
    windowed,
    yarn,
)

TOLERANCE = 1e-4
WIDTH = "model.kv_channels"

CASES = {
    "gpt2": gpt2("gpt2_124m"),
    # 250 tokens in an embedding of 256 rows.
    "gpt2_padded": gpt2("gpt2_124m", vocab_size=250),
    "llama2": llama("llama2_7b", "Llama", theta=1e4, epsilon=1e-5),
    "llama3": llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5),
    "llama3_one_group": llama("llama3_8b", "Llama", groups=1, theta=5e5, epsilon=1e-5),
    "mistral": llama("mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5),
    "mistral_wide_heads": llama(
        "mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5, head_width=24, overrides=["model.kv_channels=24"]
    ),
    "qwen2_5": llama("qwen2_5_7b", "Qwen2", groups=2, theta=1e6, epsilon=1e-6),
    "llama3_1": llama("llama3_1_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5, rope=RESCALED_ROPE),
    "mistral_nemo": llama(
        "mistral_nemo_12b", "Mistral", groups=2, theta=1e6, epsilon=1e-5, head_width=8, overrides=[f"{WIDTH}=8"]
    ),
    "qwen3": llama("qwen3_8b", "Qwen3", groups=2, theta=1e6, epsilon=1e-6, head_width=24, overrides=[f"{WIDTH}=24"]),
    "smollm3": smollm3(),
    "windows": windowed(8),
    "yarn": yarn(),
    "phi4": llama("phi4", "Phi3", groups=2, theta=2.5e5, epsilon=1e-5),
    "phi3_partial_rotation": llama(
        "phi4",
        "Phi3",
        theta=2.5e5,
        epsilon=1e-5,
        rope={"partial_rotary_factor": 0.5},
        overrides=["model.rotary_percentage=0.5"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    expected = reference_logits(reference, case)
    with built_model(case, map_weights(reference, case)) as model:
        logits = run_model(model, case)
    assert logits.shape == (case.batch, case.length, 256)
    assert expected.std() > 0.5, "logits this flat would agree whatever the model computes"
    torch.testing.assert_close(logits[..., : case.vocab_size], expected, atol=TOLERANCE, rtol=0.0)
    # Rows that pad the vocabulary are zero here, so that their logits are.
    assert logits[..., case.vocab_size :].abs().sum() == 0.0


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt2_padded"])
def test_loss_equals_that_of_transformers(name: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    tokens = make_tokens(case)
    with torch.no_grad():
        # Labels that are the inputs: transformers shifts them by one and leaves the last position out.
        expected = reference(input_ids=tokens, labels=tokens).loss
    with built_model(case, map_weights(reference, case)) as model:
        losses = run_model(model, case, labels=tokens.roll(-1, dims=1))
    torch.testing.assert_close(losses[:, :-1].mean(), expected, atol=TOLERANCE, rtol=0.0)


def test_rows_that_pad_the_vocabulary_take_part_in_the_softmax() -> None:
    """As in Megatron-LM: the model has to learn that they never come."""
    case = CASES["gpt2_padded"]
    reference = build_reference(case)
    labels = make_tokens(case).roll(-1, dims=1)
    logits = torch.nn.functional.pad(reference_logits(reference, case), (0, 6))
    expected = torch.logsumexp(logits, dim=-1) - logits.gather(-1, labels[..., None])[..., 0]
    with built_model(case, map_weights(reference, case)) as model:
        losses = run_model(model, case, labels=labels)
    torch.testing.assert_close(losses, expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("gpt2", "model.activation=gelu"),
        ("gpt2", "model.layernorm_epsilon=1.0e-6"),
        ("llama3", "model.rotary_base=400000"),
        ("llama3", "model.rotary_percentage=0.5"),
        ("llama3", "model.layernorm_epsilon=1.0e-6"),
        ("qwen2_5", "model.layernorm_epsilon=1.0e-5"),
        ("mistral", "model.rotary_base=10000"),
        ("llama3_1", "model.rope_scaling_factor=null"),
        ("smollm3", "model.no_rope_freq=2"),
        ("windows", "model.window_size=[8,0]"),
        ("yarn", "model.yarn_original_max_position_embeddings=128"),
        ("yarn", "model.rope_scaling_factor=8"),
        ("windows", "model.window_attn_skip_freq=[1,1,0]"),
        ("smollm3", "model.no_rope_freq=null"),
        ("phi3_partial_rotation", "model.rotary_percentage=1.0"),
    ],
)
def test_comparison_sees_a_setting_that_differs(name: str, override: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    with built_model(case, map_weights(reference, case), override) as model:
        difference = run_model(model, case)[..., : case.vocab_size] - reference_logits(reference, case)
    assert difference.abs().max() > 5 * TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "llama3", "smollm3", "windows"])
def test_training_follows_transformers_and_torch(name: str) -> None:
    """Backward pass, clipping, Adam and the groups without weight decay, against code that shares none of ours."""
    case = CASES[name]
    reference = build_reference(case)
    with built_training(case, map_weights(reference, case), "model.optim.lr=1e-3") as training:
        losses, norms = train_ours(training, 10)
        expected_losses, expected_norms = train_reference(reference, case, training.config, 10)
    assert expected_losses[-1] < expected_losses[0] - 0.5
    assert max(expected_norms) > training.config.trainer.gradient_clip_val, "nothing was clipped"
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)


def test_tensor_parallel_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    case = CASES["llama3"]
    reference = build_reference(case)
    torch.save({"weights": map_weights(reference, case), "tokens": make_tokens(case)}, tmp_path / "input.pt")
    result = fork_ranks(2, ["tests/programs/tensor_parallel_logits.py", str(tmp_path), *case.override_list()])
    assert result.returncode == 0, result.stderr
    expected = reference_logits(reference, case)
    outputs = torch.load(tmp_path / "output.pt")
    assert outputs.keys() == {"tp2", "tp2_sp"}
    for logits in outputs.values():
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)
