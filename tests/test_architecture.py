"""The house of DESIGN.md: which room may import which, read from the source, imports inside functions included."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gpt_pretrain"

# What each room knows beside itself. `report` works on what a run leaves on disk, so it knows no live room.
KNOWS = {
    "config": set(),
    "megatron": {"config"},
    "fp8": {"config", "megatron"},
    "data": {"config"},
    "checkpoint": {"config", "megatron"},
    "report": {"config"},
    # Plans in the words of megatron-core and FP8, and touches nothing that trains.
    "plan": {"config", "megatron", "fp8"},
    # Checks a run as it is planned, and does what it would do to its data.
    "prepare_data": {"config", "data", "plan"},
    # A run that could not fit by the plan does not start.
    "training": {"config", "megatron", "fp8", "plan", "data", "checkpoint", "report"},
    # Another library's names for what a checkpoint holds; between the two stand these commands.
    "huggingface": {"config", "checkpoint"},
    "export": {"config", "megatron", "data", "checkpoint", "huggingface"},
    "import_hf": {"config", "megatron", "data", "checkpoint", "huggingface"},
    "generate": {"config", "megatron", "data", "checkpoint", "export", "training"},
    "benchmark": {"config", "megatron", "fp8", "plan", "report", "training"},
    # Asks the machine what every room above it would; nothing knows the doctor.
    "doctor": {"config", "megatron", "plan", "training", "__main__"},
    # The plan tells what would help a run that ran out of memory.
    "__main__": {"config", "megatron", "plan", "training"},
    "__init__": set(),
}
# Rooms that must answer, or work, where torch is not loaded.
WITHOUT = {"config": {"torch", "megatron", "transformer_engine"}, "report": {"torch", "megatron", "transformer_engine"}}


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
            # `from gpt_pretrain import training` names the room only here.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def broken_arrows(package):
    found = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for module in imported_modules(path, package):
            top, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if top == package.name and other in KNOWS and other not in {room, *KNOWS.get(room, ())}:
                found.append(f"{path.relative_to(package)}: {room} imports {other}")
            if top in WITHOUT.get(room, ()):
                found.append(f"{path.relative_to(package)}: {room} imports {top}")
    return sorted(set(found))


def test_every_room_has_its_arrows_stated():
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert rooms | files <= set(KNOWS)


def test_no_arrow_of_the_house_runs_back_up():
    assert broken_arrows(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("config/a.py", "from gpt_pretrain.training.run import train", "config imports training"),
        ("config/a.py", "def f():\n    import gpt_pretrain.data.corpus", "config imports data"),
        ("config/a.py", "import torch", "config imports torch"),
        ("data/a.py", "from gpt_pretrain import megatron", "data imports megatron"),
        ("data/deep/a.py", "from ...training import run", "data imports training"),
        ("megatron/a.py", "from ..data import corpus", "megatron imports data"),
        ("report/a.py", "if True:\n    from gpt_pretrain.training import run", "report imports training"),
        ("report/a.py", "def f():\n    import torch.distributed", "report imports torch"),
        ("checkpoint/a.py", "from gpt_pretrain.training import step", "checkpoint imports training"),
    ],
)
def test_the_check_finds_an_arrow_that_runs_back_up(tmp_path, file, source, expected):
    path = tmp_path / "gpt_pretrain" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert broken_arrows(tmp_path / "gpt_pretrain") == [f"{file}: {expected}"]


def test_the_check_lets_legal_arrows_pass(tmp_path):
    path = tmp_path / "gpt_pretrain" / "training" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch\nfrom gpt_pretrain.config import schema\nfrom . import step\nfrom ..data import corpus"
    )
    assert broken_arrows(tmp_path / "gpt_pretrain") == []
