"""What the batch scripts make of a job, without a Slurm: programs that write down how they were called stand for it.

On a real Slurm test_slurm.py runs them; more nodes than one, containers and every end of a run are tried here.
"""

import re
import shutil
import subprocess
import sys

import pytest

from gpt_pretrain.rules.overrides import parse_override
from tests.launching import REPOSITORY, clean_environment

# Writes its arguments and its environment down, does what a run would have done, and ends as one.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORD/srun"
env >"$RECORD/environment"
mkdir -p "$RECORD/run/checkpoints"
[[ -z ${CHECKPOINT:-} ]] || echo "$CHECKPOINT" >"$RECORD/run/checkpoints/latest"
[[ -z ${SRUN_SAYS:-} ]] || echo "$SRUN_SAYS" >&2
exit ${SRUN_CODE:-0}
"""
# Slurm would end the script here; that it cannot be requeued lets the script go on.
SCONTROL = """#!/bin/bash
echo "$@" >"$RECORD/scontrol"
exit 1
"""
# The script follows its logs until a look at them finds the job's step gone, and would look twice a second.
TAIL = f"""#!/bin/bash
exec {shutil.which("tail")} "${{@/#--sleep-interval=*/--sleep-interval=0.02}}"
"""
TWO_NODES = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "96",
}


class Script:
    def __init__(self, folder):
        self.folder = folder
        self.run_dir = folder / "run"
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("tail", TAIL)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def run(self, *overrides, script="fp8_gpt.sbatch", **env):
        base = clean_environment(None)
        base |= TWO_NODES | {"VENV": sys.prefix, "RECORD": str(self.folder)}
        base["PATH"] = f"{self.folder / 'bin'}:{base['PATH']}"
        command = ["bash", f"scripts/slurm/{script}", *overrides, f"run_dir={self.run_dir}"]
        return subprocess.run(
            command, cwd=REPOSITORY, env=base | env, capture_output=True, text=True, check=False, timeout=60
        )

    @property
    def srun(self):
        return (self.folder / "srun").read_text().splitlines()

    @property
    def environment(self):
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    @property
    def was_requeued(self):
        return (self.folder / "scontrol").exists() and (self.folder / "scontrol").read_text() == "requeue 77\n"


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


@pytest.mark.parametrize("name", ["fp8_gpt.sbatch", "prepare_data.sbatch"])
def test_a_script_that_is_started_without_slurm_says_what_it_is_for(name, script):
    done = script.run(script=name, SLURM_JOB_ID="")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"sbatch scripts/slurm/{name}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_every_gpu_of_every_node_gets_a_task_and_its_share_of_the_processors(script):
    done = script.run(
        "model=llama3_8b", "sample.prompt='two  words'", SLURM_RESTART_COUNT="3", SLURM_NTASKS_PER_GPU="1"
    )
    assert done.returncode == 0, done.stderr
    options = [line for line in script.srun if line.startswith("--")]
    assert options[:4] == ["--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=12"]
    assert f"--output={script.run_dir}/logs/77_3/rank_%t.log" in options
    command = script.srun[len(options) :]
    assert command[:3] == [f"{sys.prefix}/bin/python", "-m", "gpt_pretrain"]
    assert command[3:6] == ["fp8=delayed", "model=llama3_8b", "sample.prompt='two  words'"]
    assert script.environment["OMP_NUM_THREADS"] == "1", "what the user has set stands"
    assert "SLURM_NTASKS_PER_GPU" not in script.environment


def test_the_node_with_the_fewest_processors_decides_how_many_a_task_has(script):
    assert script.run(SLURM_JOB_CPUS_PER_NODE="128(x2),64").returncode == 0
    assert "--cpus-per-task=8" in script.srun
    done = script.run(SLURM_JOB_CPUS_PER_NODE="13,7")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 7 processors for 8 tasks a node; ")


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ([], ["fp8=delayed"]),
        (["model.fp8_emulate=true"], ["fp8=delayed"]),
        (["logging.fp8_statistics_interval=10"], ["fp8=delayed"]),
        (["fp8=none"], []),
        (["fp8=tensorwise"], []),
        (["experiment=gpt3_1_3b_1gpu"], ["fp8=delayed"]),
        (["++model.fp8=True", "++model.fp8_margin=0"], []),
        (["model.fp8_recipe=tensorwise"], ["fp8=tensorwise"]),
        (["++model.fp8_recipe=blockwise", "++model.fp8=True"], []),
    ],
)
def test_a_run_is_in_fp8_unless_something_is_said_of_it(overrides, added, script, compose_config):
    assert script.run(*overrides).returncode == 0
    assert script.srun[script.srun.index("gpt_pretrain") + 1 :] == [*added, *overrides, f"run_dir='{script.run_dir}'"]
    assert compose_config(*added, *overrides).model.fp8 is (overrides != ["fp8=none"])


@pytest.mark.parametrize(
    "name", ["a b", "a,b", "1e3", "null", "ü", "[x]", 'a"b', "a%tb", "a=b", "$x", "#a", "(b)", "~c", " d"]
)
def test_script_and_run_read_a_run_directory_alike(name, script):
    script.run_dir = script.folder / name
    assert script.run().returncode == 0
    assert (script.folder / name / "logs" / "77_0").is_dir()
    assert parse_override(script.srun[-1]).value() == str(script.folder / name)


@pytest.mark.parametrize("name", ["'a b'", "a\\,b", "${name}", "a\nb"])
def test_a_run_directory_that_they_would_read_otherwise_is_refused(name, script):
    script.run_dir = f"run/{name}"
    done = script.run()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: run_dir=run/{name} ")
    assert not (script.folder / "srun").exists()


@pytest.mark.parametrize("name", ["fp8_gpt.sbatch", "prepare_data.sbatch"])
def test_a_container_sees_the_checkout_and_what_the_user_mounts(name, script):
    env = {"CONTAINER_IMAGE": "/images/gpt.sqsh", "CONTAINER_MOUNTS": "/data:/data,/runs:/runs", "VENV": "/nowhere"}
    assert script.run("data=mock", script=name, **env).returncode == 0
    place = [line for line in script.srun if line.startswith("--container")]
    assert place == [
        "--container-image=/images/gpt.sqsh",
        f"--container-workdir={REPOSITORY}",
        f"--container-mounts={REPOSITORY}:{REPOSITORY},/data:/data,/runs:/runs",
    ]
    assert "python" in script.srun


def test_gpus_that_another_command_line_asked_for_are_noticed(script):
    done = script.run(SLURM_NTASKS="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --ntasks=2 with 2 × 8 GPUs; leave it out, it is one task a GPU; without GPUs")
    assert "env -u SBATCH_GPUS_PER_NODE sbatch" in done.stderr
    done = script.run("data=mock", script="prepare_data.sbatch")
    assert done.returncode == 0
    assert done.stdout.startswith("note: this job holds 8 GPUs and uses none; ")


def test_another_launchers_variables_do_not_reach_the_ranks(script):
    stale = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "login1", "MASTER_PORT": "1"}
    assert script.run(**stale).returncode == 0
    assert not set(stale) & set(script.environment)


# What the run ends with, whether it has left a new checkpoint, and whether the job is started again: by default, and
# where two failures in a row are allowed for.
ENDS = {
    "done": (0, True, False, False),
    "stopped, saved": (75, True, True, True),
    "stopped before Python heard signals": (138, True, True, True),
    "stopped, nothing saved": (75, False, False, True),
    "a mistake": (2, False, False, False),
    "a crash of all ranks": (1, True, False, False),
    "Ctrl-C": (130, True, False, False),
    "a rank died or hung": (71, False, False, True),
    "a rank died or hung after a checkpoint": (71, True, False, True),
    "a rank was killed": (137, False, False, True),
}


@pytest.mark.parametrize(("code", "saved", "again", "again_if_allowed"), ENDS.values(), ids=ENDS.keys())
def test_how_a_run_ended_decides_whether_its_job_starts_again(code, saved, again, again_if_allowed, script):
    env = {"SRUN_CODE": str(code), "CHECKPOINT": "step_00000010" if saved else ""}
    done = script.run(**env)
    assert (done.returncode, script.was_requeued) == (code, again), done.stdout + done.stderr
    (script.folder / "scontrol").unlink(missing_ok=True)
    env["CHECKPOINT"] = "step_00000020" if saved else ""
    done = script.run(RESTARTS_AFTER_FAILURE="2", **env)
    assert (done.returncode, script.was_requeued) == (code, again_if_allowed), done.stdout + done.stderr


def test_a_checkpoint_of_a_step_that_the_run_had_saved_before_counts_as_a_new_one(script):
    """As after a rollback that gets as far again."""
    for _ in range(2):
        (script.folder / "scontrol").unlink(missing_ok=True)
        script.run(SRUN_CODE="75", CHECKPOINT="step_00000010")
        assert script.was_requeued


@pytest.mark.parametrize("form", ["--config-dir={}", "--config-dir {}", "-cd {}"])
def test_a_run_that_is_repeated_keeps_its_fp8_settings(form, script, tmp_path):
    run = tmp_path / "a run"
    run.mkdir()
    for text in (None, "name: gpt"):
        if text is not None:
            (run / "config.yaml").write_text(text)
        script.run(*(part.format(run) for part in form.split(" ")), "--config-name=config")
        given = (script.folder / "srun").read_text().splitlines()
        assert ("fp8=delayed" in given) == (text is None)
        assert "--config-name=config" in given


def test_failures_are_counted_in_a_row_and_a_new_checkpoint_forgives_them(script):
    requeued = []
    for checkpoint in ("", "", "step_00000010", "", ""):
        (script.folder / "scontrol").unlink(missing_ok=True)
        script.run(RESTARTS_AFTER_FAILURE="2", SRUN_CODE="71", CHECKPOINT=checkpoint)
        requeued.append(script.was_requeued)
    assert requeued == [True, True, True, True, False]


def test_the_log_of_a_failed_job_ends_with_what_the_rank_that_failed_first_said(script):
    logs = script.run_dir / "logs" / "77_0"
    logs.mkdir(parents=True)
    for rank in (0, 5):
        (logs / f"rank_{rank}.log").write_text(f"trace of rank {rank}\n")
    said = (
        "srun: error: gpu01: task 5: Exited with exit code 1\nsrun: error: gpu01: tasks 0-4: Exited with exit code 71"
    )
    done = script.run(SRUN_CODE="71", SRUN_SAYS=said)
    assert done.stdout.endswith("rank_5.log:\ntrace of rank 5\n")
    assert re.search(r"rank_0\.log:\ntrace of rank 0\n--- ", done.stdout)
    assert "rank 5 first" in (script.run_dir / "logs" / "77.failures").read_text()
