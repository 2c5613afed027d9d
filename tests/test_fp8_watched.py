"""Products of experts that no token came to: neither a fault of the run, nor proven by nobody."""

import re
import sys
import types
from itertools import product as combinations

import pytest
import torch

from gpt_pretrain.fp8.gemms import OPERANDS, Operand, Phase, Product
from gpt_pretrain.fp8.observer import WatchedProducts, differences_of_ranks, observe_products
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.run.products import EXPERT_FC1, QKV, resolve
from gpt_pretrain.training.header import describe_fp8
from tests.emulated_training import emulated_training
from tests.platforms import H200, spec_of
from tests.refusals import compose_quickly

PLANNED = {Phase.forward: ("e4m3", "e4m3"), Phase.dgrad: ("e5m2", "e4m3"), Phase.wgrad: ("e5m2", "e4m3")}
BF16 = ("bfloat16", "bfloat16")
EXPERTS, ATTENTION = f"decoder.layers.1.{EXPERT_FC1}", f"decoder.layers.0.{QKV}"


def product(phase, formats):
    operands = [Operand(role=role, format=name) for role, name in zip(OPERANDS[phase], formats, strict=True)]
    return Product(phase=phase, operands=(operands[0], operands[1]))


@pytest.fixture(scope="module")
def ranks_with():
    """Each rank computes all products as planned, but for those that a test replaces: by formats, "idle" or None."""
    run = resolve(compose_quickly(["model=moe_small", "fp8=tensorwise", "model.num_layers=2"]))
    settings = run.fp8
    planned = {linear.module: linear for linear in run.linears if linear.layer >= 0}
    assert {EXPERTS, ATTENTION} <= set(planned)

    def build(*replaced_on_ranks):
        ranks = []
        for replaced in replaced_on_ranks:
            watched = WatchedProducts(settings, "bfloat16")
            for (name, linear), phase in combinations(planned.items(), Phase):
                does = replaced.get(name, PLANNED[phase] if linear.precision == "fp8" else BF16)
                if does in ("idle", "idle in one microbatch"):
                    watched.note_idle(name, phase)
                if does not in ("idle", None):
                    watched.note(name, product(phase, PLANNED[phase] if does == "idle in one microbatch" else does))
            ranks.append(watched.compare(planned))
        return ranks

    return build


@pytest.mark.parametrize(
    ("ranks", "what_differs"),
    [
        pytest.param([{}, {}], set(), id="all as planned"),
        pytest.param([{EXPERTS: "idle"}, {}], set(), id="idle here, computed there"),
        pytest.param(
            [{EXPERTS: "idle"}, {EXPERTS: "idle"}], {(EXPERTS, "no such product")}, id="idle everywhere, so unproven"
        ),
        pytest.param(
            [{EXPERTS: "idle"}, {EXPERTS: BF16}],
            {(EXPERTS, "no such product"), (EXPERTS, "bfloat16 × bfloat16")},
            id="idle here, computed in BF16 there",
        ),
        pytest.param([{EXPERTS: "idle in one microbatch"}], set(), id="idle in one microbatch"),
        pytest.param([{EXPERTS: None}, {}], {(EXPERTS, "no such product")}, id="not even called"),
        pytest.param([{ATTENTION: None}, {}], {(ATTENTION, "no such product")}, id="no experts, computed there alone"),
        pytest.param([{}, {ATTENTION: BF16}], {(ATTENTION, "bfloat16 × bfloat16")}, id="another format on one rank"),
    ],
)
def test_idle_products_are_proven_by_other_ranks_or_not_at_all(ranks_with, ranks, what_differs):
    differences = differences_of_ranks(ranks_with(*ranks))
    assert {(difference.module, difference.live) for difference in differences} == what_differs
    assert len(differences) == len(set(differences)) == 3 * len(what_differs), "each of the three products, once"


def test_a_difference_names_its_ranks(ranks_with):
    differences = differences_of_ranks(ranks_with({}, {ATTENTION: BF16}, {ATTENTION: BF16, EXPERTS: None}))
    assert {(each.module, each.ranks) for each in differences} == {(ATTENTION, (1, 2)), (EXPERTS, (2,))}
    assert all(
        re.search(rf"  1, 2 +{ATTENTION}$|  2 +{EXPERTS}$", row)
        for row in str(ProofError(differences)).splitlines()[2:-1]
    )


@pytest.fixture
def grouped_linear(monkeypatch):
    """Layers of experts where Transformer Engine has its own, whose products are called as there."""
    package = "transformer_engine.pytorch.module"
    linear, layernorm_linear, grouped = (
        types.ModuleType(f"{package}.{name}") for name in ("linear", "layernorm_linear", "grouped_linear")
    )

    def grouped_gemm(a, b, *, m_splits, layout="TN"):
        assert [len(rows) for rows in b] == m_splits
        return [
            {"TN": lambda w, x: x @ w.mT, "NN": lambda w, dy: dy @ w, "NT": lambda x, dy: dy.mT @ x}[layout](*pair)
            for pair in zip(a, b, strict=True)
        ]

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weights, m_splits):
            ctx.save_for_backward(x, weights)
            ctx.m_splits = m_splits
            return torch.cat(grouped.general_grouped_gemm(weights, x.split(m_splits), m_splits=m_splits))

        @staticmethod
        def backward(ctx, dy):
            (x, weights), m_splits = ctx.saved_tensors, ctx.m_splits
            dx = grouped.general_grouped_gemm(weights, dy.split(m_splits), m_splits=m_splits, layout="NN")
            dw = grouped.general_grouped_gemm(x.split(m_splits), dy.split(m_splits), m_splits=m_splits, layout="NT")
            return torch.cat(dx), torch.stack(dw), None

    class GroupedLinear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(2, 8, 4))

        def forward(self, x, m_splits):
            return Products.apply(x, self.weights, m_splits)

    GroupedLinear.__module__ = grouped.__name__
    grouped.general_grouped_gemm, grouped._GroupedLinear = grouped_gemm, Products
    for module, function in ((linear, "_Linear"), (layernorm_linear, "_LayerNormLinear")):
        module.general_gemm = None
        setattr(module, function, type(function, (), {"forward": staticmethod(len), "backward": staticmethod(len)}))
    parent = types.ModuleType(package)
    parent.linear, parent.layernorm_linear, parent.grouped_linear = linear, layernorm_linear, grouped
    packages = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch"), parent
    for module in (*packages, linear, layernorm_linear, grouped):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return GroupedLinear


@pytest.mark.parametrize(("m_splits", "computed", "idle"), [([3, 2], 2, 0), ([0, 5], 1, 0), ([0, 0], 0, 1)])
def test_the_observer_tells_of_grouped_products_without_rows(grouped_linear, m_splits, computed, idle):
    seen, idles = [], []
    with emulated_training() as training:
        experts = training.chunks[0].decoder.layers[1].mlp.linear_fc1 = grouped_linear()
        with observe_products(
            training.chunks,
            lambda name, product: seen.append((name, product.phase)),
            idle_listener=lambda name, phase: idles.append((name, phase)),
        ):
            experts(torch.randn(sum(m_splits), 4, requires_grad=True), m_splits).sum().backward()
    name = "decoder.layers.1.mlp.linear_fc1"
    assert sorted(map(str, seen)) == sorted(str((name, phase)) for phase in Phase for _ in range(computed))
    assert sorted(map(str, idles)) == sorted(str((name, phase)) for phase in Phase for _ in range(idle))


def test_the_observer_tells_only_of_products_that_are_asked_for(grouped_linear):
    name, asked, seen = "decoder.layers.1.mlp.linear_fc1", [], []

    def asks(layer, phase):
        asked.append((layer, phase))
        return phase is Phase.dgrad and asked.count((name, phase)) == 1

    with emulated_training() as training:
        experts = training.chunks[0].decoder.layers[1].mlp.linear_fc1 = grouped_linear()
        with observe_products(training.chunks, lambda layer, product: seen.append((layer, product.part)), asks=asks):
            experts(torch.randn(5, 4, requires_grad=True), [3, 2]).sum().backward()
    assert sorted(map(str, asked)) == sorted(str((name, phase)) for phase in Phase for _ in range(2)), "each expert's"
    assert seen == [(name, 0)]


@pytest.mark.parametrize("graphs", [None, "none"])
def test_a_run_whose_layers_are_replayed_says_that_only_its_first_step_is_proven(graphs):
    overrides = ["model=gpt2_124m", "model.micro_batch_size=4", "model.global_batch_size=8", "fp8=tensorwise"]
    spec = spec_of(
        compose_quickly([*overrides, "data=mock", *([f"model.cuda_graph_impl={graphs}"] if graphs else [])]), H200
    )
    assert (spec.kernels.cuda_graph_impl is None) == (graphs is not None)
    assert ("model.cuda_graph_impl=none" in describe_fp8(spec)) == (graphs is None)
