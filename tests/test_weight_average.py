"""Weights averaged over steps are what the formula says, train nothing, and survive stops, layouts and exports.

How they pass from layout to layout is in `test_checkpoint_resharding`, skipped updates are in `test_training_guards`.
"""

import pytest
import torch
from safetensors.torch import load_file

from gpt_pretrain.checkpoint.load import load_checkpoint, load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.export import main
from gpt_pretrain.fp8.delayed import present_amaxes_kept
from gpt_pretrain.megatron.weight_average import AVERAGE, averaged_weights
from tests.emulated_training import emulate, emulated_training, save_checkpoint
from tests.planning import plan_of
from tests.resharded_training import saved_state
from tests.runs import run_small
from tests.saved_models import FAMILIES, saved_model

DECAY = 0.75
AVERAGED = (f"model.optim.ema_decay={DECAY}",)
BF16 = "trainer.precision=bf16"
DATA = {"tokenizer": "of the run", "tokens": "of the run", "splits": "of the run"}
KINDS = {
    "fp32": (),
    "fp32 distributed": ("parallelism=dp",),
    "bf16": (BF16,),
    "zero2": (BF16, "parallelism=zero2"),
    "fsdp": (BF16, "parallelism=fsdp"),
    "fsdp in fp32": ("parallelism=fsdp",),
    "SGD without momentum": ("optimizer=sgd", "model.optim.momentum=0", "model.optim.lr=0.3"),
    "Muon": ("optimizer=muon", BF16, "parallelism=dp"),
    "Lion": ("optimizer=lion",),
    "delayed": emulate("delayed", BF16),
    "FP8 weights": (*emulate("torchao_tensorwise"), "model.fp8_params=true", BF16, "parallelism=dp"),
}


def states(training):
    for part in training.trainable.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                yield master, part.optimizer.state[master]


def masters(training):
    return [master.detach().clone() for master, _ in states(training)]


def averages(training):
    return [each[AVERAGE].clone() for _, each in states(training)]


def equal(first, second):
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def validate_averaged(training):
    """As `training.validation` does."""
    optimizer, model = training.trainable.optimizer, training.trainable.model
    with model.newest_parameters(), present_amaxes_kept(training.chunks), averaged_weights(optimizer, model):
        return training.validate()


def validate_newest(training):
    with training.trainable.model.newest_parameters():
        return training.validate()


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_the_average_is_what_the_formula_says(overrides):
    """In fp64, with the weights of all steps weighed by powers of the decay."""
    with emulated_training(*AVERAGED, *overrides) as training:
        seen = [masters(training)]
        assert equal(averages(training), seen[0])
        for steps in range(1, 5):
            training.step()
            seen.append(masters(training))
            shares = [DECAY**steps, *((1 - DECAY) * DECAY ** (steps - step) for step in range(1, steps + 1))]
            for found, *values in zip(averages(training), *seen, strict=True):
                assert found.dtype is torch.float32
                expected = sum(share * value.double() for share, value in zip(shares, values, strict=True))
                torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
        assert not equal(averages(training), masters(training))


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_a_validation_computes_with_the_average_and_training_does_not_see_it(overrides):
    with emulated_training(*overrides) as training:
        expected = [training.step() for _ in range(3)]
        expected += [validate_newest(training), *(training.step() for _ in range(2))]
        weights = masters(training)
    with emulated_training(*AVERAGED, *overrides) as training:
        losses = [training.step() for _ in range(3)]
        before, held = averages(training), masters(training)
        averaged = validate_averaged(training)
        assert equal(averages(training), before)
        assert equal(masters(training), held)
        losses += [validate_newest(training), *(training.step() for _ in range(2))]
        assert losses == expected
        assert equal(masters(training), weights)
    assert abs(averaged - expected[3]) > 1e-3, "the averaged weights are others"
    # Of a model that has never had other weights.
    with emulated_training(*AVERAGED, *overrides) as training:
        with torch.no_grad():
            for (_, each), value in zip(states(training), before, strict=True):
                each[AVERAGE].copy_(value)
        # Delayed scaling has no scales before a first step.
        assert averaged == pytest.approx(validate_averaged(training), rel=5e-2 if "fp8=delayed" in overrides else 1e-6)


def save(training, folder):
    progress = TrainingProgress(step=3, consumed_samples=12)
    return save_checkpoint(folder, training.trainable, progress, training.config, DATA)


def restore(training, path):
    return load_checkpoint(verify_checkpoint(path), training.trainable, training.config, DATA)


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS)
def test_a_resumed_run_averages_on_bit_for_bit(overrides, tmp_path):
    with emulated_training(*AVERAGED, *overrides) as training:
        for _ in range(3):
            training.step()
        path = save(training, tmp_path)
        expected = [training.step() for _ in range(3)], averages(training)
        # In place, as a rewind does.
        restore(training, path)
        assert [training.step() for _ in range(3)] == expected[0]
        assert equal(averages(training), expected[1])
    with emulated_training(*AVERAGED, *overrides, "model.seed=7") as training:
        assert restore(training, path).notes == []
        assert [training.step() for _ in range(3)] == expected[0]
        assert equal(averages(training), expected[1])


CHANGE = "checkpoint.allow_optimizer_change=true"


@pytest.mark.parametrize("layout", [(), (BF16, "parallelism=dp")], ids=["fp32", "distributed"])
@pytest.mark.parametrize(
    ("saved", "resumed", "told"),
    [
        ((), AVERAGED, "model.optim.ema_decay=0.75"),
        (AVERAGED, (), "model.optim.ema_decay=null"),
        (AVERAGED, (*AVERAGED, "optimizer=lion", CHANGE), "model.optim.ema_decay=0.75"),
        (AVERAGED, ("model.optim.ema_decay=0.5",), None),
    ],
    ids=["begins", "ends", "another optimizer", "another decay"],
)
def test_an_average_begins_or_ends_at_a_resume_with_a_note(saved, resumed, told, layout, tmp_path):
    with emulated_training(*saved, *layout) as training:
        for _ in range(3):
            training.step()
        path, kept = save(training, tmp_path), averages(training) if saved else None
        weights, following = masters(training), training.step()
    with emulated_training(*resumed, *layout, "model.seed=7") as training:
        notes = restore(training, path).notes
        assert equal(masters(training), weights)
        if told is None:
            assert notes == []
            assert equal(averages(training), kept)
        else:
            assert told in notes[-1]
            assert path.name in notes[-1]
        if told == "model.optim.ema_decay=0.75":
            assert equal(averages(training), weights)
        if not resumed:
            assert not any(AVERAGE in each for _, each in states(training))
        assert training.step() == pytest.approx(following, rel=1e-6)


@pytest.mark.parametrize("overrides", [(), (BF16, "parallelism=dp"), (BF16, "parallelism=fsdp")])
def test_a_run_from_weights_averages_from_them_on(overrides, tmp_path):
    with emulated_training(*overrides, "model.seed=7") as training:
        training.step()
        path = save(training, tmp_path)
    with emulated_training(*AVERAGED, *overrides) as training:
        load_weights(verify_checkpoint(path), training.trainable, training.config, DATA)
        assert equal(averages(training), masters(training))


@pytest.mark.parametrize("precision", ["trainer.precision=fp32", BF16])
def test_the_average_is_exported(precision, tmp_path, capsys):
    with saved_model(tmp_path, *FAMILIES["llama"], precision, *AVERAGED) as saved:
        pass
    assert main([f"checkpoint={saved.path}", f"out={tmp_path / 'raw'}", "dtype=fp32"]) == 0
    assert main([f"checkpoint={saved.path}", f"out={tmp_path / 'ema'}", "dtype=fp32", "weights=ema"]) == 0
    assert "averaged over steps" in capsys.readouterr().out
    stored, key = saved_state(saved.path), "decoder.layers.mlp.linear_fc2.weight"
    raw, averaged = (
        load_file(tmp_path / name / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
        for name in ("raw", "ema")
    )
    assert torch.equal(raw, stored[key][1].float())
    assert torch.equal(averaged, stored[f"optimizer.state.ema.{key}"][1])
    assert not torch.equal(averaged, raw)
    assert main([f"checkpoint={saved.path}", f"out={tmp_path / 'core'}", "format=megatron", "weights=ema"]) == 0


def test_an_average_that_is_not_there_is_not_exported(tmp_path, capsys):
    with saved_model(tmp_path, *FAMILIES["llama"]) as saved:
        pass
    assert main([f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}", "weights=ema"]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in ("weights=ema", str(saved.path), "weights=raw"))
    assert not (tmp_path / "hf").exists()


def test_the_plan_counts_it_in_checkpoints_and_time():
    without, averaged = plan_of("model=llama3_8b"), plan_of("model=llama3_8b", "model.optim.ema_decay=0.99")
    assert averaged.checkpoint.num_bytes - without.checkpoint.num_bytes == 4 * without.num_parameters
    assert averaged.speed.bf16.seconds["optimizer"] > without.speed.bf16.seconds["optimizer"]


RUN = ("trainer.max_steps=6", "trainer.val_check_interval=3", "model.micro_batch_size=2", "model.global_batch_size=4")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, [*RUN, *AVERAGED])


def test_a_run_logs_the_loss_of_the_average(one_process, tmp_path, cache_dir):
    first, *others = one_process.validation
    assert first.ema_loss == first.loss
    assert all(record.ema_loss > record.loss + 1e-3 for record in others), "the average is behind while the loss falls"
    without = run_small(1, tmp_path / "run", cache_dir, RUN)
    assert [record.ema_loss for record in without.validation] == [None] * 3
    assert [record.loss for record in without.train] == [record.loss for record in one_process.train]


@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=dp"],
        ["parallelism=zero2"],
        ["parallelism=fsdp"],
        ["parallelism=tp2"],
        ["parallelism=pp2"],
        ["parallelism=single"],
    ],
    ids="".join,
)
def test_two_ranks_average_as_one_does(layout, one_process, tmp_path, cache_dir):
    found = run_small(2, tmp_path / "run", cache_dir, [*RUN, *AVERAGED, *layout])
    for record, expected in zip(found.validation, one_process.validation, strict=True):
        assert record.loss == pytest.approx(expected.loss, rel=1e-4)
        assert record.ema_loss == pytest.approx(expected.ema_loss, rel=1e-4)
