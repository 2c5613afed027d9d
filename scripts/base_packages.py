"""What an image's base has installed stays as it is: `base_packages.py freeze|check FOLDER`, for the Dockerfile.

A base such as NVIDIA's PyTorch container brings packages that were compiled for each other and that no registry has:
PyTorch, Transformer Engine, apex, flash-attn. `freeze` writes to FOLDER, before anything is installed:

    constraints.txt   the versions that pip has to keep: of what was compiled for the base; and, for packages that the
                      base does not have, those of this project's own constraints.txt
    requirements.txt  what pyproject.toml asks for
    base.json         a fingerprint of each package that has to stay

A package of the base that was not compiled for it (tensorboard, rich) is not pinned: pip leaves what is new enough, and
replaces what this project cannot use. `check` compares afterwards: exit code 1 names what is no longer what it was.
"""

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
# Compiled against each other, whatever their versions look like.
_STACK = re.compile(r"(torch|pytorch-triton|triton|numpy|apex|flash-attn|(transformer-engine|nvidia|cuda)-?.*)")


def canonical(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_compiled_for_base(package: Distribution) -> bool:
    """Whether a package is of the stack, or built by the base's makers: a local version, or from a folder or file."""
    name = canonical(package.metadata["Name"])
    return bool(_STACK.fullmatch(name) or "+" in package.version or package.read_text("direct_url.json"))


def installed() -> dict[str, Distribution]:
    """Canonical name → package; of two on Python's path the first, which is the one that is imported."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        # Of a package that was removed by half, metadata without a name may be left.
        if not package.metadata["Name"]:
            continue
        found.setdefault(canonical(package.metadata["Name"]), package)
    return found


def fingerprint(package: Distribution) -> dict[str, str]:
    """Version, place and a hash of the list of files with theirs: another build of the same version differs, too."""
    files = package.read_text("RECORD") or package.read_text("installed-files.txt") or ""
    return {
        "version": package.version,
        "folder": str(package.locate_file("")),
        "files": hashlib.sha256(files.encode()).hexdigest(),
    }


def project_pins() -> Iterator[tuple[str, str]]:
    """Canonical name and line of this project's constraints."""
    for line in (PROJECT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            yield canonical(line.partition("==")[0]), line


def freeze(folder: Path) -> None:
    """Writes the three files."""
    packages = installed()
    kept = {name: package for name, package in sorted(packages.items()) if is_compiled_for_base(package)}
    lines = [f"{name}=={package.version}" for name, package in kept.items()]
    lines += [line for name, line in project_pins() if name not in packages]
    requirements = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "constraints.txt").write_text("\n".join(lines) + "\n")
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    fingerprints = {name: fingerprint(package) for name, package in kept.items()}
    (folder / "base.json").write_text(json.dumps(fingerprints, indent=2) + "\n")
    sys.stdout.write("kept as the base has them: " + ", ".join(lines[: len(kept)]) + "\n")


def check(folder: Path) -> int:
    """Compares with what was frozen; returns the exit code."""
    packages = installed()
    before = json.loads((folder / "base.json").read_text())
    changed = False
    for name, was in before.items():
        now = fingerprint(packages[name]) if name in packages else None
        if now != was:
            changed = True
            what = "is gone"
            if now is not None:
                build = "another build of " if now["version"] == was["version"] else ""
                what = f"is now {build}{now['version']} in {now['folder']}"
            sys.stderr.write(f"error: {name} {was['version']} of the base in {was['folder']} {what}\n")
    return int(changed)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("freeze", "check"):
        sys.exit("usage: base_packages.py freeze|check FOLDER")
    sys.exit(freeze(Path(sys.argv[2])) if sys.argv[1] == "freeze" else check(Path(sys.argv[2])))
