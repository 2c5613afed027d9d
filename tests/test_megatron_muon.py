"""Muon's update is what its formula says, for the layers' matrices alone; everything else is Adam's.

Other layouts are in `test_checkpoint_resharding`, skipped updates in `test_training_guards`.
"""

import math

import pytest
import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from gpt_pretrain.megatron import muon
from gpt_pretrain.megatron.muon_matrices import is_orthogonalized
from gpt_pretrain.megatron.optimizer_state import _steps_taken
from tests.emulated_training import emulate, emulated_training

RATE, DECAY, MOMENTUM = 3e-3, 0.1, 0.95
# Of emerging-optimizers' "quintic"; Jordan's modded-nanogpt found them.
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
# Two query groups of two heads of 16 channels.
HEADS = (32, 16, 16)
MUON = ("optimizer=muon", "model.num_query_groups=2", "trainer.gradient_clip_val=0", "model.activation=swiglu")
EXACT = ("model.optim.muon_fp32_matmul_prec=highest",)
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96")


def iterated(matrix):
    """Newton-Schulz iteration, as its authors write it."""
    x = matrix / matrix.norm()
    if x.shape[0] > x.shape[1]:
        return iterated(matrix.T).T
    for a, b, c in QUINTIC:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x


def by_singular_values(matrix):
    """The same from a decomposition: the polynomials of the singular values, and the polar factor's vectors."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for a, b, c in QUINTIC:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def scaled(matrix, orthogonalize):
    return orthogonalize(matrix) * 0.2 * math.sqrt(max(matrix.shape))


def expected_update(name, direction, orthogonalize):
    """Of one matrix, in fp64; queries, keys and values are three."""
    if not name.endswith("linear_qkv.weight"):
        return scaled(direction, orthogonalize)
    parts = direction.view(-1, sum(HEADS), direction.shape[1]).split(HEADS, dim=1)
    updates = [
        scaled(part.reshape(-1, direction.shape[1]), orthogonalize).view(part.shape[0], -1, direction.shape[1])
        for part in parts
    ]
    return torch.cat(updates, dim=1).view(direction.shape)


def weights(training):
    return {
        name: parameter.detach().double().clone()
        for chunk in training.chunks
        for name, parameter in chunk.named_parameters()
    }


def matrices(training):
    """Names of what must be Muon's, told without asking it."""
    return [
        name
        for name, weight in weights(training).items()
        if "decoder.layers." in name and name.endswith("weight") and weight.dim() == 2 and "router" not in name
    ]


@pytest.mark.parametrize("orthogonalize", [iterated, by_singular_values])
@pytest.mark.parametrize("layout", ["parallelism=single", "parallelism=dp"])
def test_two_steps_are_what_the_formula_says(layout, orthogonalize):
    with emulated_training(*MUON, *EXACT, layout) as training:
        names = matrices(training)
        assert len(names) == 8
        momenta = dict.fromkeys(names, 0.0)
        for _ in range(2):
            before, gradients = weights(training), training.gradients()
            training.step()
            after = weights(training)
            for name in names:
                momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * gradients[name]
                direction = (1 - MOMENTUM) * gradients[name] + MOMENTUM * momenta[name]
                update = expected_update(name, direction, orthogonalize)
                found = (before[name] * (1 - RATE * DECAY) - after[name]) / RATE
                # Five iterations of three products each, of fp32 numbers; weights are rounded once more.
                assert (found - update).abs().max() < 1e-3 * update.abs().max()


def test_five_iterations_come_near_to_the_polar_factor():
    """The iteration turns singular values from 1% of the norm on into numbers around 1, and never farther than 0.3."""
    with emulated_training(*MUON) as training:
        before, gradients = weights(training), training.gradients()
        training.step()
        after = weights(training)
        for name in ("decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.1.mlp.linear_fc2.weight"):
            update = (before[name] * (1 - RATE * DECAY) - after[name]) / RATE
            u, s, v = torch.linalg.svd(gradients[name], full_matrices=False)
            large = s > 0.01 * s.norm()
            assert large.sum() > 8
            along = torch.diag(u.T @ update @ v.T)[large] / (0.2 * math.sqrt(max(update.shape)))
            assert (along - 1).abs().max() < 0.3
            gradient = torch.diag(u.T @ gradients[name] @ v.T)[large] / gradients[name].norm() * math.sqrt(large.sum())
            assert (gradient - 1).abs().max() > 0.5, "the gradient itself is far from it"


@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["dense", "experts"])
def test_everything_else_is_adams(experts):
    after = []
    for optimizer in ("muon", "adam"):
        with emulated_training(*MUON, *experts, f"optimizer={optimizer}") as training:
            names = matrices(training)
            training.step()
            after.append(weights(training))
    others = after[0].keys() - set(names)
    assert {"embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"} <= others
    assert any("router" in name for name in others) is bool(experts)
    for name, weight in after[0].items():
        assert weight.equal(after[1][name]) is (name in others), name


def test_updates_are_those_of_megatron_core():
    """Of its class for one rank, which takes a matrix at a time."""
    with emulated_training(*MUON) as training:
        chunk = training.chunks[0]
        own = {name: weight for name, weight in chunk.named_parameters() if is_orthogonalized(weight)}
        theirs = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in own.items()}
        for name, weight in theirs.items():
            weight.is_qkv = name.endswith("linear_qkv.weight")
        settings = {"split_qkv": True, "is_qkv_fn": lambda weight: weight.is_qkv, "qkv_split_shapes": list(HEADS)}
        optimizer = TensorParallelMuon(
            list(theirs.values()), lr=RATE, weight_decay=DECAY, nesterov=True, extra_scale_factor=0.2, **settings
        )
        training.step_beside(optimizer, theirs, num_steps=3)
        for name, weight in theirs.items():
            # A product of one matrix may be summed up in another order than one of several.
            assert (weight - own[name]).abs().max() < 2e-2 * RATE, name
            assert not torch.equal(weight, torch.zeros_like(weight))


def test_a_batch_is_as_large_as_memory_for_it(monkeypatch):
    """Whatever fits at once, the same comes out, up to the order of sums."""
    after = []
    for at_once in (2**26, 1):
        monkeypatch.setattr(muon, "MUON_VALUES_AT_ONCE", at_once)
        with emulated_training(*MUON, *EXACT) as training:
            (part,) = training.trainable.optimizer.chained_optimizers
            assert len(part.optimizer._batches) == (4 if at_once > 1 else 8)
            training.step()
            after.append(weights(training))
    for name, weight in after[0].items():
        assert (weight - after[1][name]).abs().max() < 1e-3 * RATE


@pytest.mark.parametrize(
    "override",
    [
        "model.optim.muon_momentum=0.5",
        "model.optim.muon_nesterov=false",
        "model.optim.muon_split_qkv=false",
        "model.optim.muon_num_ns_steps=4",
        "model.optim.muon_coefficient_type=simple",
        "model.optim.muon_coefficient_type=polar_express",
        "model.optim.muon_coefficient_type=cans",
        "model.optim.muon_coefficient_type=aol",
        "model.optim.muon_coefficient_type=deepseekv4",
        "model.optim.muon_scale_mode=unit_rms_norm",
        "model.optim.muon_scale_mode=shape_scaling",
        "model.optim.muon_extra_scale_factor=0.3",
        "model.optim.muon_fp32_matmul_prec=highest",
    ],
)
def test_every_key_reaches_the_update(override):
    after = []
    for overrides in ((), (override,)):
        with emulated_training(*MUON, *overrides) as training:
            for _ in range(2):
                training.step()
            after.append(weights(training))
            names = matrices(training)
    changed = {name for name in names if not after[0][name].equal(after[1][name])}
    qkv = {name for name in names if "linear_qkv" in name}
    assert changed
    if "split_qkv" in override:
        assert qkv & changed


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.precision=bf16"],
        ["trainer.precision=bf16", "parallelism=dp"],
        ["trainer.precision=bf16", "parallelism=zero2"],
        emulate("delayed"),
        [*emulate("torchao_tensorwise"), "model.fp8_params=true", "trainer.precision=bf16", "parallelism=dp"],
        EXPERTS,
    ],
    ids=["bf16", "bf16 distributed", "zero2", "delayed", "stored codes", "experts"],
)
def test_it_learns(overrides):
    with emulated_training(*MUON, *overrides) as training:
        losses = [training.step() for _ in range(12)]
    assert losses[-1] < losses[0] - 1.5


def test_ranks_that_hold_matrices_alone_count_steps_too():
    """Whichever rank writes a checkpoint, Adam's step is in it."""
    with emulated_training(*MUON) as training:
        for _ in range(2):
            training.step()
        (part,) = training.trainable.optimizer.chained_optimizers
        matrices_alone = {weight: states for weight, states in part.optimizer.state.items() if "step" not in states}
        assert len(matrices_alone) == 8
        part.optimizer.state = matrices_alone
        assert _steps_taken(part.optimizer) == 2
