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
from tests.launching import on_one_gpu

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
        ("5:cpu:/job\n4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "1073741824\n"}, 2**30),
        # What version 1 writes where there is no limit.
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "2"}, "rank 3 is not below the world size 2"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' in the environment is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x' in the environment is not a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x' in the environment is not a whole number"),
        ({"LOCAL_WORLD_SIZE": "0"}, "the launcher states 0 processes on each node"),
    ],
)
def test_contradicting_launcher_variables_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_launch({**TORCHRUN, **change})


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
