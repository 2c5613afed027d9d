"""Keys without effect in a run, and why: one table for the rules, which refuse such keys, and for the plan.

The schema says with which settings of another key nothing reads a key (`config.facts`). Reasons that depend on a
recipe, an optimizer or several keys stand here.

A key is refused only if somebody asked for it. Most keys have a value that asks for nothing (null, false, empty). If
YAML must name a real value, as for Adam's betas, only the command line shows that somebody asked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from gpt_pretrain.config.choices import AUTO, AmaxComputeAlgo, Fp8Backend, OnSaveError, ScheduleName
from gpt_pretrain.config.errors import show
from gpt_pretrain.config.facts import NOT_TOLD, Unread
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.config.recipes import DELAYED_KEYS, RECIPES
from gpt_pretrain.config.schedule import has_length, rate_phases
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import registered
from gpt_pretrain.run.optimizers import optimizer_of
from gpt_pretrain.run.products import Resolved, resolve

type Why = Callable[[Resolved], str]
"""Why a key has no effect in a run; empty if it has one."""

# Keys of `checkpoint.` that only a run with saves reads, with the values that ask for nothing.
READ_BY_SAVES = {
    "async_save": True,
    "keep_last": None,
    "keep_every": None,
    "keep_best": False,
    "on_save_error": OnSaveError.stop,
}


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A reason why a key may have no effect."""

    key: str
    why: Why
    instead: str = ""
    """The way out, after "use". Empty if only the command line shows that the key is wanted: leave it out."""
    silent: Sequence[Any] | None = None
    """Values that ask for nothing; None: null, false and empty, or no value if there is no `instead`."""
    joint: str = " with "
    """What stands before `why` in the refusal."""

    def is_asked(self, config: Config) -> bool:
        """Whether the value asks for something."""
        value = value_of(config, self.key)
        if self.silent is not None:
            return value not in self.silent
        return value is not None and (schema_keys()[self.key].optional or bool(value))


def _if(holds: Callable[[Resolved], bool], why: str) -> Why:
    return lambda run: why if holds(run) else ""


def _keeps_history(run: Resolved) -> bool:
    return run.fp8 is not None and run.fp8.recipe.keeps_history


def _without_history(run: Resolved) -> str:
    if run.fp8 is None or run.fp8.recipe.keeps_history:
        return ""
    return f"model.fp8_recipe={run.fp8.recipe.name}: {run.fp8.recipe.words.scales_from}"


def _no_high_precision_wgrad(run: Resolved) -> str:
    if run.fp8 is None or not run.fp8.recipe.has_wgrad or (run.fp8.recipe.leaves_wgrad_out and run.fp8.emulate):
        return ""
    if run.fp8.backend is Fp8Backend.torchao:
        return f"model.fp8_recipe={run.fp8.recipe.name}, which computes weight gradients in FP8"
    if run.fp8.recipe.leaves_wgrad_out:
        return "model.fp8_emulate=false: Transformer Engine 2.12 dropped it (override_linear_precision is gone)"
    return f"model.fp8_recipe={run.fp8.recipe.name}: only delayed has it, and only emulated"


def _unread_by_optimizer(name: str) -> Why:
    return lambda run: optimizer_of(run.model.optim.name).unread.get(name, "")


def _has_own_warmup(run: Resolved) -> bool:
    sched = run.model.optim.sched
    has_warmup = sched.warmup_steps is not None or sched.warmup_tokens is not None
    return sched.name is ScheduleName.constant and has_warmup


def _saves_nothing(run: Resolved) -> bool:
    saves = run.config.checkpoint
    return not saves.save_at_end and saves.save_interval is None and saves.save_interval_minutes is None


@cache
def _table() -> tuple[NoEffect, ...]:
    return (*_fp8_rows(), *_other_rows(), *_schema_rows())


def _schema_rows() -> Iterator[NoEffect]:
    """What the schema says, one row for each setting of another key."""
    for path, key in schema_keys().items():
        idle = key.facts.idle
        if idle is None and key.facts.before is not NOT_TOLD:
            idle = [key.facts.before]
        for unread in key.facts.unread:
            instead = unread.instead.format(key=path, idle=show(idle[0] if idle else None))
            silent = idle if instead else key.facts.idle
            yield NoEffect(path, partial(_told, unread), instead, silent)


def _told(unread: Unread, run: Resolved) -> str:
    value = value_of(run.config, unread.key)
    return f"{unread.key}={show(value)}{unread.because}" if unread.applies(value) else ""


def _fp8_rows() -> Iterator[NoEffect]:
    # The default recipe has no measured size: turning FP8 on would not be enough.
    auto_alone = _if(lambda run: AUTO in run.model.fp8_exclude and not run.model.fp8, "model.fp8=false")
    yield NoEffect("model.fp8_exclude", auto_alone, "[], or leave all keys of FP8 out (fp8=none)")
    for name in DELAYED_KEYS:
        yield NoEffect(f"model.{name}", _without_history, "null, or fp8=delayed")
    # 1024 is the recipe's own length, which conf/ names; 1 says the same as most_recent (NeMo's old pair).
    newest = _if(
        lambda run: _keeps_history(run) and run.model.fp8_amax_compute_algo is AmaxComputeAlgo.most_recent,
        "model.fp8_amax_compute_algo=most_recent",
    )
    yield NoEffect("model.fp8_amax_history_len", newest, "null, or model.fp8_amax_compute_algo=max", (None, 1, 1024))
    only_one = _if(
        lambda run: _keeps_history(run) and run.model.fp8_amax_history_len == 1, "model.fp8_amax_history_len=1"
    )
    yield NoEffect("model.fp8_amax_compute_algo", only_one, silent=(None, AmaxComputeAlgo.most_recent))
    ignored = _if(
        lambda run: run.fp8 is not None,
        "Transformer Engine ignores it and computes new scales at every step (since 1.8)",
    )
    yield NoEffect("model.fp8_interval", ignored, "1, or null", silent=(None, 1), joint=": ")
    # Nobody expects an effect: the plan shows the key, and no rule refuses it.
    overruled = _if(
        lambda run: bool(run.model.fp8_e4m3 and run.model.fp8_hybrid), "model.fp8_e4m3=true, which overrules it"
    )
    yield NoEffect("model.fp8_hybrid", overruled, silent=(None, False, True))
    without_wgrad = [name for name, recipe in RECIPES.items() if recipe.leaves_wgrad_out or not recipe.has_wgrad]
    ways = ["null", *(f"fp8={name} with model.fp8_emulate=true" for name in without_wgrad)]
    yield NoEffect("model.fp8_wgrad", _no_high_precision_wgrad, ", or ".join(ways), silent=(None, True))


def _other_rows() -> Iterator[NoEffect]:
    for name in sorted({name for each in registered("optimizer") for name in each.value.unread}):
        yield NoEffect(f"model.optim.{name}", _unread_by_optimizer(name))
    sched = "model.optim.sched"
    own_warmup = _if(_has_own_warmup, f"{sched}.name=constant, and the warmup has steps of its own")
    yield NoEffect(f"{sched}.decay_steps", own_warmup)
    yield NoEffect(f"{sched}.decay_tokens", own_warmup)
    no_warmup = _if(
        lambda run: has_length(run.config) and not rate_phases(run.config).warmup, f"no warmup ({sched}.warmup_steps)"
    )
    yield NoEffect(f"{sched}.init_lr", no_warmup)
    whole_files = _if(lambda run: bool(run.config.model.data.validation_prefix), "model.data.validation_prefix")
    yield NoEffect("model.data.splits_string", whole_files)
    nothing_saved = _if(
        _saves_nothing,
        "nothing saved (checkpoint.save_at_end=false, and neither save_interval nor save_interval_minutes)",
    )
    for name, silent in READ_BY_SAVES.items():
        instead = f"checkpoint.save_interval_minutes=30, or checkpoint.{name}={show(silent)}"
        yield NoEffect(f"checkpoint.{name}", nothing_saved, instead, (silent,), joint=": ")


def why_no_effect(run: Resolved, key: str) -> str:
    """Why a key has no effect in this run; empty if it has one."""
    return next((why for row in _table() if row.key == key and (why := row.why(run))), "")


def no_effect_problems(run: Resolved) -> Iterator[str]:
    """One message per reason, with all keys that have no effect for it."""
    asked: dict[tuple[str, str], list[str]] = {}
    told: set[str] = set()
    for row in _table():
        if not row.instead or row.key in told or not row.is_asked(run.config):
            continue
        why = row.why(run)
        if why:
            told.add(row.key)
            asked.setdefault((row.joint + why, row.instead), []).append(_setting(run.config, row.key))
    for (because, instead), settings in asked.items():
        has = "has" if len(settings) == 1 else "have"
        yield f"{', '.join(settings)} {has} no effect{because}; use {instead}"


def given_without_effect(config: Config, given: frozenset[str]) -> list[str]:
    """A message for each key of the command line, including elements of lists, that only the command line asks for."""
    return [
        f"{_setting(config, row.key)} has no effect with {why}; leave it out"
        for row, why in _unread(config, given)
        if not row.instead
    ]


def unread_keys(config: Config, given: frozenset[str]) -> dict[str, str]:
    """The keys of the command line that are refused because the run does not read them, and why."""
    return {path: why for row, why in _unread(config, given) for path in given if _is_of(path, row)}


def _unread(config: Config, given: frozenset[str]) -> Iterator[tuple[NoEffect, str]]:
    """For each key that was given in vain, the first reason."""
    run, told = resolve(config), set[str]()
    for row in _table():
        is_asked = row.is_asked(config) if row.instead or row.silent is not None else True
        is_new = is_asked and row.key not in told and any(_is_of(path, row) for path in given)
        if is_new and (why := row.why(run)):
            told.add(row.key)
            yield row, why


def _is_of(path: str, row: NoEffect) -> bool:
    return path == row.key or path.startswith(f"{row.key}.")


def _setting(config: Config, key: str) -> str:
    value = value_of(config, key)
    return f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={show(value)}"
