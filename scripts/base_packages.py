"""Keeps the packages of a base image as they are; for the Dockerfile.

    base_packages.py freeze FOLDER [EXTRA,…]
    base_packages.py check FOLDER

A base such as NVIDIA's PyTorch container has packages that were compiled for each other and are on no registry:
PyTorch, Transformer Engine, apex, flash-attn. `freeze` writes to FOLDER, before anything is installed:

    constraints.txt   versions for pip: those of the packages compiled for the base, and this project's own
                      constraints.txt for packages that the base lacks
    requirements.txt  the requirements in pyproject.toml, with those of the named extras
    base.json         a fingerprint of each package, "kept" or "free"

A package of the base that was not compiled for it (tensorboard, rich) is not pinned: pip keeps it if it is new enough.
Afterwards `check` exits with 1 and names the kept packages that have changed, and files of theirs that another package
has overwritten, which pip does silently.
"""

import hashlib
import json
import os
import re
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
# Compiled against each other, whatever their versions look like.
_STACK = re.compile(r"(torch|pytorch-triton|triton|numpy|apex|flash-attn|(transformer-engine|nvidia|cuda)-?.*)")


def canonical(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_compiled_for_base(package: Distribution) -> bool:
    """Whether a package belongs to the stack, or the base's makers built it: a local version, a folder or a file."""
    name = canonical(package.metadata["Name"])
    return bool(_STACK.fullmatch(name) or "+" in package.version or package.read_text("direct_url.json"))


def installed() -> dict[str, Distribution]:
    """Canonical name → package; of two on Python's path the first, which is imported."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        # A half-removed package may leave metadata without a name.
        if package.metadata["Name"]:
            found.setdefault(canonical(package.metadata["Name"]), package)
    return found


def fingerprint(package: Distribution) -> dict[str, str]:
    """Version, folder and a hash of the file list with its hashes, which tells two builds of a version apart."""
    files = package.read_text("RECORD") or package.read_text("installed-files.txt") or ""
    return {
        "version": package.version,
        "folder": str(package.locate_file("")),
        "files": hashlib.sha256(files.encode()).hexdigest(),
    }


def project_requirements(extras: str) -> list[str]:
    """This project's requirements with those of `extras`, names separated by commas."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    offered = project["optional-dependencies"]
    requirements = list(project["dependencies"])
    for extra in filter(None, extras.split(",")):
        if extra not in offered:
            sys.exit(f"error: EXTRAS={extras}: pyproject.toml has no extra {extra!r}; use {', '.join(offered)}")
        requirements += offered[extra]
    return requirements


def freeze(folder: Path, extras: str) -> None:
    """Writes the three files."""
    requirements = project_requirements(extras)
    packages = installed()
    kept = {name: package for name, package in sorted(packages.items()) if is_compiled_for_base(package)}
    lines = [f"{name}=={package.version}" for name, package in kept.items()]
    pins = (PROJECT / "constraints.txt").read_text().splitlines()
    lines += [pin for pin in pins if pin and pin[0] != "#" and canonical(pin.partition("==")[0]) not in packages]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "constraints.txt").write_text("\n".join(lines) + "\n")
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    base = {
        "kept": {name: fingerprint(package) for name, package in kept.items()},
        "free": {name: fingerprint(package) for name, package in packages.items() if name not in kept},
    }
    (folder / "base.json").write_text(json.dumps(base, indent=2) + "\n")
    sys.stdout.write("kept as the base has them: " + ", ".join(lines[: len(kept)]) + "\n")


def contents(package: Distribution) -> dict[str, str | None]:
    """Path → hash, or None without one, of each file that a package has installed."""
    return {os.path.normpath(package.locate_file(file)): file.hash and file.hash.value for file in package.files or []}


def check(folder: Path) -> int:
    """Compares the packages with the frozen ones, and returns the exit code."""
    packages = installed()
    base = json.loads((folder / "base.json").read_text())
    before = base["kept"] | base["free"]
    added = {name: contents(package) for name, package in packages.items() if fingerprint(package) != before.get(name)}
    changes = []
    for name, was in base["kept"].items():
        here = f"{name} {was['version']} of the base in {was['folder']}"
        if name not in packages:
            changes.append(f"{here} is gone")
        elif name in added:
            now = fingerprint(packages[name])
            build = "another build of " if now["version"] == was["version"] else ""
            changes.append(f"{here} is now {build}{now['version']} in {now['folder']}")
        else:
            own = contents(packages[name])
            for other, files in added.items():
                if lost := sorted(path for path, content in files.items() if own.get(path, content) != content):
                    by = f"{other} {packages[other].version}"
                    changes.append(f"{here} was written over by {by}: files: {len(lost)}, the first: {lost[0]}")
    sys.stderr.writelines(f"error: {change}\n" for change in changes)
    return int(bool(changes))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["freeze", folder, *extras] if len(extras) <= 1:
            freeze(Path(folder), *extras or [""])
        case ["check", folder]:
            sys.exit(check(Path(folder)))
        case _:
            sys.exit("usage: base_packages.py freeze FOLDER [EXTRA,…] | check FOLDER")
