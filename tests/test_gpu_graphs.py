"""CUDA graphs of layers: bit for bit the run without them, also resumed and validated; and really replayed."""

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpt_pretrain.checkpoint.state import random_states
from gpt_pretrain.fp8.proof import Proof
from gpt_pretrain.megatron.graphs import without_graphs
from gpt_pretrain.training.step import mean_loss, validate
from tests.resharded_training import saved_state
from tests.runs import SMALL_GPU_RUN, run_small
from tests.transformers_reference import build_reference, built_training, gpt2, map_weights, te_names

pytestmark = pytest.mark.gpu

GRAPHS = "model.cuda_graph_impl=local"
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
CASE = gpt2("gpt2_124m", width=256, head_width=64, inner_width=512, length=128, weight_scale=1.0)
# What varies from run to run is left out, so that equal means equal; NVTE_… below does the same for attention.
SAME = ("model.transformer_engine=true", "trainer.precision=bf16", "model.cross_entropy_loss_fusion=false")


@pytest.fixture(scope="module")
def weights():
    return te_names(map_weights(build_reference(CASE), CASE))


def validation_loss(training):
    model, batches = training.trainable.model, training.batches
    with model.gathered_parameters():
        return validate(model, [iter(batches)], training.config.model, len(batches), 1, on_batch=lambda: None)


def trained(weights, *overrides):
    """Losses and norms of six steps and of validations before and between them; what is left at the end."""
    with built_training(CASE, weights, *SAME, *overrides) as training:
        fp8 = training.config.model.fp8
        model = training.trainable.model
        proof = Proof(training.config, model, training.trainable.optimizer) if fp8 else None
        curve = [validation_loss(training)]
        for number in range(6):
            with proof.watching() if proof is not None and number == 0 else nullcontext():
                result = training.step()
            curve += [mean_loss(result.loss_sum_and_tokens), float(result.grad_norm)]
            if number == 2:
                curve.append(validation_loss(training))
            if proof is not None and number == 0:
                proof.judge(training.config.model.optim.lr)
        left = [parameter.float() for chunk in model.gpt_chunks for parameter in chunk.parameters()]
        return curve, left, random_states()["tracker"]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(DROPOUT, id="bf16"),
        pytest.param((*DROPOUT, "fp8=tensorwise"), id="tensorwise"),
        pytest.param(("fp8=blockwise",), id="blockwise"),
    ],
)
def test_graphs_change_no_bit(overrides, weights, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    expected, graphed = trained(weights, *overrides), trained(weights, *overrides, GRAPHS)
    assert graphed[0] == expected[0]
    torch.testing.assert_close(graphed[1:], expected[1:], rtol=0, atol=0)


def graph_launches(function):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.key == "cudaGraphLaunch")


def test_training_steps_replay_each_layer_and_nothing_else_does(weights):
    with built_training(CASE, weights, *SAME, GRAPHS) as training:
        # The first step is computed, and recorded at its end.
        training.step()
        # Forward and backward of each microbatch.
        replays = CASE.layers * 2 * len(training.batches)
        assert graph_launches(training.step) == replays
        assert graph_launches(lambda: validation_loss(training)) == 0
        with without_graphs(training.trainable.model.gpt_chunks):
            assert graph_launches(training.step) == 0
        assert graph_launches(training.step) == replays


def test_a_resumed_run_with_graphs_is_the_uncut_one_without(tmp_path, cache_dir):
    cut, end = 4, 14
    overrides = [
        *SMALL_GPU_RUN,
        *DROPOUT,
        "fp8=tensorwise",
        "checkpoint.save_at_end=true",
        "trainer.deterministic=true",
        f"model.optim.sched.decay_steps={end}",
    ]
    eager, graphed = tmp_path / "eager", tmp_path / "graphed"
    uncut = run_small(1, eager, cache_dir, [*overrides, f"trainer.max_steps={end}"], on_gpus=True)
    run_small(1, graphed, cache_dir, [*overrides, GRAPHS, f"trainer.max_steps={cut}"], on_gpus=True)
    resumed = run_small(1, graphed, cache_dir, [*overrides, GRAPHS, f"trainer.max_steps={end}"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, cut]
    curves = [[(step.loss, step.grad_norm) for step in metrics.train] for metrics in (resumed, uncut)]
    assert curves[0] == curves[1]
    state, expected = (saved_state(each / "checkpoints" / f"step_{end:08d}") for each in (graphed, eager))
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
