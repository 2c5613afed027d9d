"""The residual stream's gradient added in the norm's backward kernel on GPUs: layers train as with separate sums."""

from collections import Counter
from inspect import unwrap

import pytest
import torch

from gpt_pretrain.kernels import residual_gradient
from tests.launching import gpu_environment, run_ranks
from tests.rounding import fp8_anew_tolerance, loss_tolerance
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = pytest.mark.gpu

FUSED, SEPARATE = (f"model.residual_gradient_fusion={fused}" for fused in ("true", "false"))


@pytest.fixture
def kernels(monkeypatch):
    """How often each of Transformer Engine's kernels ran in linear layers."""
    import transformer_engine_torch

    counts = Counter()

    def counting(name):
        kernel = unwrap(getattr(transformer_engine_torch, name))

        def call(*arguments):
            counts[name] += 1
            return kernel(*arguments)

        return call

    wrapped = residual_gradient.adding_what_waits(counting("rmsnorm_bwd"), counting("rmsnorm_bwd_add"))
    monkeypatch.setattr(residual_gradient, "wrapped_norm_backward", lambda: wrapped)
    monkeypatch.setattr(transformer_engine_torch, "rmsnorm_bwd", wrapped)
    return counts


@pytest.mark.parametrize("precision", ["none", "delayed"])
def test_layers_train_as_with_separate_sums(precision, kernels):
    case, steps = CASES["llama3"], 5
    weights = te_names(map_weights(build_reference(case), case))
    curves, ran = {}, {}
    for fusion in (SEPARATE, FUSED):
        kernels.clear()
        with built_training(case, weights, *TE_BF16, f"fp8={precision}", fusion, "model.optim.lr=2e-4") as training:
            curves[fusion], _ = train_ours(training, steps)
            model, passes = training.config.model, 2 * steps * case.layers * len(training.batches)
        ran[fusion] = dict(kernels)
    assert ran == {SEPARATE: {"rmsnorm_bwd": passes}, FUSED: {"rmsnorm_bwd_add": passes}}
    for step, (ours, separate) in enumerate(zip(curves[FUSED], curves[SEPARATE], strict=True), start=1):
        tolerance = loss_tolerance(model, torch.bfloat16, step)
        tolerance += 0 if precision == "none" else fp8_anew_tolerance(model, step)
        assert ours == pytest.approx(separate, rel=tolerance)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("fp8", [(), ("fp8=delayed",)], ids=["bf16", "delayed"])
def test_layouts_train_as_with_separate_kernels(fp8):
    """The cast of the gradient of queries, keys and values, too."""
    done = run_ranks(2, ["tests/programs/fused_gradient_layouts.py", *fp8], env=gpu_environment(2), timeout_s=300)
    assert done.returncode == 0, done.stderr[-6000:]
