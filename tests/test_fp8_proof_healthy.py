"""Healthy runs that look wrong: rounding errors add up, vanish or have no size. No proof may stop one, or warn.

Each case changes the weights of a tiny GPT, and trains and proves two steps of it, or three where histories go on.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt_pretrain.megatron.stored_weights import StoredWeight
from gpt_pretrain.report.metrics_file import load_metrics
from tests.emulated_training import Training, emulate, emulated_training
from tests.forked_runs import fork_ranks
from tests.runs import small_run_arguments
from tests.sabotages import prove
from tests.stored_weights import STORED

RECIPES = {
    "delayed": emulate("delayed", "trainer.precision=bf16"),
    "delayed, short history": emulate("delayed", "model.fp8_amax_history_len=2", "trainer.precision=bf16"),
    "tensorwise": emulate("tensorwise", "trainer.precision=bf16"),
    "blockwise": emulate("blockwise", "trainer.precision=bf16"),
    "mxfp8": emulate("mxfp8", "trainer.precision=bf16"),
    "torchao_tensorwise": emulate("torchao_tensorwise", "trainer.precision=bf16"),
    "torchao_rowwise": emulate("torchao_rowwise", "trainer.precision=bf16"),
    "torchao_rowwise_with_gw_hp": emulate("torchao_rowwise_with_gw_hp", "trainer.precision=bf16"),
    "FP8 weights": STORED,
}


def change_weights(training: Training, names: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gives all weights whose names end so other values, and their masters the same."""
    with torch.no_grad():
        for chunk in training.chunks:
            for name, weight in chunk.named_parameters():
                if name.endswith(names):
                    values = weight.dequantize() if isinstance(weight, StoredWeight) else weight
                    weight.copy_(change(values.float()).to(weight.dtype))
    training.trainable.optimizer.reload_model_params()


LINEARS = tuple(f"linear_{kind}.weight" for kind in ("qkv", "proj", "fc1", "fc2"))
EMBEDDING = ("word_embeddings.weight",)


def of_weights(names: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Training], None]:
    return lambda training: change_weights(training, names, change)


def one_hot(weight: torch.Tensor) -> torch.Tensor:
    return torch.eye(weight.shape[1])[torch.arange(weight.shape[0]) % weight.shape[1]]


def outlier_channels(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[:, ::17] *= 1000
    return changed


# What is done to the weights before the first step, more overrides, and whether values that FP8 holds may be told.
CASES: dict[str, tuple[Callable[[Training], None], tuple[str, ...], bool]] = {
    "all tokens alike": (of_weights(EMBEDDING, lambda weight: weight[:1].expand_as(weight)), (), False),
    "a common offset": (of_weights(EMBEDDING, lambda weight: weight + 100), (), False),
    "one-hot embeddings": (of_weights(EMBEDDING, one_hot), (), False),
    "embeddings of zeros": (of_weights(EMBEDDING, torch.zeros_like), (), False),
    "outlier channels": (of_weights(EMBEDDING, outlier_channels), (), False),
    "outlier weights": (of_weights(LINEARS, outlier_channels), (), False),
    "projections of zeros": (of_weights((LINEARS[1], LINEARS[3]), torch.zeros_like), (), False),
    "linear layers of zeros": (of_weights(LINEARS, torch.zeros_like), (), False),
    "equal weights": (of_weights(LINEARS, lambda weight: torch.full_like(weight, 0.01)), (), False),
    "weights of two values": (of_weights(LINEARS, lambda weight: 0.02 * weight.sign()), (), False),
    "powers of two": (
        of_weights(LINEARS, lambda weight: torch.exp2(weight.abs().log2().round()) * weight.sign()),
        (),
        False,
    ),
    "codes": (of_weights(LINEARS, lambda weight: (weight * 2**12).to(torch.float8_e4m3fn).float() * 2**-12), (), True),
    "tiny weights": (of_weights(LINEARS, lambda weight: weight * 1e-30), (), False),
    "no learning": (of_weights((), torch.zeros_like), ("model.optim.lr=0", "model.optim.weight_decay=0"), False),
    "long sums": (
        of_weights(EMBEDDING, lambda weight: weight[:1].expand_as(weight)),
        (
            "model.encoder_seq_length=2048",
            "model.max_position_embeddings=2048",
            "model.num_layers=1",
            "model.micro_batch_size=1",
            "model.global_batch_size=2",
        ),
        False,
    ),
    "sixteen tokens": (
        of_weights((), torch.zeros_like),
        ("model.encoder_seq_length=32", "model.micro_batch_size=1", "model.global_batch_size=1"),
        False,
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_a_healthy_run_passes(case: str, recipe: str) -> None:
    change, overrides, may_be_exact = CASES[case]
    told: list[Any] = []
    with emulated_training(*RECIPES[recipe], *overrides) as training:
        change(training)
        for number in range(3 if recipe.startswith("delayed") else 2):
            told += prove(training, step=number).warnings
    assert [warning for warning in told if not (may_be_exact and "changed by rounding" in warning)] == []


@pytest.mark.parametrize("layout", ["dp", "tp2_sp"])
def test_the_step_after_a_validation_is_proven_on_several_ranks(layout, tmp_path, cache_dir):
    """Each rank's histories begin the step with the amaxes of the samples that it has validated."""
    run = ["fp8=delayed", "model.fp8_emulate=true", f"parallelism={layout}", "logging.fp8_proof_interval=1"]
    validations = ["trainer.val_check_interval=2", "trainer.limit_val_batches=4", "trainer.max_steps=5"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*run, *validations, "model.hidden_size=64"])
    done = fork_ranks(2, arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [(proof.step, proof.warnings) for proof in load_metrics(tmp_path / "run").fp8_proofs] == [
        (step, ()) for step in range(1, 6)
    ]
