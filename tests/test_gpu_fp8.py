"""FP8 on one GPU through the command line: the proof passes where FP8 runs, and ends the run where it does not."""

import json

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.emulated_training import RECOMPUTED
from tests.launching import gpu_environment, run_ranks
from tests.nemo import NEMO_FP8_WITH_TE
from tests.runs import SMALL_GPU_RUN, run_small, small_run_arguments

pytestmark = pytest.mark.gpu

STORED = "model.fp8_params=true"
DETERMINISTIC = ("trainer.deterministic=true", "checkpoint.save_at_end=true", "model.optim.sched.decay_steps=10")
RUNS = {
    "bf16": (),
    "nemo": NEMO_FP8_WITH_TE,
    "delayed": ("fp8=delayed",),
    "delayed most recent": ("fp8=delayed", "model.fp8_amax_compute_algo=most_recent", "model.fp8_margin=1"),
    "delayed excluded": ("fp8=delayed", "model.fp8_exclude=['decoder.layers.0.*','*.linear_fc2']"),
    "delayed stored": ("fp8=delayed", STORED),
    "delayed separate": ("fp8=delayed", STORED, "model.activation_cast_fusion=false"),
    "tensorwise fused excluded": (
        "fp8=tensorwise",
        "model.activation_cast_fusion=true",
        "model.fp8_exclude=['decoder.layers.0.*','decoder.layers.1.mlp.linear_fc2']",
    ),
    "delayed excluded stored": ("fp8=delayed", STORED, "model.fp8_exclude=['decoder.layers.0.*']"),
    "tensorwise": ("fp8=tensorwise",),
    "tensorwise stored": ("fp8=tensorwise", STORED),
    "tensorwise ends in bf16": ("fp8=tensorwise", "model.first_last_layers_bf16=true"),
    "blockwise": ("fp8=blockwise",),
    "blockwise stored": ("fp8=blockwise", STORED),
    "delayed recomputed": ("fp8=delayed", *RECOMPUTED),
    "delayed attention": ("fp8=delayed", "model.fp8_dot_product_attention=true", "model.kv_channels=128"),
}


def run(tmp_path, cache_dir, overrides, program=("-m", "gpt_pretrain"), env=None):
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [*SMALL_GPU_RUN, *overrides])
    assert arguments[:2] == ["-m", "gpt_pretrain"]
    return run_ranks(1, [*program, *arguments[2:]], env={**gpu_environment(1), **(env or {})})


@pytest.fixture(scope="module")
def bf16_loss(tmp_path_factory, cache_dir):
    directory = tmp_path_factory.mktemp("bf16")
    done = run(directory, cache_dir, RUNS["bf16"])
    assert done.returncode == 0, done.stderr[-3000:]
    return load_metrics(directory / "run").train[-1].loss


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16"])
def test_fp8_is_proven_and_learns_as_bf16_does(tmp_path, cache_dir, bf16_loss, name):
    done = run(tmp_path, cache_dir, RUNS[name])
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    proofs = [line for line in lines if line["kind"] == "fp8_coverage"]
    # The first step and the tenth.
    assert len(proofs) == 2
    for proof in proofs:
        assert 0.3 < proof["gemm_flops_share"] < 1.0
        assert (proof["parameter_bytes_share"] > 0) == any("fp8_params" in override for override in RUNS[name])
        assert proof["warnings"] == []
    assert load_metrics(tmp_path / "run").train[-1].loss == pytest.approx(bf16_loss, rel=0.03)


@pytest.mark.parametrize(("name", "micro_batch_size"), [("delayed", 64), ("delayed stored", 32)])
def test_first_gradient_of_delayed_scaling_is_that_of_bf16(tmp_path, cache_dir, name, micro_batch_size):
    # Of 8,192 tokens: scales of 1 would flush most of what is one token's.
    step = [*SMALL_GPU_RUN, "model.global_batch_size=64", f"model.micro_batch_size={micro_batch_size}"]
    step += ["trainer.max_steps=1", "trainer.val_check_interval=null"]
    expected = run_small(1, tmp_path / "bf16", cache_dir, step, on_gpus=True)
    metrics = run_small(1, tmp_path / "fp8", cache_dir, [*step, *RUNS[name]], on_gpus=True)
    assert metrics.fp8_coverage.first_scale_passes > 1
    assert metrics.train[0].grad_norm == pytest.approx(expected.train[0].grad_norm, rel=3e-2)


def test_first_gradients_of_a_large_batch_are_not_saturated(tmp_path, cache_dir):
    """131,072 tokens in one microbatch: the gradients of single ones are far below what a scale of 1 keeps."""
    step = ["model=gpt2_124m", "model.hidden_size=768", "model.ffn_hidden_size=3072", "model.encoder_seq_length=1024"]
    step += ["model.micro_batch_size=128", "model.global_batch_size=128"]
    step += ["trainer.max_steps=1", "trainer.limit_val_batches=0", "checkpoint.save_at_end=false"]
    expected = run_small(1, tmp_path / "bf16", cache_dir, step, on_gpus=True)
    observed = ["fp8=delayed", "logging.fp8_statistics_interval=1"]
    metrics = run_small(1, tmp_path / "fp8", cache_dir, [*step, *observed], on_gpus=True)
    assert metrics.fp8_coverage.first_scale_passes > 2
    assert metrics.train[0].grad_norm == pytest.approx(expected.train[0].grad_norm, rel=2e-2)
    assert max(tensor.saturated for tensor in metrics.fp8[0].tensors) < 1e-3


@pytest.mark.parametrize(
    "name",
    ["delayed", "tensorwise", "blockwise", "nemo", "tensorwise stored", "blockwise stored", "delayed excluded stored"],
)
def test_resumed_run_equals_the_uncut_run_bit_for_bit(tmp_path, cache_dir, name):
    overrides = [*SMALL_GPU_RUN, *RUNS[name], *DETERMINISTIC]
    uncut = run_small(1, tmp_path / "uncut", cache_dir, [*overrides, "trainer.max_steps=10"], on_gpus=True)
    run_small(1, tmp_path / "cut", cache_dir, [*overrides, "trainer.max_steps=4"], on_gpus=True)
    resumed = run_small(1, tmp_path / "cut", cache_dir, [*overrides, "trainer.max_steps=10"], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, 4]
    curves = [
        [(record.step, record.loss, record.grad_norm) for record in metrics.train] for metrics in (resumed, uncut)
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("before", "after", "asked", "tolerance"),
    [
        pytest.param("bf16", "delayed stored", [], 1e-2, id="BF16 goes on in FP8"),
        pytest.param(
            "delayed stored", "tensorwise stored", ["checkpoint.reset_fp8_state=true"], 1e-2, id="another recipe"
        ),
        # The same codes, cast by the optimizer or by the layer.
        pytest.param("tensorwise stored", "tensorwise", [], 0.0, id="weights in FP8 go on in BF16"),
    ],
)
def test_fp8_may_change_between_saving_and_resuming(  # noqa: PLR0917 - a table's columns and pytest's fixtures
    tmp_path, cache_dir, before, after, asked, tolerance
):
    masters = [*SMALL_GPU_RUN, *DETERMINISTIC, "model.use_distributed_optimizer=true"]
    run_small(1, tmp_path / "cut", cache_dir, [*masters, *RUNS[before], "trainer.max_steps=4"], on_gpus=True)
    resumed = [*masters, "trainer.max_steps=10", f"checkpoint.resume={tmp_path / 'cut/checkpoints/step_00000004'}"]
    ends = {before: RUNS[before], after: [*RUNS[after], *asked]}
    curves = [
        [record.loss for record in run_small(1, tmp_path / fp8, cache_dir, [*resumed, *given], on_gpus=True).train]
        for fp8, given in ends.items()
    ]
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=tolerance, abs=0.0)
    assert (curves[1] == curves[0]) == (tolerance == 0.0)


@pytest.mark.parametrize(
    ("sabotage", "overrides", "expected"),
    [
        ("replace_te_layers", ("fp8=delayed",), "e4m3 × e4m3"),
        ("swap_te_recipe", ("fp8=delayed",), "DelayedScaling"),
        ("drop_gather", ("fp8=delayed", STORED), "weight after the step"),
    ],
)
def test_a_sabotaged_run_ends_with_what_differs(tmp_path, cache_dir, sabotage, overrides, expected):
    done = run(tmp_path, cache_dir, overrides, program=("tests/programs/sabotaged_run.py", sabotage))
    assert done.returncode == 2, done.stdout[-1500:] + done.stderr[-3000:]
    assert "FP8 does not run as planned" in done.stderr
    assert expected in done.stderr


def test_an_environment_variable_that_changes_the_recipe_is_refused(tmp_path, cache_dir):
    variable = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    done = run(tmp_path, cache_dir, ("fp8=blockwise",), env={variable: "1"})
    assert done.returncode == 2
    assert variable in done.stderr
