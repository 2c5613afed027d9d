"""What becomes of a configuration of another program: our keys, and everything that has none.

A program is a table from its names to rows, and functions for what depends on several of them (`TOGETHER`):

    "hidden_size": Becomes("model.hidden_size")
    "normalization": Becomes("model.normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
    "fp32_residual_connection": NotHere("the residual stream was fp32", "it has the type of the weights")
    "log_throughput log_progress": NoNeed("every record has the throughput")
    "model.seed .micro_batch_size": SAME
    "profiling.*": NoNeed("python -m gpt_pretrain.benchmark times a run")

One row may be that of several names, and a name that begins with a dot is in the section of the one before it.

Values are effective: a default of the other program counts as much as what was written, because ours may differ.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpt_pretrain.config.errors import ConfigError, reason, show
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.translate.shell_words import UNKNOWN
from gpt_pretrain.translate.structured_files import read_value, with_options

ANOTHER_MODEL = "there is no such layer: the result is another model"
"""What stands in place of a setting without which the model is not the same."""


class Untranslatable(ValueError):
    """A value without a counterpart here; the message says what this program does instead."""


@dataclass(frozen=True, slots=True)
class Becomes:
    """A setting that becomes a key of ours."""

    key: str
    values: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    """Ours for theirs, or a function that may raise `Untranslatable`; None: the same."""
    only_given: bool = False
    """Whether the other program's default says nothing: what is faster is chosen here."""
    there: str = ""
    """What values that are not in `values` did."""
    here: str = "it has no such value"
    """What this program does instead of them."""


@dataclass(frozen=True, slots=True)
class NotHere:
    """A setting without counterpart: what it did, what differs here, and the values that ask for nothing."""

    there: str
    here: str
    idle: tuple[Any, ...] = (None, False)


@dataclass(frozen=True, slots=True)
class NoNeed:
    """A setting that this program does not need, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Together:
    """A setting that a function of the format translates, with others."""


WINDOW = NotHere("attention saw a sliding window", "model.window_size=[TOKENS - 1,0] asks for one of TOKENS")
"""Of a window's size alone: which layers have it, other settings say."""
type Row = Becomes | NotHere | NoNeed | Together
TOGETHER = Together()
SAME = Becomes("")
"""In a table: a key of ours has the same name."""


def names(text: str) -> list[str]:
    """Names that white space separates; one that begins with a dot is in the section of the one before it."""
    found: list[str] = []
    for word in text.split():
        found.append(f"{found[-1].partition('=')[0].rpartition('.')[0]}{word}" if word.startswith(".") else word)
    return found


def table(rows: Mapping[str, Row]) -> dict[str, Row]:
    """One row a name, of rows that several have."""
    return {name: Becomes(name) if row is SAME else row for several, row in rows.items() for name in names(several)}


def becomes(text: str) -> dict[str, Row]:
    """Rows of `their_name=our.key` words, for values that are the same; their names as in a table."""
    return {name: Becomes(key) for name, key in (word.split("=") for word in names(text))}


def defaults(text: str) -> dict[str, Any]:
    """Values of `name=value` words as YAML has them; names as in a table."""
    found = dict(word.split("=", 1) for word in names(text))
    return {name: read_value(value) for name, value in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A configuration of another program as it has been read."""

    program: str
    values: Mapping[str, Any]
    """Effective values by the program's names, dotted where it has sections."""
    given: Mapping[str, str]
    """Names that were given, each as it was written: "--hidden-size 4096"."""
    described: Callable[[str], str] = lambda name: ""
    """What a setting does there, for one that no table has."""
    numbers: Collection[str] = ()
    """Settings that have a number, or none, beside those that become numbers of ours."""
    default: Callable[[str, Any], str] = lambda name, value: f"{name}={show(value)}"
    """A default as the program would write it."""

    def shown(self, name: str) -> str:
        """A setting for the report."""
        if name in self.given:
            return self.given[name]
        return f"{self.default(name, self.values.get(name))} ({self.program}'s default)"

    def get(self, name: str, default: Any = None) -> Any:
        """A value; `default` if there is none."""
        return self.values.get(name, default)

    def first(self, *names: str) -> str:
        """The first of several names that is there; empty if none is."""
        return next((name for name in names if name in self.values), "")


@dataclass(frozen=True, slots=True)
class Setting:
    """The effective value of one of our keys, with enums by name, and where it comes from."""

    value: Any
    origin: str
    given: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A setting without counterpart."""

    setting: str
    there: str
    here: str

    @property
    def changes_model(self) -> bool:
        """Whether the model is another one without it."""
        return self.here == ANOTHER_MODEL

    @property
    def text(self) -> str:
        """All of it as one item of a list."""
        return f"{self.setting}: {self.there}{'; ' if self.there else ''}here {self.here}"


@dataclass(kw_only=True)
class Translation:
    """What a configuration becomes."""

    program: str
    name: str
    source: Source = field(default_factory=lambda: Source(program="", values={}, given={}))
    """What is translated, from `translate_source` on."""
    preset: str | None = None
    """The preset that is the other program's model, if it only names it; "base", with open sizes, if none is."""
    settings: dict[str, Setting] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    not_needed: list[tuple[str, str]] = field(default_factory=list)
    """Settings and why nothing stands for them."""
    up_to_you: list[tuple[str, str]] = field(default_factory=list)
    """Keys of ours that the user has to give, and why."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, and numbers that were derived."""

    def set(self, key: str, value: Any, origin: str, *, given: bool = True) -> None:
        """Sets a key of ours; the last setting counts. A value that is known elsewhere alone is up to the user."""
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and (UNKNOWN.search(text) or "${" in text) for text in texts):
            self.up_to_you.append((key, origin))
        else:
            self.settings[key] = Setting(value, origin, given)

    def derive(self, key: str, value: Any, *names: str, how: str = "") -> None:
        """Sets a key from settings that belong together; `how` says by what calculation."""
        given = [name for name in names if name in self.source.given]
        origin = ", ".join(map(self.source.shown, given or names[:1]))
        self.set(key, value, f"{origin}{how and f': {how}'}", given=bool(given))

    def take(self, key: str, name: str) -> None:
        """Sets a key to the value of a setting."""
        self.derive(key, self.source.get(name), name)

    def lose(self, setting: str, there: str, here: str) -> None:
        """Reports a setting without counterpart."""
        self.lost.append(Lost(setting, there, here))

    def texts(self) -> Iterator[str]:
        """Every text of the lists that names a setting of the other program."""
        yield from (setting.origin for setting in self.settings.values())
        yield from (lost.setting for lost in self.lost)
        yield from (setting for setting, _ in self.not_needed)
        yield from (text for pair in self.up_to_you for text in pair)
        yield from self.notes

    def value(self, key: str, default: Any = None) -> Any:
        """The value of one of our keys so far."""
        return self.settings[key].value if key in self.settings else default


def row_of(rows: Mapping[str, Row], name: str) -> Row | None:
    """The row of a name, or of its longest beginning that has one (`profiling.*`)."""
    if name in rows:
        return rows[name]
    beginnings = (f"{name[:length]}*" for length in range(len(name), -1, -1))
    return next((rows[each] for each in beginnings if each in rows), None)


_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def _applied(row: Becomes, value: Any) -> Any:
    if row.values is None:
        return value
    if callable(row.values):
        return row.values(value)
    if value not in row.values:
        raise Untranslatable(row.here)
    return row.values[value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What there is to know of a program whose configuration is files of settings."""

    name: str
    rows: Mapping[str, Row]
    derive: Callable[[Source, Translation], None]
    """Translates what depends on several settings."""
    marks: Sequence[str]
    """A YAML or JSON file of it has one name at least of each text."""
    words: Callable[[Mapping[str, Any], Sequence[str]], tuple[dict[str, Any], dict[str, str]]] | None = with_options
    """How its command line changes values (`structured_files`); None: it does not."""
    json_section: str = ""
    """The section that a JSON file is."""
    complete: str = ""
    """A setting of every whole configuration; without it, what is given is translated alone."""
    prepare: Callable[["Source", "Translation"], "Source"] = lambda source, translation: source
    """Brings settings into the form that the rows have."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of today by those of earlier versions."""
    numbers: Collection[str] = ()
    """Settings that have a number, or none, beside those that become numbers of ours."""


@contextmanager
def other_kinds_refused(program: str) -> Iterator[None]:
    """Says of a value that no calculation takes that it is of another kind."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
        told = f"a setting has a value of another kind than {program} takes"
        raise ConfigError([f"{told}, and the others could not be translated: {reason(error)}"]) from error


def translate_source(
    rows: Mapping[str, Row], derive: Callable[[Source, Translation], None], source: Source, translation: Translation
) -> None:
    """Translates every setting by its row, or together with others; every one that was given is in a list.

    Raises:
        ConfigError: A value has another kind than the other program takes.
    """
    if wrong := [source.shown(name) for name in source.given if _is_no_number(name, rows, source)]:
        raise ConfigError([f"{setting} is no number, which {source.program} takes here" for setting in wrong])
    translation.source = source
    with other_kinds_refused(source.program):
        _apply_rows(rows, source, translation)
        derive(source, translation)
    texts = "\n".join(translation.texts())
    for name, shown in source.given.items():
        if shown not in texts:
            translation.not_needed.append((source.shown(name), "nothing reads it beside the other settings"))


def _is_no_number(name: str, rows: Mapping[str, Row], source: Source) -> bool:
    """Whether a setting has something else where a number belongs."""
    row, value = row_of(rows, name), source.values.get(name)
    if isinstance(row, Becomes) and row.values is None:
        numeric = schema_keys()[row.key].kind in (int, float)
    else:
        numeric = name in source.numbers
    is_known = not isinstance(value, str) or not (UNKNOWN.search(value) or "${" in value or value in ("auto", "???"))
    return (
        numeric and is_known and value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
    )


def _apply_rows(rows: Mapping[str, Row], source: Source, translation: Translation) -> None:
    for name, value in source.values.items():
        row, given = row_of(rows, name), name in source.given
        match row:
            case Becomes():
                if row.only_given and not given:
                    continue
                try:
                    ours = _applied(row, value)
                    if ours is not None or schema_keys()[row.key].optional:
                        translation.set(row.key, ours, source.shown(name), given=given)
                except Untranslatable as error:
                    translation.lose(source.shown(name), row.there or source.described(name), str(error))
            case NotHere() if not any(value is idle or value == idle for idle in row.idle):
                translation.lose(source.shown(name), row.there, row.here)
            case NotHere() | NoNeed() if given:
                why = row.why if isinstance(row, NoNeed) else "it asks for nothing"
                translation.not_needed.append((source.shown(name), why))
            case None if given and value in _NOTHING:
                translation.not_needed.append((source.shown(name), "it asks for nothing"))
            case None if given:
                translation.lose(source.shown(name), source.described(name), "nothing does it")
