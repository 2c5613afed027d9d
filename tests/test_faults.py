"""Runs that are killed at random moments, also inside a save, end as the run that never was: same losses, same weights.

A process of a run is killed with SIGKILL, started again with the same command, killed again, and so on. Half of the
kills come at a random moment, from the start of the process on; the others hit a random operation on the files of a
checkpoint. A third of the victims are stopped before, and half of those continued. The seed is the test's own, the
moment is the machine's.
"""

import hashlib
import os
import random
import re
import signal
import time

import pytest
import torch

from gpt_pretrain.checkpoint.directory import complete_checkpoints, latest_checkpoint
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.report.metrics_file import load_metrics
from tests.runs import small_run_arguments

SAVE_INTERVAL = 4
# More than a killed life gets done, so that all kills find a run to hit.
STEPS_PER_KILL = 8
# Files and directories that a save of rank 0 makes, renames and removes; the others write their tensors.
OPERATIONS = (11, 1)
# Of the directory that a save is written into, or of one that is on its way out.
IN_A_SAVE = ".step_*"
TINY = (
    "model.num_layers=1",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "model.hidden_dropout=0.1",
    "trainer.limit_val_batches=0",
    f"checkpoint.save_interval={SAVE_INTERVAL}",
    "checkpoint.keep_last=2",
)


def curve(run_dir):
    return [(record.step, record.loss, record.grad_norm, record.lr) for record in load_metrics(run_dir).train]


def weights(run_dir):
    """SHA-256 of every tensor of the model in the newest checkpoint, and of the files, which hold the moments, too."""
    path = latest_checkpoint(run_dir / "checkpoints")
    tensors = CheckpointTensors(path)
    hashes = {
        key: hashlib.sha256(tensors.read(key).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for key in tensors
    }
    assert len(hashes) > 5
    return path.name, hashes


# A record of the metrics file, whole: the last line may be torn.
RECORD = re.compile(r'^\{"kind": "(start|train)", "step": (\d+),.*\}$', re.MULTILINE)


def lives(run_dir):
    """What each life has logged so far: the step that it went on from, and the last that it did."""
    path = run_dir / "metrics.jsonl"
    found = []
    for kind, step in RECORD.findall(path.read_text()) if path.exists() else []:
        if kind == "start":
            found.append([int(step)] * 2)
        else:
            found[-1][1] = int(step)
    return found


class Lives:
    """Starts a run again and again, and kills it."""

    def __init__(self, parent, cache_dir, folder, *, num_ranks, overrides, seed):
        self.run_dir = folder / "run"
        self.num_saves_hit = 0
        self._parent = parent
        self._arguments = small_run_arguments(self.run_dir, cache_dir, [*TINY, *overrides])[2:]
        self._output = folder / "output"
        self._num_ranks = num_ranks
        self._random = random.Random(seed)

    def start(self, faults=None):
        faults = {rank: [["end_soon"], *(faults or {}).get(rank, [])] for rank in range(self._num_ranks)}
        return self._parent.start(self._arguments, self._output, num_ranks=self._num_ranks, faults=faults)

    def die(self):
        """One life, which a kill of one rank ends."""
        before = lives(self.run_dir)
        victim = self._random.randrange(self._num_ranks)
        if self._random.random() < 0.5:
            # Rank 0 makes, renames and removes directories; every rank writes files.
            run = self.start({victim: [["die_in_save", self._random.randint(1, 2 * OPERATIONS[victim > 0])]]})
        else:
            run = self.start()
            # Until ranks are connected it is their launcher that ends the others.
            if self._random.random() < 0.7 or self._num_ranks > 1:
                self._await_steps(run, len(before), self._random.randint(1, 2 * SAVE_INTERVAL), timeout_s=60)
                time.sleep(self._random.uniform(0, 0.05))
            else:
                # While it starts, or at the latest with its first step.
                self._await_steps(run, len(before), 1, timeout_s=self._random.uniform(0, 1))
            self._stop(run, victim)
            # Alone: whatever it has started must see to its own end.
            run.signal(victim, signal.SIGKILL)
        codes = run.wait(60)
        assert codes[victim] == -signal.SIGKILL, f"it was not the kill that ended it, but {codes}: {run.text()}"
        assert 0 not in codes, "no rank ends well without the other"
        self.num_saves_hit += any((self.run_dir / "checkpoints").glob(IN_A_SAVE))
        self._check_what_was_lost(before)

    def _stop(self, run, victim):
        """As a suspended job is, or a process that the system has no memory for."""
        if self._random.random() < 1 / 3:
            run.signal(victim, signal.SIGSTOP)
            time.sleep(self._random.uniform(0, 0.3))
            if self._random.random() < 1 / 2:
                run.signal(victim, signal.SIGCONT)
                time.sleep(self._random.uniform(0, 0.05))

    def _await_steps(self, run, num_before, num_steps, timeout_s):
        """Until the life that has just begun has done so many steps, or time is up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for began, done in lives(self.run_dir)[num_before:]:
                if done - began >= num_steps:
                    return
            assert not run.poll(), f"it ended by itself: {run.text()}"
            time.sleep(0.01)

    def _check_what_was_lost(self, before):
        """What was being saved at the last kill is lost, with the steps to the next save, which waits for it."""
        for began, _ in lives(self.run_dir)[len(before) :]:
            lost = before[-1][1] - began if before else 0
            assert lost <= 2 * SAVE_INTERVAL, f"step {before[-1][1]} was done, and it went on from step {began}"

    def finish(self):
        run = self.start()
        assert run.wait(900) == [0] * self._num_ranks, run.text()


def check_against_uncut(parent, cache_dir, folder, num_kills, *, num_ranks=1, overrides=(), seed=0):
    overrides = [*overrides, f"trainer.max_steps={STEPS_PER_KILL * num_kills}"]
    how = {"num_ranks": num_ranks, "seed": seed}
    (folder / "uncut").mkdir()
    # It saves once, at its end: a save changes nothing.
    once = [*overrides, "checkpoint.save_interval=null"]
    uncut = Lives(parent, cache_dir, folder / "uncut", overrides=once, **how)
    uncut.finish()
    (folder / "killed").mkdir()
    killed = Lives(parent, cache_dir, folder / "killed", overrides=overrides, **how)
    for _ in range(num_kills):
        killed.die()
    killed.finish()

    assert len(curve(uncut.run_dir)) == STEPS_PER_KILL * num_kills
    assert curve(killed.run_dir) == curve(uncut.run_dir)
    assert weights(killed.run_dir) == weights(uncut.run_dir)
    assert len(complete_checkpoints(killed.run_dir / "checkpoints")) == 2, "what kills left behind has gone"
    assert not list((killed.run_dir / "checkpoints").glob(IN_A_SAVE))
    return killed


# Ranks and keys, with the number of kills in CI, 24 in all, and of those that take minutes, 240.
VICTIMS = {
    "alone": (1, [], 10, 80),
    "one of two ranks": (2, ["parallelism=dp"], 4, 40),
    "one of two ranks with sharded weights": (2, ["parallelism=fsdp"], 4, 40),
    # Each life's server of processes imports torch, which takes longer than the life.
    "with data-loading processes": (1, ["model.data.num_workers=1"], 2, 40),
    "with saves that the loop waits for": (1, ["checkpoint.async_save=false"], 4, 40),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("victim", "num_kills"),
    [
        pytest.param(name, number, marks=marks, id=f"{name}-{number}")
        for name, (*_, few, many) in VICTIMS.items()
        for number, marks in ((few, []), (many, [pytest.mark.slow]))
    ],
)
def test_a_run_killed_at_random_moments_ends_as_the_one_that_never_was(victim, num_kills, parent, cache_dir, tmp_path):
    num_ranks, overrides, *_ = VICTIMS[victim]
    seed = list(VICTIMS).index(victim)
    killed = check_against_uncut(
        parent, cache_dir, tmp_path, num_kills, num_ranks=num_ranks, overrides=overrides, seed=seed
    )
    # A save that the loop waits for has ended before the next step.
    assert killed.num_saves_hit >= num_kills // 8 or victim != "alone"


def holds_a_lock(cache, pid):
    """Whether a process that prepares a cache is now stopped with a lock of it in its hands."""
    if not any(cache.glob("*/*.status.json")):
        return False
    os.kill(pid, signal.SIGSTOP)
    if any(cache.glob("*/*.status.json")):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_of_two_first_runs_that_prepare_one_cache_the_first_may_be_killed(parent, cache_dir, tmp_path):
    arguments = [*TINY, "trainer.max_steps=3", "checkpoint.save_at_end=false", f"model.data.cache_dir={tmp_path}/cache"]

    def start(name):
        return parent.start(
            small_run_arguments(tmp_path / name, cache_dir, arguments)[2:], tmp_path / f"output of {name}"
        )

    first = start("first")
    (pid,) = first.pids
    deadline = time.monotonic() + 120
    # Stopped while it holds a lock, so that the other meets it on every machine.
    while not holds_a_lock(tmp_path / "cache", pid):
        assert time.monotonic() < deadline, first.text()
    other = start("other")
    while "waiting for process" not in other.text():
        assert time.monotonic() < deadline, other.text()
        time.sleep(0.05)
    first.kill()
    assert other.wait(120) == [0], other.text()
    again = start("again")
    assert again.wait(120) == [0], again.text()
    assert len(curve(tmp_path / "other")) == 3
    assert curve(tmp_path / "other") == curve(tmp_path / "again")
