"""What joins the training loop: callbacks and sinks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import check_call, check_method, check_name, register, registering

if TYPE_CHECKING:
    import torch


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
    """The newest logged numbers by plot, as in TensorBoard: "train/loss", the mean since the line of the log before,
    "validation/perplexity" (docs/metrics.md). A number that is not logged yet is a KeyError that says when it comes."""
    read_loss: Callable[[], float]
    """Waits for the device and returns the newest step's cross entropy in nats per token, over all ranks; NaN before
    the process's first step. Every rank may call it or not."""
    read_grad_norm: Callable[[], float]
    """The same for the gradient's L2 norm over all parameters, before clipping."""
    stop: Callable[[str], None]
    """Ends the run after this step or the next one, with a checkpoint and exit code 0, as if it was done; takes the
    reason, which rank 0 prints. One rank may call it, or all. Repeated, the command goes on from there."""
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

        With `model.overlap_param_gather`, weights are whole again only in the other methods. With
        `parallelism=fsdp`, a rank has none that is whole here, and `run.model` is refused.
        """

    def validation(self, run: Run) -> None:
        """After each validation; `run.metrics` has "validation/loss"."""

    def save(self, run: Run) -> None:
        """When a checkpoint, `run.checkpoint`, is on the disk; with `checkpoint.async_save` some steps later.

        `run.step` is the run's step by then; that of the checkpoint is in its name.
        """

    def end(self, run: Run) -> None:
        """After the last step and the last save of this process, unless the run crashed."""


class Sink(Protocol):
    """Another place for metrics; rank 0 opens one of each as `cls(run_dir, config, start_step)`.

    `start_step` is the step that this process continues from: what was written about later steps is superseded.
    """

    def __init__(self, run_dir: Path, config: Config, start_step: int) -> None: ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers by plot, such as "train/loss", as they are after `step`; the last are "summary/…"."""

    def close(self) -> None:
        """Called once, at the end of the process's part of the run, also after a failure."""


class Evaluate(Protocol):
    """The model's evaluating function, as a validation task gets it."""

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence of token ids the cross entropy, in nats, of each token but the first, given those before.

        A sequence has 2 to `model.encoder_seq_length` tokens. Every rank calls it with the same sequences and gets the
        same numbers; data-parallel ranks share the work.
        """


type ValidationTask = Callable[[Run, Evaluate], Mapping[str, float]]


def validation_task(name: str) -> Callable[[ValidationTask], ValidationTask]:
    """Registers a function that measures the model at each validation, as a decorator.

    It is called on every rank as `function(run, evaluate)` and returns numbers by name, which go where the validation
    loss goes, as "validation/TASK/NAME". Texts become token ids by the run's tokenizer, which is at
    `run.run_dir / "tokenizer.json"`.
    """
    return registering("validation_task", name, "run, evaluate")


def callback[C: type[Callback]](name: str) -> Callable[[C], C]:
    """Registers a subclass of `Callback`, as a decorator; `name` is for messages."""
    check_name("callback", name)

    def add(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            raise UserError(f"callback {name!r}: {cls!r} is no subclass of gpt_pretrain.extend.Callback")
        _check_hooks(name, cls)
        check_call("callback", name, cls, "", written="__init__(self)")
        register("callback", name, cls, cls.__module__)
        return cls

    return add


def _check_hooks(name: str, cls: type[Callback]) -> None:
    hooks = [hook for hook in vars(Callback) if not hook.startswith("_")]
    added = {each: value for one in cls.__mro__[:-2] for each, value in vars(one).items() if one is not Callback}
    for method, value in added.items():
        if method not in hooks and _looks_like_a_hook(method, value):
            raise UserError(
                f"callback {name!r}: {cls.__name__}.{method} would never be called: the methods of a callback are "
                f"{', '.join(hooks)}; begin the name of one for your own use with _"
            )
    if not set(hooks) & set(added):
        raise UserError(
            f"callback {name!r}: {cls.__name__} overrides none of {', '.join(hooks)}, so it would never run"
        )
    for hook in set(hooks) & set(added):
        check_method("callback", name, cls, hook, "run")


def _looks_like_a_hook(method: str, value: Any) -> bool:
    takes_run = isfunction(value) and list(signature(value).parameters)[1:] == ["run"]
    return not method.startswith("_") and isfunction(value) and (takes_run or method.startswith("on_"))


def sink[S: type[Any]](name: str) -> Callable[[S], S]:
    """Registers a class with the methods of `Sink`, as a decorator; `name` is for messages."""
    return registering("sink", name, {"__init__": "run_dir, config, start_step", "write": "step, values", "close": ""})
