"""Losses and gradients that are not finite change nothing, on any rank; too many of them end the run with a dump."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from itertools import count, pairwise

import pytest
import torch

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.infinities import StepCasts
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer import StepResult
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.report.records import LossSpikeRecord, SkippedStepRecord
from gpt_pretrain.training.setup import set_up
from gpt_pretrain.training.stop import NotFiniteError, StepGuard, StopRequest, TokensMissingError
from gpt_pretrain.training.trainer import Trainer
from gpt_pretrain.training.watchdog import Watchdog
from tests.emulated_training import emulate, emulated_training
from tests.platforms import spec_of
from tests.runs import small_run_arguments


def state(training):
    """Every number that a step may change: weights, masters, moments, step counts."""
    tensors = [parameter for chunk in training.chunks for parameter in chunk.parameters()]
    for part in training.trainable.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                tensors.append(parameter)
                tensors += [value for _, value in sorted(part.optimizer.state[parameter].items())]
    return [tensor.detach().clone() for tensor in tensors]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def spoil_result(value):
    return lambda module, inputs, result: result * value


def spoil_gradient(value):
    def hook(module, inputs, result):
        result.register_hook(lambda gradient: gradient * value)

    return hook


def spoil_loss(module, inputs, result):
    """The loss alone: its gradient stays what it is."""
    return result + math.inf if isinstance(result, torch.Tensor) else result


FINAL_NORM = "decoder.final_layernorm"
OPTIMIZERS = {
    "Adam": [],
    "Adam with BF16 weights": ["trainer.precision=bf16"],
    "distributed Adam": ["parallelism=dp", "trainer.precision=bf16"],
    "SGD with momentum": ["model.optim.name=sgd"],
    "Muon": ["optimizer=muon"],
    "distributed Muon": ["optimizer=muon", "parallelism=dp", "trainer.precision=bf16"],
    "Lion": ["optimizer=lion"],
    "distributed Lion": ["optimizer=lion", "parallelism=dp", "trainer.precision=bf16"],
    "averaged weights": ["model.optim.ema_decay=0.5", "parallelism=dp", "trainer.precision=bf16"],
    "no clipping": ["trainer.gradient_clip_val=0"],
    "FP8": emulate("tensorwise"),
}


@pytest.mark.parametrize("bad_first", [True, False], ids=["the first step", "a later step"])
@pytest.mark.parametrize("overrides", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_is_not_finite_might_as_well_not_have_been(overrides, bad_first):
    """Bit for bit: what comes after it equals a training that never saw it."""
    with emulated_training(*overrides) as training:
        if not bad_first:
            training.step()
        before = None if bad_first else state(training)
        module = training.chunks[0].get_submodule(FINAL_NORM)
        handle = module.register_forward_hook(spoil_gradient(math.nan))
        assert math.isfinite(training.step()), "the loss of a bad gradient is one of its own"
        handle.remove()
        assert bad_first or same(state(training), before)
        training.step()
        after = state(training)
    with emulated_training(*overrides) as training:
        for _ in range(1 if bad_first else 2):
            training.step()
        assert same(state(training), after)
        assert not same(after, before or after[:-1])


@pytest.mark.parametrize(
    ("name", "hook"),
    [(FINAL_NORM, spoil_result(math.nan)), (FINAL_NORM, spoil_gradient(math.inf)), ("", spoil_loss)],
    ids=["NaN in the forward pass", "infinite gradient", "infinite loss with finite gradients"],
)
def test_loss_and_gradient_are_both_watched(name, hook):
    with emulated_training() as training:
        training.step()
        before = state(training)
        handle = training.chunks[0].get_submodule(name).register_forward_hook(hook)
        training.step()
        assert same(state(training), before)
        handle.remove()
        training.step()
        assert not same(state(training), before)


FC2_OF_FIRST = "decoder.layers.0.mlp.linear_fc2"


def spoil_input(value, calls=(0, 1)):
    """One value of a layer's input, in some of its calls."""

    def register(module):
        number = count()

        def hook(module, inputs):
            return (_with(inputs[0], value), *inputs[1:]) if next(number) in calls else inputs

        return module.register_forward_pre_hook(hook)

    return register


def spoil_output_gradient(value, calls=(0, 1)):
    """One value of the gradient of a layer's output, in some of its calls."""

    def register(module):
        number = count()

        def hook(module, inputs, result):
            result[0].register_hook(lambda gradient: _with(gradient, value) if next(number) in calls else gradient)

        return module.register_forward_hook(hook)

    return register


def _with(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[5] = value
    return tensor


class SpoilWeight:
    """One value of a weight, until it is removed."""

    def __init__(self, module):
        self._place = module.weight.data.view(-1)[5:6]
        self._before = self._place.clone()
        self._place.fill_(math.inf)

    def remove(self):
        self._place.copy_(self._before)


def scaling(training):
    """Scales and histories of delayed scaling; empty for other recipes."""
    states = [state for layer in training.layers().values() for state in layer.fp8_meta.values()]
    return [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]


@cache
def unspoilt(overrides):
    """What two sound steps leave: the state, and the scales."""
    with emulated_training(*overrides) as training:
        for _ in range(2):
            assert not training.result().skipped
        return state(training), scaling(training)


SPOILS = {
    "input": spoil_input(math.inf),
    "input of the first microbatch": spoil_input(-math.inf, calls=[0]),
    "gradient": spoil_output_gradient(-math.inf),
    "gradient of the first microbatch": spoil_output_gradient(math.inf, calls=[0]),
    "weight": SpoilWeight,
    "NaN in an input": spoil_input(math.nan),
    "NaN in a gradient": spoil_output_gradient(math.nan, calls=[0]),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize(
    "overrides",
    [
        emulate("delayed"),
        emulate("delayed", "model.fp8_amax_history_len=1", "model.fp8_amax_compute_algo=most_recent"),
        emulate("tensorwise", "parallelism=dp", "trainer.precision=bf16"),
        emulate("blockwise"),
        emulate("mxfp8"),
        emulate("torchao_tensorwise", "trainer.precision=bf16"),
        emulate("torchao_rowwise"),
        emulate("torchao_rowwise_with_gw_hp"),
    ],
    ids=[
        *("delayed", "delayed, history of 1", "tensorwise", "blockwise", "mxfp8"),
        *("torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"),
    ],
)
def test_a_step_with_an_infinity_in_an_fp8_layer_might_as_well_not_have_been(overrides, spoil):
    """A cast saturates, so that loss and gradients are finite; what follows is bit for bit a training without it."""
    with emulated_training(*overrides) as training:
        training.step()
        before, scales = state(training), scaling(training)
        handle = spoil(training.chunks[0].get_submodule(FC2_OF_FIRST))
        result = training.result()
        handle.remove()
        assert result.skipped
        assert same(state(training), before)
        assert same(scaling(training), scales)
        assert not training.result().skipped
        after, scales = state(training), scaling(training)
    expected, expected_scales = unspoilt(overrides)
    assert same(after, expected)
    assert same(scales, expected_scales)
    assert not same(after, before)


@pytest.mark.parametrize("spoil", [spoil_input(math.inf), spoil_output_gradient(math.inf)], ids=["input", "gradient"])
def test_a_cast_turns_an_infinity_into_a_number(spoil):
    """Why loss and gradient norm are not enough."""
    with emulated_training(*emulate("tensorwise")) as training:
        spoil(training.chunks[0].get_submodule(FC2_OF_FIRST))
        result = training.result()
        assert result.skipped
        assert math.isfinite(result.grad_norm)
        assert bool(torch.isfinite(result.loss_sum_and_tokens).all())


def test_the_histories_alone_show_an_infinity():
    """They are all that Transformer Engine's layers have."""
    with emulated_training(*emulate("delayed")) as training:
        training.step()
        casts = StepCasts(training.chunks)
        assert not casts.met_infinity()
        layer = next(iter(training.layers().values()))
        next(iter(layer.fp8_meta.values())).amax_history[-1] = math.inf
        assert casts.met_infinity()


def test_an_infinity_of_a_validation_skips_no_step_and_freezes_no_scale():
    with emulated_training(*emulate("delayed")) as training:
        training.step()
        handle = spoil_input(math.inf)(training.chunks[0].get_submodule(FC2_OF_FIRST))
        training.validate()
        handle.remove()
        assert not all(bool(torch.isfinite(tensor).all()) for tensor in scaling(training))
        assert not training.result().skipped
        assert all(bool(torch.isfinite(tensor).all()) for tensor in scaling(training))


def guard(compose_config, *overrides):
    return StepGuard(compose_config(*overrides).trainer)


def step_result(loss, *, skipped=False):
    return StepResult(
        loss_sum_and_tokens=torch.tensor([loss * 4, 4.0]), grad_norm=torch.tensor([1.0]), skipped=torch.tensor(skipped)
    )


def guarded(guard, losses):
    """Records of a run of these losses, NaN for skipped steps."""
    told = []
    for step, loss in enumerate(losses, start=1):
        told += guard.add(step, 8 * (step - 1), 8, step_result(loss, skipped=math.isnan(loss)))
        guard.check()
    return told + guard.read()


def test_skipped_steps_count_in_a_row_only(compose_config):
    watch = guard(compose_config, "trainer.max_skipped_steps=3")
    told = guarded(watch, [1.0, math.nan, math.nan, 1.0, math.nan, math.nan, 1.0])
    assert [(record.step, record.in_a_row, record.first_sample) for record in told] == [
        (2, 1, 8),
        (3, 2, 16),
        (5, 1, 32),
        (6, 2, 40),
    ]
    with pytest.raises(NotFiniteError, match="in 3 steps in a row, up to step 10") as stopped:
        guarded(watch, [1.0] * 7 + [math.nan] * 4)
    assert (stopped.value.bad_step.step, stopped.value.bad_step.first_sample) == (10, 72)


def test_a_loss_that_leaps_is_told_and_noise_is_not(compose_config):
    noise = torch.rand(100, generator=torch.Generator().manual_seed(1)).tolist()
    losses = [math.exp(-step / 30) + 2.0 + 0.2 * value for step, value in enumerate(noise)]
    assert guarded(guard(compose_config), losses) == [], "a falling, noisy loss has no spike"
    losses[70] += 3.0
    (spike,) = guarded(guard(compose_config), losses)
    assert isinstance(spike, LossSpikeRecord)
    assert (spike.step, spike.first_sample, spike.num_samples) == (71, 560, 8)
    assert spike.loss == pytest.approx(losses[70])
    assert spike.limit < losses[70]
    assert guarded(guard(compose_config, "trainer.spike_threshold=null"), losses) == []


def test_skipped_losses_are_no_measure_of_spikes(compose_config):
    losses = [2.0, 2.01, math.nan] * 10 + [2.02, 2.5]
    *skipped, spike = guarded(guard(compose_config), losses)
    assert all(isinstance(record, SkippedStepRecord) for record in skipped)
    assert (len(skipped), spike.step) == (10, 32)
    assert spike.median == pytest.approx(2.01)


@pytest.mark.parametrize("counted", [2.0, 3.0, 8.0])
def test_a_step_that_saw_other_tokens_than_its_samples_ends_the_run(compose_config, counted):
    watch = StepGuard(compose_config().trainer, num_tokens=2)
    watch.add(1, 0, 2, replace(step_result(2.0), loss_sum_and_tokens=torch.tensor([8.0, counted])))
    told = rf"^step 1 computed its loss from {counted:.0f} tokens, and its 2 samples have 4: "
    with pytest.raises(TokensMissingError, match=told):
        watch.read()


@pytest.mark.parametrize("tokens", [4, 8209 * 2047])
def test_a_step_that_saw_the_tokens_of_its_samples_goes_on(compose_config, tokens):
    """The second number is odd and above 2^24: fp32 counts one more."""
    watch = StepGuard(compose_config().trainer, num_tokens=tokens)
    watch.add(1, 0, 1, replace(step_result(2.0), loss_sum_and_tokens=torch.tensor([8.0, float(tokens)])))
    assert watch.read() == []


class HalfMasked:
    """Samples of which every other token does not count."""

    def __init__(self, dataset):
        self._dataset, self.num_epochs = dataset, dataset.num_epochs
        self.sequence_length_at = dataset.sequence_length_at

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        sample = dict(self._dataset[index])
        sample["loss_mask"] = sample["loss_mask"].clone()
        sample["loss_mask"][::2] = 0
        return sample


def test_a_run_that_trains_on_half_of_its_tokens_ends(tmp_path, compose_config, no_launcher):
    install_cpu_device()
    config = compose_config("data=mock", *SMALL, "model.data.num_workers=0", "trainer.max_steps=4")
    launch, platform = read_launch(), detect_platform()
    with process_groups(config.model, launch, platform):
        setup = set_up(spec_of(config, platform), prepare_corpus(config, show_progress=False), tmp_path)
        setup = replace(setup, train_data=HalfMasked(setup.train_data))
        watchdog = Watchdog(None, learning_steps=1, launch=launch, run_dir=tmp_path)
        trainer = Trainer(setup, log=lambda record: None, watchdog=watchdog)
        tokens = config.model.global_batch_size * 32
        with pytest.raises(TokensMissingError, match=rf"^step 1 .* {tokens // 2:,} .* {tokens:,}"):
            trainer.train(StopRequest(None))


SMALL = (
    "model.num_layers=2",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=3",
    "trainer.max_steps=7",
)
FC2 = "decoder.layers.1.mlp.linear_fc2"


@pytest.fixture
def run(parent, tmp_path, cache_dir):
    def run_faulty(*overrides, num_ranks=1, faults=()):
        arguments = small_run_arguments(tmp_path / "run", cache_dir, [*SMALL, *overrides])
        return parent.run(arguments[2:], tmp_path / "output", num_ranks=num_ranks, faults=dict(faults))

    return run_faulty


LAYOUTS = {
    "one process": (1, [], 0),
    "DP2": (2, ["parallelism=dp"], 1),
    "TP2": (2, ["parallelism=tp2"], 1),
    "PP2": (2, ["parallelism=pp2"], 1),
}


@pytest.mark.parametrize(("num_ranks", "layout", "rank"), LAYOUTS.values(), ids=LAYOUTS)
def test_one_ranks_nan_skips_the_step_on_all(num_ranks, layout, rank, run, tmp_path):
    """Steps 4 and 5 go wrong on one rank; weights that took part of an update would tear the ranks apart."""
    codes, text = run(*layout, num_ranks=num_ranks, faults={rank: [["poison_result", [4, 5], FC2, "nan"]]})
    assert codes == [0] * num_ranks, text
    metrics = load_metrics(tmp_path / "run")
    assert [(record.step, record.in_a_row) for record in metrics.skipped_steps] == [(4, 1), (5, 2)]
    assert [record.first_sample for record in metrics.skipped_steps] == [24, 32]
    assert [(record.step, record.skipped_steps) for record in metrics.train] == [(3, 0), (6, 2), (7, 0)]
    assert [record.consumed_samples for record in metrics.train] == [24, 48, 56], "samples of skipped steps count"
    assert all(math.isfinite(record.loss) and math.isfinite(record.grad_norm) for record in metrics.train)
    assert all(earlier.loss > later.loss for earlier, later in pairwise(metrics.train))
    assert metrics.summary.skipped_steps == 2
    assert "warning: step 4: loss nan, gradient norm nan; nothing was updated (1 in a row); samples 24 to 31" in text
    assert (tmp_path / "run" / "checkpoints" / "step_00000007").is_dir()


# What is spoilt and where the ranks meet have nothing to do with each other; all pairs of them are slow.
EACH_ONCE = [
    ("delayed", "DP2", "gradient"),
    ("tensorwise", "TP2", "input"),
    ("blockwise", "PP2", "gradient"),
    ("torchao_rowwise", "TP2", "gradient"),
]


@pytest.mark.parametrize(
    ("recipe", "layout", "what"),
    [
        *EACH_ONCE,
        *(
            pytest.param(recipe, layout, "input" if what == "gradient" else "gradient", marks=pytest.mark.slow)
            for recipe, layout, what in EACH_ONCE
        ),
    ],
)
def test_one_ranks_infinity_in_an_fp8_layer_skips_the_step_on_all(recipe, layout, what, run, tmp_path):
    num_ranks, overrides, rank = LAYOUTS[layout]
    codes, text = run(
        *overrides,
        f"fp8={recipe}",
        "model.fp8_emulate=true",
        num_ranks=num_ranks,
        faults={rank: [[f"poison_{what}", [4, 5], FC2, "inf"]]},
    )
    assert codes == [0] * num_ranks, text
    metrics = load_metrics(tmp_path / "run")
    assert [(record.step, record.in_a_row) for record in metrics.skipped_steps] == [(4, 1), (5, 2)]
    assert [(record.step, record.skipped_steps) for record in metrics.train] == [(3, 0), (6, 2), (7, 0)]
    assert all(earlier.loss > later.loss for earlier, later in pairwise(metrics.train))
    assert metrics.summary.skipped_steps == 2


DUMPS = {
    "infinite gradient, PP2": (
        2,
        ["parallelism=pp2"],
        {1: [["poison_gradient", [3, None], FC2, "inf"]]},
        "backward",
        FC2,
    ),
    "NaN on the second rank, DP2": (
        2,
        ["parallelism=dp"],
        {1: [["poison_result", [3, None], FC2, "nan"]]},
        "forward",
        FC2,
    ),
    "a weight, TP2": (2, ["parallelism=tp2"], {1: [["poison_weight", 3, f"{FC2}.weight"]]}, "weight", f"{FC2}.weight"),
    "FP8": (
        1,
        ["fp8=delayed", "model.fp8_emulate=true"],
        {0: [["poison_result", [3, None], FC2, "nan"]]},
        "forward",
        FC2,
    ),
    "infinite input of an FP8 layer, DP2": (
        2,
        ["parallelism=dp", "fp8=delayed", "model.fp8_emulate=true"],
        {1: [["poison_input", [3, None], FC2, "inf"]]},
        "input",
        FC2,
    ),
    "infinite gradient of an FP8 layer's output, PP2": (
        2,
        ["parallelism=pp2", "fp8=delayed", "model.fp8_emulate=true"],
        {1: [["poison_gradient", [3, None], FC2, "inf"]]},
        "backward",
        FC2,
    ),
}


@pytest.mark.parametrize("case", DUMPS.values(), ids=DUMPS)
def test_too_many_end_the_run_and_name_the_first_bad_tensor(case, run, tmp_path):
    num_ranks, overrides, faults, phase, module = case
    codes, text = run(
        *overrides, "trainer.max_skipped_steps=3", "checkpoint.save_interval=2", num_ranks=num_ranks, faults=faults
    )
    assert codes == [1] * num_ranks, text
    # A save at step 4 looks at the weights, and does not wait for the third skipped step.
    step, why = (
        5,
        "loss, gradient or FP8 tensors were not finite in 3 steps in a row, up to step 5 (trainer.max_skipped_steps=3)",
    )
    if phase == "weight":
        step, why = 4, "the weights are not finite any more after step 4"
    path = tmp_path / "run" / "dumps" / f"step_{step:08d}.json"
    dump = json.loads(path.read_text())
    assert (dump["step"], dump["first_sample"], dump["num_samples"]) == (step, 8 * (step - 1), 8)
    bad, (rank,) = dump["first_bad"], faults
    assert (bad["phase"], bad["module"], bad["rank"]) == (phase, module, rank)
    assert bad["num_nan"] + bad["num_inf"] > 0
    if phase != "weight":
        # Microbatches of two; the second of two data parallel ranks begins with the second.
        first = 34 if "parallelism=dp" in overrides else 32
        assert bad["samples"] == [first, first + 1]
    metrics = load_metrics(tmp_path / "run")
    assert (metrics.summary.end_reason, metrics.summary.exit_code) == ("not_finite", 1)
    assert f"error: {why}; the first bad tensor is " in text
    assert module in text
    assert str(path) in text
    newest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert newest == ("step_00000002\n" if phase == "weight" else "step_00000004\n"), "a bad state was saved"


def test_the_first_bad_tensor_is_told_where_no_file_can_be(run, tmp_path):
    dumps = tmp_path / "run" / "dumps"
    dumps.parent.mkdir()
    dumps.write_text("a file in the place of the folder")
    num_ranks, overrides, faults, _, module = DUMPS["NaN on the second rank, DP2"]
    codes, text = run(*overrides, "trainer.max_skipped_steps=3", num_ranks=num_ranks, faults=faults)
    assert codes == [1] * num_ranks, text
    told = rf"the first bad tensor is .*{module}.*all that was found: it could not be written \({dumps}: File exists\)"
    assert re.search(told, text)
