"""What your own modules can add to a run, without a change here: see docs/bring_your_own.md.

`extensions=[my_lab.callbacks]` imports `my_lab.callbacks` before the configuration is composed; while it is imported,
it registers what it brings with the functions of this module:

    callback    code that runs at the start, after steps, validations and saves, and at the end
    sink        another place for metrics
    keys        keys of your own, in a group of your own
    optimizer   a name for model.optim.name
    data_source a name for model.data.data_impl
    tokenizer   a name for model.tokenizer.library

What is registered is checked, shown, stored and refused like the program's own. A name can be registered once. This
module imports neither torch nor megatron-core, and an extension must not do so while it is imported either: `--help`
and refusals answer before torch is loaded, and torch must find the environment that the run sets for it. Import them
inside your functions.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from gpt_pretrain.config import own
from gpt_pretrain.config.choices import DataImpl, OpenChoice, OptimizerName, TokenizerLibrary
from gpt_pretrain.config.convert import WrongValue, convert
from gpt_pretrain.config.errors import RankError, RunError, UserError, reason, show
from gpt_pretrain.config.files import group_names
from gpt_pretrain.config.keys import TYPE_NAMES, declare_section, schema_keys, schema_sections, section_keys
from gpt_pretrain.config.schema import Config

if TYPE_CHECKING:
    import tokenizers
    import torch

__all__ = [
    "Callback",
    "Config",
    "DataSource",
    "Run",
    "Sink",
    "UserError",
    "callback",
    "data_source",
    "keys",
    "optimizer",
    "own_keys",
    "sink",
    "tokenizer",
]

# Keys of `model.optim` that an optimizer may or may not read; all read the others.
_OPTIM_KEYS = ("betas", "eps", "momentum")


class ExtensionError(RankError):
    """An exception in an extension's code; the message names the extension, its file and line."""


@dataclass(kw_only=True, slots=True)
class Run:
    """What a callback sees of the run; each rank has its own. Read it, and change nothing but weights and gradients."""

    config: Config
    """The whole configuration, every value resolved; `own_keys` has yours."""
    run_dir: Path
    """The run's directory, the same on all ranks. Write from rank 0 only, to names of your own."""
    rank: int
    """0 up to the number of processes."""
    model: "list[torch.nn.Module]"
    """This rank's part of the model: one module for each virtual pipeline stage, parameters as megatron-core names
    them."""
    optimizer: Any
    """megatron-core's `MegatronOptimizer`; its `param_groups` hold this rank's masters."""
    step: int
    """Optimizer steps done, from the start of the whole run."""
    metrics: Mapping[str, float]
    """The newest logged numbers by plot, as in TensorBoard: "train/loss", "validation/perplexity" (docs/metrics.md)."""
    read_loss: Callable[[], float]
    """Waits for the device and returns the newest step's cross entropy in nats per token, over all ranks; NaN before
    the process's first step. Every rank may call it or not."""
    checkpoint: Path | None = None
    """The newest checkpoint that this process has completed; in `save` the one just completed."""
    end_reason: str | None = None
    """In `end`: why the run ends ("max_steps", "interrupted", …; `EndReason` in docs/metrics.md)."""


class Callback:
    """Code that runs beside the training loop, on every rank; override what you need.

    A run makes one object of each registered class, without arguments. Its attributes are not in checkpoints: keep what
    must survive a resume in a file of the run's directory. Collective operations must be called by all ranks alike. An
    exception ends the run, unless it is a `UserError`, which ends it as a mistake in the configuration.
    """

    def start(self, run: Run) -> None:
        """Before the first step of this process; `run.step` is above 0 after a resume."""

    def after_step(self, run: Run) -> None:
        """After each step, and after its log line, validation and save, if any.

        With `model.overlap_param_gather`, weights are whole again only in the other methods.
        """

    def validation(self, run: Run) -> None:
        """After each validation; `run.metrics` has "validation/loss"."""

    def save(self, run: Run) -> None:
        """When a checkpoint, `run.checkpoint`, is on the disk; with `checkpoint.async_save` some steps later."""

    def end(self, run: Run) -> None:
        """After the last step and the last save of this process, unless the run crashed."""


class Sink(Protocol):
    """Another place for metrics; rank 0 opens one of each as `cls(run_dir, config, start_step)`.

    `start_step` is the step that this process continues from: what was written about later steps is superseded.
    """

    def __init__(self, run_dir: Path, config: Config, start_step: int) -> None: ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers by plot, such as "train/loss", as they are after `step`."""

    def close(self) -> None:
        """Called once, at the end of the process's part of the run, also after a failure."""


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


def where(error: BaseException, file: str) -> str:
    """Line, error and the frames from `file` on, of an exception that passed through it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [number for number, frame in enumerate(frames) if frame.filename == file]
    line = f"line {frames[inside[-1]].lineno}: " if inside else ""
    shown = traceback.format_list(frames[inside[0] :]) if inside else traceback.format_tb(error.__traceback__)
    return "\n".join([f"{line}{reason(error)}", *"".join(shown).splitlines()])


REGISTERED: list[Registered] = []
"""In the order of registration."""


def registered(kind: str) -> list[Registered]:
    """Everything of a kind."""
    return [each for each in REGISTERED if each.kind == kind]


def registered_choice(kind: str, choice: OpenChoice) -> Registered | None:
    """What an extension has registered for the value of a key; None for one of the program's own."""
    return next((each for each in registered(kind) if each.name == choice.name), None)


def sources() -> dict[str, str]:
    """What was registered, with the SHA-256 of the file that did it, which all ranks must share."""
    return {f"{each.kind} {each.name!r} of {each.module}": each.digest for each in REGISTERED}


def _register(kind: str, name: str, value: Any, module: str, builtin: type[OpenChoice] | None = None) -> None:
    """Adds to the registry, and to `builtin`, which has the program's own names of the kind."""
    file = str(sys.modules[module].__file__)
    new = Registered(kind=kind, name=name, module=module, file=file, value=value)
    others = registered(kind)
    if builtin is not None and name in builtin.__members__ and not any(other.name == name for other in others):
        raise UserError(f"{new}: this program has its own {kind} of that name; choose another")
    for other in others:
        if other.name == name:
            raise UserError(f"{new} is already registered: {other}; give one of them another name")
    REGISTERED.append(new)
    if builtin is not None:
        builtin.add(name)


def _check_methods(kind: str, name: str, cls: type, methods: Sequence[str]) -> None:
    if missing := [method for method in methods if not callable(getattr(cls, method, None))]:
        raise UserError(f"{kind} {name!r}: {cls.__name__} has no method {' and no method '.join(missing)}")


def callback[C: type[Callback]](name: str) -> Callable[[C], C]:
    """Registers a subclass of `Callback`, as a decorator; `name` is for messages."""

    def register(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            raise UserError(f"callback {name!r}: {cls!r} is no subclass of gpt_pretrain.extend.Callback")
        known = vars(Callback)
        if not any(hook in known and not hook.startswith("_") for each in cls.__mro__[:-2] for hook in vars(each)):
            hooks = ", ".join(hook for hook in known if not hook.startswith("_"))
            raise UserError(f"callback {name!r}: {cls.__name__} overrides none of {hooks}, so it would never run")
        _register("callback", name, cls, cls.__module__)
        return cls

    return register


def sink[S: type[Any]](name: str) -> Callable[[S], S]:
    """Registers a class with the methods of `Sink`, as a decorator; `name` is for messages."""

    def register(cls: S) -> S:
        _check_methods("sink", name, cls, ("write", "close"))
        _register("sink", name, cls, cls.__module__)
        return cls

    return register


def keys[D: type[Any]](group: str) -> Callable[[D], D]:
    """Registers a dataclass as a group of keys, as a decorator: its field `beta` becomes the key `GROUP.beta`.

    Every field has a default and the string below it as its help; the class's docstring is the title of the group.
    Types are int, float, bool, str, an Enum, a list of the first four, `dict[str, …]` of them, and any of these with
    `| None`.
    """

    def register(cls: D) -> D:
        if not group.isidentifier():
            raise UserError(f"keys {group!r}: the name of a group consists of letters, digits and _")
        if group not in own.SECTIONS and group in {*schema_keys(), *schema_sections(), *group_names(), "hydra"}:
            raise UserError(f"keys {group!r}: this program has a key or a group of that name; choose another")
        _check_keys(group, cls)
        _register("keys", group, cls, cls.__module__)
        declare_section(group, cls)
        return cls

    return register


def _check_keys(group: str, cls: type) -> None:
    if not is_dataclass(cls):
        raise UserError(f"keys {group!r}: {cls.__name__} is no dataclass; put @dataclass below @keys")
    if (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        raise UserError(f"keys {group!r}: {cls.__name__} has no docstring, which --help prints above its keys")
    found = section_keys(cls)
    for field in fields(cls):
        path = f"{group}.{field.name}"
        key = found.get(field.name)
        kinds = () if key is None else (key.kind, key.item) if key.kind in (list, dict) else (key.kind,)
        if not kinds or not all(kind in {*TYPE_NAMES, list, dict} or _is_enum(kind) for kind in kinds):
            raise UserError(
                f"{path} has the type {field.type}, which no key can have; use one of docs/bring_your_own.md"
            )
        assert key is not None
        if not key.doc:
            raise UserError(f"{path} has no help: put a string literal on the line below it")
        if field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{path} has no default, so every run would need it; give it one")
        default = field.default if field.default_factory is MISSING else field.default_factory()
        try:
            convert(default.name if isinstance(default, Enum) else default, key)
        except WrongValue as wrong:
            raise UserError(f"{path}: its default {show(default)} {wrong}") from None


type BuildOptimizer = Callable[[list[dict[str, Any]], Config], "torch.optim.Optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOptimizer:
    """An optimizer that an extension has registered."""

    build: BuildOptimizer
    states: tuple[str, ...]
    reads: tuple[str, ...]
    elementwise: bool


def optimizer(
    name: str, *, states: Sequence[str], elementwise: bool, reads: Sequence[str] = ()
) -> Callable[[BuildOptimizer], BuildOptimizer]:
    """Registers a function that builds a `torch.optim.Optimizer`, as a decorator; `model.optim.name=NAME` chooses it.

    The function gets torch's parameter groups and the whole configuration. Parameters and gradients are fp32; the
    schedule sets each group's "lr" and "weight_decay" before every step. Before the run builds its model, the optimizer
    makes trial steps on a small matrix, and is refused if what is said here does not hold.

    The optimizer need not know about skipped updates: its `step` is called for one parameter at a time, and where the
    loss, a gradient or an FP8 tensor was not finite, the parameter and its states keep their values, without a wait for
    the device. For that time, a copy of them takes memory.

    Args:
        name: What `model.optim.name` takes.
        states: Its tensors in `optimizer.state[parameter]`, of the parameter's shape, fp32, zero at first. They are
            counted in the plan and saved in checkpoints. "step", if named, is a single number instead.
        elementwise: Whether a value's update depends on this value, its gradients and states alone. Others need whole
            matrices and cannot train with a distributed optimizer or tensor parallelism, which cut them.
        reads: Which of `model.optim.betas`, `eps` and `momentum` it reads; the others are refused on the command line.
    """
    if wrong := [key for key in reads if key not in _OPTIM_KEYS]:
        raise UserError(f"optimizer {name!r}: reads={wrong} is none of {', '.join(_OPTIM_KEYS)}")

    def register(build: BuildOptimizer) -> BuildOptimizer:
        value = OwnOptimizer(build=build, states=tuple(states), reads=tuple(reads), elementwise=elementwise)
        _register("optimizer", name, value, build.__module__, builtin=OptimizerName)
        return build

    return register


class DataSource(Protocol):
    """Text in files, made as `cls(config)`; the run tokenizes it once, caches the tokens and splits the documents."""

    files: Sequence[Path]
    """What `documents` reads, in the order of the corpus; a change of path, size or time makes new tokens."""

    def __init__(self, config: Config) -> None: ...

    def documents(self, path: Path) -> Iterator[str]:
        """The documents of one file, the same ones in the same order each time."""

    def identity(self) -> Any:
        """A JSON value of all else that the text depends on, such as keys of your own; a change makes new tokens."""


def data_source[S: type[Any]](name: str) -> Callable[[S], S]:
    """Registers a class with the members of `DataSource`, as a decorator; `model.data.data_impl=NAME` chooses it."""

    def register(cls: S) -> S:
        _check_methods("data_source", name, cls, ("documents", "identity"))
        _register("data_source", name, cls, cls.__module__, builtin=DataImpl)
        return cls

    return register


type BuildTokenizer = Callable[[Config], "tokenizers.Tokenizer"]


def tokenizer(name: str) -> Callable[[BuildTokenizer], BuildTokenizer]:
    """Registers a function that makes a `tokenizers.Tokenizer`; `model.tokenizer.library=NAME` chooses it.

    The function gets the whole configuration and makes the same tokenizer each time, however it comes by it. The
    vocabulary has an end-of-document token such as <|endoftext|>. The run saves it as `tokenizer.json`, from which
    export and generation read it without the extension's help; a component in Python cannot be saved and is refused.
    """

    def register(build: BuildTokenizer) -> BuildTokenizer:
        _register("tokenizer", name, build, build.__module__, builtin=TokenizerLibrary)
        return build

    return register


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def own_keys[D](config: Config, kind: type[D]) -> D:
    """The values of a registered group of keys, as an object of the dataclass that declares it."""
    for group, section in own.SECTIONS.items():
        if section is kind:
            return cast(D, getattr(config, group))
    raise UserError(f"{kind.__name__} is not registered with gpt_pretrain.extend.keys")
