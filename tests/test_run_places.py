"""The places of a run: what stands in for one of its files, and a run directory that is moved, replaced or deleted."""

import json
import os
import shutil
import socket

import pytest

from gpt_pretrain.__main__ import main
from gpt_pretrain.checkpoint.directory import latest_checkpoint
from gpt_pretrain.config.errors import RunError, UserError
from gpt_pretrain.config.files import ForeignFileError, new_directory, open_to_append, unfinished_path, write_file
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.report.metrics_file import load_metrics, metrics_path
from gpt_pretrain.training.run import train
from tests.emulated_training import TINY
from tests.platforms import spec_of

pytestmark = [pytest.mark.usefixtures("no_launcher"), pytest.mark.timeout(120)]
QUICK = (*TINY, "trainer.limit_val_batches=0", "logging.tensorboard=false", "sample.max_new_tokens=0")


def make_socket(path):
    bound = socket.socket(socket.AF_UNIX)
    # Its path may be too long for a socket's address.
    folder = os.open(path.parent, os.O_RDONLY)
    bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


# What somebody may put in the place of a file; VICTIM is a file elsewhere.
STAND_INS = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.parent / "gone"),
    "device": lambda path, victim: path.symlink_to("/dev/zero"),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
    "socket": lambda path, victim: make_socket(path),
    "directory": lambda path, victim: path.mkdir(),
}


@pytest.fixture
def victim(tmp_path):
    """A file whose content must stay."""
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text("precious\n")
    yield path
    assert [each.name for each in path.parent.iterdir()] == ["precious"]
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize("kind", STAND_INS)
def test_nothing_is_written_through_an_unfinished_name(kind, victim, tmp_path):
    path = tmp_path / "config.yaml"
    STAND_INS[kind](unfinished_path(path), victim)
    write_file(path, "own")
    assert path.read_text() == "own"
    entry = tmp_path / "entry"
    STAND_INS[kind](unfinished_path(entry), victim)
    with new_directory(entry) as unfinished:
        (unfinished / "file").write_text("own")
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "elsewhere", "entry"]


@pytest.mark.parametrize("kind", STAND_INS)
def test_nothing_is_appended_to_what_stands_in_for_a_log(kind, victim, tmp_path):
    path = tmp_path / "log"
    STAND_INS[kind](path, victim)
    if kind == "hard link":
        with open_to_append(path) as file:
            file.write("own\n")
        assert path.read_text() == "precious\nown\n"
    else:
        with pytest.raises(ForeignFileError, match=f"^{path} "):
            open_to_append(path)


# Every unfinished name in a run directory, some of which are directories, and that of traces, which nobody may need.
UNFINISHED = (
    ".config.yaml.unfinished",
    ".lock.unfinished",
    ".tokenizer.json.unfinished",
    "stacks/rank_0.txt",
    "checkpoints/.latest.unfinished",
    "checkpoints/.step_00000001.unfinished",
    "checkpoints/..step_00000001.removed.unfinished",
    "checkpoints/.step_00000001.removed",
)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "socket"])
def test_a_run_trains_whatever_its_unfinished_files_are(kind, victim, tmp_path):
    run_dir = tmp_path / "run"
    for name in UNFINISHED:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        STAND_INS[kind](run_dir / name, victim)
    assert main([*QUICK, "trainer.max_steps=1", f"run_dir={run_dir}"]) == 0
    assert latest_checkpoint(run_dir / "checkpoints").name == "step_00000001"


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", ".lock", "checkpoints/latest"])
@pytest.mark.parametrize("kind", ["dangling link", "device", "pipe", "directory"])
def test_what_stands_in_for_a_file_of_a_run_is_refused_at_once(name, kind, victim, tmp_path, capsys):
    run_dir = tmp_path / "run"
    (run_dir / name).parent.mkdir(parents=True)
    STAND_INS[kind](run_dir / name, victim)
    assert main([*QUICK, "trainer.max_steps=1", f"run_dir={run_dir}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run_dir / name) in line


def test_links_to_other_disks_are_followed(tmp_path):
    for name in ("disk", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "checkpoints")
    for steps in (1, 2):
        assert main([*QUICK, f"trainer.max_steps={steps}", f"run_dir={tmp_path / 'run'}"]) == 0
    assert latest_checkpoint(tmp_path / "checkpoints").name == "step_00000002"
    assert load_metrics(tmp_path / "disk").summary is not None


@pytest.fixture
def start(compose_config, tmp_path):
    """Trains for six steps with a checkpoint every second one, and does something after the third."""

    def run(after_third_step, *overrides):
        install_cpu_device()
        saves = ("trainer.max_steps=6", "trainer.log_every_n_steps=1", "checkpoint.save_interval=2")
        config = compose_config(*QUICK, *saves, f"run_dir={tmp_path / 'run'}", *overrides)
        train(spec_of(config, detect_platform()), after_step=lambda step, _: after_third_step() if step == 3 else None)

    return run


def delete(folder):
    # A save that renames its files meanwhile takes some away from under it.
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


MOVES = {
    "moved": lambda path: path.rename(path.with_name("moved")),
    "replaced": lambda path: (path.rename(path.with_name("moved")), path.mkdir()),
    "replaced by another run": lambda path: (
        path.rename(path.with_name("moved")),
        path.mkdir(),
        metrics_path(path).write_text("another run's\n"),
    ),
    "a dangling link": lambda path: (path.rename(path.with_name("moved")), path.symlink_to(path.with_name("gone"))),
    "deleted": delete,
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("saves", ["between two", "during one", "none"])
def test_a_run_directory_that_is_not_there_any_more_ends_the_run(how, saves, start, tmp_path):
    run_dir = tmp_path / "run"
    overrides = {
        "between two": ["checkpoint.async_save=false"],
        "during one": [],
        "none": [
            "checkpoint.save_interval=null",
            "checkpoint.save_at_end=false",
            "checkpoint.save_interval_minutes=null",
        ],
    }
    with pytest.raises(RunError, match=f"run_dir={run_dir} "):
        start(lambda: MOVES[how](run_dir), *overrides[saves])
    left = sorted(path.name for path in run_dir.iterdir()) if run_dir.exists() else []
    assert left == (["metrics.jsonl"] if how == "replaced by another run" else []), "no second run directory"
    assert left == [] or metrics_path(run_dir).read_text() == "another run's\n"
    if how != "deleted":
        # A save that was being written may fail before step 4 is logged.
        assert [record.step for record in load_metrics(tmp_path / "moved").train][:3] == [1, 2, 3]
        assert saves != "between two" or latest_checkpoint(tmp_path / "moved" / "checkpoints").name == "step_00000002"


def test_a_run_directory_that_comes_back_takes_the_next_checkpoint(compose_config, tmp_path):
    run_dir, moved = tmp_path / "run", tmp_path / "moved"

    def after_step(step, _):
        if step == 3:
            run_dir.rename(moved)
        elif step == 5:
            moved.rename(run_dir)

    install_cpu_device()
    overrides = ("trainer.max_steps=6", "trainer.log_every_n_steps=1", "checkpoint.save_interval=2")
    saves = ("checkpoint.on_save_error=continue", "checkpoint.async_save=false")
    config = compose_config(*QUICK, *overrides, *saves, f"run_dir={run_dir}")
    train(spec_of(config, detect_platform()), after_step=after_step)
    records = [json.loads(line) for line in metrics_path(run_dir).read_text().splitlines()]
    saves = [(each["saved_step"], each["problem"] is None) for each in records if each["kind"] == "checkpoint"]
    assert saves == [(2, True), (4, False), (6, True)]
    assert [each["step"] for each in records if each["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_run_directory_that_is_linked_from_its_old_place_goes_on(start, tmp_path):
    run_dir = tmp_path / "run"
    start(lambda: (run_dir.rename(tmp_path / "moved"), run_dir.symlink_to(tmp_path / "moved")))
    assert latest_checkpoint(tmp_path / "moved" / "checkpoints").name == "step_00000006"
    assert load_metrics(run_dir).summary is not None
    assert not (run_dir / "lock").exists()


def test_checkpoints_that_were_replaced_are_missed_and_deleted_ones_made_anew(start, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"

    def put_on_another_disk():
        shutil.move(checkpoints, tmp_path / "disk")
        checkpoints.symlink_to(tmp_path / "disk")

    start(put_on_another_disk, "checkpoint.async_save=false")
    assert latest_checkpoint(tmp_path / "disk").name == "step_00000006"
    shutil.rmtree(tmp_path / "run")
    start(lambda: shutil.rmtree(checkpoints), "checkpoint.async_save=false")
    assert latest_checkpoint(checkpoints).name == "step_00000006"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match=f"{checkpoints} .*step_00000002"):
        start(lambda: (checkpoints.rename(tmp_path / "old"), checkpoints.mkdir()), "checkpoint.async_save=false")
    assert list(checkpoints.iterdir()) == []


def test_a_directory_that_another_run_has_taken_is_left_to_it(start, tmp_path):
    lock = tmp_path / "run" / "lock"
    with pytest.raises(RunError, match=str(lock)):
        start(lambda: write_file(lock, lock.read_text()))
    assert lock.exists(), "it is not this run's to delete"
    with pytest.raises(UserError, match="in use"):
        start(lambda: None)
