"""Value embeddings: what is added to which layer's values, whose rate they have, and where their weights go."""

from pathlib import Path

import pytest
import torch

from gpt_pretrain.checkpoint.state import describe_weights, differences
from gpt_pretrain.config.derived import kv_channels, layers_with_value_embeddings, num_query_groups
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.huggingface.architectures import choose_architecture
from gpt_pretrain.plan.stages import count_parameters
from tests.emulated_training import RECOMPUTED, emulate, emulated_training
from tests.refusals import compose_quickly
from tests.rounding import loss_tolerance
from tests.runs import SMALL_RUN, run_small

MULT = 4.0
EVERY_OTHER = ("model.value_embedding_freq=2", f"model.value_embedding_mult={MULT}")


def read_values(training):
    """What each layer's attention reads as values in one step's first microbatch, and its tokens."""
    (chunk,) = training.chunks
    read, hooks = {}, []
    for number, layer in enumerate(chunk.decoder.layers):

        def keep(module, inputs, number=number):
            read.setdefault(number, inputs[2].detach().clone())

        hooks.append(layer.self_attention.core_attention.register_forward_pre_hook(keep))
    tokens = []
    hooks.append(
        chunk.embedding.register_forward_pre_hook(
            lambda module, inputs, named: tokens.append(named["input_ids"]), with_kwargs=True
        )
    )
    training.gradients()
    for hook in hooks:
        hook.remove()
    return read, tokens[0]


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_reads_values_and_their_tokens_vectors(groups):
    overrides = ("model.num_layers=3", f"model.num_query_groups={groups}", *EVERY_OTHER)
    with emulated_training(*overrides) as training:
        (chunk,) = training.chunks
        tables = chunk.value_embeddings.tables
        assert list(tables) == ["0", "2"]
        assert all(0.015 < table.std() < 0.025 for table in tables.values()), "drawn as other weights are"
        assert not tables["0"].equal(tables["2"])
        given, tokens = read_values(training)
        table = tables["0"].detach().clone()
        with torch.no_grad():
            tables["0"].zero_()
        without, _ = read_values(training)
    vectors = table[tokens.t()].unflatten(-1, (groups, 64 // 4))
    torch.testing.assert_close(given[0], without[0] + MULT * vectors)
    assert not given[1].equal(without[1]), "later layers see the difference"


@pytest.mark.parametrize("more", [(), RECOMPUTED, emulate("delayed")], ids=["plain", "recomputed", "fp8"])
def test_gradients_are_those_of_a_lookup(more):
    """The gradient of a table is that of the values, row by row of their tokens, times the factor."""
    with emulated_training(*EVERY_OTHER, *more) as training:
        (chunk,) = training.chunks
        of_values, all_tokens = [], []

        def keep(module, inputs):
            if torch.is_grad_enabled() and inputs[2].requires_grad:
                all_tokens.append(chunk.value_embeddings.tokens)
                inputs[2].register_hook(of_values.append)

        chunk.decoder.layers[1].self_attention.core_attention.register_forward_pre_hook(keep)
        found = training.gradients()["value_embeddings.tables.1"]
    expected = torch.zeros_like(found)
    for gradient, tokens in zip(of_values, all_tokens, strict=True):
        expected.index_add_(0, tokens.t().flatten(), MULT * gradient.double().flatten(0, 1).flatten(1))
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_adam_trains_them_at_the_rate_of_embeddings():
    with emulated_training(*EVERY_OTHER, "model.optim.decoupled_lr=1e-2", "optimizer=muon") as training:
        groups = training.trainable.optimizer.param_groups
        (chunk,) = training.chunks
        before = chunk.value_embeddings.tables["1"].detach().clone()
        training.step()
        moved = (chunk.value_embeddings.tables["1"] - before).abs().max().item()
    assert {group["max_lr"] for group in groups} == {1e-2, 3e-3}
    # Adam's first step moves what has a gradient by the rate.
    assert moved == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize(
    ("num_layers", "freq", "layers"), [(4, 2, [1, 3]), (5, 2, [0, 2, 4]), (3, 1, [0, 1, 2]), (4, 8, [3])]
)
def test_the_last_layer_has_them_and_every_nth_before_it(num_layers, freq, layers):
    model = compose_quickly([f"model.num_layers={num_layers}", f"model.value_embedding_freq={freq}", "data=mock"]).model
    assert layers_with_value_embeddings(model) == layers


def test_parameters_are_counted():
    without, model = (compose_quickly(["data=mock", *more]).model for more in ((), EVERY_OTHER))
    with emulated_training(*EVERY_OTHER) as training:
        assert training.trainable.model.num_parameters == count_parameters(training.config.model)
    assert count_parameters(model) - count_parameters(without) == 2 * 2048 * num_query_groups(model) * kv_channels(
        model
    )


def test_they_make_another_model_that_no_other_program_computes():
    without, model = (compose_quickly(["data=mock", *more]).model for more in ((), EVERY_OTHER))
    assert "model.value_embedding_freq=2" in differences(describe_weights(model), describe_weights(without))
    assert "model.value_embedding_freq=null" in differences(describe_weights(without), describe_weights(model))
    with pytest.raises(ConfigError, match=r"model\.value_embedding_freq=2 is not supported by"):
        choose_architecture(model)


def test_a_run_goes_on_in_another_layout(tmp_path: Path, cache_dir: Path):
    short = ["trainer.limit_val_batches=0", "model.micro_batch_size=2", *EVERY_OTHER, "model.optim.sched.name=constant"]
    uncut = run_small(1, tmp_path / "uncut", cache_dir, [*short, "trainer.max_steps=4", "checkpoint.save_at_end=false"])
    run_small(1, tmp_path / "run", cache_dir, [*short, "trainer.max_steps=2", "checkpoint.save_at_end=true"])
    went_on = run_small(
        2,
        tmp_path / "run",
        cache_dir,
        [*short, "trainer.max_steps=4", "parallelism=tp2", "checkpoint.save_at_end=false"],
    )
    model = compose_quickly([*SMALL_RUN, *short]).model
    assert [record.step for record in went_on.train] == [1, 2, 3, 4]
    for record, expected in zip(went_on.train, uncut.train, strict=True):
        assert record.loss == pytest.approx(expected.loss, rel=loss_tolerance(model, torch.float32, record.step))
