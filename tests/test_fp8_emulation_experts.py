"""Experts in emulated FP8: a loop of single products, proven, counted, resumed and resharded."""

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.fp8.proof import Proof, ProofError
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.watches import ExpertWatch, Fp8Watch
from tests.emulated_training import emulate, emulated_training
from tests.expert_training import EXPERTS
from tests.refusals import compose_quickly
from tests.rounding import fp8_anew_tolerance
from tests.runs import SMALL_RUN, run_small

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57_344.0}
# Values that lie on the border of two codes may fall to either; products of 64 and 96 terms in fp32.
TOLERANCE = 1e-5
# Two layers of four experts, of which a token meets two.
LAYERS, NUM_EXPERTS = 2, 4
# A small run of which every step is proven.
RUN = (
    "model.num_moe_experts=4",
    "model.moe_ffn_hidden_size=64",
    "model.num_layers=2",
    "trainer.limit_val_batches=0",
    "model.optim.sched.name=constant",
    "model.optim.sched.warmup_steps=0",
    "logging.fp8_proof_interval=1",
    *emulate("tensorwise"),
)


def rounded(x, dtype):
    """One scale for the tensor, from its largest magnitude."""
    largest = x.abs().max()
    scale = LARGEST[dtype] / largest
    return (x * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() / scale


class SingleProducts(torch.autograd.Function):
    """A linear layer of tensorwise scaling, written down once more."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = rounded(dy, torch.float8_e5m2)
        return dy @ weight, dy.t() @ x


def loop_of_single_products(experts, rows, counts, probs):
    """Each expert's rows through its own products, one after the other; those without rows are left out."""
    results = []
    parts = zip(experts.local_experts, rows.split(counts), probs.split(counts), strict=True)
    for expert, own, weights in parts:
        if len(own) == 0:
            continue
        gate, up = SingleProducts.apply(own, expert.linear_fc1.weight).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up * weights[:, None]
        results.append(SingleProducts.apply(inner, expert.linear_fc2.weight))
    return torch.cat(results)


def weights_of(experts):
    return [linear.weight for expert in experts.local_experts for linear in (expert.linear_fc1, expert.linear_fc2)]


@pytest.mark.parametrize(
    "counts",
    [[16, 16, 16, 16], [1, 30, 7, 26], [40, 0, 24, 0], [0, 0, 64, 0]],
    ids=["even", "uneven", "two without a token", "one with all"],
)
def test_experts_are_a_loop_of_single_products(counts):
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        experts = training.chunks[0].decoder.layers[0].mlp.experts
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(64, 64, generator=generator).requires_grad_()
        probs = torch.rand(64, generator=generator).requires_grad_()
        wanted = torch.randn(64, 64, generator=generator)
        inputs = [rows, probs, *weights_of(experts)]
        output, _ = experts(rows, torch.tensor(counts), probs)
        expected = loop_of_single_products(experts, rows, counts, probs)
        torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
        found = torch.autograd.grad(output, inputs, wanted)
        gradients = torch.autograd.grad(expected, inputs, wanted, allow_unused=True)
        for each, other in zip(found, gradients, strict=True):
            if other is None:
                # An expert without tokens has a gradient all the same, which the exchange waits for.
                assert not each.any()
            else:
                torch.testing.assert_close(each, other, rtol=TOLERANCE, atol=TOLERANCE * other.abs().max().item())


def to_two_experts(router, arguments, result):
    """All tokens to expert 0, and to 1 or 2 by turns; none to 3."""
    probs, routing = result
    chosen = torch.zeros_like(routing)
    chosen[:, 0] = True
    chosen[0::2, 1] = chosen[1::2, 2] = True
    # The router keeps a gradient.
    return chosen * 0.5 + 0.0 * probs, chosen


def proven(training, *, starved):
    """A proof of one step, in which the last expert of each layer had no token."""
    if starved:
        for layer in training.chunks[0].decoder.layers:
            layer.mlp.router.register_forward_hook(to_two_experts)
    proof = Proof(training.trainable.model, training.trainable.optimizer, 0)
    with proof.watching():
        training.step()
    return proof.judge()


@pytest.mark.parametrize("starved", [False, True], ids=["routed", "one without a token"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_experts_are_proven(recipe, starved):
    with emulated_training(*EXPERTS, *emulate(recipe)) as training:
        found = proven(training, starved=starved)
        # Weights that a token meets: attention, two experts of three matrices; LM head; scores as 2 · 64 · 32 / 2.
        attention, expert = 64 * 64 + (64 + 2 * 32) * 64, 3 * 64 * 96
        in_fp8 = LAYERS * (attention + 2 * expert)
        rest = LAYERS * (2 * 64 * 32 // 2 + NUM_EXPERTS * 64) + 64 * 128
        assert found.fp8_flops_share == pytest.approx(in_fp8 / (in_fp8 + rest), rel=1e-3)


@pytest.mark.parametrize(("kind", "plain"), [("linear_fc1", ColumnParallelLinear), ("linear_fc2", RowParallelLinear)])
def test_an_expert_outside_of_fp8_ends_the_run(kind, plain):
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        expert = training.chunks[0].decoder.layers[1].mlp.experts.local_experts[2]
        getattr(expert, kind).__class__ = plain
        with pytest.raises(ProofError) as error:
            proven(training, starved=False)
    name = f"decoder.layers.1.mlp.experts.local_experts.2.{kind}"
    assert {(each.module, each.live) for each in error.value.differences} == {(name, "no such product")}
    assert {each.what for each in error.value.differences} == {phase.value for phase in Phase}


def test_products_of_a_layer_whose_experts_all_had_no_tokens_are_not_proven():
    """Nobody computed them: here no expert of a layer gets a row, and nobody else has one."""
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        experts = training.chunks[0].decoder.layers[0].mlp.experts
        experts.register_forward_pre_hook(
            lambda module, given: (given[0][:0], torch.zeros_like(given[1]), given[2][:0])
        )
        experts.register_forward_hook(
            lambda module, given, result: (result[0].new_zeros(128, 64) + 0.0 * result[0].sum(), None)
        )
        with pytest.raises(ProofError) as error:
            proven(training, starved=False)
    modules = {each.module.partition(".local_experts.")[0] for each in error.value.differences}
    assert modules == {"decoder.layers.0.mlp.experts"}


def test_statistics_join_the_experts_of_a_layer():
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        model = training.trainable.model
        collector = StatisticsCollector(model.spec.linears, training.chunks, model.spec.platform.device)
        seen, values = {}, {}

        def note(name, product):
            if product.phase is Phase.forward:
                layer = (
                    name.replace(name[name.index(".local_experts") : name.rindex(".")], "") if "local" in name else name
                )
                operand = next(each for each in product.operands if each.role is Role.input)
                seen[layer] = max(seen.get(layer, 0.0), operand.amax.item())
                values[layer] = values.get(layer, 0) + operand.codes.numel()

        with observe_products(training.chunks, note), collector.observe(1):
            training.step()
        (statistics,) = collector.read()
        inputs = {each.layer: each for each in statistics.tensors if each.tensor == "input"}
        assert set(inputs) == {linear.module for linear in model.spec.linears if linear.precision == "fp8"}
        for name, tensor in inputs.items():
            assert tensor.amax == pytest.approx(seen[name])
        # Each of 128 tokens meets two experts.
        assert values["decoder.layers.0.mlp.experts.linear_fc1"] == 2 * 128 * 64
        weights = [each for each in statistics.tensors if each.tensor == "weight"]
        # Each expert is compared with its own weight.
        assert {each.lagging for each in weights} == {0.0}


def test_an_expert_without_tokens_is_told():
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        for layer in training.chunks[0].decoder.layers:
            layer.mlp.router.register_forward_hook(to_two_experts)
        watch = ExpertWatch(training.trainable.model, step=0)
        training.step()
        (record,) = watch.records(1)
        # 128 tokens on expert 0, 64 on two others; the mean is 64.
        assert (record.busiest_expert, record.idlest_expert) == (2.0, 0.0)
        assert record.idle_experts == LAYERS


def losses(metrics):
    return [record.loss for record in metrics.train]


def test_experts_in_fp8_resume_as_the_same_run(tmp_path, cache_dir):
    whole = run_small(1, tmp_path / "whole", cache_dir, [*RUN, "trainer.max_steps=4"])
    run_small(1, tmp_path / "cut", cache_dir, [*RUN, "trainer.max_steps=2"])
    resumed = run_small(1, tmp_path / "cut", cache_dir, [*RUN, "trainer.max_steps=4"])
    assert losses(resumed) == losses(whole)
    assert [record.busiest_expert for record in resumed.experts] == [each.busiest_expert for each in whole.experts]


def test_experts_in_fp8_go_on_over_two_ranks_proven_and_counted(tmp_path, cache_dir):
    """EP 1 → EP 2: the loss goes on where it was; scales of other microbatches round it anew."""
    counted = "logging.fp8_statistics_interval=1"
    run_small(1, tmp_path / "run", cache_dir, [*RUN, "trainer.max_steps=4"])
    one = run_small(1, tmp_path / "one", cache_dir, [*RUN, "trainer.max_steps=6"])
    run_small(2, tmp_path / "run", cache_dir, [*RUN, counted, "trainer.max_steps=6", "parallelism=ep2"])
    metrics = load_metrics(tmp_path / "run")
    anew = fp8_anew_tolerance(compose_quickly([*SMALL_RUN, *RUN]).model, step=2)
    assert losses(metrics)[4:] == pytest.approx(losses(one)[4:], rel=anew)
    assert metrics.fp8_coverage.gemm_flops_share == one.fp8_coverage.gemm_flops_share
    layers = {tensor.layer for record in metrics.fp8 for tensor in record.tensors}
    assert {
        f"decoder.layers.{layer}.mlp.experts.{kind}" for layer in (0, 1) for kind in ("linear_fc1", "linear_fc2")
    } <= (layers)
    assert [record.step for record in metrics.experts] == [1, 2, 3, 4, 5, 6]


def test_alarms_name_the_experts():
    """Weights over seven decades: E4M3 has zero for a fifth of them, its smallest number for a twelfth of the rest."""
    with emulated_training(*EXPERTS, *emulate("tensorwise")) as training:
        for expert in training.chunks[0].decoder.layers[1].mlp.experts.local_experts:
            weight = expert.linear_fc2.weight
            weight.data.copy_(10.0 ** -(7 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))))
        model = training.trainable.model
        watch, step = Fp8Watch(model), training.config.trainer.log_every_n_steps
        with watch.step(step):
            training.step()
        (record,) = watch.records()
        (warning,) = [each for each in record.warnings if "weight" in each]
        assert "decoder.layers.1.mlp.experts.linear_fc2" in warning
