"""A process before torch is imported: its user, its memory, and its place among the processes of a run."""

import getpass
import os
import pwd
from dataclasses import replace

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.launch import environment
from gpt_pretrain.launch.environment import host_memory_bytes, prepare_libraries
from gpt_pretrain.launch.ranks import first_host, read_launch, without_launcher
from tests.launching import on_one_gpu, run_ranks

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def test_a_user_that_the_machine_does_not_know_is_called_by_number(monkeypatch):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in NAMES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    prepare_libraries()
    assert getpass.getuser() == str(os.getuid())


def test_a_user_who_has_a_name_keeps_it(monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("USER", "")
    prepare_libraries()
    assert getpass.getuser() == "ada"
    assert os.environ["USER"] == ""


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1073741824\n"}, 2**30),
        # The narrowest of those that the process is in.
        ("0::/job/step\n", {"job/memory.max": "1073741824\n", "job/step/memory.max": "max\n"}, 2**30),
        ("0::/job/step\n", {"job/memory.max": "2147483648\n", "job/step/memory.max": "1073741824\n"}, 2**30),
        # A container that sees itself as the root, under the host's path.
        ("0::/docker/0123\n", {"memory.max": "1073741824\n"}, 2**30),
    ],
)
def test_a_limit_of_a_container_or_a_job_counts(tmp_path, monkeypatch, groups, limits, expected):
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text(groups)
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(limit)
    for name, path in {"_OWN_GROUPS": own, "_GROUPS": root}.items():
        monkeypatch.setattr(environment, name, path)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert installed > 2**31, "the limits above are lower"
    whose = "this machine" if expected is None else "this process's control group"
    assert host_memory_bytes() == (expected or installed, whose)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[012-013]",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1, 1)),
        (TORCHRUN, ("torchrun", 3, 8, 3, 4, 2)),
        (SRUN, ("srun", 5, 8, 1, 4, 2)),
        ({"SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1, 1)),
    ],
)
def test_the_launcher_is_read_from_its_variables(env, expected):
    launch = read_launch(env)
    shown = (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    assert (*shown, launch.num_nodes) == expected
    alone = without_launcher({**env, "SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "x"})
    assert read_launch(alone).launcher == "none"
    assert alone["SLURM_JOB_ID"] == "77", "the job of a step is still the process's"
    assert "TORCHELASTIC_RUN_ID" not in alone


def test_ranks_that_share_a_gpu_in_tests_have_the_places_that_torchrun_gave_them():
    place = {**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
    assert read_launch(on_one_gpu(place)) == replace(read_launch(place), launcher="srun")


# A shell of salloc, a step of fewer tasks than its job, and what a job's --ntasks-per-node leaves in smaller steps.
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
UNDERSTOOD = {
    "salloc's shell": ({**ONE_TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, ("none", 0, 1, 0, 1)),
    "a batch script": ({**ONE_TASK, "SLURM_STEP_ID": "4294967291"}, ("none", 0, 1, 0, 1)),
    "a batch script without a step": ({**ONE_TASK, "SLURM_STEP_ID": None}, ("none", 0, 1, 0, 1)),
    "a step of one task": ({**ONE_TASK, "SLURM_STEP_NUM_TASKS": "1"}, ("srun", 0, 1, 0, 1)),
    "one task of a job with eight a node": (
        {**ONE_TASK, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "8"},
        ("srun", 0, 1, 0, 1),
    ),
    "fewer tasks than nodes": ({**ONE_TASK, "SLURM_NTASKS": "1"}, ("srun", 0, 1, 0, 1)),
    "at most so many a node": ({"SLURM_NTASKS_PER_NODE": "8"}, ("srun", 5, 8, 1, 4)),
    "torchrun in a step": (TORCHRUN, ("torchrun", 3, 8, 3, 4)),
}


def changed(env, change):
    return {name: value for name, value in {**env, **change}.items() if value is not None}


@pytest.mark.parametrize("case", UNDERSTOOD)
def test_a_step_is_not_mistaken_for_its_job(case):
    change, expected = UNDERSTOOD[case]
    launch = read_launch(changed(SRUN, change))
    shown = (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    assert shown == expected


# What contradicts the variables of a launcher, or is no number at all, and the variables that the message names.
CONTRADICTIONS = [
    *((TORCHRUN, {name: value}, [f"{name}='{value}'"]) for name in TORCHRUN for value in ("x", "-1", "1e1", "9" * 30)),
    (TORCHRUN, {"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'"]),
    (TORCHRUN, {"WORLD_SIZE": "2"}, ["RANK=3", "WORLD_SIZE=2", "rank 3 is not below the world size 2"]),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "0 processes on each node"]),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "16"}, ["LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"]),
    (TORCHRUN, {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
    (TORCHRUN, {"RANK": "0"}, ["RANK=0", "LOCAL_RANK=3"]),
    (TORCHRUN, {"RANK": "7", "LOCAL_RANK": "0"}, ["RANK=7", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=4"]),
    (TORCHRUN, {"MASTER_PORT": "0"}, ["MASTER_PORT='0'"]),
    (TORCHRUN, {"MASTER_PORT": "65536"}, ["MASTER_PORT='65536'"]),
    *((TORCHRUN, {name: None}, [f"{name} is not set"]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    *(
        (SRUN, {name: value}, [name])
        for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_JOB_ID", "SLURM_STEP_ID")
        for value in ("x", "-1", "9" * 30)
    ),
    *((SRUN, {name: None}, [f"{name} is not set"]) for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")),
    (SRUN, {"SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_NTASKS=8"]),
    (SRUN, {"SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "SLURM_NNODES=2"]),
    (SRUN, {"SLURM_NTASKS": "0"}, ["SLURM_NTASKS='0'"]),
    (SRUN, {"SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_PROCID=5", "SLURM_STEP_NUM_TASKS=4"]),
    (SRUN, {"SLURM_NNODES": "3"}, ["SLURM_NTASKS=8", "SLURM_NNODES=3"]),
    (SRUN, {"SLURM_NNODES": None, "SLURM_JOB_NUM_NODES": "3"}, ["SLURM_NTASKS=8", "SLURM_JOB_NUM_NODES=3"]),
    (SRUN, {"SLURM_NTASKS": "7", "SLURM_NNODES": "4"}, ["SLURM_NTASKS=7", "SLURM_NNODES=4"]),
    (SRUN, {"SLURM_STEP_NODELIST": "gpu[01-"}, ["SLURM_STEP_NODELIST='gpu[01-'"]),
    (SRUN, {"SLURM_STEP_NODELIST": None, "SLURM_STEP_NUM_TASKS": "8"}, ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
]


@pytest.mark.parametrize(("env", "change", "named"), CONTRADICTIONS)
def test_contradicting_launcher_variables_are_refused(env, change, named):
    with pytest.raises(ConfigError) as refused:
        read_launch(changed(env, change))
    assert all(name in str(refused.value) for name in named), refused.value


def test_one_task_of_a_job_with_eight_a_node_is_told_what_its_layout_needs():
    """A process as such a step starts it: neither a hang nor a traceback."""
    step = {**SRUN, **ONE_TASK, "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "8"}
    done = run_ranks(1, ["-m", "gpt_pretrain", "parallelism=tp2"], env=step, timeout_s=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.tensor_model_parallel_size=2 ")
    salloc = {**SRUN, **ONE_TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    # Alone it may run a sweep, which a launcher's process may not.
    done = run_ranks(1, ["-m", "gpt_pretrain", "-m", "model.seed=1,2", "parallelism=tp2"], env=salloc, timeout_s=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.tensor_model_parallel_size=2 ")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[012-015,020],login1", "gpu012"),
        ("a1,b[1-2]", "a1"),
        ("node7", "node7"),
        ("rack[0-1]_blade[02-07,09],login1", "rack0_blade02"),
        ("gpu[3,5]-ib", "gpu3-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host
