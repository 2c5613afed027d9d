"""The first scales of delayed scaling: the first step has BF16's gradient, and nothing was trained for it."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gpt_pretrain.training.step import mean_loss
from gpt_pretrain.training.watches import find_first_scales, stabilize_scales
from tests.emulated_training import emulate, emulated_training
from tests.runs import run_small

# 8,192 tokens a step, whose gradients are so small that a scale of 1 flushes many.
BATCH = "model.global_batch_size=256"
ONE, TWO = "model.micro_batch_size=256", "model.micro_batch_size=128"


@pytest.fixture
def single_process():
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Batches:
    """As the iterators of a run are looked into."""

    def __init__(self, batches):
        self._batches = list(batches)

    def peek(self, num_batches):
        return self._batches[:num_batches]


def first_scales(training):
    batches = [None if each is None else Batches(each) for each in training.iterators(first_sample=0)]
    return find_first_scales(training.trainable, batches)


def first_steps(*overrides, passes=None):
    """Norm of the first gradient, and the losses before and after the first update."""
    with emulated_training(BATCH, *overrides) as training:
        if passes is not None:
            assert first_scales(training) == passes
        first = training.result()
        return first.grad_norm.item(), mean_loss(first.loss_sum_and_tokens), training.step()


@pytest.mark.parametrize("micro_batch", [ONE, TWO], ids=["one microbatch", "two"])
def test_first_step_trains_on_what_bf16_trains_on(micro_batch):
    norm, loss, loss_after = first_steps(micro_batch)
    with_scales = first_steps(micro_batch, *emulate("delayed"), passes=2)
    with_scales_of_one = first_steps(micro_batch, *emulate("delayed"))

    assert with_scales == (
        pytest.approx(norm, rel=5e-3),
        pytest.approx(loss, rel=1e-4),
        pytest.approx(loss_after, rel=3e-4),
    )
    # Otherwise this shows nothing.
    assert with_scales_of_one[0] < 0.985 * norm


@pytest.mark.parametrize(
    ("num_microbatches", "scales", "passes"),
    [
        pytest.param(1, [[1, 1], [8e7, 9e9], [6e7, 9e9]], 2, id="settled"),
        pytest.param(1, [[], [8e7, 9e9], [6e7, 9e9]], 2, id="made in the first pass"),
        pytest.param(1, [[1, 1], [9e10, 9e9], [8e9, 9e9], [2e9, 9e9], [2e9, 9e9]], 4, id="saturated twice"),
        pytest.param(1, [[1, 1], [8e7, 1], [8e7, 9e9], [8e7, 9e9]], 3, id="seen late"),
        pytest.param(1, [[1, 1], [1, 1]], 1, id="never seen"),
        pytest.param(1, [[10.0 ** (20 - i), 1] if i else [1, 1] for i in range(9)], 8, id="never settled"),
        pytest.param(3, [[10.0 ** (20 - i), 1] if i else [1, 1] for i in range(4)], 3, id="three microbatches"),
        pytest.param(8, [[1, 1], [8e7, 9e9]], 1, id="eight microbatches"),
        pytest.param(1, [[1, 7e9]], 0, id="known"),
    ],
)
def test_passes_go_on_until_scales_have_settled(single_process, num_microbatches, scales, passes):
    shown = iter([torch.tensor(each) for each in scales])
    run = []
    assert stabilize_scales(lambda: next(shown), lambda: run.append("a pass"), num_microbatches) == passes
    assert len(run) == passes
    assert next(shown, None) is None


def test_nothing_but_scales_is_changed():
    with emulated_training(BATCH, ONE, *emulate("delayed")) as training:
        optimizer, scheduler = training.trainable.optimizer, training.trainable.scheduler

        def held():
            weights = [weight for chunk in training.chunks for weight in chunk.parameters()]
            return [tensor.detach().clone() for tensor in (*weights, *optimizer.get_parameters())]

        def moments():
            return [len(each.optimizer.state) for each in optimizer.chained_optimizers]

        before = held(), moments(), scheduler.num_steps
        assert first_scales(training) == 2
        assert all(torch.equal(now, then) for now, then in zip(held(), before[0], strict=True))
        assert (moments(), scheduler.num_steps) == before[1:]
        assert first_scales(training) == 0, "they are known"


def test_a_run_looks_for_scales_where_it_has_none(tmp_path, cache_dir):
    run = ["model.num_layers=2", "trainer.limit_val_batches=0", *emulate("delayed"), "trainer.max_steps=1"]

    def passes(name, *overrides):
        return run_small(1, tmp_path / name, cache_dir, [*run, *overrides]).fp8_coverage.first_scale_passes

    assert passes("run") == 2, "of four microbatches"
    assert passes("run", "trainer.max_steps=2") == 0, "the checkpoint has them"
    assert passes("run", "trainer.max_steps=3", "checkpoint.reset_fp8_state=true") == 2
    assert passes("tensorwise", "fp8=tensorwise") == 0
