"""Finds the modules that `extensions` names, before the configuration is composed, and imports them.

The command line comes first, then the file of `--config-name` (`conf/config.yaml` by default). No other file is read
for it: whoever may write a preset, a run's `config.yaml` or a checkpoint's manifest must not be able to run code. The
check of the jobs later refuses a composition that names other modules than were imported (`rules.jobs`).
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from gpt_pretrain.config import own
from gpt_pretrain.config.errors import ConfigError, UserError, show
from gpt_pretrain.config.keys import did_you_mean, nearest_name
from gpt_pretrain.config.load import saved_extensions
from gpt_pretrain.config.source import Loader, Source
from gpt_pretrain.extend.registry import REGISTERED, where

_MODULE = re.compile(rf"{own.DROPS}?[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_WRITE = "write extensions=[my_lab.callbacks]"


def import_given(overrides: Sequence[str]) -> None:
    """Imports what the command line names, if it says anything about extensions.

    Raises:
        ConfigError: Everything that is wrong with a module, with its file and line.
    """
    own.LOADED[:] = []
    own.GIVEN[:] = [line.lstrip("+") for line in overrides if re.match(r"\+{0,2}extensions\b", line)]
    if own.GIVEN:
        # As in Hydra, the last one counts.
        line = own.GIVEN[-1]
        import_extensions(_value_of(line), line)


def extended_loader(overrides: Sequence[str], source: Source) -> Loader:
    """The loader of a command line, once its extensions are imported: those of the primary file, if it names none.

    Raises:
        ConfigError: A file or a folder is missing, or everything that is wrong with a module.
    """
    import_given(overrides)
    loader = Loader(source)
    found = None if own.GIVEN else loader.primary_extensions()
    if found is not None:
        origin = f"extensions of --config-name={loader.source.config_name}"
        import_extensions(found, origin)
    return loader


def check_resumed(overrides: Sequence[str]) -> None:
    """Names the extensions of a run that is resumed without them, before their keys and choices are unknown.

    Raises:
        ConfigError: The run directory on the command line has checkpoints, and its run had extensions.
    """
    lines = [line for line in overrides if re.match(r"\+{0,2}run_dir=", line)]
    if own.GIVEN or own.LOADED or not lines:
        return
    override = _parsed(lines[-1])
    if override is None or override.is_sweep_override() or not (run_dir := override.value()):
        return
    checkpoints = Path(str(run_dir), "checkpoints")
    if not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return
    if problem := own.missing_problem(saved_extensions(checkpoints.parent)):
        raise ConfigError([f"{lines[-1]} was trained with {problem}"])


def _parsed(line: str) -> Override | None:
    try:
        (override,) = OverridesParser.create().parse_overrides([line])
    except HydraException:
        return None
    return override


def _value_of(line: str) -> Any:
    override = _parsed(line)
    if override is None:
        return None
    if override.is_sweep_override():
        raise ConfigError([f"{line}: all runs of a sweep share a process and its modules; {_WRITE}"])
    return override.value() if override.key_or_group == "extensions" else None


def _names(origin: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        way = f"write extensions=[{value}]" if isinstance(value, str) else _WRITE
        raise ConfigError([f"{origin} is not a list of modules; {way}"])
    if wrong := [name for name in value if not (isinstance(name, str) and _MODULE.fullmatch(name))]:
        raise ConfigError([f"{origin}: {show(name)} is not the name of a module; {_WRITE}" for name in wrong])
    modules = [name.removeprefix(own.DROPS) for name in value]
    if twice := [name for name in dict.fromkeys(modules) if modules.count(name) > 1]:
        raise ConfigError([f"{origin}: {', '.join(twice)} is named more than once; name each module once"])
    return value


def import_extensions(names: Any, origin: str) -> None:
    """Imports a list of modules as extensions; `origin` says in messages who named them.

    Raises:
        ConfigError: Everything that is wrong with a module, with its file and line.
    """
    own.LOADED[:] = []
    for name in _names(origin, names):
        if not name.startswith(own.DROPS):
            _import(name, origin)
        own.LOADED.append(name)


def _import(name: str, origin: str) -> None:
    had_torch, known = "torch" in sys.modules, name in sys.modules
    num_registered = len(REGISTERED)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError([f"{origin}: {_why_not_imported(name, error)}"]) from error
    if "torch" in sys.modules and not had_torch:
        problem = (
            "or a module that it imports loads torch while it is imported, before the run has prepared the environment "
            "for it; move `import torch` into the functions that use it, or the code into a module that they import"
        )
        raise ConfigError([f"{origin}: {name} ({module.__file__}) {problem}"])
    own_modules = [each.module for each in REGISTERED if f"{each.module}.".startswith(f"{name}.")]
    if not known and len(REGISTERED) == num_registered and not own_modules:
        problem = (
            "registers nothing, so it would change nothing; register with gpt_pretrain.extend "
            "(docs/bring_your_own.md), or leave it out"
        )
        raise ConfigError([f"{origin}: {name} ({module.__file__}) {problem}"])


def _why_not_imported(name: str, error: BaseException) -> str:
    if isinstance(error, UserError):
        return f"{name}: {error}"
    if isinstance(error, SyntaxError):
        return f"{name} cannot be imported: {error.filename}, line {error.lineno}: {error.msg}; correct that file"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return _not_found(error.name)
    spec = find_spec(name) if "." not in name or name.rpartition(".")[0] in sys.modules else None
    file = "" if spec is None or spec.origin is None else spec.origin
    told = f" ({file})" if file else ""
    return f"{name}{told} cannot be imported: {where(error, file)}\ncorrect it, or leave the extension out"


def _not_found(missing: str) -> str:
    parent = missing.rpartition(".")[0]
    places = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else sys.path
    beside = [f"{parent}.{each.name}" if parent else each.name for each in pkgutil.iter_modules(places)]
    nearest = did_you_mean(nearest_name(missing, beside))
    return (
        f"there is no module {missing}{nearest}; start from the folder that holds it (this is {Path.cwd()}), "
        "set PYTHONPATH, or install it"
    )
