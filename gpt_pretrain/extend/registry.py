"""What extensions have registered in this process, and the errors of their code, which say whose they are."""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from gpt_pretrain.config.choices import OpenChoice
from gpt_pretrain.config.errors import RankError, RunError, UserError, reason, show


class ExtensionError(RankError):
    """An exception in an extension's code; the message names the extension, its file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Something that an extension has registered."""

    kind: str
    name: str
    module: str
    """The module that registered it, and its file."""
    file: str
    value: Any

    @property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return hashlib.sha256(Path(self.file).read_bytes()).hexdigest()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.module} ({self.file})"

    @contextmanager
    def named(self, doing: str) -> Iterator[None]:
        """Around a call of its code: whatever it raises says whose it is.

        Raises:
            UserError: It raised one.
            ExtensionError: It raised another exception.
        """
        try:
            yield
        except UserError as error:
            raise UserError(f"{self}: {error}") from error
        except RunError:
            raise
        except Exception as error:
            raise ExtensionError(f"{self} failed in {doing}, {where(error, self.file)}") from error

    @contextmanager
    def named_if_inside(self, doing: str) -> Iterator[None]:
        """The same around code that calls what it has built: only exceptions from its module or package are its."""
        try:
            yield
        except Exception as error:
            is_named = isinstance(error, ExtensionError) or str(error).startswith(tuple(map(str, REGISTERED)))
            frames = traceback.extract_tb(error.__traceback__)
            if is_named or not any(_is_of(frame.filename, self.file) for frame in frames):
                raise
            with self.named(doing):
                raise


def _is_of(filename: str, file: str) -> bool:
    """Whether a file is a registering one, or stands beside it in a package."""
    beside = Path(file).with_name("__init__.py").exists() and Path(filename).parent == Path(file).parent
    return filename == file or beside


def where(error: BaseException, file: str) -> str:
    """Line, error and the frames from `file` on, of an exception that passed through it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [number for number, frame in enumerate(frames) if _is_of(frame.filename, file)]
    line = ""
    if inside:
        last = frames[inside[-1]]
        line = f"{'' if last.filename == file else f'{Path(last.filename).name}, '}line {last.lineno}: "
    shown = traceback.format_list(frames[inside[0] :]) if inside else traceback.format_tb(error.__traceback__)
    return "\n".join([f"{line}{reason(error)}", *"".join(shown).splitlines()])


REGISTERED: list[Registered] = []
"""What extensions have registered, in the order of registration."""
BUILT_IN: list[Registered] = []
"""What the program's own modules have."""


def registered(kind: str) -> list[Registered]:
    """Everything of a kind."""
    return [each for each in (*BUILT_IN, *REGISTERED) if each.kind == kind]


def registered_choice(kind: str, choice: OpenChoice) -> Registered | None:
    """What has been registered for the value of a key; None where the program needs no registration."""
    return next((each for each in registered(kind) if each.name == choice.name), None)


def register(kind: str, name: str, value: Any, module: str, builtin: type[OpenChoice] | None = None) -> None:
    """Adds to the registry, and an extension's name to `builtin`, which has the program's own names of the kind."""
    file = str(sys.modules[module].__file__)
    new = Registered(kind=kind, name=name, module=module, file=file, value=value)
    if module.partition(".")[0] == __name__.partition(".")[0]:
        BUILT_IN.append(new)
        return
    others = [each for each in REGISTERED if each.kind == kind and each.name == name]
    if builtin is not None and name in builtin.__members__ and not others:
        raise UserError(f"{new}: this program has its own {kind} of that name; choose another")
    if others:
        raise UserError(f"{new} is already registered: {others[0]}; give one of them another name")
    REGISTERED.append(new)
    if builtin is not None:
        builtin.add(name)


def import_modules(package: str) -> list[ModuleType]:
    """Imports the modules of a package of the program, which register what they bring, in the order of their names."""
    return [import_module(f"{package}.{each.name}") for each in iter_modules(sys.modules[package].__path__)]


def registering[F](
    kind: str,
    name: str,
    takes: str | Mapping[str, str],
    *,
    builtin: type[OpenChoice] | None = None,
    value_of: Callable[[Any], Any] = lambda function: function,
) -> Callable[[F], F]:
    """The decorator that registers a function with these arguments, or a class with these methods, or `value_of` it."""
    check_name(kind, name)

    def add(function: F) -> F:
        if isinstance(takes, str):
            check_call(kind, name, function, takes)
        else:
            check_methods(kind, name, function, takes)
        register(kind, name, value_of(function), function.__module__, builtin=builtin)
        return function

    return add


def check_name(kind: str, name: object) -> None:
    """Refuses a decorator without parentheses, which gets what it decorates in the place of a name."""
    if not isinstance(name, str):
        written = getattr(name, "__name__", show(name))
        raise UserError(f'@extend.{kind} has no name; write @extend.{kind}("NAME") above {written}')


def check_call(kind: str, name: str, function: Any, arguments: str, *, written: str = "") -> None:
    """Refuses a function that cannot be called with as many arguments as these; `written` is how it is declared."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Written in C: it does not say.
        return
    try:
        signature.bind(*filter(None, arguments.split(", ")))
    except TypeError as error:
        called = getattr(function, "__name__", name)
        raise UserError(
            f"{kind} {name!r}: {called}{signature} is called as {called}({arguments}), which it does not take "
            f"({error}); declare it as def {written or f'{called}({arguments})'}"
        ) from None


def check_methods(kind: str, name: str, cls: Any, methods: Mapping[str, str]) -> None:
    """Refuses a class that lacks one of these methods, or whose method does not take these arguments after `self`."""
    if missing := [method for method in methods if not callable(getattr(cls, method, None))]:
        raise UserError(f"{kind} {name!r}: {cls.__name__} has no method {' and no method '.join(missing)}")
    for method, arguments in methods.items():
        check_method(kind, name, cls, method, arguments)


def check_method(kind: str, name: str, cls: type, method: str, arguments: str) -> None:
    """Refuses a method that does not take these arguments after `self`."""
    expected = ", ".join(filter(None, ("self", arguments)))
    check_call(kind, name, getattr(cls, method), expected)
