"""Only the command line and the user's own primary file name modules to import; what is missing is named."""

import shutil

import pytest

from tests.extensions import TINY, run_extended, write_module

# Leaves a trace where it is imported.
TRACED = """
    from pathlib import Path
    from gpt_pretrain import extend

    Path(__file__).with_suffix(".imported").touch()

    @extend.callback("traced")
    class Traced(extend.Callback):
        def end(self, run):
            pass
"""


@pytest.fixture(scope="module")
def trained_with(tmp_path_factory):
    """A run whose extension is on Python's path wherever it is used, and which a later command does not name."""
    folder = tmp_path_factory.mktemp("extended")
    write_module(folder, TRACED)
    done = run_extended(folder, *TINY, "extensions=[lab]", "trainer.max_steps=1", f"run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(trained_with, tmp_path):
    shutil.copytree(trained_with, tmp_path, dirs_exist_ok=True)
    (tmp_path / "lab.imported").unlink()
    return tmp_path


def was_imported(folder):
    return (folder / "lab.imported").exists()


def test_a_primary_file_of_the_users_own_names_extensions(folder):
    (folder / "conf").mkdir()
    (folder / "conf/mine.yaml").write_text("defaults: [config, _self_]\nextensions: [lab]\n")
    done = run_extended(folder, "--config-dir", str(folder / "conf"), "--config-name", "mine", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert was_imported(folder)


def test_the_command_line_comes_before_the_primary_file(folder):
    (folder / "conf").mkdir()
    (folder / "conf/mine.yaml").write_text("defaults: [config, _self_]\nextensions: [lab]\n")
    source = ["--config-dir", str(folder / "conf"), "--config-name", "mine"]
    done = run_extended(folder, *source, "--cfg", "job", "extensions=[]")
    assert done.returncode == 0, done.stderr
    assert not was_imported(folder)


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("experiment/theirs.yaml", ["experiment=theirs"]),
        ("base.yaml", ["--config-name", "mine"]),
    ],
)
def test_a_preset_imports_nothing(file, arguments, folder):
    path = folder / "conf" / file
    path.parent.mkdir(parents=True)
    package = "" if file == "base.yaml" else "# @package _global_\n"
    path.write_text(f"{package}defaults: [{'config' if file == 'base.yaml' else ''}]\nextensions: [lab]\n")
    (folder / "conf/mine.yaml").write_text("defaults: [base, _self_]\n")
    done = run_extended(folder, *TINY, "--config-dir", str(folder / "conf"), *arguments, "trainer.max_steps=1")
    assert done.returncode == 2, done.stdout
    for part in ("extensions=[lab]", file):
        assert part in done.stderr
    assert not was_imported(folder)


@pytest.mark.parametrize("name", ["config", "theirs"])
def test_a_saved_configuration_imports_nothing(name, folder):
    (folder / "conf").mkdir()
    shutil.copy(folder / "run/config.yaml", folder / f"conf/{name}.yaml")
    source = ["--config-dir", str(folder / "conf"), "--config-name", name]
    done = run_extended(folder, *source, "trainer.max_steps=2", f"run_dir={folder / 'new'}")
    assert done.returncode == 2, done.stdout
    assert "extensions=[lab]" in done.stderr
    assert not was_imported(folder)


@pytest.mark.parametrize("has_configuration", [True, False])
def test_a_run_to_resume_imports_nothing_and_names_the_extension_that_it_had(has_configuration, folder):
    """The run's configuration says it at once, and without one the checkpoint does."""
    if not has_configuration:
        (folder / "run/config.yaml").unlink()
    done = run_extended(folder, *TINY, "trainer.max_steps=2", f"run_dir={folder / 'run'}")
    assert done.returncode == 2, done.stdout
    for part in (f"run_dir={folder / 'run'}" if has_configuration else "step_00000001", "extensions=[lab]"):
        assert part in done.stderr
    assert not was_imported(folder)


@pytest.mark.parametrize("given", ["extensions=[lab]", "extensions=[]"])
def test_a_run_goes_on_with_the_extensions_that_the_command_line_names(given, folder):
    done = run_extended(folder, *TINY, "trainer.max_steps=2", f"run_dir={folder / 'run'}", given)
    assert done.returncode == 0, done.stderr
    assert was_imported(folder) == (given == "extensions=[lab]")


def test_a_saved_configuration_is_read_where_the_command_line_names_its_extensions(folder):
    source = ["--config-dir", str(folder / "run")]
    done = run_extended(folder, *source, "extensions=[lab]", "trainer.max_steps=2", f"run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
