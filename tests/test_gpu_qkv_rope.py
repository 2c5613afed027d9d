"""Queries, keys and values split and rotated in one kernel on a GPU: Transformer Engine's bits, layers that train."""

from collections import Counter

import pytest
import torch

from gpt_pretrain.kernels import layers_triton
from gpt_pretrain.kernels.qkv_rope import split_and_rotate
from tests.qkv_ropes import Shape, check_against_fp64, make_angles, make_gradients, make_mixed
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = pytest.mark.gpu

FUSED, SEPARATE = (f"model.fused_single_qkv_rope={fused}" for fused in ("true", "false"))
PLAIN_LOSS = "model.cross_entropy_loss_fusion=false"
SHAPES = {
    "Llama 3 8B": Shape(length=8192, batch=2, groups=8, heads=4, width=128, turned=128),
    "half of each head": Shape(length=1024, batch=3, groups=12, heads=1, width=64, turned=32),
}


def test_rotates_as_complex_numbers_do():
    check_against_fp64("cuda", torch.bfloat16, 1.01 * 2**-8)


@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_transformer_engines_rotation(name):
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    shape = SHAPES[name]
    angles = make_angles(shape.length, shape.turned, "cuda")
    mixed = make_mixed(shape, torch.bfloat16, "cuda").requires_grad_()
    widths = [shape.heads * shape.width, shape.width, shape.width]
    ours = split_and_rotate(mixed, angles, angles, widths)
    queries, keys, values = mixed.split(widths, dim=-1)
    queries = queries.reshape(shape.length, shape.batch, -1, shape.width)
    theirs = *(apply_rotary_pos_emb(each, angles, fused=True) for each in (queries, keys)), values
    gradients = make_gradients(shape, torch.bfloat16, "cuda", "joined")
    of_ours, of_theirs = (torch.autograd.grad(parts, mixed, gradients) for parts in (ours, theirs))
    assert all(map(torch.equal, (*ours, *of_ours), (*theirs, *of_theirs)))


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_layers_train_bit_for_bit_as_with_separate_kernels(precision, monkeypatch):
    # As in test_gpu_graphs.py: otherwise attention's own gradients vary from run to run, and the loss may.
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    launches = Counter()
    launch = layers_triton.launch_qkv_rope

    def launch_and_count(*arguments, joins):
        launches[joins] += 1
        launch(*arguments, joins=joins)

    monkeypatch.setattr(layers_triton, "launch_qkv_rope", launch_and_count)
    case = CASES["llama3"]
    weights = te_names(map_weights(build_reference(case), case))
    fp8 = [] if precision == "bf16" else [f"fp8={precision}"]
    curves, counts = {}, {}
    for fusion in (SEPARATE, FUSED):
        with built_training(case, weights, *TE_BF16, *fp8, fusion, PLAIN_LOSS, "model.optim.lr=2e-4") as training:
            curves[fusion] = train_ours(training, 10)
            counts[fusion], passes = dict(launches), 10 * case.layers * len(training.batches)
        launches.clear()
    assert counts == {SEPARATE: {}, FUSED: {False: passes, True: passes}}
    assert curves[FUSED] == curves[SEPARATE]
