"""FP8 statistics of whole runs with emulated layers: scales follow from amaxes by hand, and layouts see the same."""

from dataclasses import fields

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.run import train
from tests.platforms import spec_of
from tests.runs import SMALL_RUN, run_small

# One microbatch a step: the scale of a step comes from the amaxes of the steps before.
OVERRIDES = (
    "fp8=delayed",
    "model.fp8_emulate=true",
    "model.fp8_margin=1",
    "model.fp8_exclude=[decoder.layers.1.mlp.linear_fc2]",
    "model.num_layers=2",
    "model.micro_batch_size=2",
    "model.global_batch_size=2",
    "trainer.max_steps=4",
    "trainer.limit_val_batches=0",
    "checkpoint.save_at_end=false",
)
# 448 and 57,344 halved by the margin.
LARGEST = {"input": 224.0, "weight": 224.0, "output_gradient": 28672.0}
LAYERS = [
    f"decoder.layers.{layer}.{kind}"
    for layer in range(2)
    for kind in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]


@pytest.fixture(scope="module")
def observed_on_two_ranks(cache_dir, tmp_path_factory):
    """Every step of a run with tensor parallelism; it also prepares the corpus that all runs read."""
    layout = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
    run_dir = tmp_path_factory.mktemp("ranks")
    return run_small(2, run_dir, cache_dir, [*OVERRIDES, *layout, "logging.fp8_statistics_interval=1"])


@pytest.fixture
def train_here(observed_on_two_ranks, cache_dir, tmp_path, no_launcher, compose_config):
    """Trains in this process, which saves the start of another, and returns what was logged."""

    def run(name, *overrides):
        data = (f"model.data.text_files=[{cache_dir / 'sources.jsonl'}]", f"model.data.cache_dir={cache_dir}")
        config = compose_config(*SMALL_RUN, *data, *OVERRIDES, f"run_dir={tmp_path / name}", *overrides)
        install_cpu_device()
        assert train(spec_of(config, detect_platform())) == "max_steps"
        return load_metrics(tmp_path / name)

    return run


def by_tensor(record):
    return {(tensor.layer, tensor.tensor): tensor for tensor in record.tensors}


def check_against_the_recipe(metrics):
    """Delayed scaling with `max`, from the recorded amaxes alone: of every step, but not of the passes before."""
    assert [record.step for record in metrics.fp8] == [1, 2, 3, 4]
    passes = metrics.fp8_coverage.first_scale_passes
    assert passes > 0
    # That was over the first batch, too.
    largest_amax = {key: LARGEST[key[1]] / tensor.scale_min for key, tensor in by_tensor(metrics.fp8[0]).items()}
    for key, tensor in by_tensor(metrics.fp8[0]).items():
        assert largest_amax[key] == pytest.approx(tensor.amax, rel=0.1), key
    for record in metrics.fp8:
        tensors = by_tensor(record)
        assert list(dict.fromkeys(layer for layer, _ in tensors)) == LAYERS[:-1], "the last one is excluded"
        assert len(tensors) == 3 * (len(LAYERS) - 1)
        for key, tensor in tensors.items():
            expected = LARGEST[tensor.tensor] / largest_amax[key]
            assert (tensor.scale_min, tensor.scale_max) == (pytest.approx(expected, rel=1e-6),) * 2, (record.step, key)
            assert tensor.amax_history_used == passes + record.step + 1
            largest_amax[key] = max(largest_amax[key], tensor.amax)


def test_scales_follow_from_the_amaxes_and_observing_changes_nothing(train_here, tmp_path, capfd):
    metrics = train_here("observed", "logging.fp8_statistics_interval=1", "logging.tensorboard=true")
    printed = capfd.readouterr().out
    quiet = train_here("quiet")

    check_against_the_recipe(metrics)
    first = by_tensor(metrics.fp8[0])
    # About four standard deviations of 0.02. With a scale of 1, and not of 224 / 0.08, E4M3 would flush those below
    # 2^-10, which are erf(2^-10 / 0.02 / √2) = 3.9%, and E5M2 more than half of the gradients.
    assert first[LAYERS[0], "weight"].amax == pytest.approx(0.08, abs=0.02)
    for layer in LAYERS[:-1]:
        assert first[layer, "weight"].flushed < 1e-3
        assert first[layer, "output_gradient"].flushed < 0.05
    assert [record.loss for record in quiet.train] == [record.loss for record in metrics.train]
    assert quiet.fp8 == []
    assert printed.count("\nfp8 step 4/4 worst ") == 3
    tags = EventAccumulator(str(tmp_path / "observed" / "tensorboard")).Reload().Tags()["scalars"]
    assert f"fp8/amax/{LAYERS[0]}/output_gradient" in tags
    assert len([tag for tag in tags if tag.startswith("fp8/amax/")]) == 3 * (len(LAYERS) - 1)


def test_statistics_come_at_their_interval(train_here):
    metrics = train_here("every_third", "logging.fp8_statistics_interval=3", "trainer.log_every_n_steps=4")

    assert [record.step for record in metrics.train] == [4]
    assert [record.step for record in metrics.fp8] == [3]


def test_tensor_parallel_ranks_see_what_one_process_sees(observed_on_two_ranks, train_here):
    check_against_the_recipe(observed_on_two_ranks)
    alone = by_tensor(train_here("alone", "logging.fp8_statistics_interval=1").fp8[0])
    together = by_tensor(observed_on_two_ranks.fp8[0])

    assert list(together) == list(alone)
    for key, tensor in together.items():
        if tensor.tensor == "weight":
            # Shards of the same weights: their counts add up to the whole's.
            assert tensor == alone[key]
            continue
        # Sums over ranks round differently, and what lies at half a step falls to the other side.
        for field in fields(tensor):
            value, expected = getattr(tensor, field.name), getattr(alone[key], field.name)
            assert value == (pytest.approx(expected, rel=1e-2, abs=1e-3) if isinstance(value, float) else expected)
