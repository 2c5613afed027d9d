"""Megatron-LM, started with the command line and the weights that we write for it, trains as we do, on a CPU."""

import pytest
import torch

from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import fork_ranks
from tests.megatron_lm import MODELS, STEPS, logged_losses, make_twin
from tests.rounding import loss_tolerance

# Without a GPU there are megatron-core's local layers alone, and no fused kernels.
ON_CPU = (
    *("--transformer-impl", "local", "--distributed-backend", "gloo"),
    *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    "--no-masked-softmax-fusion",
)
SIZES = ("model.hidden_size=64", "model.ffn_hidden_size=96", "model.encoder_seq_length=32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_first_losses_are_those_of_megatron_lm(name, dtype, tmp_path):
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    twin = make_twin(tmp_path, name, f"trainer.precision={precision}", sizes=SIZES)
    theirs = fork_ranks(1, [*twin.theirs, *ON_CPU])
    assert theirs.returncode == 0, theirs.stdout[-2000:] + theirs.stderr[-4000:]
    ours = fork_ranks(1, [*twin.ours, f"run_dir={tmp_path / 'run'}"])
    assert ours.returncode == 0, ours.stdout[-2000:] + ours.stderr[-4000:]

    tolerances = [loss_tolerance(twin.config.model, dtype, step) for step in range(1, STEPS + 1)]
    losses = [record.loss for record in load_metrics(tmp_path / "run").train]
    twin.check(logged_losses(theirs.stdout), losses, tolerances)
