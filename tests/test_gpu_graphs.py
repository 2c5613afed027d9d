"""CUDA graphs of layers: bit for bit the run without them, also resumed and validated; and really replayed."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.checkpoint.state import random_states
from gpt_pretrain.fp8.proof import Proof
from gpt_pretrain.megatron.whole_layers import release_graphs, without_graphs
from gpt_pretrain.training.step import mean_loss, validate
from tests.emulated_training import save_checkpoint
from tests.transformers_reference import build_reference, built_training, gpt2, map_weights, te_names

pytestmark = pytest.mark.gpu

GRAPHS = "model.cuda_graph_impl=local"
CASE = gpt2("gpt2_124m", width=256, head_width=64, inner_width=512, length=128, weight_scale=1.0)
# What varies from run to run is left out, so that equal means equal; NVTE_… below does the same for attention.
SAME = (
    "model.transformer_engine=true",
    "trainer.precision=bf16",
    "model.cross_entropy_loss_fusion=false",
    "model.activation_cast_fusion=false",
)
FUSED, OWN = (f"model.gradient_accumulation_fusion={fused}" for fused in ("true", "false"))
DATA = {"tokenizer": "none"}


@pytest.fixture(scope="module")
def weights():
    return te_names(map_weights(build_reference(CASE), CASE))


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def validation_loss(training):
    model, batches = training.trainable.model, training.batches
    with model.gathered_parameters():
        return validate(model, [iter(batches)], 1, on_batch=lambda: None)


def train(training, steps, *, proven=True):
    """Losses and gradient norms of these steps, the first of them proven, and of a validation before each third."""
    config, trainable = training.config, training.trainable
    is_due = config.model.fp8 and proven
    curve = []
    for step in steps:
        if step % 3 == 0:
            curve.append(validation_loss(training))
        proof = Proof(trainable.model, trainable.optimizer, 0) if is_due else None
        with nullcontext() if proof is None else proof.watching():
            result = training.step()
        if proof is not None:
            proof.judge()
            is_due = False
        curve += [mean_loss(result.loss_sum_and_tokens), float(result.grad_norm)]
    return curve


def state(training):
    (chunk,) = training.trainable.model.gpt_chunks
    parameters = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    return parameters, random_states()["tracker"]


def trained(weights, *overrides):
    """Six steps, and what is left at their end."""
    with built_training(CASE, weights, *SAME, *overrides) as training:
        return train(training, range(6)), state(training)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((FUSED,), id="bf16"),
        pytest.param((FUSED, "fp8=tensorwise"), id="tensorwise"),
        pytest.param((OWN,), id="bf16, gradients of their own"),
        pytest.param((OWN, "fp8=tensorwise"), id="tensorwise, gradients of their own"),
    ],
)
def test_graphs_change_no_bit(overrides, weights):
    (expected, left), (curve, graphed) = trained(weights, *overrides), trained(weights, *overrides, GRAPHS)
    assert curve == expected
    torch.testing.assert_close(graphed, left, rtol=0, atol=0)


@pytest.mark.usefixtures("deterministic")
def test_a_run_resumed_with_graphs_is_the_uncut_one_without(weights, tmp_path):
    fp8 = (FUSED, "fp8=tensorwise")
    expected, left = trained(weights, *fp8)
    with built_training(CASE, weights, *SAME, *fp8, GRAPHS) as training:
        curve = train(training, range(3))
        progress = TrainingProgress(step=3, consumed_samples=3 * training.config.model.global_batch_size)
        saved = save_checkpoint(tmp_path, training.trainable, progress, training.config, DATA)
    with built_training(CASE, weights, *SAME, *fp8, GRAPHS) as training:
        load_checkpoint(verify_checkpoint(saved), training.trainable, training.config, DATA)
        curve += train(training, range(3, 6))
        # Once more from there, now that the graphs are recorded: what is restored reaches them.
        load_checkpoint(verify_checkpoint(saved), training.trainable, training.config, DATA)
        again = train(training, range(3, 6), proven=False)
        assert curve == expected
        assert again == curve[-len(again) :]
        torch.testing.assert_close(state(training), left, rtol=0, atol=0)


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


def graph_pools():
    """The pools of memory that graphs have for themselves."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()} - {(0, 0)}


def test_graphs_of_a_run_that_has_ended_keep_no_memory(weights):
    before = graph_pools()
    with built_training(CASE, weights, *SAME, "fp8=tensorwise", GRAPHS) as training:
        for _ in range(2):
            training.step()
        (recorded,) = graph_pools() - before
        release_graphs(training.trainable.model.gpt_chunks)
    del training
    assert recorded not in graph_pools()
