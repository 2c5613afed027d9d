"""A run directory that cannot be written is told with its key, before anything is computed, by both programs."""

import sys
from pathlib import Path

import pytest

from gpt_pretrain.__main__ import main as train
from gpt_pretrain.benchmark.__main__ import main as benchmark
from gpt_pretrain.compare.__main__ import main as compare
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.launch.run_dir import check_contents, check_run_dir, make_run_dir
from gpt_pretrain.plan.__main__ import main as plan

# A folder that even root writes no files into stands for read-only mounts.
NO_FILES = Path("/proc")

pytestmark = pytest.mark.skipif(not NO_FILES.is_dir(), reason="there is no /proc")


def compare_finished(arguments):
    """`compare` of runs that are finished; it refuses the place before it looks for them."""
    return compare(["runs=[missing]", *(each for each in arguments if each.startswith("run_dir="))])


@pytest.fixture(params=["takes no files", "inside of a file", "name too long"])
def unwritable(request, tmp_path):
    """A run directory that cannot be made, and why."""
    (tmp_path / "file").write_text("")
    return {
        "takes no files": (NO_FILES / "foo", "No such file or directory at /proc"),
        "inside of a file": (tmp_path / "file" / "sub", f"Not a directory at {tmp_path / 'file'}"),
        "name too long": (tmp_path / ("x" * 300), "File name too long at"),
    }[request.param]


def test_making_it_tells_key_reason_and_way_out(unwritable):
    path, reason = unwritable
    with pytest.raises(UserError) as refused:
        make_run_dir(str(path), "name")
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
    for attempt in (lambda: check_run_dir(config), lambda: make_run_dir(config.run_dir, config.name)):
        with pytest.raises(
            UserError, match=r"^run_dir=null \(outputs/DATE/TIME_NAME\) cannot be written: No such file"
        ):
            attempt()


def test_asking_makes_nothing_and_making_leaves_nothing_inside(tmp_path, compose_config):
    config = compose_config(f"run_dir={tmp_path / 'a' / 'b'}")
    check_run_dir(config)
    assert list(tmp_path.iterdir()) == []
    assert make_run_dir(config.run_dir, config.name) == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []
    check_run_dir(config)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("sign", "held", "refusing"),
    [
        ("metrics.jsonl", "a run", (benchmark, compare, compare_finished)),
        ("checkpoints/latest", "a run", (benchmark, compare, compare_finished)),
        ("benchmark.json", "a benchmark", (train, compare, compare_finished)),
        ("machine/task.json", "a benchmark", (train, compare, compare_finished)),
        ("compare.json", "a comparison", (train, benchmark)),
        ("runs/bf16_seed_1234/config.yaml", "a comparison", (train, benchmark)),
    ],
)
def test_what_another_command_left_is_not_written_over(tmp_path, capsys, sign, held, refusing):
    place = tmp_path / sign
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("kept")
    for program in refusing:
        assert program(["data=mock", f"run_dir={tmp_path}"]) == 2
        told = capsys.readouterr().err
        assert f"run_dir={tmp_path} holds {held}" in told
        assert "another run_dir" in told
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [place]


@pytest.mark.parametrize(
    ("signs", "kind"),
    [
        (("metrics.jsonl", "checkpoints"), "a run"),
        # A comparison of finished runs that was written beside one of them.
        (("metrics.jsonl", "compare.json"), "a run"),
        (("benchmark.json",), "a benchmark"),
        (("compare.json", "runs/bf16_seed_1"), "a comparison"),
        (("plan.json",), "a run"),
        (("runs/others",), "a run"),
    ],
)
def test_a_directory_goes_on_as_what_it_holds(tmp_path, signs, kind):
    for sign in signs:
        (tmp_path / sign).mkdir(parents=True)
    check_contents(str(tmp_path), kind)
    check_contents(str(tmp_path / "new"), kind)
