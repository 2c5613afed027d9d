"""Deterministic mode: same seed, same layout, same bits, in processes that know nothing of each other."""

import hashlib
import json

import pytest
import torch

from gpt_pretrain.checkpoint.directory import latest_checkpoint
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.report.metrics_file import load_metrics
from tests.runs import small_run_arguments

SMALL = (
    "trainer.deterministic=true",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "model.num_layers=2",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    # Random numbers in every step.
    "model.hidden_dropout=0.1",
)


def sha256(run_dir):
    """Of all tensors of the newest checkpoint: weights, masters and moments."""
    tensors = CheckpointTensors(latest_checkpoint(run_dir / "checkpoints"))
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors.read(key).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [(1, ["fp8=delayed", "model.fp8_emulate=true", "trainer.precision=bf16"]), (2, ["parallelism=dp"])],
    ids=["FP8", "DP2"],
)
def test_two_runs_are_the_same_bits_and_another_seed_is_not(num_ranks, overrides, parent, tmp_path, cache_dir):
    hashes, curves = [], []
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        arguments = small_run_arguments(tmp_path / name, cache_dir, [*SMALL, *overrides, f"model.seed={seed}"])
        run = parent.start(arguments[2:], tmp_path / f"{name}.output", num_ranks=num_ranks)
        try:
            assert run.wait(120) == [0] * num_ranks, run.text()
        finally:
            run.kill()
        hashes.append(sha256(tmp_path / name))
        metrics = load_metrics(tmp_path / name)
        curves.append(
            json.dumps(
                [[(record.step, record.loss) for record in kind] for kind in (metrics.train, metrics.validation)]
            )
        )
    assert hashes[0] == hashes[1] != hashes[2]
    assert curves[0] == curves[1] != curves[2]
