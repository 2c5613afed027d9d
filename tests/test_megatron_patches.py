"""Patches of other libraries: each patched name exists as its record says, and nothing is patched elsewhere."""

import ast
import importlib.util
import inspect
import json
import sys
import types
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import PATCHES, Patch, patch, patched
from tests.launching import run_ranks

PACKAGE = Path(__file__).parents[1] / "gpt_pretrain"
NAMES = [
    pytest.param(
        record,
        name,
        id=f"{record.place}.{name}",
        marks=[pytest.mark.gpu] if record.place.startswith("transformer_engine") else [],
    )
    for record in PATCHES
    for name in record.names
]
IN_MODULES = [
    param for param in NAMES if param.values[0].place.startswith("megatron.") and ":" not in param.values[0].place
]

# In a process where nothing is patched: for each name whether it is there, and the parameters of its function.
AS_INSTALLED = """
import inspect, json, sys
from gpt_pretrain.launch.patches import PATCHES

def parameters(function):
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None

found = {}
for record in PATCHES:
    try:
        owner = record.owner()
    except ImportError as error:
        assert (error.name or "").startswith("transformer_engine"), error
        continue
    there = {name: parameters(getattr(owner, name)) for name in record.names if hasattr(owner, name)}
    found[record.place] = found.get(record.place, {}) | there
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def installed():
    done = run_ranks(1, ["-c", AS_INSTALLED], timeout_s=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def names_read(module):
    """The global names that functions of a module read."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        node.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(("record", "name"), NAMES)
def test_a_patched_name_is_there_with_the_parameters_that_its_record_says(record, name, installed):
    there = installed[record.place]
    absent = record.absent_without
    if absent is not None and importlib.util.find_spec(absent) is None and name not in there:
        assert name in names_read(record.place), "what is brought in is still asked for under this name"
        return
    assert name in there
    if record.names[name] is not None:
        assert there[name] == list(record.names[name])


@pytest.mark.parametrize(("record", "name"), IN_MODULES)
def test_a_name_that_megatron_core_holds_in_a_module_is_read_in_that_module(record, name):
    """A function that is only handed on, imported elsewhere by its name, would be patched to no effect."""
    assert name in names_read(record.place)


@pytest.mark.parametrize("record", PATCHES, ids=lambda record: record.place)
def test_every_patch_says_what_why_and_until_when(record):
    assert all(text.strip() for text in (record.what, record.why, record.until))


@pytest.fixture
def library(monkeypatch):
    """A library with a function, and a record that patches it."""
    module = types.ModuleType("some_library")
    module.function = before = lambda: "theirs"
    monkeypatch.setitem(sys.modules, "some_library", module)
    record = Patch(place="some_library", names={"function": ()}, what="a name", why="it is slow", until="2.0")
    return module, record, before


def test_a_temporary_patch_is_undone_also_after_an_error(library):
    module, record, before = library

    def fail():
        assert module.function() == "ours"
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), patched(record, function=lambda: "ours"):
        fail()
    assert module.function is before


def test_class_methods_come_back_as_they_were(monkeypatch):
    class Owner:
        @classmethod
        def asks(cls):
            return cls

    module = types.ModuleType("some_library")
    module.Owner = Owner
    monkeypatch.setitem(sys.modules, "some_library", module)
    record = Patch(place="some_library:Owner", names={"asks": ()}, what="a name", why="it is slow", until="2.0")
    with patched(record, asks=classmethod(lambda cls: None)):
        assert Owner.asks() is None
    assert Owner.asks() is Owner


@pytest.mark.parametrize("put_in_place", [patch, lambda *given, **values: patched(*given, **values).__enter__()])
def test_a_name_that_the_library_has_no_more_is_an_error(put_in_place, library):
    module, record, _ = library
    del module.function
    with pytest.raises(RuntimeError) as refused:
        put_in_place(record, function=None)
    assert all(part in str(refused.value) for part in ("some_library", "function", "it is slow"))
    patch(replace(record, absent_without="another"), function=None)
    assert module.function is None


def test_a_name_that_no_record_lists_is_an_error(library):
    module, record, _ = library
    module.other = None
    with pytest.raises(AssertionError, match="other"):
        patch(record, other=1)


def is_foreign(module):
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top != "gpt_pretrain"


def root(node):
    """The name that an expression starts with: `torch` of `torch.cuda.stream`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def foreign_names(tree):
    """Names that stand for something of another library: imported, or assigned or looped over from what is."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names if is_foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_foreign(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Name):
            if root(node.value) in names:
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
            inside = {root(part) for part in ast.walk(node.iter) if isinstance(part, ast.Attribute | ast.Name)}
            if inside & names:
                names |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return names


def stores(node):
    """The attributes that a statement assigns or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            places = targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            places = [target]
        case _:
            places = []
    for place in places:
        for part in ast.walk(place):
            if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store | ast.Del):
                yield part


def changes_of_others(source):
    """Lines that change what another library owns: an attribute, by `setattr` too, or whether it can be imported."""
    tree = ast.parse(source)
    foreign = foreign_names(tree)
    found = set()
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))]:
        arguments = function.args if isinstance(function, ast.FunctionDef | ast.Lambda) else None
        handed_in = {argument.arg for argument in arguments.args + arguments.kwonlyargs} if arguments else set()
        for node in ast.walk(function):
            for place in stores(node):
                is_ours = isinstance(place, ast.Subscript) and "__dict__" not in ast.unparse(place)
                if (root(place) in foreign and not is_ours) or ast.unparse(place).startswith("sys.modules"):
                    found.add(node.lineno)
            if isinstance(node, ast.Call):
                called, first = ast.unparse(node.func), root(node.args[0]) if node.args else None
                if called in {"setattr", "delattr"} and first in foreign | handed_in:
                    found.add(node.lineno)
                if called.startswith("sys.modules.") and called.rpartition(".")[2] not in {"get", "keys", "items"}:
                    found.add(node.lineno)
    return sorted(found)


# OmegaConf's look-ups are bounded where configurations are read, which must not import megatron-core.
OF_OTHERS = {"config/lookups.py"}


def test_nothing_is_patched_but_through_patches():
    found = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(inspect.getfile(patches)) and changes_of_others(path.read_text())
    }
    assert found == OF_OTHERS
    assert changes_of_others(Path(inspect.getfile(patches)).read_text()), "where they are allowed they are seen"
