"""The products of the watched step against the plan: of each rank, and of all ranks together.

A rank must have computed every planned product itself. The one exception are its experts where no token came to any of
them: it has called their grouped product for no rows, which computes nothing in any format. That product is proven by
the ranks whose experts had tokens, and if there are none, by nobody.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpt_pretrain.fp8.gemms import CODE_TYPES, Phase, Product
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import Linear

# A linear layer's name in the whole model, and one of its products.
type _Key = tuple[str, Phase]
type _Formats = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that is not as planned."""

    module: str
    what: str
    planned: str
    live: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What a rank's products are against the plan."""

    differences: tuple[Difference, ...]
    as_planned: frozenset[_Key]
    """Products that this rank has computed, in the planned formats."""
    idle: Mapping[_Key, Difference]
    """Products that it has called for no rows alone: what differs if no other rank has computed them."""


class WatchedProducts:
    """Notes what the linear layers of this rank compute.

    Args:
        settings: The FP8 of the run.
        high: Type of what is not in FP8: "bfloat16".
    """

    def __init__(self, settings: Fp8Settings, high: str) -> None:
        self._settings = settings
        self._high = high
        self._formats: dict[_Key, set[_Formats]] = defaultdict(set)
        self._idle: set[_Key] = set()

    def note(self, module: str, product: Product) -> None:
        """A product that is computed."""
        self._formats[module, product.phase].add(product.formats)

    def note_idle(self, module: str, phase: Phase) -> None:
        """A grouped product that is called for no rows."""
        self._idle.add((module, phase))

    def compare(self, planned: Mapping[str, Linear]) -> Compared:
        """Compares with the linear layers of this rank, by their names in the whole model."""
        differences, as_planned, idle = [], set(), {}
        for name, linear in planned.items():
            for phase, formats in self._planned_formats(linear).items():
                live = self._formats.get((name, phase), set())
                difference = Difference(module=name, what=phase.value, planned=_listed({formats}), live=_listed(live))
                if live == {formats}:
                    as_planned.add((name, phase))
                elif live:
                    differences.append(difference)
                elif (name, phase) in self._idle:
                    idle[name, phase] = difference
                # Layers that never compute in FP8 need not report what they do.
                elif linear.precision == "fp8":
                    differences.append(difference)
        differences += self._unplanned(planned)
        return Compared(differences=tuple(differences), as_planned=frozenset(as_planned), idle=idle)

    def _unplanned(self, planned: Mapping[str, Linear]) -> Iterator[Difference]:
        for (name, phase), formats in self._formats.items():
            if name not in planned and any(part in CODE_TYPES for pair in formats for part in pair):
                yield Difference(module=name, what=phase.value, planned="not in FP8", live=_listed(formats))

    def _planned_formats(self, linear: Linear) -> dict[Phase, _Formats]:
        forward, gradient = self._settings.forward_format, self._settings.gradient_format
        if linear.precision != "fp8":
            forward = gradient = self._high
        formats = {
            Phase.forward: (forward, forward),
            Phase.dgrad: (gradient, forward),
            Phase.wgrad: (gradient, forward),
        }
        if linear.wgrad_precision != "fp8":
            formats[Phase.wgrad] = (self._high, self._high)
        return formats


def differences_of_ranks(ranks: Sequence[Compared]) -> list[Difference]:
    """What differs on any rank, each once; an idle product only where no rank has computed it as planned."""
    computed = {key for rank in ranks for key in rank.as_planned}
    found = [difference for rank in ranks for difference in rank.differences]
    found += [difference for rank in ranks for key, difference in rank.idle.items() if key not in computed]
    return list(dict.fromkeys(found))


def _listed(formats: set[_Formats]) -> str:
    return " and ".join(sorted(f"{first} × {second}" for first, second in formats)) or "no such product"
