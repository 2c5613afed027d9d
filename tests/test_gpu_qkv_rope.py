"""Queries, keys and values split and rotated in one kernel on a GPU: Transformer Engine's bits, layers that train.

With norms in the same kernel it rounds less often than Transformer Engine.
"""

from collections import Counter
from unittest.mock import Mock, patch

import pytest
import torch

from gpt_pretrain.kernels import qkv_cast_triton, qkv_rope_triton
from gpt_pretrain.kernels.qkv_rope import split_and_rotate
from tests.launching import gpu_environment, run_ranks
from tests.qkv_ropes import (
    CAST_SHAPES,
    EPSILON,
    Shape,
    check_against_fp64,
    counted_launches,
    head_norms,
    make_angles,
    make_gradients,
    make_mixed,
    make_norms,
    share_of_cast_codes_that_differ,
    split_and_rotate_in_fp64,
)
from tests.rounding import fp8_anew_tolerance, loss_tolerance
from tests.test_gpu_parity import CASES, SHAPE, TE_BF16
from tests.transformers_reference import build_reference, built_training, llama, map_weights, te_names, train_ours

pytestmark = pytest.mark.gpu

FUSED, SEPARATE = (f"model.fused_single_qkv_rope={fused}" for fused in ("true", "false"))
PLAIN_LOSS = "model.cross_entropy_loss_fusion=false"
SHAPES = {
    "Llama 3 8B": Shape(length=8192, batch=2, groups=8, heads=4, width=128, turned=128),
    "half of each head": Shape(length=1024, batch=3, groups=12, heads=1, width=64, turned=32),
}


QWEN3 = llama("qwen3_8b", "Qwen3", groups=2, theta=1e6, epsilon=1e-6, overrides=["model.kv_channels=64"], **SHAPE)


@pytest.mark.parametrize("normalizes", [False, True])
def test_rotates_as_complex_numbers_do(normalizes):
    check_against_fp64("cuda", torch.bfloat16, 1.01 * 2**-8, normalizes=normalizes)


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
    launch = qkv_rope_triton.launch_qkv_rope

    def launch_and_count(*arguments, joins):
        launches[joins] += 1
        launch(*arguments, joins=joins)

    monkeypatch.setattr(qkv_rope_triton, "launch_qkv_rope", launch_and_count)
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


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_what_it_rotates_back(codes):
    shapes = [*CAST_SHAPES, SHAPES["Llama 3 8B"]]
    for scale in (3.0, None):
        assert share_of_cast_codes_that_differ("cuda", torch.bfloat16, codes, shapes, scale=scale) <= 0.01


@pytest.mark.parametrize("precision", ["delayed", "tensorwise"])
def test_layers_train_as_with_separate_casts(precision, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    case = CASES["llama3"]
    weights = te_names(map_weights(build_reference(case), case))
    curves, counts = {}, {}
    for cast in ("false", "true"):
        with (
            patch.object(qkv_cast_triton, "launch_rope_cast", Mock(wraps=qkv_cast_triton.launch_rope_cast)) as launch,
            built_training(case, weights, *TE_BF16, f"fp8={precision}", f"model.qkv_cast_fusion={cast}") as training,
        ):
            curves[cast] = train_ours(training, 10)
            counts[cast], passes = launch.call_count, 10 * case.layers * len(training.batches)
    assert counts == {"false": 0, "true": passes}
    # The same bits are cast with the same scales.
    assert curves["true"] == curves["false"]


@pytest.mark.parametrize("name", SHAPES)
def test_norms_and_rotation_are_as_exact_as_transformer_engines(name):
    from transformer_engine.pytorch import RMSNorm
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    shape = SHAPES[name]
    angles, norms = make_angles(shape.length, shape.turned, "cuda"), make_norms(shape.width, torch.bfloat16, "cuda")
    mixed = make_mixed(shape, torch.bfloat16, "cuda").requires_grad_()
    gradients = make_gradients(shape, torch.bfloat16, "cuda", "joined")
    ours = split_and_rotate(mixed, angles, angles, head_norms(shape.width, *norms))
    of_ours = torch.autograd.grad(ours, [mixed, *norms], gradients)

    modules = [RMSNorm(shape.width, eps=EPSILON, dtype=torch.bfloat16, device="cuda") for _ in norms]
    for module, weight in zip(modules, norms, strict=True):
        module.weight.data.copy_(weight.detach())
    widths = [shape.heads * shape.width, shape.width, shape.width]
    *rotated, values = mixed.split(widths, dim=-1)
    heads = (each.reshape(shape.length, shape.batch, -1, shape.width) for each in rotated)
    normalized = [module(each) for module, each in zip(modules, heads, strict=True)]
    theirs = *(apply_rotary_pos_emb(each, angles, fused=True) for each in normalized), values
    of_theirs = torch.autograd.grad(theirs, [mixed, *(module.weight for module in modules)], gradients)

    exact = [each.detach().double().requires_grad_() for each in (mixed, *norms)]
    expected = split_and_rotate_in_fp64(exact[0], angles, shape.width, exact[1:])
    of_expected = torch.autograd.grad(expected, exact, [each.double() for each in gradients])
    for one, other, exactly in zip((*ours, *of_ours), (*theirs, *of_theirs), (*expected, *of_expected), strict=True):
        error, their_error = (float((each.double() - exactly).norm() / exactly.norm()) for each in (one, other))
        assert error < 2**-8
        # Weights of a few elements round to either side.
        assert error <= their_error or exactly.dim() == 1


def test_gradients_of_norms_repeat_to_the_bit():
    shape = SHAPES["Llama 3 8B"]
    angles, norms = make_angles(shape.length, shape.turned, "cuda"), make_norms(shape.width, torch.float32, "cuda")
    mixed = make_mixed(shape, torch.bfloat16, "cuda").requires_grad_()
    gradients = make_gradients(shape, torch.bfloat16, "cuda", "joined")
    parts = split_and_rotate(mixed, angles, angles, head_norms(shape.width, *norms))
    first, second = (torch.autograd.grad(parts, [mixed, *norms], gradients, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_layers_with_norms_train_as_with_separate_kernels(precision):
    weights = te_names(map_weights(build_reference(QWEN3), QWEN3))
    fp8 = [] if precision == "bf16" else [f"fp8={precision}"]
    curves, stored, steps = {}, {}, 5
    for fusion in (SEPARATE, FUSED):
        overrides = *TE_BF16, *fp8, fusion, PLAIN_LOSS, "model.optim.lr=2e-4"
        with counted_launches(normalizes=True) as launches, built_training(QWEN3, weights, *overrides) as training:
            curves[fusion], _ = train_ours(training, steps)
            passes = steps * QWEN3.layers * len(training.batches)
            assert [launch.call_count for launch in launches] == ([passes] * 2 if fusion == FUSED else [0, 0])
            model = training.config.model
            stored[fusion] = training.trainable.model.gpt_chunks[0].sharded_state_dict().keys()
    assert stored[FUSED] == stored[SEPARATE]
    for step, (ours, separate) in enumerate(zip(curves[FUSED], curves[SEPARATE], strict=True), start=1):
        tolerance = loss_tolerance(model, torch.bfloat16, step) + (fp8_anew_tolerance(model, step) if fp8 else 0)
        assert ours == pytest.approx(separate, rel=tolerance)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_tensor_parallel_ranks_get_the_gradients_of_separate_norms(precision):
    overrides = ["trainer.precision=bf16", "model.transformer_engine=true"]
    overrides += [] if precision == "bf16" else [f"fp8={precision}"]
    done = run_ranks(2, ["tests/programs/normalized_layouts.py", *overrides], env=gpu_environment(2))
    assert done.returncode == 0, done.stderr[-6000:]
