"""`python -m gpt_pretrain.checkpoint`: what it prints, what it refuses, and its exit codes."""

import pytest

from gpt_pretrain.checkpoint.__main__ import main
from tests.checkpoint_files import publish
from tests.launching import run_ranks


@pytest.fixture
def run_dir(tmp_path):
    for step, loss in ((10, 3.25), (20, None)):
        publish(tmp_path / "run" / "checkpoints", step, validation_loss=loss)
    return tmp_path / "run"


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_the_list_has_a_row_for_each_checkpoint(run_dir, capsys, below):
    (run_dir / "checkpoints" / ".step_00000030.unfinished").mkdir()
    assert main(["list", str(run_dir / below)]) == 0
    header, first, second, left = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "saved", "size", "fp8", "validation"]
    assert "10 " in first
    assert "182 B" in first
    assert "tensorwise, weights in FP8" in first
    assert first.rstrip().endswith(" 3.2500")
    assert second.rstrip().endswith("latest")
    assert left == ".step_00000030.unfinished: a save that did not end; the next one removes it"


def test_a_garbled_manifest_is_shown_in_its_row(run_dir, capsys):
    (run_dir / "checkpoints" / "step_00000010" / "manifest.json").write_text("{")
    assert main(["list", str(run_dir)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "10 " in printed
    assert "manifest.json" in printed
    assert "garbled" in printed


def test_whole_checkpoints_are_said_to_be_whole(run_dir, capsys):
    assert main(["verify", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2 files, 182 B: as they were written") == 2
    assert main(["verify", str(run_dir / "checkpoints" / "step_00000020")]) == 0
    assert capsys.readouterr().out.count("as they were written") == 1


def test_each_bad_file_is_named_and_the_good_checkpoints_too(run_dir, capsys):
    bad = run_dir / "checkpoints" / "step_00000010"
    (bad / "metadata.json").write_text("[]")
    (bad / "__0_0.distcp").unlink()
    assert main(["verify", str(run_dir)]) == 2
    captured = capsys.readouterr()
    assert f"{run_dir / 'checkpoints' / 'step_00000020'}: 2 files" in captured.out
    assert sorted(line.split(":")[1].split()[0] for line in captured.err.splitlines()) == [
        str(bad / "__0_0.distcp"),
        str(bad / "metadata.json"),
    ]


@pytest.mark.parametrize(
    ("command", "below", "message"),
    [
        ("list", "nowhere", "is not a directory; name a run's directory, or its checkpoints/"),
        ("list", "checkpoints/step_00000010", "is a single checkpoint; name its run's directory"),
        ("list", "checkpoints/step_00000010/__0_0.distcp", "is not a directory"),
        ("verify", "nowhere", "is not a directory"),
        ("verify", "empty", "holds no complete checkpoint"),
        ("verify", "checkpoints/step_00000099", "does not exist"),
    ],
)
def test_wrong_paths_are_refused(run_dir, capsys, command, below, message):
    (run_dir / "empty").mkdir()
    assert main([command, str(run_dir / below)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {run_dir / below}")
    assert message in captured.err
    assert captured.out == ""


def test_the_program_answers_without_torch(run_dir):
    """Loading torch takes seconds, and a login node may not have it."""
    without = (
        "import sys; sys.modules['torch'] = None; sys.modules['megatron'] = None; "
        "from gpt_pretrain.checkpoint.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    assert run_ranks(1, ["-c", without, "list", str(run_dir)]).returncode == 0
    assert run_ranks(1, ["-c", without, "verify", str(run_dir)]).returncode == 0
