"""A run that runs out of memory says what was forecast, what was used, and which keys would help, and how much."""

import pytest
import torch

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.config.load import load_config
from gpt_pretrain.plan.machine import planned_platform
from gpt_pretrain.plan.memory import GIB
from gpt_pretrain.plan.out_of_memory import explain_out_of_memory, plan_remedies, ran_out_of_memory
from gpt_pretrain.plan.world import planned_launch
from gpt_pretrain.training import trainer
from tests.launching import gpu_environment, run_ranks
from tests.planning import plan_of
from tests.runs import SMALL_GPU_RUN, small_run_arguments

ON_EIGHT = ("model=llama3_8b", "model.global_batch_size=16", "model.micro_batch_size=2", "plan.num_gpus=8")


def remedies(*overrides):
    config = load_config(overrides)
    launch = planned_launch(config)
    return {
        found.overrides: found.peak_gib for found in plan_remedies(config, launch, planned_platform(config, launch))
    }


def test_a_run_that_runs_out_of_memory_ends_with_the_forecast_and_the_keys(tmp_path, monkeypatch, capfd, no_launcher):
    def run_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")

    monkeypatch.setattr(trainer, "train_step", run_out)
    arguments = small_run_arguments(tmp_path / "run", tmp_path, ["trainer.limit_val_batches=0"])

    assert main(arguments[2:]) == 1
    error = capfd.readouterr().err
    assert "error: out of memory on rank 0 (CPU): CUDA out of memory. Tried to allocate 2.00 GiB.\n" in error
    assert "the forecast for this run is a peak of " in error
    assert "activations " in error
    assert "used at most: " in error
    told = error[error.index("what would help, by the forecast, the most helpful first (each alone):") :]
    assert "model.micro_batch_size=1 " in told
    assert "model.activations_checkpoint_granularity=full" in told


@pytest.mark.gpu
def test_a_gpu_that_has_no_more_memory_ends_the_run_likewise(tmp_path):
    # 134 MB for each tensor of [s, b, h], a dozen of them in each of 16 layers: 25 GB, of which the process may have
    # a twelfth of the GPU, so that tests beside it have theirs.
    wide = ["model.hidden_size=2048", "model.ffn_hidden_size=4096", "model.num_attention_heads=32"]
    huge = [*wide, "model.num_layers=16", "model.micro_batch_size=256", "model.global_batch_size=256"]
    arguments = small_run_arguments(tmp_path / "run", tmp_path, [*SMALL_GPU_RUN, *huge])
    share = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.08"}
    done = run_ranks(1, arguments, env={**gpu_environment(1), **share})

    assert done.returncode == 1, done.stderr[-2000:]
    assert "error: out of memory on rank 0 (NVIDIA" in done.stderr
    assert "of the GPU's " in done.stderr
    assert "model.micro_batch_size=1 " in done.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out_is_known(error, expected):
    assert ran_out_of_memory(error) is expected


def test_a_cpu_that_has_no_more_memory_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert ran_out_of_memory(raised.value)


def test_the_remedies_are_sorted_and_are_the_plans_own_forecasts():
    found = remedies(*ON_EIGHT, "fp8=delayed")
    assert list(found.values()) == sorted(found.values())
    for overrides, peak_gib in found.items():
        planned = plan_of(*ON_EIGHT, "fp8=delayed", *overrides.split())
        assert peak_gib == pytest.approx(planned.memory.worst.peak / GIB), overrides
        assert peak_gib < plan_of(*ON_EIGHT, "fp8=delayed").memory.worst.peak / GIB
    assert {"model.use_distributed_optimizer=true", "model.micro_batch_size=1"} <= set(found)
    assert any("model.fp8_params=true" in overrides for overrides in found)
    assert any("model.optim.use_precision_aware_optimizer=true" in overrides for overrides in found)


def test_what_is_on_already_or_breaks_a_rule_is_not_offered():
    found = " ".join(
        remedies(
            "model=gpt2_124m",
            "model.micro_batch_size=1",
            "parallelism=dp",
            "plan.num_gpus=3",
            "model.global_batch_size=3",
        )
    )
    assert "fp8_params" not in found, "the run is not in FP8"
    assert "use_distributed_optimizer" not in found, "it is on"
    assert "micro_batch_size" not in found, "it is 1"
    assert "parallel_size" not in found, "three ranks are no pairs"
    assert "activations_checkpoint_granularity=full" in found


def test_the_message_names_the_rank_and_the_first_line_of_the_error():
    config = load_config(["data=mock"])
    text = explain_out_of_memory(config, read_launch({}), MemoryError())
    assert text.startswith("out of memory on rank 0 (CPU): MemoryError\n")
