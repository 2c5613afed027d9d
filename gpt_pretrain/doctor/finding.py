"""A finding: something on this machine that does not work as it should, and the way out."""

from dataclasses import dataclass
from enum import Enum


class Blocks(Enum):
    """What a finding keeps from working."""

    training = "training"
    fp8 = "fp8"
    nothing = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that does not work as it should."""

    about: str
    """Library, variable or part of the machine: the subject of the sentence."""
    what: str
    """The rest of the sentence: what is so, and what follows from it; no full stop."""
    fix: str | None
    """A command for a shell; None where a shell cannot mend it, and `what` says who can."""
    blocks: Blocks


WHO_HAS_IT = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
"""Names the processes that hold a GPU."""


def is_taken(problem: str) -> bool:
    """Whether a GPU fails for what other processes do with it, and no library is to blame."""
    return "out of memory" in problem or "busy or unavailable" in problem
