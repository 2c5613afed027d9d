"""What is known of a key besides its type and help: facts that stand on its field of the schema.

    rotary_base: int = key(minimum=1, identity="model", aliases=["rope_theta"])

Rules, `--help`, loading, plan and compare read them from `config.keys.Key.facts`. A misspelt fact does not import, and
tests/test_config_schema.py compares every name and value in a fact with the schema.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, get_args

type Identity = Literal["data", "batch", "tokenizer", "model"]
NOT_TOLD: Any = object()
"""In place of a value, where null is one."""
IDENTITIES: tuple[Identity, ...] = get_args(Identity.__value__)


@dataclass(frozen=True, slots=True)
class Unread:
    """A setting of another key with which nothing reads this one."""

    key: str
    """The other key, dotted from the root."""
    values: tuple[Any, ...]
    are_needed: bool
    """Whether this key is read only with these values, or read unless the other key has one of them."""
    because: str
    """What follows the other setting in messages."""
    instead: str
    """The way out, after "use", with {key} and {idle} for this key and its first idle value. Empty: only the command
    line shows that the key is wanted, and there it is left out."""

    def applies(self, value: Any) -> bool:
        """Whether nothing reads this key where the other one has this value."""
        return (value in self.values) is not self.are_needed


def unread_with(key: str, *values: Any, because: str = "", instead: str = "") -> Unread:
    """Nothing reads the key where another one has one of these values."""
    return Unread(key, values, False, because, instead)


def read_with(key: str, *values: Any, because: str = "", instead: str = "") -> Unread:
    """The key is read only where another one has one of these values."""
    return Unread(key, values, True, because, instead)


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The facts of one key; null is in every range."""

    help: str = ""
    """Its help; empty: the string below the field."""
    minimum: float | None = None
    """The smallest value."""
    above: float | None = None
    """A bound that values exceed."""
    below: float | None = None
    """A bound that values stay below."""
    maximum: float | None = None
    """The largest value."""
    use: str = ""
    """Values that a refusal offers; by default the range itself."""
    why: str = ""
    """Why values outside of the range are refused."""
    largest: int = 2**53
    """The largest integer: far above any run, yet small enough for every rule, forecast and index to answer at once. By
    default a floating-point number holds it exactly."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Choices of other programs that are not here, with the reasons."""
    word: str | None = None
    """A word that may stand for a list of only this word."""
    default: Any = NOT_TOLD
    """For an argument of a command that may be left out; the configuration has its values in conf/."""
    before: Any = NOT_TOLD
    """What configurations without the key mean, which runs of earlier versions have saved. Every new key has it:
    otherwise `export` and `generate` would refuse all checkpoints that were saved before."""
    core: Sequence[str] = ()
    """Fields of megatron-core's configs that take the value as it is: "OptimizerConfig.adam_eps", or "OptimizerConfig"
    for its field of the key's name. They keep megatron-core's defaults where nothing reads the key."""
    aliases: Sequence[str] = ()
    """Its names in NeMo, Megatron-LM, Hugging Face's Trainer and configurations, and torchtitan, as the last part of an
    unknown key, or as the whole of it if they have a dot. The closest spelling finds most other names."""
    identity: Identity | None = None
    """What two runs must share for their losses to be comparable, if the key is a part of it."""
    planned: bool = False
    """Whether the plan shows what becomes of the key."""
    idle: Sequence[Any] | None = None
    """Values that ask for nothing where nothing reads the key. None: no value if `unread` has no way out; otherwise
    `before`, or null, false and empty without it."""
    unread: Sequence[Unread] = ()
    """What leaves nothing to read the key; the first that applies is told."""

    @property
    def has_range(self) -> bool:
        """Whether some numbers are refused."""
        return not (self.minimum is self.above is self.below is self.maximum is None)

    def range_problem(self, value: Any) -> str | None:
        """What is wrong with a number, and what to use, as a message says it after the setting; None in the range."""
        low = (self.minimum is not None and value < self.minimum) or (self.above is not None and value <= self.above)
        high = (self.below is not None and value >= self.below) or (self.maximum is not None and value > self.maximum)
        if not (low or high):
            return None
        wrong = "is out of range"
        if self.below is self.maximum is None:
            wrong = "is not positive" if self.above == 0 else "is too small"
        return f"{wrong}{self.why and f': {self.why}'}; use {self.use or self.range_text()}"

    def range_text(self) -> str:
        """The range in words: "1 or more", "0 up to below 1"; empty without one."""
        if not self.has_range:
            return ""
        low = f"above {self.above:g}" if self.minimum is None else f"{self.minimum:g}"
        if self.below is not None:
            return f"{low} up to below {self.below:g}"
        if self.maximum is not None:
            return f"{low} up to {self.maximum:g}"
        return low if self.minimum is None else f"{low} or more"


def _fields_with[**P](facts: Callable[P, Facts]) -> Callable[P, Any]:
    def key(*args: P.args, **kwargs: P.kwargs) -> Any:
        made = facts(*args, **kwargs)
        return field(default=MISSING if made.default is NOT_TOLD else made.default, metadata={"facts": made})

    return key


key = _fields_with(Facts)
"""A field with facts in a dataclass of keys; it takes the fields of `Facts`."""
NO_FACTS = Facts()
