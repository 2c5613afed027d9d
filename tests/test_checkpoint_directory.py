"""How checkpoints come into a run's directory and go again, and what their manifests notice."""

import json
import os
import shutil
import time
from dataclasses import replace

import pytest

from gpt_pretrain.checkpoint.directory import (
    Destination,
    Retention,
    complete_checkpoints,
    earlier_checkpoints,
    find_checkpoints,
    latest_checkpoint,
    time_after,
)
from gpt_pretrain.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    check_files,
    deal,
    read_manifest,
    write_manifest,
)
from gpt_pretrain.config.errors import UserError
from tests.checkpoint_files import KEEP_ALL, file_size_limit, manifest, publish


def steps(directory):
    return [int(path.name.removeprefix("step_")) for path in complete_checkpoints(directory)]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [10, 20, 30, 40, 50]),
        (1, None, [50]),
        (2, None, [40, 50]),
        (2, 20, [20, 40, 50]),
        (1, 25, [50]),
        (9, None, [10, 20, 30, 40, 50]),
    ],
)
def test_retention_keeps_the_last_and_those_of_chosen_steps(tmp_path, keep_last, keep_every, kept):
    for step in (10, 20, 30, 40, 50):
        publish(tmp_path, step, Retention(keep_last=keep_last, keep_every=keep_every))
        assert latest_checkpoint(tmp_path) == tmp_path / f"step_{step:08d}"
    assert steps(tmp_path) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *(f"step_{step:08d}" for step in kept)]


def test_the_best_checkpoint_stays_until_a_better_one_is_complete(tmp_path):
    retention = Retention(keep_last=1, keep_every=None, keep_best=True)
    stay = []
    for step, loss in ((10, 3.0), (20, 2.0), (30, None), (40, 2.5), (50, 2.0), (60, 1.9), (70, 4.0)):
        publish(tmp_path, step, retention, saved_at=1000.0 + step, validation_loss=loss)
        stay.append(steps(tmp_path))
    assert stay == [[10], [20], [20, 30], [20, 40], [20, 50], [60], [60, 70]]


def test_a_run_that_went_back_keeps_its_new_checkpoints_and_not_those_it_gave_up(tmp_path):
    for step in (10, 20, 30):
        publish(tmp_path, step, saved_at=1000.0 + step)
    publish(tmp_path, 15, Retention(keep_last=2, keep_every=None), saved_at=2000.0)
    assert steps(tmp_path) == [30, 15], "in the order in which they were saved"
    publish(tmp_path, 20, Retention(keep_last=2, keep_every=None), saved_at=2001.0)
    assert steps(tmp_path) == [15, 20]


def test_what_a_run_came_from_leaves_out_attempts_that_were_given_up(tmp_path):
    """At second 4 the run went back to step 10, at second 7 to step 30: of 20 and 40 nothing is left in step 50."""
    paths = {
        step: publish(tmp_path, step, saved_at=second, given_up=given_up)
        for step, second, given_up in (
            (10, 1.0, []),
            (20, 2.0, []),
            (30, 5.0, [[11, 4.0]]),
            (40, 6.0, [[11, 4.0]]),
            (50, 8.0, [[11, 4.0], [31, 7.0]]),
        )
    }
    assert earlier_checkpoints(paths[50]) == [paths[30], paths[10]]
    assert earlier_checkpoints(paths[40]) == [paths[30], paths[10]]
    assert earlier_checkpoints(paths[20]) == [paths[10]]
    # What the newest says of them is not the only word.
    newest = publish(tmp_path, 60, saved_at=9.0, given_up=[[11, 4.0], [31, 7.0]])
    (newest / MANIFEST).write_text("{")
    assert earlier_checkpoints(newest) == [paths[50], paths[30], paths[10]]


def missing_target(directory):
    directory.symlink_to(directory.parent / "unmounted")


def a_file(directory):
    directory.write_text("")


def a_pointer_alone(directory):
    directory.mkdir()
    (directory / "latest").write_text("step_00000010\n")


def a_pointer_to_nowhere(directory):
    directory.mkdir()
    (directory / "latest").symlink_to(directory / "unmounted")


def a_pointer_that_is_a_directory(directory):
    publish(directory, 10)
    (directory / "latest").unlink()
    (directory / "latest").mkdir()


def a_checkpoint_without_its_manifest(directory):
    (publish(directory, 10) / MANIFEST).unlink()
    (directory / "latest").unlink()


@pytest.mark.parametrize(
    "left",
    [
        missing_target,
        a_file,
        a_pointer_alone,
        a_pointer_to_nowhere,
        a_pointer_that_is_a_directory,
        a_checkpoint_without_its_manifest,
    ],
)
def test_what_is_left_of_checkpoints_is_no_fresh_start(left, tmp_path):
    left(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=f"^{tmp_path / 'checkpoints'}"):
        find_checkpoints(tmp_path / "checkpoints")


def test_no_directory_of_checkpoints_and_an_empty_one_are_a_fresh_start(tmp_path):
    assert find_checkpoints(tmp_path / "checkpoints").paths == []
    (tmp_path / "checkpoints").mkdir()
    assert find_checkpoints(tmp_path / "checkpoints").paths == []


def test_what_is_saved_later_comes_later_whatever_the_clock_says(tmp_path):
    ahead = time.time() + 1e6
    publish(tmp_path, 10, saved_at=ahead)
    publish(tmp_path, 20, saved_at=time_after(tmp_path))
    given_up = time_after(tmp_path)
    publish(tmp_path, 15, saved_at=time_after(tmp_path, [[11, given_up]]), given_up=[[11, given_up]])
    assert steps(tmp_path) == [10, 20, 15]
    publish(tmp_path, 20, saved_at=time_after(tmp_path, [[11, given_up]]), given_up=[[11, given_up]])
    assert steps(tmp_path) == [10, 15, 20]
    assert [path.name[-2:] for path in earlier_checkpoints(tmp_path / "step_00000020")] == ["15", "10"]


def test_a_clock_that_was_set_back_does_not_cost_the_new_checkpoint(tmp_path):
    publish(tmp_path, 10, saved_at=5000.0)
    publish(tmp_path, 20, Retention(keep_last=1, keep_every=None), saved_at=1.0)
    assert steps(tmp_path) == [20]


def test_nothing_goes_before_latest_names_the_new_checkpoint(tmp_path):
    publish(tmp_path, 10)
    destination = Destination(directory=tmp_path, step=20, retention=Retention(keep_last=1, keep_every=None))
    destination.clear()
    destination.unfinished.mkdir()
    assert steps(tmp_path) == [10]
    with pytest.raises(OSError, match="File too large"), file_size_limit(0):
        destination.publish()
    assert steps(tmp_path) == [10]
    assert (tmp_path / "latest").read_text() == "step_00000010\n"


def test_the_next_save_removes_what_killed_saves_have_left_and_nothing_else(tmp_path):
    publish(tmp_path, 10)
    for left in (".step_00000020.unfinished", ".step_00000030.unfinished", ".step_00000005.removed"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "__3_0.distcp").write_bytes(b"half")
    mine = tmp_path / "notes.txt"
    mine.write_text("keep")
    (tmp_path / "step_00000040").mkdir()
    Destination(directory=tmp_path, step=20, retention=KEEP_ALL).clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes.txt", "step_00000010", "step_00000040"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    path = publish(tmp_path, 10)
    (path / "extra").write_text("of the old one")
    publish(tmp_path, 10, consumed_samples=1)
    assert read_manifest(path).consumed_samples == 1
    assert sorted(file.name for file in path.iterdir()) == ["__0_0.distcp", MANIFEST, "metadata.json"]


def test_a_manifest_says_what_was_written(tmp_path):
    path = publish(tmp_path, 10, data={"tokenizer": "t", "tokens": "x"})
    found = read_manifest(path)
    assert (found.step, found.consumed_samples, found.time_unix) == (10, 80, 1010.0)
    assert found.data == {"tokenizer": "t", "tokens": "x"}
    assert found.layout == manifest(10).layout
    assert found.num_bytes == len(b"tensors of step 10" * 10) + 2
    assert check_files(path, found) == []


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_one_changed_byte_is_found(tmp_path, name):
    path = publish(tmp_path, 10)
    flip(path / name, 1)
    assert check_files(path, read_manifest(path), hashes=False) == [], "its size is what it was"
    (problem,) = check_files(path, read_manifest(path))
    assert problem.startswith(f"{path / name} has changed: its SHA-256 is ")


def test_every_byte_of_the_manifest_itself_counts(tmp_path):
    path = publish(tmp_path, 10)
    file = path / MANIFEST
    content = file.read_bytes()
    for at in range(0, len(content), 7):
        flip(file, at)
        with pytest.raises(UserError) as refused:
            read_manifest(path)
        assert str(file) in str(refused.value)
        file.write_bytes(content)
    read_manifest(path)


def test_missing_truncated_and_grown_files_are_named_with_their_bytes(tmp_path):
    path = publish(tmp_path, 10)
    (path / "metadata.json").unlink()
    os.truncate(path / "__0_0.distcp", 100)
    assert sorted(check_files(path, read_manifest(path))) == [
        f"{path / '__0_0.distcp'} is truncated: it has 100 bytes, and 180 were written",
        f"{path / 'metadata.json'} is missing: 2 bytes were written",
    ]
    (path / "metadata.json").write_text("{} ")
    assert f"{path / 'metadata.json'} has grown: it has 3 bytes, and 2 were written" in check_files(
        path, read_manifest(path)
    )


def test_shares_of_all_ranks_are_the_whole_and_even(tmp_path):
    sizes = {f"file{index}": size for index, size in enumerate([7, 1, 1, 5, 3, 3, 2, 2])}
    shares = deal(sizes, sizes.__getitem__, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert sorted(sum(sizes[name] for name in share) for share in shares) == [8, 8, 8]
    path = publish(tmp_path, 10)
    found = read_manifest(path)
    shutil.rmtree(path)
    by_rank = [check_files(path, found, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(map(len, by_rank)) == [0, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a complete checkpoint of this application (no manifest.json in it)"),
        (b"", "is garbled"),
        (b"[1, 2]", "is garbled"),
        (b"\xff\xfe", "is garbled"),
        (b'{"format_version": 1}', "has changed since it was written"),
    ],
    ids=["missing", "empty", "a list", "not text", "cut"],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path, content, message):
    path = publish(tmp_path, 10)
    (path / MANIFEST).unlink()
    if content is not None:
        (path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_manifest(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("named", ["", "checkpoints"])
def test_who_names_a_runs_directory_is_told_its_newest_checkpoint(tmp_path, named):
    for step in (20, 3):
        publish(tmp_path / "checkpoints", step)
    with pytest.raises(UserError, match=r"name the directory of one in it, such as .*/checkpoints/step_00000020$"):
        read_manifest(tmp_path / named)


@pytest.mark.parametrize(("changes", "said"), [({}, "0.1.0"), ({"versions": 3}, "it does not say which")])
def test_a_manifest_of_another_version_says_which_reads_it(tmp_path, monkeypatch, changes, said):
    path = publish(tmp_path, 10)
    changed = replace(read_manifest(path), **changes)
    monkeypatch.setattr("gpt_pretrain.checkpoint.manifest.FORMAT_VERSION", FORMAT_VERSION + 1)
    write_manifest(path, changed)
    monkeypatch.undo()
    assert json.loads((path / MANIFEST).read_text())["format_version"] == FORMAT_VERSION + 1
    with pytest.raises(UserError, match=rf"is of format version 2, and this version of .* reads 1; .* it: {said}$"):
        read_manifest(path)


def test_what_is_no_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; name the directory of a checkpoint"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is not a directory; name the directory of a checkpoint"):
        read_manifest(tmp_path / "file")


def test_a_manifest_from_before_rewinds_is_read():
    values = manifest(3).to_json()
    for name in ("rewinds", "passed_over", "losses", "spikes", "given_up"):
        del values[name]
    assert Manifest.from_json(values) == manifest(3)
    with pytest.raises(ValueError, match='"losses"'):
        Manifest.from_json({**values, "losses": 3.0})
