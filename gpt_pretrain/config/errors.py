"""Mistakes that a user can fix: the errors, how their messages show values, and the conversion of values to their type.

`commands.door` prints these errors without a traceback. A value is converted only without loss (`1e3` to an integer,
`1` to a number, "12" to 12). pydantic would not make this shorter: it accepts 1 and "on" as booleans and enums by
value, its errors would need the same sentences, and its import takes 0.25 s. OmegaConf's structured configs stop at the
first error.
"""

import contextlib
import csv
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import AUTO
from gpt_pretrain.config.keys import TYPE_NAMES, Key, did_you_mean, nearest_name

# What YAML 1.1 and other programs write for a boolean.
_OTHER_SPELLINGS = {"true": ("1", "yes", "on", "y", "t"), "false": ("0", "no", "off", "n", "f")}
_MISFITS = {
    int: "is not an integer",
    float: "is not a number",
    bool: "is neither true nor false",
    str: "is not a string",
    Any: "is neither a string nor a number",
}
# The largest numbers of a configuration: far above any run, yet small enough for every rule, forecast and index to
# answer at once. Nothing else bounds what a file or a command line can say.
# For any integer key: exact as a floating-point number.
_ANY = 2**53
_LARGEST = {
    # The rules look at every product of every layer.
    2**10: "num_layers activations_checkpoint_num_layers virtual_pipeline_model_parallel_size num_workers "
    "num_dataset_builder_threads num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 rounds",
    2**16: "num_attention_heads num_query_groups kv_channels num_moe_experts moe_router_topk fp8_margin",
    2**20: "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size devices num_nodes num_gpus hidden_size max_new_tokens micro_batch_size",
    2**24: "ffn_hidden_size moe_ffn_hidden_size encoder_seq_length max_position_embeddings global_batch_size",
    # megatron-core's builders count these in 32 bits.
    2**31 - 1: "vocab_size make_vocab_size_divisible_by max_steps steps warmup_steps",
    # numpy's largest.
    2**32 - 1: "seed",
}
_LARGEST_OF = {name: largest for largest, names in _LARGEST.items() for name in names.split()}
# A word that may stand for a list of only this word.
_WORDS = {"model.fp8_exclude": AUTO}
# The largest of seconds, rates and shares; a thread waits no longer.
_LARGEST_NUMBER = 1e9


class UserError(ValueError):
    """A user's mistake: the message names the key or file, the value, the rule and the way out."""


class ConfigError(UserError):
    """All mistakes in a configuration, one message each, so that the user can fix them together."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ConfigError lists at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """A failure that is no mistake of the user: printed without a traceback, exit code 1."""


def reason(error: BaseException) -> str:
    """One line about an error of other code, whose message may be empty or very long."""
    said = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def show(value: Any) -> str:
    """A value as messages print it: strings quoted, null, true and false as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    return repr(value)


def written(value: Any) -> str:
    """A value as on a command line: null, true and false as in YAML, strings unquoted where possible."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, str):
        return f'"{value}"' if not value or value != value.strip() else value
    return show(value)


def one_of(values: Sequence[object]) -> str:
    """Values as messages offer them: "1, 2 or 4"."""
    shown = list(values) if len(values) <= 12 else [*values[:11], values[-1]]
    return " or ".join(filter(None, [", ".join(map(str, shown[:-1])), str(shown[-1])]))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def multiples_near(number: int, of: int) -> list[int]:
    """The positive multiples of `of` next to `number`, below and above."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def format_bytes(num_bytes: int) -> str:
    """A file size with three significant digits, in binary units: 512 B, 1.5 MiB, 19.6 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def format_amount(value: float) -> str:
    """A positive number without an exponent: <0.01, 0.59, 8.7, 63, 1,234."""
    if value >= 9.95:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.01 or value == 0 else "<0.01"


def format_seconds(seconds: float) -> str:
    """A duration, in milliseconds below one second."""
    return f"{format_amount(seconds)} s" if seconds >= 0.9995 else f"{format_amount(1e3 * seconds)} ms"


# The commands of docs/gpu.md. The package is on no registry: extras are installed from the checkout.
_INSTALL_COMMANDS = {
    # Without build isolation it is built against the installed PyTorch.
    "te": "python -m pip install --no-build-isolation -c constraints.txt -e '.[te]'",
    # Its wheel for CUDA 13.
    "flash": "python -m pip install -c constraints.txt -e '.[flash]'",
    "torchao": "python -m pip install -c constraints.txt -e '.[torchao]'",
    "wandb": "python -m pip install -c constraints.txt -e '.[wandb]'",
    "plot": "python -m pip install -c constraints.txt -e '.[plot]'",
}


def install_command(extra: str) -> str:
    """The command that installs an extra from the checkout."""
    return _INSTALL_COMMANDS[extra]


def how_to_install(extra: str) -> str:
    """The way out of a message about a missing extra."""
    return f"install it from the checkout with {install_command(extra)}"


class WrongValue(Exception):
    """A value that does not fit its key; the message follows `key=value`."""


def _scalar(value: Any, kind: Any, or_null: str = "") -> Any:
    """A value as `kind`, a key of `_MISFITS`; `or_null` ends the message if null would fit, too."""
    if kind is bool:
        text = str(value).lower()
        if isinstance(value, bool) or (isinstance(value, str) and text in _OTHER_SPELLINGS):
            return text == "true"
        # Offered, not accepted: 1 may mean a level, and "on" a choice of another program.
        meant = next((f"; use {name}" for name, words in _OTHER_SPELLINGS.items() if text in words), "")
        raise WrongValue(f"{_MISFITS[bool]}{or_null}{meant}")
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        if kind is Any:
            return value
        with contextlib.suppress(ValueError, OverflowError):
            converted = kind(value)
            if kind is float and not math.isfinite(converted):
                raise WrongValue(f"is not finite{or_null}")
            if kind is not int or isinstance(value, str) or converted == value:
                return converted
    raise WrongValue(f"{_MISFITS[kind]}{or_null}")


def _choice(value: Any, key: Key) -> Any:
    if isinstance(value, str) and value in key.choices:
        return key.kind[value]
    text = str(value)
    by_value = {str(member.value).lower(): member.name for member in key.kind}
    nearest = by_value.get(text.lower()) or nearest_name(text, key.choices)
    allowed = ", ".join(key.choices) + (" or null" if key.optional else "")
    raise WrongValue(f"is not one of {allowed}{did_you_mean(nearest)}")


def _member(value: Any, key: Key, what: str) -> Any:
    """An element of a list, or an entry of a mapping."""
    try:
        return _scalar(value, key.item)
    except WrongValue as wrong:
        raise WrongValue(f"has {what}={show(value)} {wrong}") from None


def largest_value(path: str) -> int:
    """The largest integer that a key takes."""
    return _LARGEST_OF.get(path.rpartition(".")[2], _ANY)


def convert(value: Any, key: Key) -> Any:
    """A value as the type of its key.

    Raises:
        WrongValue: It does not fit.
    """
    if value is None:
        if key.optional:
            return None
        raise WrongValue(f"may not be null; it takes: {key.type_text}")
    if key.kind is list:
        value = [value] if isinstance(value, str) and value == _WORDS.get(key.path) else value
        if not isinstance(value, list):
            raise WrongValue(f"is not a list; write {key.path}=[…] with {TYPE_NAMES[key.item]}s")
        return [_member(item, key, f"an element that does not fit: [{index}]") for index, item in enumerate(value)]
    if key.kind is dict:
        if not isinstance(value, dict):
            raise WrongValue(f"is not a mapping; write {key.path}.NAME=… with a {TYPE_NAMES[key.item]}")
        return {str(name): _member(item, key, f"an entry that does not fit: {name}") for name, item in value.items()}
    converted = _choice(value, key) if key.choices else _scalar(value, key.kind, " or null" if key.optional else "")
    if key.kind is int and abs(converted) > (largest := largest_value(key.path)):
        raise WrongValue(f"is beyond any run; use {largest} or less")
    if key.kind is float and abs(converted) > _LARGEST_NUMBER:
        raise WrongValue(f"is beyond any run; use {_LARGEST_NUMBER:g} or less")
    return converted


def read_value(text: str, key: Key) -> Any:
    """The value of a command's argument; strings, including those in a list, are taken literally.

    Raises:
        ConfigError: The value does not fit.
    """
    value: str | list[str] | None = None if text == "null" and key.optional else text
    if key.kind is list and text.startswith("[") and text.endswith("]"):
        value = next(csv.reader([text[1:-1]], skipinitialspace=True), [])
    try:
        return convert(value, key)
    except WrongValue as wrong:
        raise ConfigError([f"{key.path}={text} {wrong}"]) from None
