"""A run that runs out of memory says what was forecast, what was used, and which keys would help, and how much."""

import re
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import psutil
import pytest
import torch

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.launch.environment import host_memory_bytes
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.plan import out_of_memory
from gpt_pretrain.plan.machine import planned_spec
from gpt_pretrain.plan.memory import GIB
from gpt_pretrain.plan.out_of_memory import check_states_fit, explain_out_of_memory, plan_remedies, ran_out_of_memory
from tests.launching import gpu_environment, run_ranks
from tests.planning import plan_of
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly
from tests.runs import SMALL_GPU_RUN, small_run_arguments

ON_EIGHT = ("model=llama3_8b", "model.global_batch_size=16", "model.micro_batch_size=2", "plan.num_gpus=8")


def remedies(*overrides):
    spec = planned_spec(compose_quickly(overrides))
    return {found.overrides: found.needed_gib for found in plan_remedies(spec, attrgetter("peak_gib"))}


def test_a_run_that_runs_out_of_memory_ends_with_the_forecast_and_the_keys(tmp_path, parent):
    arguments = small_run_arguments(tmp_path / "run", tmp_path, ["trainer.limit_val_batches=0"])
    run = parent.start(arguments[2:], tmp_path / "output", faults={0: [["run_out_of_memory_at_step", 1]]})

    assert run.wait(120) == [1]
    error = run.outputs[0].read_text()
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


@pytest.mark.parametrize("recipe", ["delayed", "torchao_tensorwise"])
def test_the_remedies_are_sorted_and_are_the_plans_own_forecasts(recipe):
    found = remedies(*ON_EIGHT, f"fp8={recipe}")
    assert list(found.values()) == sorted(found.values())
    for overrides, peak_gib in found.items():
        planned = plan_of(*ON_EIGHT, f"fp8={recipe}", *overrides.split())
        assert peak_gib == pytest.approx(planned.memory.peak_gib), overrides
        assert peak_gib < plan_of(*ON_EIGHT, f"fp8={recipe}").memory.peak_gib
    assert {"model.use_distributed_optimizer=true", "model.micro_batch_size=1"} <= set(found)
    for strategy in ("optim_grads", "optim_grads_params"):
        assert any(f"model.data_parallel_sharding_strategy={strategy}" in each.split() for each in found)
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
    assert not any("fp8_params" in offer for offer in remedies(*ON_EIGHT, "fp8=torchao_rowwise")), "it refuses that"
    assert "use_distributed_optimizer" not in found, "it is on"
    assert "micro_batch_size" not in found, "it is 1"
    assert "overlap_grad_reduce" not in found, "it is on"
    assert "=optim_grads" not in " ".join(remedies(*ON_EIGHT, "parallelism=zero2")).split(), "it is on"
    assert "data_parallel_sharding_strategy" not in " ".join(remedies(*ON_EIGHT, "parallelism=fsdp")), "all of it is on"
    assert "data_parallel_sharding_strategy" not in " ".join(remedies("model=gpt2_124m")), "one rank shares with none"
    assert "parallel_size" not in found, "three ranks are no pairs"
    assert "activations_checkpoint_granularity=full" in found


def test_the_message_names_the_rank_and_the_first_line_of_the_error():
    config = compose_quickly(["data=mock"])
    text = explain_out_of_memory(spec_of(config), MemoryError())
    assert text.startswith("out of memory on rank 0 (CPU): MemoryError\n")


def refused(monkeypatch, platform, *overrides, total_gib, ranks=1):
    """What is said of a run on a machine with this much memory; None where nothing is."""
    monkeypatch.setattr(out_of_memory, "_total_gib", lambda platform: (total_gib, "this one"))
    config = compose_quickly(["data=mock", *overrides])
    launch = replace(read_launch({}), world_size=ranks, local_world_size=ranks)
    try:
        check_states_fit(build_run_spec(config, launch, platform))
    except UserError as error:
        return str(error)
    return None


def test_states_that_no_gpu_could_hold_are_refused_with_the_keys_that_help(monkeypatch):
    # 8,030,261,248 parameters: 2 bytes of weight, 4 of gradient, 4 of master and 8 of moments.
    of_8b = ("model=llama3_8b",)
    assert refused(monkeypatch, H200, *of_8b, total_gib=134.7) is None
    told = refused(monkeypatch, H200, *of_8b, total_gib=134.6).splitlines()
    assert told[0] == (
        "the model does not fit: weights, gradients and optimizer states alone take 134.62 GiB (weights 14.96, "
        "gradients 29.92, masters 29.92, moments 59.83), and this one has 134.60 GiB"
    )
    # Sixteen bits of each master are the weight itself.
    helps = " ".join(told[2].split())
    assert helps.startswith("model.use_distributed_optimizer=true model.optim.use_precision_aware_optimizer=true ")
    assert helps.endswith("119.66 GiB (-11%)")
    assert "granularity" not in "".join(told), "activations are not counted"
    assert len(told) == 3
    too_small = refused(monkeypatch, H200, *of_8b, total_gib=119.0).splitlines()
    assert too_small[1:3] == told[1:3]
    assert too_small[3] == "none of them is enough alone: use more GPUs, or a smaller model"
    # Sharded over four ranks, each with a GPU of its own: 6 bytes, and 12 of which it has a quarter.
    of_four = (*of_8b, "parallelism=dp", "model.global_batch_size=4")
    assert refused(monkeypatch, H200, *of_four, total_gib=67.4, ranks=4) is None
    assert "alone take 67.31 GiB (" in refused(monkeypatch, H200, *of_four, total_gib=67.2, ranks=4)


UNTIED = "model.share_embeddings_and_output_weights=false"


@pytest.mark.parametrize(
    ("ranks", "layout", "copies"),
    [(1, (), 1), (2, (), 2), (4, ("parallelism=pp2", "model.pipeline_model_parallel_size=4", UNTIED), 1)],
)
def test_processes_without_gpus_share_the_memory_of_their_machine(monkeypatch, ranks, layout, copies):
    overrides = ("model=gpt2_124m", "model.global_batch_size=64", *layout)
    # In fp32, 16 bytes for each parameter.
    needed_gib = copies * 16 * plan_of(*overrides).num_parameters / GIB
    assert refused(monkeypatch, CPU, *overrides, total_gib=needed_gib + 0.01, ranks=ranks) is None
    told = refused(monkeypatch, CPU, *overrides, total_gib=needed_gib - 0.01, ranks=ranks)
    assert f"alone take {needed_gib:.2f} GiB" in told
    assert (f" in {ranks} processes (" in told) == (ranks > 1)
    assert re.search(r"this one has \d+\.\d\d GiB and no GPU$", told.splitlines()[0])
    items = re.findall(r"(?:weights|gradients|moments) (\d+\.\d+)", told.splitlines()[0])
    assert len(items) == 3
    assert sum(map(float, items)) == pytest.approx(needed_gib, abs=0.02)


def test_a_model_that_no_machine_could_hold_is_refused_before_its_data_is_read(
    tmp_path, capfd, no_launcher, monkeypatch
):
    """Without a GPU, Linux would end the process, and nothing would be said."""
    monkeypatch.setattr(out_of_memory, "_total_gib", lambda platform: (1000.0, "this machine"))
    arguments = ["model=llama3_70b", "data=text", f"model.data.text_files=[{tmp_path}/none.txt]"]
    assert main([*arguments, f"run_dir={tmp_path}/run", f"model.data.cache_dir={tmp_path}/cache"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(
        "error: the model does not fit: weights, gradients and optimizer states alone take 1051.33 "
    )
    assert error.endswith(": use a machine with GPUs or with more memory, or a smaller model\n")
    assert list(tmp_path.iterdir()) == []


def test_swap_counts_as_memory_of_a_run_without_a_gpu(monkeypatch):
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=3 * GIB))
    total_gib, whose = out_of_memory._total_gib(CPU)
    memory, owner = host_memory_bytes()
    assert (total_gib, whose) == (memory / GIB + 3, owner)
