"""The repository's own promises: documented commands exist, pins are complete, the wheel carries its configuration."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MIB = 1 << 20


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def install(venv, path, **environment):
    return subprocess.run(
        [ROOT / "scripts" / "install.sh", venv],
        env={"PATH": str(path), "HOME": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def path_without_python(tmp_path):
    """A PATH with what the installation script itself needs, and no Python and no uv."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "rm", "mv", "mkdir", "touch", "env", "tail"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tools


def test_the_pins_are_exact_and_name_no_host_and_no_path():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pattern = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")

    assert not [line for line in lines if not line.startswith("#") and not pattern.fullmatch(line)]
    assert len(pins()) == len([line for line in lines if not line.startswith("#")]), "a package is pinned twice"


@pytest.mark.parametrize("group", ["dependencies", *PROJECT["optional-dependencies"]])
def test_every_dependency_has_a_pin_that_it_allows(group):
    wanted = PROJECT["dependencies"] if group == "dependencies" else PROJECT["optional-dependencies"][group]
    for requirement in map(Requirement, wanted):
        pinned = pins().get(canonicalize_name(requirement.name))
        assert pinned is not None, requirement.name
        assert requirement.specifier.contains(pinned, prereleases=True), f"{requirement} does not allow {pinned}"


def test_the_wheel_carries_every_configuration_file(tmp_path):
    # A machine that only runs the gpu tests has no build backend.
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    packed = set(zipfile.ZipFile(wheel).namelist())

    expected = {f"gpt_pretrain/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert "gpt_pretrain/conf/config.yaml" in expected
    assert expected <= packed
    assert {f"{path.relative_to(ROOT)}" for path in (ROOT / "gpt_pretrain").rglob("*.py")} <= packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_an_editable_installation_without_build_isolation_needs_hatchling_alone(tmp_path, monkeypatch):
    from hatchling.builders.wheel import WheelBuilder

    # What is None is not found, installed or not.
    monkeypatch.setitem(sys.modules, "editables", None)
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])

    packed = zipfile.ZipFile(wheel)
    (path,) = (name for name in packed.namelist() if name.endswith(".pth"))
    assert packed.read(path).decode() == str(ROOT)


@pytest.mark.parametrize("script", [".ci/run", "scripts/install.sh", "tests/slurm/start.sh"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_no_file_of_the_repository_is_large():
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.split("\0") if name]

    assert len(files) > 30
    assert not [str(file) for file in files if file.exists() and file.stat().st_size > MIB]


@pytest.mark.parametrize("says", ["its mark", "the mark of an interrupted installation", "Python's metadata"])
@pytest.mark.parametrize("target", ["install", "docs", "test", "lint", "clean"])
def test_make_leaves_the_environment_of_another_checkout_alone(says, target, tmp_path):
    mine, other, venv = tmp_path / "mine", tmp_path / "a checkout", tmp_path / "a checkout" / ".venv"
    for path in ("Makefile", "pyproject.toml", "constraints.txt", ".python-version", "scripts/install.sh"):
        (mine / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, mine / path)
    (venv / "bin").mkdir(parents=True)
    if says == "Python's metadata":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (packages,) = venv.glob("lib/*/site-packages")
        (packages / "gpt_pretrain-1.dist-info").mkdir()
        (packages / "gpt_pretrain-1.dist-info" / "METADATA").write_text("Name: gpt_pretrain\nVersion: 1\n")
        (packages / "gpt_pretrain-1.dist-info" / "direct_url.json").write_text(json.dumps({"url": other.as_uri()}))
    else:
        (venv / (".installed" if says == "its mark" else ".installing")).write_text(f"{other}\n")
    before = sorted(venv.rglob("*"))
    # Older than the files that it is made from.
    for mark in venv.glob(".installed"):
        os.utime(mark, (0, 0))
    done = subprocess.run(["make", target, f"VENV={venv}"], cwd=mine, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"VENV={venv}" in done.stderr
    assert f"{other}," in done.stderr
    assert sorted(venv.rglob("*")) == before


def test_the_installation_without_a_python_says_what_to_do(tmp_path, path_without_python):
    done = install(tmp_path / "venv", path_without_python)

    assert done.returncode == 1
    assert "No Python of version 3.12 or newer was found" in done.stderr
    assert "make install PYTHON=" in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()


def test_an_old_python_is_refused_by_name(tmp_path, path_without_python):
    old = path_without_python / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)

    done = install(tmp_path / "venv", path_without_python, PYTHON="old-python")

    assert done.returncode == 1
    assert "PYTHON=old-python is not a Python of version 3.12 or newer" in done.stderr


def test_an_interrupted_installation_is_started_over(tmp_path, path_without_python):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "half").touch()
    (venv / ".installing").touch()

    done = install(venv, path_without_python)

    assert "was interrupted; starting it over" in done.stdout
    assert not (venv / "bin" / "half").exists()
    assert not (venv / ".installed").exists()


def put_uv(path, *, exit_code):
    """Puts a uv on the PATH that makes an environment without Python, writes forty lines, and ends."""
    uv = path / "uv"
    uv.write_text(f'#!/usr/bin/env bash\n[[ $1 == venv ]] || {{ printf "line %s\\n" {{1..40}}; exit {exit_code}; }}\n')
    uv.chmod(0o755)


def test_an_installation_says_little_and_logs_the_rest(tmp_path, path_without_python):
    put_uv(path_without_python, exit_code=0)

    done = install(tmp_path / "venv", path_without_python)

    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "venv" / "install.log") in done.stdout
    assert len(done.stdout.splitlines()) <= 4
    assert "line 40" in (tmp_path / "venv" / "install.log").read_text()
    assert (tmp_path / "venv" / ".installed").exists()


def test_a_failed_installation_shows_the_end_of_its_log(tmp_path, path_without_python):
    put_uv(path_without_python, exit_code=1)

    done = install(tmp_path / "venv", path_without_python)

    assert done.returncode == 1
    assert {"line 40", "line 21"} <= set(done.stderr.splitlines())
    assert "line 20" not in done.stderr.splitlines()
    assert str(tmp_path / "venv" / "install.log") in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()
    # The next one starts over.
    assert (tmp_path / "venv" / ".installing").exists()
