"""Jobs of a real Slurm: it warns, requeues, cancels and kills; the run ends with the losses of one left alone."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpt_pretrain.checkpoint.manifest import check_files, read_manifest
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.report.metrics_file import load_metrics
from tests.emulated_training import emulate
from tests.forked_runs import forked_python
from tests.launching import REPOSITORY
from tests.runs import small_run_arguments
from tests.slurm_jobs import Slurm, ask, missing_slurm, slurm_environment, wait_for

# Where the machine is busy, every start of a job takes its time.
pytestmark = pytest.mark.timeout(600)

TWO_TASKS = ("--ntasks=2", "--time=20")
# Long enough for a signal to find it at work.
LONG = ("fp8=none", "model.micro_batch_size=2", "trainer.max_steps=100", "trainer.limit_val_batches=0")


@pytest.fixture
def slurm(tmp_path):
    missing = missing_slurm()
    if missing is not None:
        pytest.skip(missing)
    opened = Slurm(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def forking(parent, tmp_path):
    """The environment of jobs whose Python is forks, for those that Slurm sends no signals: none would arrive."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    with forked_python(parent, tmp_path / "venv" / "bin"):
        yield {"VENV": str(tmp_path / "venv")}


@pytest.fixture
def train(slurm, tmp_path, cache_dir):
    """Submits a small training; `where` names its run directory."""

    def submit(*overrides, options=TWO_TASKS, where="run", env=None):
        arguments = small_run_arguments(tmp_path / where, cache_dir, overrides)[2:]
        return slurm.submit("fp8_gpt.sbatch", arguments, *options, run_dir=tmp_path / where, env=env)

    return submit


def newest_checkpoint(run_dir):
    """The manifest of the newest checkpoint, once every byte is what it says."""
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    manifest = read_manifest(checkpoint)
    assert check_files(checkpoint, manifest) == []
    return manifest


def has_been_warned(pid):
    """Whether SIGUSR1 waits for a stopped process, or has ended it: Slurm may let it go on itself."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True
    masks = [int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, flags=re.MULTILINE)]
    return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def test_a_job_cut_by_its_time_limit_goes_on_by_itself_and_ends_as_one_that_never_was_cut(
    train, parent, tmp_path, cache_dir, request
):
    cut = train(*LONG, where="cut", options=(*TWO_TASKS, "--signal=USR1@90"))
    cut.wait_for_step(5)
    # A stopped run waits without work for Slurm's warning. Limits are whole minutes, and Slurm looks each 30 s for
    # those that come within 90 s and half a minute: it finds this one, 50 to 110 s away, at its next look.
    cut.signal("STOP")
    _, minutes, seconds = (int(part) for part in cut.field("RunTime").split(":"))
    ask("scontrol", "update", f"JobId={cut.number}", f"TimeLimit={math.ceil((60 * minutes + seconds + 50) / 60)}")
    ranks = [cut.pid(0), cut.pid(1)]
    # The one that never is cut fills the time.
    arguments = small_run_arguments(tmp_path / "uncut", cache_dir, LONG)[2:]
    uncut = parent.start(arguments, tmp_path / "uncut.output", num_ranks=2)
    request.addfinalizer(uncut.kill)
    wait_for(lambda: all(map(has_been_warned, ranks)), lambda: f"Slurm did not warn: {cut.text}")
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)
    wait_for(lambda: cut.num_restarts == 1, lambda: cut.text)
    first = load_metrics(cut.run_dir).summary
    assert (first.end_reason, first.exit_code) == ("warned", 75)
    assert 5 <= newest_checkpoint(cut.run_dir).step == first.step < 100
    # Without it the short limit would hold for the second start, too.
    ask("scontrol", "update", f"JobId={cut.number}", "TimeLimit=20")

    assert uncut.wait(120) == [0, 0], uncut.text()
    assert cut.wait_for_end() == "COMPLETED", cut.text
    assert cut.num_restarts == 1
    assert f"steps: {first.step} → 100" in cut.rank_log(0, start=1)
    curves = [{step.step: step.loss for step in load_metrics(tmp_path / name).train} for name in ("cut", "uncut")]
    assert list(curves[1]) == list(range(1, 101))
    assert curves[0] == curves[1]


def test_a_signal_sent_by_hand_saves_and_puts_the_job_into_the_queue_again(train):
    job = train(*LONG)
    job.wait_for_step(2)
    job.signal("USR1")
    wait_for(lambda: job.num_restarts == 1, lambda: job.text)
    summary = load_metrics(job.run_dir).summary
    assert (summary.end_reason, summary.exit_code) == ("warned", 75)
    assert newest_checkpoint(job.run_dir).step == summary.step < 100
    assert "stopped with steps left and a new checkpoint; the job goes into the queue again" in job.text
    wait_for(lambda: job.state in ("PENDING", "RUNNING"), lambda: f"job {job.number} is {job.state}: {job.text}")


def test_a_killed_rank_ends_the_job_after_as_many_new_starts_as_are_allowed(train, forking):
    job = train(*LONG, env={"RESTARTS_AFTER_FAILURE": "1", **forking})
    job.wait_for_step(1)
    os.kill(job.pid(1), signal.SIGKILL)
    wait_for(lambda: job.num_restarts == 1, lambda: job.text)
    job.wait_for_step(1, start=1)
    os.kill(job.pid(1), signal.SIGKILL)

    assert job.wait_for_end() == "FAILED"
    assert (job.num_restarts, job.field("ExitCode")) == (1, "137:0")
    assert len((job.run_dir / "logs" / f"{job.number}.failures").read_text().splitlines()) == 2
    assert re.search(r"^srun: error: .*: task 1: Killed", job.text, flags=re.MULTILINE)
    assert "watchdog: rank 1" in job.text
    # The stack of the one that was left behind, for the killed one could say nothing.
    last = "".join(job.rank_log(0, start=1).splitlines(keepends=True)[-20:])
    assert job.text.endswith(last)
    assert 'File "' in last
    assert not (job.run_dir / "checkpoints" / "latest").exists()


def test_a_job_with_gpus_has_a_task_for_each_in_fp8_and_is_not_requeued_when_it_is_cancelled(train):
    """The test cluster's GPUs are only names; FP8 is emulated on processors."""
    job = train(
        "model.fp8_emulate=true",
        "trainer.max_steps=100000",
        "trainer.limit_val_batches=0",
        options=("--nodes=1", "--gpus-per-node=2", "--cpus-per-gpu=1", "--time=20"),
    )
    job.wait_for_step(1)
    config = load_saved_config(job.run_dir / "config.yaml")
    assert config.model.fp8
    assert config.model.fp8_recipe.name == "delayed"
    assert "processes: 2 on 1 node," in job.text, "the job's log has what rank 0 writes, while it writes"

    ask("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED"
    wait_for(lambda: not ask("squeue", "--noheader", f"--jobs={job.number}"), lambda: job.text)
    assert newest_checkpoint(job.run_dir).step == load_metrics(job.run_dir).summary.step
    assert job.num_restarts == 0


def test_a_job_on_two_nodes_trains_in_fp8_as_ranks_on_one_do(train, forking, parent, tmp_path, cache_dir):
    """Tensor parallel ranks share a node; both nodes are this machine."""
    layout = (*emulate("delayed"), "parallelism=tp2", "model.micro_batch_size=2", "trainer.max_steps=5")
    short = (*layout, "trainer.limit_val_batches=0", "checkpoint.save_at_end=false")
    options = ("--partition=two", "--nodes=2", "--ntasks-per-node=2", "--time=20")
    job = train(*short, where="nodes", options=options, env=forking)
    codes, text = parent.run(
        small_run_arguments(tmp_path / "one", cache_dir, short)[2:], tmp_path / "one.output", num_ranks=4
    )
    assert codes == [0] * 4, text
    assert job.wait_for_end() == "COMPLETED", job.text
    assert "2 × 2 tasks on " in job.text
    assert "processes: 4 on 2 nodes," in job.text
    metrics, expected = (load_metrics(tmp_path / where) for where in ("nodes", "one"))
    assert metrics.fp8_coverage.gemm_flops_share > 0
    assert len(metrics.train) == 5
    assert [record.loss for record in metrics.train] == [record.loss for record in expected.train]


REFUSED = {
    "an override that is not a key": (
        ("fp8=none", "model.hiden_size=64"),
        ("--ntasks=2",),
        {},
        "error: model.hiden_size is not a key; did you mean model.hidden_size?",
    ),
    "fewer processors than GPUs": (
        (),
        ("--gpus-per-node=2",),
        {},
        "error: 1 processors for 2 tasks a node; add --exclusive or --cpus-per-gpu=N",
    ),
    "tasks that Slurm shares out unequally": (
        ("fp8=none",),
        ("--partition=two", "--nodes=2", "--ntasks=4"),
        {},
        "error: 1 processors for 2 tasks a node; add --exclusive",
    ),
    "another number of tasks than of GPUs": (
        (),
        ("--gpus-per-node=2", "--ntasks-per-node=4"),
        {},
        "error: --ntasks-per-node=4 with 2 GPUs a node; leave it out, it is one task a GPU",
    ),
    "no Python": ((), (), {"VENV": "/nowhere"}, "error: /nowhere/bin/python is missing on "),
}


@pytest.mark.parametrize("mistake", REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_fails_the_job_before_anything_starts_and_its_log_ends_with_the_message(mistake, slurm, tmp_path):
    overrides, options, env, message = mistake
    job = slurm.submit("fp8_gpt.sbatch", [*overrides, f"run_dir={tmp_path}/run"], *options, env=env)
    assert job.wait_for_end() == "FAILED"
    assert job.field("ExitCode") == "2:0"
    assert job.last_lines[-1].startswith(message), job.text
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_another_checkouts_slurm_is_another_one(slurm, tmp_path):
    script = tmp_path / "other" / "tests" / "slurm" / "start.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "slurm" / "start.sh", script)
    other = subprocess.run([script], env=slurm_environment(), capture_output=True, text=True, check=True, timeout=120)
    try:
        assert other.stdout.strip() != os.environ["SLURM_CONF"]
        assert ask("sinfo", "--noheader", "--format=%t", env={"SLURM_CONF": other.stdout.strip()}) == "idle"
    finally:
        subprocess.run([script, "stop"], env=slurm_environment(), check=True, timeout=120)
    assert not Path(other.stdout.strip()).exists()
    assert missing_slurm.__wrapped__() is None, "this one goes on"


def test_data_is_prepared_by_a_job_of_its_own(slurm, forking, tmp_path, cache_dir):
    """That the training then finds it is tried in test_prepare_data_command.py."""
    arguments = small_run_arguments(tmp_path / "run", cache_dir, [f"model.data.cache_dir={tmp_path}/cache"])[2:]
    job = slurm.submit("prepare_data.sbatch", arguments, env=forking)
    assert job.wait_for_end() == "COMPLETED", job.text
    assert "prepared: " in job.text
    assert list((tmp_path / "cache").rglob("corpus.bin"))


def test_each_run_of_a_sweep_is_a_job_of_its_own(slurm, forking, tmp_path, cache_dir):
    arguments = [line for line in small_run_arguments(tmp_path, cache_dir) if not line.startswith("run_dir=")]
    arguments += ["-m", "hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", f"hydra.sweep.dir={tmp_path}/sweep"]
    arguments += ['hydra.launcher.sbatch=["--time=20","--job-name=sweep"]', "trainer.max_steps=3"]
    done = subprocess.run(
        [sys.executable, *arguments, "model.seed=1,2"],
        cwd=REPOSITORY,
        env=slurm_environment(forking),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"job (\d+): model\.seed=(\d)\n    log: (.*)/(.*)\n", done.stdout)
    assert [seed for _, seed, _, _ in told] == ["1", "2"]
    for number, seed, run_dir, log in told:
        job = slurm.adopt(number, tmp_path / "sweep" / str(int(seed) - 1) / log, tmp_path / "sweep")
        assert run_dir == f"{tmp_path}/sweep/{int(seed) - 1}"
        assert job.wait_for_end() == "COMPLETED", job.text
        assert job.field("JobName") == "sweep"
        config = load_saved_config(tmp_path / "sweep" / str(int(seed) - 1) / "config.yaml")
        assert (config.model.seed, config.model.fp8) == (int(seed), False), "what the gate has checked"
