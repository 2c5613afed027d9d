"""The repository's own promises: documented commands exist, pins are complete, the wheel carries its configuration."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpt_pretrain.config.schema import Config

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PAGES = sorted(page.relative_to(ROOT) for folder in ("", "docs", "benchmarks") for page in (ROOT / folder).glob("*.md"))
MIB = 1 << 20


def documents():
    return "\n".join((ROOT / name).read_text() for name in DOCUMENTS)


def pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def configuration_keys(node=Config, prefix=""):
    keys = set()
    for name, hint in get_type_hints(node).items():
        keys.add(prefix + name)
        for kind in get_args(hint) or (hint,):
            if is_dataclass(kind):
                keys |= configuration_keys(kind, f"{prefix}{name}.")
    return keys


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
    for tool in ("bash", "dirname", "rm", "mv", "mkdir", "touch", "env"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tools


def test_every_make_command_of_the_documents_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^ *|&& )make ([a-z-]+)", documents(), flags=re.MULTILINE))

    assert {"train", "test"} <= named
    assert named <= targets


def test_every_choice_of_the_documents_exists():
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    named = {
        (group, choice)
        for group, choices in re.findall(r"(?<![\w.])([a-z0-9]+)=([a-z0-9_,]+)", documents())
        for choice in choices.split(",")
        if group in groups
    }

    assert named
    assert not [f"{group}={choice}" for group, choice in named if not (ROOT / f"conf/{group}/{choice}.yaml").exists()]


def test_every_key_of_the_documents_exists():
    keys = configuration_keys()
    named = set(re.findall(r"(?<![\w./])((?:model|trainer|checkpoint|logging|sample)(?:\.\w+)+)\b(?!\.)", documents()))

    assert "trainer.max_steps" in named
    assert named <= keys


def test_every_path_of_the_documents_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", documents()) if not link.startswith("https://")]

    assert "docs/fp8.md" in links
    assert not [link for link in links if not (ROOT / link).exists()]


def anchors(page):
    """The headings of a page, spelled as GitHub and mkdocs spell their anchors."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(link, folder):
    path, _, anchor = link.partition("#")
    target = folder / path
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_and_anchor_of_a_page_resolves(page):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    internal = [link if not link.startswith("#") else page.name + link for link in links if "://" not in link]

    assert not [link for link in internal if not resolves(link, (ROOT / page).parent)]


@pytest.mark.parametrize("folder", ["gpt_pretrain", "conf", "tests"])
def test_every_page_that_a_comment_names_exists(folder):
    files = [path for suffix in ("py", "yaml") for path in (ROOT / folder).rglob(f"*.{suffix}")]
    pattern = re.compile(r"(?:docs|benchmarks)/\w+\.md(?:#[\w-]+)?")
    named = {link for path in files for link in pattern.findall(path.read_text())}

    assert named
    assert not [link for link in named if not resolves(link, ROOT)]


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


def test_dataclass_keys_are_walked_to_the_leaves():
    assert {"model.data.text_files", "model.optim.sched.name", "trainer.max_steps"} <= configuration_keys()
    assert len(configuration_keys()) > len(fields(Config))
