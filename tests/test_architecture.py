"""Which package may import which, read from the source, imports inside functions included."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gpt_pretrain"

# What each package may import beside itself. `report` works on what a run leaves on disk, and needs no torch.
KNOWS = {
    "config": set(),
    # What extensions register: whatever uses it looks it up there.
    "extend": {"config"},
    "launch": {"config"},
    "run": {"config", "extend", "launch", "kernels"},
    "features": {"config", "extend", "launch", "run", "kernels"},
    "rules": {"config", "extend", "launch", "run", "features"},
    "kernels": set(),
    "megatron": {"config", "extend", "launch", "run", "features", "kernels"},
    "fp8": {"config", "launch", "run", "kernels", "megatron"},
    "data": {"config", "extend", "launch"},
    "checkpoint": {"config", "run", "megatron", "fp8", "data"},
    "report": {"config", "extend"},
    # Another library's tasks; how a model scores token ids is handed in.
    "evaluation": {"config", "data", "report"},
    # Plans in the words of megatron-core and FP8, and touches nothing that trains.
    "plan": {"config", "launch", "rules", "run", "features", "kernels", "megatron", "fp8"},
    # A run that could not fit by the plan does not start.
    "training": {
        "config",
        "extend",
        "launch",
        "rules",
        "run",
        "features",
        "megatron",
        "fp8",
        "plan",
        "data",
        "checkpoint",
        "report",
        "evaluation",
    },
    # Another library's names for what a checkpoint holds; between the two stand these commands.
    "huggingface": {"config", "extend", "launch", "rules", "run", "features", "megatron", "data", "checkpoint"},
    # Megatron-LM's checkpoints hold the same tensors, and its arguments beside them, which `translate` has a table of.
    "megatron_lm": {"config", "extend", "rules", "megatron", "checkpoint", "huggingface", "translate"},
    "benchmark": {"config", "launch", "rules", "run", "features", "megatron", "fp8", "plan", "report", "training"},
    # Trains variants in the benchmark's processes, and knows runs by what they leave on disk.
    "compare": {"config", "launch", "rules", "report", "benchmark"},
    # Asks the machine what the packages above would; only the command of the doctor imports the doctor.
    "doctor": {"config", "launch", "rules", "run", "features", "megatron", "plan", "training"},
    # Writes experiments from other programs' configurations, and checks them as a command line is.
    "translate": {"config", "launch", "rules", "run"},
}
# What all commands share.
KNOWS["commands"] = {"config", "launch", "rules", "megatron"}
# What `python -m gpt_pretrain.COMMAND` starts: a module beside the packages, or a package's `__main__`.
KNOWS["a command"] = set(KNOWS)
# Packages that must answer, or work, where torch is not loaded.
_LIVE = {"torch", "megatron", "transformer_engine"}
WITHOUT = {"config": _LIVE, "launch": _LIVE, "rules": _LIVE, "report": _LIVE, "compare": _LIVE, "kernels": {"megatron"}}


def imported_modules(path, package):
    """Every module that a file imports, relative imports made absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [package.name, *path.relative_to(package).parent.parts]
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            # `from gpt_pretrain import training` names the package only here.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(path, package):
    place = path.relative_to(package)
    is_command = len(place.parts) == 1 or place.name == "__main__.py"
    return "a command" if is_command else place.parts[0]


def broken_arrows(package):
    found = []
    for path in sorted(package.rglob("*.py")):
        own = package_of(path, package)
        for module in imported_modules(path, package):
            top, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if top == package.name and other in KNOWS and other not in {own, *KNOWS.get(own, ())}:
                found.append(f"{path.relative_to(package)}: {own} imports {other}")
            if top in WITHOUT.get(own, ()):
                found.append(f"{path.relative_to(package)}: {own} imports {top}")
    return sorted(set(found))


def test_every_package_has_its_imports_stated():
    assert {package_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")} == set(KNOWS)


def test_no_package_imports_what_it_may_not():
    assert broken_arrows(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("config/a.py", "from gpt_pretrain.training.run import train", "config imports training"),
        ("megatron/a.py", "from ..data import corpus", "megatron imports data"),
        ("commands/a.py", "from gpt_pretrain.plan import forecast", "commands imports plan"),
    ],
)
def test_the_check_finds_an_arrow_that_runs_back_up(tmp_path, file, source, expected):
    path = tmp_path / "gpt_pretrain" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert broken_arrows(tmp_path / "gpt_pretrain") == [f"{file}: {expected}"]


def modules_of(package):
    """Each module's name with its file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def file_circles(package):
    """Groups of files that import each other in a circle, wherever in the files the imports stand."""
    modules = modules_of(package)
    imports = {}
    for name, path in modules.items():
        known = {module for module in imported_modules(path, package) if module in modules}
        # `from a.b import c` is an import of a.b.c where that is a file, and of a.b where it is not.
        deepest = {module for module in known if not any(other.startswith(f"{module}.") for other in known)}
        imports[name] = (deepest | {module for module in known if modules[module].name != "__init__.py"}) - {name}

    def reaches(start):
        seen, ahead = set(), [start]
        while ahead:
            for module in imports[ahead.pop()] - seen:
                seen.add(module)
                ahead.append(module)
        return seen

    reached = {name: reaches(name) for name in modules}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in modules
        if name in reached[name]
    }
    return sorted(sorted(circle) for circle in circles)


def test_no_files_import_each_other_in_a_circle():
    assert file_circles(PACKAGE) == []


@pytest.mark.parametrize(
    "files",
    [
        {"a.py": "from gpt_pretrain import b", "b.py": "from gpt_pretrain import a"},
        {
            "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gpt_pretrain.b import B",
            "b.py": "from gpt_pretrain.a import A",
        },
    ],
)
def test_a_circle_of_files_is_found(tmp_path, files):
    package = tmp_path / "gpt_pretrain"
    for name, source in {**files, "other.py": "from gpt_pretrain import a", "__init__.py": ""}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    (circle,) = file_circles(package)
    assert len(circle) == len(files)


def test_the_model_class_that_megatron_core_will_drop_is_named_in_one_file():
    assert [path.name for path in PACKAGE.rglob("*.py") if "GPTModel" in path.read_text()] == ["gpt.py"]


def test_no_object_changes_its_class():
    assert [path.name for path in PACKAGE.rglob("*.py") if re.search(r"__class__ *=[^=]", path.read_text())] == []
