"""Norms by layer are those of the whole model's gradients and weights, in every layout."""

import math

import pytest

from gpt_pretrain.megatron.norms import norm_names
from gpt_pretrain.training.step import train_step
from tests.emulated_training import emulate, emulated_training
from tests.optimizer_states import LEAN
from tests.runs import run_small

BF16 = "trainer.precision=bf16"
TIED = "model.share_embeddings_and_output_weights=true"
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96")
KINDS = {
    "fp32": (),
    "fp32 distributed": ("parallelism=dp",),
    "tied": (TIED, "model.position_embedding_type=learned_absolute", "model.bias=true"),
    "bf16": (BF16,),
    "bf16 distributed": (BF16, "parallelism=dp"),
    "zero2": (BF16, "parallelism=zero2"),
    "fsdp": (BF16, "parallelism=fsdp"),
    "small states": LEAN,
    "Muon": ("optimizer=muon", "parallelism=dp"),
    "experts": (*EXPERTS, "parallelism=dp"),
    "FP8 weights": (*emulate("torchao_tensorwise"), "model.fp8_params=true", BF16, "parallelism=dp"),
}


def by_layer(tensors):
    """Norms in fp64 of tensors by their parameters' names."""
    squares = dict.fromkeys(norm_names(2), 0.0)
    for name, tensor in tensors.items():
        parts = name.removeprefix("decoder.").split(".")
        squares[".".join(parts[:2]) if parts[0] == "layers" else parts[0]] += float(tensor.double().square().sum())
    return [math.sqrt(each) for each in squares.values()]


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_they_are_those_of_gradients_before_clipping_and_of_weights_after_the_update(overrides):
    with emulated_training(*overrides, "trainer.gradient_clip_val=0.1") as training:
        # Weights in FP8 and BF16 are rounded masters, such as a norm's 0.997.
        tolerance = 2.0**-4 if "model.fp8_params=true" in overrides else 2.0**-8 if BF16 in overrides else 1e-5
        is_sharded = any(each in overrides for each in ("parallelism=zero2", "parallelism=fsdp"))
        expected = None if is_sharded else by_layer(training.gradients())
        result = train_step(training.trainable, training.iterators(first_sample=0), norms=True)
        gradients, weights = result.norms.tolist()
        assert math.hypot(*gradients) == pytest.approx(float(result.grad_norm), rel=1e-5)
        if expected is not None:
            assert gradients == pytest.approx(expected, rel=1e-5)
        assert float(result.grad_norm) > 0.1
        with training.trainable.model.gathered_parameters():
            named = {name: each.detach() for chunk in training.chunks for name, each in chunk.named_parameters()}
            assert weights == pytest.approx(by_layer(named), rel=tolerance)
        assert training.result().norms is None


RUN = (
    *("logging.norms=true", "trainer.max_steps=4", "trainer.log_every_n_steps=2", "trainer.limit_val_batches=0"),
    *("model.micro_batch_size=2", "checkpoint.save_at_end=false", "model.optim.sched.decay_steps=4"),
)


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        ((), ["dp", "zero2", "fsdp", "tp2", "tp2_sp", "pp2", "single"]),
        ((TIED,), ["pp2", "tp2"]),
        ((*EXPERTS, "model.init_method_std=0.2"), ["ep2"]),
        ((*LEAN,), ["dp"]),
    ],
    ids=["", "tied", "experts", "small states"],
)
def test_two_ranks_have_those_of_one(overrides, layouts, tmp_path, cache_dir):
    one = run_small(1, tmp_path / "one", cache_dir, [*RUN, *overrides])
    assert [record.step for record in one.norms] == [2, 4]
    for record, train in zip(one.norms, one.train[-2:], strict=True):
        assert math.hypot(*record.gradients.values()) == pytest.approx(train.grad_norm, rel=1e-5)
        assert math.hypot(*record.weights.values()) == pytest.approx(record.weight_norm)
    for layout in layouts:
        two = run_small(2, tmp_path / layout, cache_dir, [*RUN, *overrides, f"parallelism={layout}"])
        for record, expected in zip(two.norms, one.norms, strict=True):
            close = 2e-2 if overrides == LEAN else 1e-3
            assert record.gradients == pytest.approx(expected.gradients, rel=close)
            assert record.weights == pytest.approx(expected.weights, rel=1e-4)
            assert record.weight_norm == pytest.approx(expected.weight_norm, rel=1e-4)
