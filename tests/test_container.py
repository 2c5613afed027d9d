"""The Dockerfile, as far as it can be tried without an engine: lint, what it copies, and its commands, run for real.

The commands run in a virtual environment that stands for the base: it finds what this one has installed, as NVIDIA's
container has PyTorch, less some packages that it does not have, and with one that is too old. pip gets those from
wheels that are packed here and from no registry, so that a command that would replace PyTorch fails.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launching import REPOSITORY

# What the stand-in for the base lacks, and what it has too old.
MISSING = ("antlr4-python3-runtime", "hydra-core", "megatron-core", "omegaconf", "tokenizers", "torchao")
TOO_OLD = "safetensors"
# The extra that is asked for when its commands are carried out: it needs the torchao that is missing.
EXTRA = "torchao"


def parse_dockerfile():
    with (REPOSITORY / "Dockerfile").open("rb") as file:
        parser = DockerfileParser(fileobj=file, env_replace=False)
        return [step for step in parser.structure if step["instruction"] != "COMMENT"], dict(parser.envs)


def copied_paths(value):
    """Sources and destination of a COPY."""
    *sources, destination = shlex.split(value)
    return sources, destination


def is_sent(path):
    """Whether .dockerignore lets a file or folder of the repository reach the engine: the last pattern decides."""
    sent = True
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, str(part)) for part in [PurePosixPath(path), *PurePosixPath(path).parents]):
            sent = line.startswith("!")
    return sent


STEPS, ENVIRONMENT = parse_dockerfile()
COPIES = [copied_paths(step["value"]) for step in STEPS if step["instruction"] == "COPY"]


def test_the_dockerfile_passes_hadolint():
    done = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", REPOSITORY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("source", [source for sources, _ in COPIES for source in sources])
def test_what_is_copied_exists_and_reaches_the_engine(source):
    assert (REPOSITORY / source).exists()
    assert is_sent(source)
    for path in (REPOSITORY / source).rglob("*"):
        name = path.relative_to(REPOSITORY)
        assert is_sent(name) is ("__pycache__" not in name.parts), name


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", "outputs/run", "tests/runs.py", "scripts/install.sh"]
)
def test_nothing_else_reaches_the_engine(path):
    assert not is_sent(path)


def test_the_base_and_the_extras_can_be_chosen_and_the_user_is_not_root():
    values = {step["instruction"]: step["value"] for step in STEPS}

    assert (STEPS[0]["instruction"], STEPS[0]["value"]) == ("ARG", "BASE=nvcr.io/nvidia/pytorch:26.07-py3")
    assert values["FROM"] == "${BASE}"
    assert values["ARG"] == 'EXTRAS=""', "no extra is installed that nobody asked for"
    assert int(values["USER"]) > 1000


def with_requirements(name):
    """A package and all that it needs, as far as it is installed here."""
    found, left = set(), [name]
    while left:
        each = canonicalize_name(left.pop())
        if each not in found:
            found.add(each)
            requirements = map(Requirement, importlib.metadata.requires(each) or [])
            left += [needed.name for needed in requirements if needed.marker is None or needed.marker.evaluate()]
    return found


def pack_wheel(name, folder):
    """Packs an installed package as the wheel that it was installed from."""
    package = importlib.metadata.distribution(name)
    tag = re.search(r"^Tag: (.+)$", package.read_text("WHEEL"), flags=re.MULTILINE)[1]
    # Scripts lie outside of the folder of packages; pip writes them anew.
    files = [file for file in package.files if ".." not in file.parts and "__pycache__" not in file.parts]
    named = f"{package.metadata['Name'].replace('-', '_')}-{package.version}-{tag}.whl"
    with zipfile.ZipFile(folder / named, "w") as wheel:
        for file in files:
            if file.name == "RECORD":
                wheel.writestr(str(file), "".join(f"{each},,\n" for each in files))
            else:
                wheel.write(package.locate_file(file), str(file))


@dataclass
class Build:
    """What the commands of the Dockerfile did."""

    environment: dict
    folder: Path
    packages: Path
    commands: list

    def run(self, command, folder):
        return subprocess.run(
            ["bash", "-c", command], cwd=folder, env=self.environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The Dockerfile, carried out in a virtual environment: its folders lie below a temporary one."""
    root = tmp_path_factory.mktemp("image")
    wheels, base = root / "wheels", root / "base"
    wheels.mkdir()
    base.mkdir()
    # The last is what pip builds this project's wheel with.
    for name in {*MISSING, TOO_OLD, *with_requirements("hatchling")}:
        pack_wheel(name, wheels)
    hidden = set()
    for name in (*MISSING, TOO_OLD):
        hidden |= {file.parts[0] for file in importlib.metadata.distribution(name).files}
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in hidden and not entry.name.startswith("gpt_pretrain-"):
            (base / entry.name).symlink_to(entry)
    (base / f"{TOO_OLD}-0.1.0.dist-info").mkdir()
    (base / f"{TOO_OLD}-0.1.0.dist-info" / "METADATA").write_text(f"Name: {TOO_OLD}\nVersion: 0.1.0\n")
    venv.create(root / "venv", symlinks=True)
    (packages,) = (root / "venv").glob("lib/python*/site-packages")
    # By way of a .pth, pip takes the base's packages for another's: it never removes one.
    (packages / "base.pth").write_text(f"{base}\n")
    # A base's own pins, which must not reach the build of this project's wheel.
    (root / "pins.txt").write_text("hatchling==0.1\n")
    environment = {
        "PATH": os.pathsep.join([str(root / "venv" / "bin"), os.environ["PATH"]]),
        "HOME": str(root),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONSTRAINT": str(root / "pins.txt"),
        **ENVIRONMENT,
        "EXTRAS": EXTRA,
    }
    done = Build(environment=environment, folder=root, packages=packages, commands=[])
    folder = root
    for step in STEPS:
        value = step["value"]
        if step["instruction"] == "WORKDIR":
            folder = root / value.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step["instruction"] == "COPY":
            copy_sources(*copied_paths(value), folder)
        elif step["instruction"] == "RUN" and re.search(r"\bpython\b", value):
            done.commands.append(done.run(re.sub(r"^(--\S+\s+)*", "", value), folder))
    return done


def copy_sources(sources, destination, folder):
    for source in sources:
        # A folder's content goes into the destination, a file by its name into a destination that ends with a slash.
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, folder / destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target = folder / destination / Path(source).name if destination.endswith("/") else folder / destination
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / source, target)


def test_the_commands_install_beside_the_base(build):
    *installations, doctor = build.commands
    for done in installations:
        assert done.returncode == 0, done.stdout + done.stderr
    there = {path.name for path in build.packages.iterdir()}
    assert {"megatron", "hydra", "omegaconf", "gpt_pretrain", "tokenizers"} <= there
    assert "torchao" in there, "what the extra needs"
    assert not {"torch", "numpy", "pyarrow", "rich"} & there, "what the base has is not installed again"
    assert "safetensors" in there, "what the base has too old is"
    assert (build.packages / "gpt_pretrain" / "conf" / "config.yaml").is_file()
    assert f"torch=={importlib.metadata.version('torch')}" in installations[0].stdout
    # The stand-in for the base has no Transformer Engine: without it no image is built, and the reason is told.
    assert doctor.returncode == 3, doctor.stdout + doctor.stderr
    assert "training   works on an assumed NVIDIA H200" in doctor.stdout
    assert "no FP8: Transformer Engine is not installed" in doctor.stdout
    assert str(build.folder / "venv") in doctor.stdout


# Versions and origins as in NVIDIA's container; rich is not compiled for anything.
COMPILED = {
    "torch": "2.13.0a0+8145d63.nv26.07",
    "transformer_engine": "2.17.0",
    "flash_attn": "2.8.1",
    "apex": "0.1",
    "numpy": "2.3.5",
    "dllogger": "1.1.0",
}
FREE = {"rich": "12.0.0"}


def install_files(folder, name, version, files):
    """A package with empty files: path → hash that its metadata has."""
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    install_metadata(folder, name, version, files="".join(f"{path},sha256={each},0\n" for path, each in files.items()))


def install_metadata(folder, name, version, files=""):
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text(files)
    if name == "dllogger":
        (metadata / "direct_url.json").write_text('{"url": "file:///opt/dllogger"}')


def base_packages(action, root, *first, extras=()):
    """Runs the script on a Python that has the packages of `root/packages`, behind those of the folders `first`."""
    path = os.pathsep.join(map(str, [*first, root / "packages"]))
    return subprocess.run(
        [sys.executable, "-S", REPOSITORY / "scripts" / "base_packages.py", action, root / "base", *extras],
        env={"PYTHONPATH": path, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def frozen(tmp_path):
    """A base, as it was before anything was installed."""
    for name, version in {**COMPILED, **FREE}.items():
        install_metadata(tmp_path / "packages", name, version)
    assert base_packages("freeze", tmp_path).returncode == 0
    return tmp_path


def test_what_was_compiled_for_the_base_is_pinned_and_the_rest_is_not(frozen):
    lines = (frozen / "base" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines)
    ours = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
    compiled = {name.replace("_", "-"): version for name, version in COMPILED.items()}

    assert {name: pinned.pop(name) for name in compiled} == compiled
    assert "rich" not in pinned, "pip may replace it, and only where it is too old"
    assert pinned.items() <= ours.items()
    assert pinned["megatron-core"] == ours["megatron-core"]


def test_a_base_that_is_as_it_was_passes(frozen):
    install_metadata(frozen / "packages", "rich", "15.0.0")
    install_metadata(frozen / "packages", "megatron_core", "0.19.2")
    done = base_packages("check", frozen)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_base_that_was_changed_ends_the_build_with_what_changed(frozen, tmp_path):
    install_metadata(tmp_path / "user", "torch", "2.12.0")
    install_metadata(frozen / "packages", "apex", "0.1", files="apex/__init__.py,sha256=0,1\n")
    shutil.rmtree(frozen / "packages" / "dllogger-1.1.0.dist-info")
    done = base_packages("check", frozen, tmp_path / "user")

    packages = frozen / "packages"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: apex 0.1 of the base in {packages} is now another build of 0.1 in {packages}",
        f"error: dllogger 1.1.0 of the base in {packages} is gone",
        f"error: torch {COMPILED['torch']} of the base in {packages} is now 2.12.0 in {tmp_path / 'user'}",
    ]


@pytest.mark.parametrize(
    ("asked", "extras"), [([], []), ([""], []), (["flash"], ["flash"]), (["wandb,flash"], ["wandb", "flash"])]
)
def test_the_extras_that_are_asked_for_are_required_too(tmp_path, asked, extras):
    done = base_packages("freeze", tmp_path, extras=asked)

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    expected = [*project["dependencies"], *(project["optional-dependencies"][extra][0] for extra in extras)]
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "base" / "requirements.txt").read_text().splitlines() == expected


def test_an_extra_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    done = base_packages("freeze", tmp_path, extras=["flash,wand"])

    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: EXTRAS=flash,wand: pyproject.toml has no extra 'wand'; use te, flash, torchao, muon, wandb"
    )


def test_files_of_the_base_that_another_package_writes_over_end_the_build(tmp_path):
    packages = tmp_path / "packages"
    install_files(packages, "flash_attn", "2.8.3", {"flash_attn/__init__.py": "a", "flash_attn/cute/mask.py": "a"})
    install_files(packages, "nvidia_nccl", "2.28", {"nvidia/__init__.py": "a"})
    assert base_packages("freeze", tmp_path).returncode == 0
    # The same file, with the same content: nothing of the base is lost.
    install_files(packages, "nvidia_cutlass_dsl", "4.8.1", {"nvidia/__init__.py": "a"})
    assert base_packages("check", tmp_path).returncode == 0

    install_files(packages, "flash_attn_4", "4.0.0", {"flash_attn/cute/mask.py": "b", "flash_attn/cute/new.py": "b"})
    done = base_packages("check", tmp_path)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: flash-attn 2.8.3 of the base in {packages} was written over by flash-attn-4 4.0.0: "
        f"files: 1, the first: {packages}/flash_attn/cute/mask.py"
    ]
