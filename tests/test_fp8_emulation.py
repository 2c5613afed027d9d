"""Emulated FP8 as a run has it: each key changes what is computed, training learns, a resumed run goes on equally."""

import pytest
import torch

from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import RECIPES, recipes_of
from gpt_pretrain.fp8.gemms import Phase
from gpt_pretrain.fp8.observer import observe_products
from tests.emulated_training import TINY, emulate, emulated_training, save_checkpoint
from tests.runs import run_small

_RESULTS = {}


def train(*overrides, num_steps=3):
    """Losses of some steps and the weights after them; computed once for each set of overrides."""
    key = (overrides, num_steps)
    if key not in _RESULTS:
        with emulated_training(*overrides) as training:
            losses = [training.step() for _ in range(num_steps)]
            (chunk,) = training.chunks
            weights = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        _RESULTS[key] = losses, weights
    return _RESULTS[key]


def same(one, other):
    (losses, weights), (other_losses, other_weights) = one, other
    return losses == other_losses and all(torch.equal(weights[name], other_weights[name]) for name in weights)


HIGH_PRECISION = ("fp8=none",)
DELAYED = emulate("delayed")
TENSORWISE = emulate("tensorwise")
HYBRID_OFF = ("model.fp8_e4m3=true", "model.fp8_hybrid=false")
# Three layers, so that one is left when the first and the last stay out.
THREE = ("model.num_layers=3",)
KEPT = (*TENSORWISE, *THREE, "model.first_last_layers_bf16=true")


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        pytest.param(HIGH_PRECISION, DELAYED, id="fp8"),
        pytest.param(DELAYED, TENSORWISE, id="recipe: delayed, tensorwise"),
        pytest.param(TENSORWISE, emulate("blockwise"), id="recipe: tensorwise, blockwise"),
        pytest.param(emulate("blockwise"), emulate("mxfp8"), id="recipe: blockwise, mxfp8"),
        pytest.param(emulate("torchao_tensorwise"), emulate("torchao_rowwise"), id="recipe: tensorwise, rowwise"),
        pytest.param(
            emulate("torchao_rowwise"), emulate("torchao_rowwise_with_gw_hp"), id="recipe: rowwise, rowwise_with_gw_hp"
        ),
        pytest.param(DELAYED, (*DELAYED, *HYBRID_OFF), id="format: delayed"),
        pytest.param(TENSORWISE, (*TENSORWISE, *HYBRID_OFF), id="format: tensorwise"),
        pytest.param(
            emulate("blockwise"),
            emulate("blockwise", "model.fp8_e4m3=false", "model.fp8_hybrid=true"),
            id="format: blockwise",
        ),
        pytest.param(
            emulate("mxfp8"), emulate("mxfp8", "model.fp8_e4m3=false", "model.fp8_hybrid=true"), id="format: mxfp8"
        ),
        pytest.param(DELAYED, (*DELAYED, "model.fp8_margin=3"), id="margin"),
        pytest.param(DELAYED, (*DELAYED, "model.fp8_amax_history_len=1"), id="history length"),
        pytest.param(
            (*DELAYED, "model.fp8_amax_history_len=8"),
            (*DELAYED, "model.fp8_amax_history_len=8", "model.fp8_amax_compute_algo=most_recent"),
            id="algorithm",
        ),
        pytest.param(TENSORWISE, (*TENSORWISE, "model.fp8_exclude=['*.linear_fc1']"), id="exclude fc1"),
        pytest.param(
            (*TENSORWISE, "model.fp8_exclude=['*.linear_fc1']"),
            (*TENSORWISE, "model.fp8_exclude=['*.linear_fc2']"),
            id="exclude fc2 instead",
        ),
        pytest.param(DELAYED, (*DELAYED, "model.fp8_exclude=['decoder.layers.0.*']"), id="exclude a layer, delayed"),
        pytest.param(DELAYED, (*DELAYED, "model.fp8_wgrad=false"), id="wgrad"),
        pytest.param((*TENSORWISE, *THREE), KEPT, id="first and last"),
        pytest.param(KEPT, (*KEPT, "model.num_layers_at_start_in_bf16=0"), id="number of first layers"),
        pytest.param(KEPT, (*KEPT, "model.num_layers_at_end_in_bf16=0"), id="number of last layers"),
    ],
)
def test_each_key_changes_what_the_layers_compute(base, changed):
    assert not same(train(*base), train(*changed))


@pytest.mark.parametrize(
    ("layers_in_fp8", "overrides"),
    [
        ({1}, KEPT),
        ({1, 2}, (*KEPT, "model.num_layers_at_end_in_bf16=0")),
        ({0, 1}, (*KEPT, "model.num_layers_at_start_in_bf16=0")),
        ({2}, (*KEPT, "model.num_layers_at_start_in_bf16=2", "model.num_layers_at_end_in_bf16=0")),
        ({0, 2}, (*TENSORWISE, *THREE, "model.fp8_exclude=['decoder.layers.1.*']")),
        ({0, 1, 2}, (*TENSORWISE, *THREE)),
    ],
)
def test_layers_that_stay_out_compute_in_high_precision(layers_in_fp8, overrides):
    with emulated_training(*overrides) as training:
        assert {int(name.split(".")[2]) for name in training.layers()} == layers_in_fp8
        assert len(training.layers()) == 4 * len(layers_in_fp8)
        formats = {}
        with observe_products(
            training.chunks, lambda name, product: formats.setdefault((name, product.phase), product.formats)
        ):
            training.step()
    assert len(formats) == 3 * 4 * len(layers_in_fp8)
    assert {formats[key] for key in formats if key[1] is Phase.forward} == {("e4m3", "e4m3")}
    assert {formats[key] for key in formats if key[1] is not Phase.forward} == {("e5m2", "e4m3")}


@pytest.mark.parametrize(
    ("overrides", "unrounded"),
    [
        pytest.param(DELAYED, {"linear_qkv", "linear_fc1"}, id="delayed"),
        pytest.param((*DELAYED, "model=gpt2_124m", *TINY), {"linear_qkv", "linear_fc1"}, id="delayed, LayerNorm"),
        pytest.param((*DELAYED, "model.fp8_exclude=['*.linear_qkv']"), {"linear_fc1"}, id="delayed, excluded"),
        pytest.param(TENSORWISE, set(), id="tensorwise"),
        pytest.param(emulate("blockwise"), set(), id="blockwise"),
        pytest.param(emulate("mxfp8"), set(), id="mxfp8"),
    ],
)
def test_delayed_scaling_alone_casts_what_a_norm_computes_before_it_is_rounded(overrides, unrounded):
    """As Transformer Engine's kernels for norms do (tests/test_gpu_fp8_emulation_gpt.py)."""
    found = set()

    def look(name, product):
        amax = product.operands[0].amax
        if product.phase is Phase.forward and amax != amax.bfloat16():
            found.add(name.rpartition(".")[2])

    with emulated_training(*overrides, "trainer.precision=bf16") as training, observe_products(training.chunks, look):
        training.step()
    assert found == unrounded


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        pytest.param(DELAYED, (*DELAYED, "model.fp8_amax_history_len=6"), id="history as long as the run"),
        pytest.param(
            (*DELAYED, "model.fp8_amax_history_len=1"),
            (*DELAYED, "model.fp8_amax_history_len=1", "model.fp8_amax_compute_algo=most_recent"),
            id="algorithm over one amax",
        ),
        pytest.param(
            (*DELAYED, *HYBRID_OFF), (*DELAYED, "model.fp8_e4m3=true", "model.fp8_hybrid=true"), id="e4m3 over hybrid"
        ),
        pytest.param(TENSORWISE, (*TENSORWISE, "model.fp8_margin=3"), id="margin without a history"),
        pytest.param(HIGH_PRECISION, (*TENSORWISE, "model.fp8_exclude=['*']"), id="everything excluded"),
        pytest.param(
            (*TENSORWISE, "model.first_last_layers_bf16=true", "model.num_layers_at_end_in_bf16=0"),
            (*TENSORWISE, "model.fp8_exclude=['decoder.layers.0.*']"),
            id="a layer excluded twice",
        ),
    ],
)
def test_what_means_the_same_computes_the_same(base, changed):
    assert same(train(*base), train(*changed))


def test_weight_gradients_in_high_precision_leave_the_first_forward_pass_alone():
    (losses, _), (other_losses, _) = train(*DELAYED), train(*DELAYED, "model.fp8_wgrad=false")
    assert losses[0] == other_losses[0]
    assert losses[1] != other_losses[1]


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [*((recipe.preset, "fp32") for recipe in RECIPES.values()), ("delayed", "bf16"), ("torchao_rowwise", "bf16")],
)
def test_every_recipe_learns_as_high_precision_does(recipe, precision):
    expected, _ = train(*HIGH_PRECISION, f"trainer.precision={precision}", num_steps=20)
    losses, _ = train(*emulate(recipe), f"trainer.precision={precision}", num_steps=20)
    assert expected[-1] < expected[0] - 1.0, "the reference does not learn, so that nothing is shown"
    # The first loss has no history yet: delayed scaling starts with scales of 1.
    assert losses == pytest.approx(expected, rel=3e-2)
    assert losses != pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        DELAYED,
        (*DELAYED, "trainer.precision=bf16"),
        TENSORWISE,
        *(emulate(recipe.preset) for recipe in recipes_of(Fp8Backend.torchao)),
    ],
    ids=" ".join,
)
def test_resumed_training_equals_the_uncut_one(overrides, tmp_path):
    overrides = (*overrides, "model.fp8_amax_history_len=5") if overrides is DELAYED else overrides
    with emulated_training(*overrides) as training:
        for _ in range(3):
            training.step()
        # What validation leaves in the histories is part of the state.
        training.validate()
        path = save_checkpoint(
            tmp_path, training.trainable, TrainingProgress(step=3, consumed_samples=12), training.config, {}
        )
        expected = [training.step() for _ in range(3)]
        expected_states = {name: layer.get_extra_state() for name, layer in training.layers().items()}
    with emulated_training(*overrides) as training:
        load_checkpoint(verify_checkpoint(path), training.trainable, training.config, {})
        assert [training.step() for _ in range(3)] == expected
        states = {name: layer.get_extra_state() for name, layer in training.layers().items()}
    if "fp8=delayed" in overrides:
        torch.testing.assert_close(states, expected_states, rtol=0, atol=0)
        assert all(state["scale_fwd"][0] != 1.0 for state in states.values())


def test_a_checkpoint_of_emulated_layers_has_the_keys_of_local_ones(tmp_path):
    """They are also the keys of Transformer Engine's layers (tests/test_gpu_*)."""

    def keys(*overrides):
        with emulated_training(*overrides) as training:
            (chunk,) = training.chunks
            return set(chunk.sharded_state_dict())

    assert keys(*DELAYED) == keys(*HIGH_PRECISION)


def test_a_whole_run_is_emulated(tmp_path):
    """The application's own proof ends a run whose products are not what the settings say."""
    overrides = ["model.num_layers=2", "trainer.max_steps=3", "trainer.limit_val_batches=0"]
    metrics = run_small(1, tmp_path / "run", tmp_path, [*emulate("delayed"), *overrides])
    assert metrics.fp8_coverage.gemm_flops_share > 0.5
    assert metrics.train[-1].loss < metrics.train[0].loss
