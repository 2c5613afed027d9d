"""A run directory that cannot be written is told with its key, before anything is computed, by both programs."""

import sys
from pathlib import Path

import pytest

from gpt_pretrain.commands.plan import main as plan
from gpt_pretrain.commands.train import main as train
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir

# A folder that even root writes no files into stands for read-only mounts.
NO_FILES = Path("/proc")

pytestmark = pytest.mark.skipif(not NO_FILES.is_dir(), reason="there is no /proc")


@pytest.fixture(params=["takes no files", "inside of a file", "name too long"])
def unwritable(request, tmp_path):
    """A run directory that cannot be made, and why."""
    (tmp_path / "file").write_text("")
    return {
        "takes no files": (NO_FILES / "foo", "No such file or directory at /proc"),
        "inside of a file": (tmp_path / "file" / "sub", f"Not a directory at {tmp_path / 'file'}"),
        "name too long": (tmp_path / ("x" * 300), "File name too long at"),
    }[request.param]


def test_making_it_tells_key_reason_and_way_out(unwritable, compose_config):
    path, reason = unwritable
    with pytest.raises(UserError) as refused:
        make_run_dir(compose_config(f"run_dir={path}"))
    assert str(refused.value).startswith(f"run_dir={path} cannot be written: ")
    assert reason.partition(" at ")[0] in str(refused.value)
    assert str(refused.value).endswith("; give another one with run_dir=DIRECTORY")


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("program", [train, plan])
@pytest.mark.parametrize("unwritable", ["takes no files", "inside of a file"], indirect=True)
def test_both_programs_refuse_it_first(program, unwritable, capsys, monkeypatch):
    path, reason = unwritable
    # What trains and what plans is loaded late: it is not even looked for.
    for module in ("gpt_pretrain.training.run", "gpt_pretrain.plan.document", "gpt_pretrain.megatron.cpu"):
        monkeypatch.setitem(sys.modules, module, None)
    assert program(["data=mock", f"run_dir={path}"]) == 2
    expected = f"error: run_dir={path} cannot be written: {reason}; give another one with run_dir=DIRECTORY\n"
    assert capsys.readouterr() == ("", expected)


def test_the_default_directory_is_refused_by_its_place(compose_config, monkeypatch):
    config = compose_config()
    monkeypatch.chdir(NO_FILES)
    for function in (check_run_dir, make_run_dir):
        with pytest.raises(
            UserError, match=r"^run_dir=null \(outputs/DATE/TIME_NAME\) cannot be written: No such file"
        ):
            function(config)


def test_asking_makes_nothing_and_making_leaves_nothing_inside(tmp_path, compose_config):
    config = compose_config(f"run_dir={tmp_path / 'a' / 'b'}")
    check_run_dir(config)
    assert list(tmp_path.iterdir()) == []
    assert make_run_dir(config) == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []
    check_run_dir(config)
