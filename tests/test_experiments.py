"""conf/experiment: each preset passes the rules at the number of processes that it is for."""

import itertools
import math

import pytest
import torch

from gpt_pretrain.benchmark.variants import benchmark_problems, read_variants
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.launch.ranks import rank_zero_of
from gpt_pretrain.plan.forecast import build_plan
from gpt_pretrain.plan.stages import plan_stages
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.rules.check import config_problems
from tests.forked_runs import fork_ranks
from tests.refusals import compose_quickly
from tests.rounding import fp8_anew_tolerance, loss_tolerance
from tests.runs import small_corpus

# Preset → processes it is for, and whether it refuses another number. With nodes of eight beyond eight.
EXPERIMENTS = {
    "smoke": (1, False),
    "gpt2_124m_1gpu": (1, True),
    "gpt3_1_3b_1gpu": (1, True),
    "speedrun_d12": (1, True),
    "gpt3_175b_512gpu": (512, True),
    "llama3_70b_64gpu": (64, True),
    "llama3_8b_2gpu": (2, True),
    "llama3_8b_4gpu": (4, True),
    "llama3_8b_8gpu": (8, True),
    "llama3_8b_8layers_1gpu": (1, True),
    "llama3_8b_1gpu": (1, True),
    "llama3_8b_layouts": (1, False),
    "gpt_12_8b_1gpu": (1, True),
    "gpt_15_4b_1gpu": (1, True),
    "mixtral_8x7b_8gpu": (8, True),
    "mixtral_8x7b_16gpu": (16, True),
    "qwen3_30b_a3b_8gpu": (8, True),
    "qwen3_30b_a3b_16gpu": (16, True),
    "llama3_1_8b_8gpu": (8, True),
    "mistral_7b_8gpu": (8, True),
    "mistral_nemo_12b_8gpu": (8, True),
    "qwen2_5_7b_8gpu": (8, True),
    "qwen3_8b_8gpu": (8, True),
    "phi4_8gpu": (8, True),
}
CLUSTER = ("llama3_8b_8gpu", "llama3_70b_64gpu", "gpt3_175b_512gpu")
# The first is one of the cluster's.
NOT_ON_H100 = ("llama3_8b_8gpu", "mixtral_8x7b_8gpu", "qwen3_30b_a3b_8gpu")
GPUS_OF_A_NODE = 8
# As the comments of the presets say it.
OWN_CORPUS = ("data=mmap", "model.data.data_prefix=[web_text_document]")
# Every key that the preset's layers, layout and batches leave to their sizes and to the length of the run.
NARROW_LLAMA = (
    "data=mock",
    # Each would be a process that imports torch, two beside each of eight ranks.
    "model.data.num_workers=0",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=256",
    "model.vocab_size=512",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.encoder_seq_length=64",
    "trainer.max_steps=2",
    "trainer.log_every_n_steps=1",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
    "checkpoint.save_interval_minutes=null",
    "checkpoint.save_at_end=false",
)
# Of the preset; one process has nothing to overlap.
NO_OVERLAP = (
    "model.use_distributed_optimizer=false",
    "model.overlap_grad_reduce=false",
    "model.overlap_param_gather=false",
)


def test_every_experiment_is_in_the_table():
    assert set(Loader(Source()).options("experiment")) == set(EXPERIMENTS)


@pytest.mark.parametrize(("experiment", "world_size"), [(name, size) for name, (size, _) in EXPERIMENTS.items()])
def test_experiment_passes_the_rules_at_its_world_size(experiment, world_size, broken_rules):
    local = min(world_size, GPUS_OF_A_NODE)
    assert broken_rules(f"experiment={experiment}", world_size=world_size, local_world_size=local) == []


@pytest.mark.parametrize(
    ("experiment", "world_size"), [(name, size) for name, (size, is_stated) in EXPERIMENTS.items() if is_stated]
)
def test_experiment_refuses_another_world_size(experiment, world_size, broken_rules):
    problems = broken_rules(f"experiment={experiment}", world_size=3)
    assert f"torchrun --nproc-per-node {min(world_size, GPUS_OF_A_NODE)} " in "\n".join(problems)


@pytest.mark.parametrize(
    ("experiment", "gpu", "fp8"),
    [
        *itertools.product(CLUSTER, ["h100", "h200"], ["none", "delayed", "tensorwise"]),
        *((name, "h100", "delayed") for name in EXPERIMENTS if name.endswith("_8gpu") and name not in NOT_ON_H100),
    ],
)
def test_cluster_experiments_fit_and_their_shapes_are_legal(experiment, gpu, fp8, broken_rules):
    # BF16 weights beside their FP8 copies take the most.
    overrides = [f"experiment={experiment}", f"fp8={fp8}", "model.fp8_params=false", f"plan.gpu={gpu}"]
    assert broken_rules(*overrides, world_size=EXPERIMENTS[experiment][0], local_world_size=GPUS_OF_A_NODE) == []
    config = compose_quickly(overrides)
    planned = build_plan(config)
    assert planned.fits
    in_fp8 = {linear.module for linear in planned.linears if linear.precision == "FP8"}
    assert len(in_fp8) == (0 if fp8 == "none" else 4), "the linear layers of attention and MLP"


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_mixtral_fits_on_eight_h200_as_its_comment_says(fp8, broken_rules):
    overrides = ["experiment=mixtral_8x7b_8gpu", f"fp8={fp8}", "plan.gpu=h200"]
    assert broken_rules(*overrides, world_size=8, local_world_size=8) == []
    config = compose_quickly(overrides)
    planned = build_plan(config)
    assert planned.num_parameters == 46_702_792_704
    assert planned.fits
    # One expert and an eighth of what is replicated: two norms, router and attention of each layer, two tables, a norm.
    expert = 32 * 3 * 4096 * 14336
    rest = 46_702_792_704 - 8 * expert
    assert plan_stages(planned.spec)[0].num_parameters == expert + rest
    items = planned.memory.worst.items
    assert items["moments"] == 8 * (expert + rest / 8)


# Of a peak with experts the plan has to forecast at least this much, and it was calibrated on Mixtral alone.
EXPERTS_MEMORY = 0.97


@pytest.mark.parametrize(
    ("experiment", "gpu", "parameters"),
    [
        ("mixtral_8x7b_16gpu", "h200", 46_702_792_704),
        ("qwen3_30b_a3b_8gpu", "h200", 30_532_122_624),
        ("qwen3_30b_a3b_16gpu", "h100", 30_532_122_624),
    ],
)
@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_experts_fit_even_where_the_plan_errs_as_it_may(experiment, gpu, parameters, fp8):
    config = compose_quickly([f"experiment={experiment}", f"fp8={fp8}", f"plan.gpu={gpu}"])
    planned = build_plan(config)
    assert planned.num_parameters == parameters
    assert planned.memory.needed_gib / EXPERTS_MEMORY < planned.gpu.memory_gib


@pytest.mark.parametrize(
    ("experiment", "overrides"),
    [
        (
            "gpt2_124m_1gpu",
            ["trainer.max_steps=19000", "model.optim.sched.warmup_steps=null", "checkpoint.save_interval=1000"],
        ),
        ("gpt3_1_3b_1gpu", ["model.global_batch_size=512", "model.optim.lr=2e-4", "trainer.max_steps=25000"]),
        ("llama3_8b_4gpu", ["model.global_batch_size=512", "model.optim.lr=3e-4", "trainer.max_steps=100000"]),
        (
            "llama3_70b_64gpu",
            ["model.global_batch_size=1024", "trainer.max_steps=100000", "checkpoint.save_interval=500"],
        ),
        ("gpt3_175b_512gpu", ["trainer.max_steps=95000", "checkpoint.save_interval=500"]),
    ],
)
def test_command_for_a_corpus_of_ones_own_passes_the_rules(experiment, overrides, broken_rules):
    world_size, _ = EXPERIMENTS[experiment]
    launch = {"world_size": world_size, "local_world_size": min(world_size, GPUS_OF_A_NODE)}
    assert broken_rules(f"experiment={experiment}", *OWN_CORPUS, *overrides, **launch) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_preset_that_saves_keeps_its_last_step_too(experiment, compose_config):
    """Whoever lengthens the run loses neither the model at the end nor the steps before a signal."""
    saves = compose_config(f"experiment={experiment}").checkpoint
    assert saves.save_at_end == (saves.save_interval is not None or saves.save_interval_minutes is not None)


@pytest.mark.parametrize("experiment", ["gpt2_124m_1gpu", "gpt3_1_3b_1gpu", "llama3_8b_2gpu", "llama3_8b_4gpu"])
def test_trial_experiments_train_on_131072_tokens_a_step(experiment, compose_config):
    model = compose_config(f"experiment={experiment}").model
    assert model.global_batch_size * model.encoder_seq_length == 131_072


@pytest.mark.parametrize("fp8", ["none", "delayed", "tensorwise"])
def test_the_speedrun_has_the_matrices_of_nanochats_depth_12(fp8, compose_config):
    planned = build_plan(compose_config("experiment=speedrun_d12", f"fp8={fp8}", "plan.gpu=h100"))
    assert planned.fits
    # Its `num_scaling_params`: wte, value_embeds, lm_head and transformer_matrices with its gates of 432.
    nanochats = 25_165_824 + 150_994_944 + 25_165_824 + 84_935_088
    # Beside them norms: two of 768 and two of a head a layer, and the last.
    assert planned.num_parameters == nanochats - 432 + 12 * (2 * 768 + 2 * 128) + 768


@pytest.mark.parametrize(("fp8", "peak_gib"), [(["fp8=none"], 125), (["fp8=delayed", "model.fp8_params=true"], 121)])
def test_the_8b_of_two_gpus_fits_as_its_comment_says(fp8, peak_gib):
    config = compose_quickly(["experiment=llama3_8b_2gpu", "plan.gpu=h200", *fp8])
    planned = build_plan(config)
    assert planned.fits
    assert planned.memory.peak_gib == pytest.approx(peak_gib, rel=0.02)


@pytest.mark.parametrize("fp8", [["fp8=none"], ["fp8=delayed", "model.fp8_params=true"]])
def test_every_layout_of_the_benchmark_is_legal_on_its_gpus(fp8):
    experiment = "experiment=llama3_8b_layouts"
    config = compose_quickly([experiment])
    assert [*benchmark_problems(config)] == []
    layouts = []
    for variant in read_variants(config, "benchmark"):
        config = compose_quickly([experiment, *fp8, *variant.overrides])
        model, num_gpus = config.model, config.trainer.devices
        assert config_problems(config, rank_zero_of(num_gpus, local_world_size=num_gpus, launcher="torchrun")) == []
        sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
        layouts.append((num_gpus, sizes, model.virtual_pipeline_model_parallel_size, model.sequence_parallel))
    assert len(set(layouts)) == len(layouts)
    # Of one, two and four GPUs every split into tensor, pipeline and context parallel ranks is there.
    for num_gpus in (1, 2, 4):
        splits = {sizes for sizes in itertools.product((1, 2, 4), repeat=3) if num_gpus % math.prod(sizes) == 0}
        assert {sizes for number, sizes, _, _ in layouts if number == num_gpus} == splits


@pytest.mark.parametrize("layout", ["single", "dp", "tp2_sp", "pp2_vp2", "tp2_pp2"])
def test_smoke_goes_with_every_small_layout(layout, broken_rules):
    assert broken_rules("experiment=smoke", f"parallelism={layout}", world_size=8) == []


def test_smoke_runs_and_keeps_no_checkpoint(tmp_path):
    done = fork_ranks(1, ["-m", "gpt_pretrain", "experiment=smoke", f"run_dir={tmp_path}/run"])
    assert done.returncode == 0, done.stderr
    assert "step 10/10" in done.stdout
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_preset_of_the_readme_trains_on_eight_processes_as_on_one(tmp_path):
    """Llama 3 8B's layers, layout and batches, made narrow: TP 2 with sequence parallelism, DP 4, emulated FP8."""
    run = ["experiment=llama3_8b_8gpu", "fp8=delayed", "model.fp8_params=false", "model.fp8_emulate=true"]
    run += NARROW_LLAMA
    losses = []
    for num_ranks, layout in ((8, []), (1, ["parallelism=single", "trainer.devices=1", *NO_OVERLAP])):
        run_dir = tmp_path / f"{num_ranks}_ranks"
        done = fork_ranks(num_ranks, ["-m", "gpt_pretrain", *run, *layout, f"run_dir={run_dir}"])
        assert done.returncode == 0, done.stderr[-3000:]
        metrics = load_metrics(run_dir)
        assert metrics.fp8_coverage is not None, "FP8 was proven"
        losses.append([record.loss for record in metrics.train])
    model = compose_quickly(run).model
    for step, (ours, expected) in enumerate(zip(*losses, strict=True), start=1):
        # Data parallel ranks scale their own microbatches.
        tolerance = loss_tolerance(model, torch.float32, step) + fp8_anew_tolerance(model, step)
        assert ours == pytest.approx(expected, rel=tolerance)


def test_the_default_model_learns_without_a_leap(tmp_path, cache_dir):
    """In a short warmup a rate that is too high makes the loss leap for a step, which hides what FP8 does to it.

    Of 200 steps the warmup is 20. At 6e-3 this seed leaps by 1.16 at step 16; at the preset's rate no seed of six rose
    by more than 0.35 in 24 steps, as batches differ.
    """
    short = ["trainer.max_steps=20", "model.optim.sched.decay_steps=200", "trainer.log_every_n_steps=1", "model.seed=1"]
    quiet = ["trainer.limit_val_batches=0", "sample.max_new_tokens=0", "checkpoint.save_at_end=false"]
    run = ["data=text", *small_corpus(cache_dir), f"run_dir={tmp_path / 'run'}"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", *run, *short, *quiet])
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [record.loss for record in load_metrics(tmp_path / "run").train]
    lowest = itertools.accumulate(losses, min)
    assert max(loss - low for loss, low in zip(losses, lowest, strict=True)) < 0.7
    assert losses[-1] < losses[0] - 0.7, "it learns"


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.endswith("_8gpu")])
@pytest.mark.parametrize("fp8", ["none", "delayed"])
def test_weights_of_eight_gpus_are_stored_as_layers_compute(experiment, fp8):
    model = compose_quickly([f"experiment={experiment}", f"fp8={fp8}"]).model
    assert model.fp8_params is (fp8 != "none" and model.num_moe_experts is None)
