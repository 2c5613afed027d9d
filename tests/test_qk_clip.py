"""A step of `model.qk_clip` is what the formula says, in numpy, and the same in every layout."""

from functools import cache

import numpy as np
import pytest
import torch

from gpt_pretrain.features.qk_clip import largest_logits
from gpt_pretrain.megatron.qk_clip import LargestLogits
from tests.emulated_training import emulate, emulated_training
from tests.runs import run_small

HEADS, GROUPS, WIDTH, LAYERS = 4, 2, 16, 2
ALPHA = 0.3
# Logits differ from head to head and are around one; no matrix has the size of QKV but QKV.
MODEL = (
    "model.num_query_groups=2",
    "model.init_method_std=0.2",
    "model.vocab_size=192",
    "model.ffn_hidden_size=160",
)
ROWS = (HEADS + 2 * GROUPS) * WIDTH
SIZES = {ROWS * 64: "weight", ROWS: "bias"}
BF16 = "trainer.precision=bf16"
BIASES = ("model.bias=true", "model.position_embedding_type=learned_absolute")
KINDS = {
    "fp32": (),
    "fp32 distributed": ("parallelism=dp",),
    "biases": BIASES,
    "biases distributed": (*BIASES, "parallelism=dp", BF16),
    "bf16": (BF16,),
    "zero2": (BF16, "parallelism=zero2"),
    "fsdp": (BF16, "parallelism=fsdp"),
    "fsdp in fp32": ("parallelism=fsdp",),
    "SGD": ("optimizer=sgd", "model.optim.lr=0.3"),
    "Lion": ("optimizer=lion",),
    "Muon": ("optimizer=muon", BF16, "parallelism=dp"),
    "experts": ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96", "parallelism=dp"),
    "recomputed": (
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=uniform",
        "model.activations_checkpoint_num_layers=1",
    ),
    "delayed": emulate("delayed", BF16),
    "FP8 weights": (*emulate("torchao_tensorwise"), "model.fp8_params=true", BF16, "parallelism=dp"),
}


def clip(threshold):
    return ("model.qk_clip=true", f"model.qk_clip_threshold={threshold}", f"model.qk_clip_alpha={ALPHA}")


@cache
def first_weights():
    """Of both layers, which a seed draws for all precisions and layouts."""
    with emulated_training(*MODEL) as training:
        return [layer.self_attention.linear_qkv.weight.detach().double().numpy() for layer in decoder(training).layers]


def decoder(training):
    return training.chunks[0].decoder


def qkv_masters(training):
    """In the order of layers, weights and biases by themselves."""
    found = {"weight": [], "bias": []}
    for part in training.trainable.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                if master.numel() in SIZES:
                    found[SIZES[master.numel()]].append(master.detach().clone().double().numpy().reshape(ROWS, -1))
    # Buffers of gradients begin with the last layer, and so do the groups of their parameters.
    if np.vdot(found["weight"][0], first_weights()[0]) < np.vdot(found["weight"][1], first_weights()[0]):
        return {kind: masters[::-1] for kind, masters in found.items()}
    return found


def reference_logits(query, key):
    """Of each head: the largest logit of a token and one that it sees. Shapes as of `largest_logits`."""
    query, key = (each.detach().double().numpy() for each in (query, key))
    key = key.repeat(HEADS // GROUPS, axis=2)
    scores = np.einsum("qbhw,kbhw->bhqk", query, key) / np.sqrt(WIDTH)
    seen = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    return np.where(seen, scores, -np.inf).max(axis=(0, 2, 3))


def watched_step(training):
    """A step, and the largest logits of each layer in it, [layers, heads]."""
    largest, hooks = {}, []
    attentions = [layer.self_attention.core_attention for layer in decoder(training).layers]

    def keep(module, inputs):
        largest.setdefault(module, []).append(reference_logits(*inputs[:2]))

    hooks = [attention.register_forward_pre_hook(keep) for attention in attentions]
    result = training.result()
    for hook in hooks:
        hook.remove()
    return result, np.stack([np.max(largest[attention], axis=0) for attention in attentions])


def factors(of_heads, threshold):
    """Of the rows of a layer's QKV projection, [rows, 1]."""
    rows = []
    for group in of_heads.reshape(GROUPS, -1):
        eta = min(1.0, threshold / group.max()) if group.max() > 0 else 1.0
        rows += [eta**ALPHA] * (HEADS // GROUPS * WIDTH) + [eta ** (1 - ALPHA)] * WIDTH + [1.0] * WIDTH
    return np.array(rows)[:, None]


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_a_step_clips_what_the_formula_says(overrides):
    first_weights()
    with emulated_training(*MODEL, *overrides) as training:
        _, logits = watched_step(training)
        unclipped = qkv_masters(training)
    of_groups = logits.reshape(LAYERS, GROUPS, -1).max(axis=2)
    # One group of both layers stays as it is.
    threshold = float((of_groups.min() + np.partition(of_groups.ravel(), 1)[1]) / 2)
    with emulated_training(*MODEL, *overrides, *clip(threshold)) as training:
        result = training.result()
        clipped = qkv_masters(training)
    assert float(result.max_attention_logit) == pytest.approx(logits.max(), rel=1e-2 if BF16 in overrides else 1e-5)
    assert len(clipped["weight"]) == LAYERS
    assert len(clipped["bias"]) == (LAYERS if overrides[: len(BIASES)] == BIASES else 0)
    for kind in ("weight", "bias") if clipped["bias"] else ("weight",):
        for found, before, of_heads in zip(clipped[kind], unclipped[kind], logits, strict=True):
            expected = before * factors(of_heads, threshold)
            # The products of queries and keys are rounded to the type of the layers.
            np.testing.assert_allclose(found, expected, rtol=1e-2 if BF16 in overrides else 1e-5)
            assert not np.array_equal(found, before)


@pytest.mark.parametrize("overrides", [(), BIASES, ("optimizer=muon",)], ids=["rope", "biases", "Muon"])
def test_the_same_inputs_have_no_logit_above_the_threshold_after_a_clip(overrides):
    """The weights change by the clip alone, and of all layers the first alone has the same inputs."""
    still = ("model.optim.lr=1e-12", "model.optim.weight_decay=0", "model.optim.sched.min_lr=0")
    with emulated_training(*MODEL, *overrides, *still, *clip(0.05)) as training:
        _, before = watched_step(training)
        _, after = watched_step(training)
    of_groups = after[0].reshape(GROUPS, -1).max(axis=1)
    assert (before[0] > 0.05).all()
    np.testing.assert_allclose(of_groups, 0.05, rtol=1e-4)


@pytest.mark.parametrize("length", [32, 1100])
def test_the_largest_logit_is_that_of_a_token_and_one_that_it_sees(length):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(length, 2, HEADS, WIDTH, generator=generator)
    key = torch.randn(length, 2, GROUPS, WIDTH, generator=generator)
    found = largest_logits(query, key, WIDTH**-0.5)
    np.testing.assert_allclose(found.numpy(), reference_logits(query, key), rtol=1e-5)


def test_heads_whose_logits_are_all_negative_stay():
    with emulated_training(*MODEL, *clip(2.0)) as training:
        logits = LargestLogits(training.trainable.model)
        attentions = [layer.self_attention for layer in decoder(training).layers]
        for attention in attentions:
            attention.core_attention.current_max_attn_logits = torch.tensor([-3.0, -1.0, 1.0, 8.0])
        assert logits.share() == 8
        assert [each.qk_clip_balancing_eta.tolist() for each in attentions] == [[1.0, 0.25]] * LAYERS


@pytest.mark.parametrize("overrides", [(), ("model.log_max_attention_logit=true",), clip(1e9)], ids=str)
def test_a_clip_that_clips_nothing_changes_nothing(overrides):
    losses = []
    for given in ((), overrides):
        with emulated_training(*MODEL, BF16, "parallelism=dp", *given) as training:
            results = [training.result() for _ in range(3)]
            losses.append([result.loss_sum_and_tokens.tolist() for result in results])
    assert losses[0] == losses[1]
    assert all((result.max_attention_logit is not None) is bool(overrides) for result in results)


def test_logits_of_a_validation_clip_nothing():
    masters, _ = [], first_weights()
    for validates in (False, True):
        with emulated_training(*MODEL, *clip(0.3)) as training:
            training.step()
            if validates:
                # As Transformer Engine's attention keeps them, which does not ask what a pass is for.
                for layer in decoder(training).layers:
                    layer.self_attention.core_attention.current_max_attn_logits = torch.full((HEADS,), 1e4)
                training.validate()
            training.step()
            masters.append(qkv_masters(training)["weight"])
    assert all(map(np.array_equal, *masters))


def test_a_skipped_update_is_not_clipped():
    first_weights()
    with emulated_training(*MODEL, *clip(0.05)) as training:
        before = qkv_masters(training)["weight"]
        head = training.chunks[0].output_layer.weight
        hook = head.register_hook(lambda gradient: gradient * torch.inf)
        assert training.result().skipped
        hook.remove()
        assert all(map(np.array_equal, qkv_masters(training)["weight"], before))
        assert not training.result().skipped
        assert not any(map(np.array_equal, qkv_masters(training)["weight"], before))


THRESHOLD = 0.05
RUN = (
    *("model.qk_clip=true", f"model.qk_clip_threshold={THRESHOLD}"),
    *("optimizer=muon", "model.optim.muon_fp32_matmul_prec=highest"),
    *("model.num_attention_heads=4", "model.num_query_groups=2"),
    *("trainer.max_steps=6", "trainer.limit_val_batches=0", "model.micro_batch_size=2"),
    "model.optim.sched.decay_steps=6",
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, RUN)


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "dp", "zero2", "fsdp", "single"])
def test_two_ranks_clip_as_one_and_resume_to_the_bit(layout, one_process, tmp_path, cache_dir):
    given = [*RUN, f"parallelism={layout}"]
    run_small(2, tmp_path / "run", cache_dir, [*given, "trainer.max_steps=3"])
    resumed = run_small(2, tmp_path / "run", cache_dir, given)
    uncut = run_small(2, tmp_path / "uncut", cache_dir, given)
    seen = [[(each.loss, each.max_attention_logit) for each in metrics.train] for metrics in (resumed, uncut)]
    assert seen[0] == seen[1]
    for record, expected in zip(uncut.train, one_process.train, strict=True):
        assert record.loss == pytest.approx(expected.loss, rel=1e-4)
        assert record.max_attention_logit == pytest.approx(expected.max_attention_logit, rel=1e-3)


def test_it_changes_a_run(one_process, tmp_path, cache_dir):
    without = run_small(
        1, tmp_path / "run", cache_dir, [*RUN[2:], "model.log_max_attention_logit=true", "checkpoint.save_at_end=false"]
    )
    first, *others = one_process.train
    assert first.max_attention_logit == without.train[0].max_attention_logit > THRESHOLD
    assert all(
        record.max_attention_logit < plain.max_attention_logit
        for record, plain in zip(others, without.train[1:], strict=True)
    )


@pytest.mark.parametrize(
    "fp8", [emulate("delayed"), (*emulate("torchao_tensorwise"), "model.fp8_params=true")], ids=["delayed", "weights"]
)
def test_fp8_is_proven(fp8, one_process, tmp_path, cache_dir):
    """Stored codes are those of the clipped masters: the proof compares both."""
    metrics = run_small(1, tmp_path / "run", cache_dir, [*RUN, *fp8, BF16, "parallelism=dp"])
    assert metrics.fp8_proofs
    assert not any(proof.warnings for proof in metrics.fp8_proofs)
    assert metrics.train[-1].loss == pytest.approx(one_process.train[-1].loss, rel=0.02)
