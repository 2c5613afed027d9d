"""Files and directories appear in one piece, or what was there before stays."""

import pytest

from gpt_pretrain.config.files import new_directory, unfinished_path, write_file
from tests.checkpoint_files import file_size_limit


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("wait_for_disk", [True, False])
def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path, wait_for_disk):
    file = tmp_path / "latest"
    write_file(file, "old\n", wait_for_disk=wait_for_disk)
    with pytest.raises(OSError, match="File too large"), file_size_limit(0):
        write_file(file, "new\n", wait_for_disk=wait_for_disk)
    assert file.read_text() == "old\n"
    write_file(file, "newer\n", wait_for_disk=wait_for_disk)
    assert file.read_text() == "newer\n"
    assert names(tmp_path) == ["latest"]


def test_a_directory_appears_when_it_is_full(tmp_path):
    path = tmp_path / "made" / "entry"
    unfinished_path(path).mkdir(parents=True)
    (unfinished_path(path) / "left").write_text("by a killed process")
    path.mkdir()
    with new_directory(path) as unfinished:
        (unfinished / "deep").mkdir()
        (unfinished / "deep" / "file").write_text("content")
        assert names(path) == []
    assert names(path.parent) == ["entry"]
    assert names(path) == ["deep"]
    assert (path / "deep" / "file").read_text() == "content"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_directory_that_is_not_finished_leaves_nothing(tmp_path, error):
    def fail():
        with new_directory(tmp_path / "entry") as unfinished:
            (unfinished / "file").write_text("content")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_a_directory_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "file").write_text("old")
    with pytest.raises(OSError, match="entry"), new_directory(tmp_path / "entry") as unfinished:
        (unfinished / "file").write_text("new")
    assert (tmp_path / "entry" / "file").read_text() == "old"
    assert names(tmp_path) == ["entry"]
