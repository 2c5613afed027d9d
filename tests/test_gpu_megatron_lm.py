"""Megatron-LM, started with the command line and the weights that we write for it, trains as we do: BF16 and FP8.

Both programs have Transformer Engine's layers; with local ones, on a CPU: `test_megatron_lm_training`.
"""

import pytest
import torch

from gpt_pretrain.report.metrics_file import load_metrics
from tests.launching import gpu_environment, run_ranks
from tests.megatron_lm import MODELS, STEPS, logged_losses, make_twin
from tests.rounding import fp8_anew_tolerance, loss_tolerance

pytestmark = pytest.mark.gpu

# Its kernel for weights' gradients is apex's. It warms up what torch compiles, also where nothing is compiled.
WITHOUT_APEX = ("--no-gradient-accumulation-fusion", "--disable-jit-fuser")
# Neither program compiles, which takes longer than twenty steps.
UNCOMPILED = ("model.bias_dropout_add_fusion=false", "model.bias_activation_fusion=false")


@pytest.mark.parametrize("fp8", [(), ("fp8=delayed",)], ids=["bf16", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_first_losses_are_those_of_megatron_lm(name, fp8, tmp_path):
    twin = make_twin(tmp_path, name, "trainer.precision=bf16", *UNCOMPILED, *fp8)
    theirs = run_ranks(1, [*twin.theirs, *WITHOUT_APEX], env=gpu_environment(1))
    assert theirs.returncode == 0, theirs.stdout[-2000:] + theirs.stderr[-4000:]
    ours = run_ranks(1, [*twin.ours, f"run_dir={tmp_path / 'run'}"], env=gpu_environment(1))
    assert ours.returncode == 0, ours.stdout[-2000:] + ours.stderr[-4000:]

    model = twin.config.model
    tolerances = [
        # Delayed scaling casts with scales of other passes: our first ones are found before step 1.
        loss_tolerance(model, torch.bfloat16, step) + (fp8_anew_tolerance(model, step) if fp8 else 0)
        for step in range(1, STEPS + 1)
    ]
    losses = [record.loss for record in load_metrics(tmp_path / "run").train]
    twin.check(logged_losses(theirs.stdout), losses, tolerances)
