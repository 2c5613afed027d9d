"""What a proof looks at: ranks and proofs take turns, so that each costs seconds, and all comes round.

A proof looks at every layer and product, in one microbatch of each rank, and at a part of each large tensor. Numbers
with a common divisor would leave pairs out, so a proof's number is read as digits: microbatches change fastest, and
parts move on when every microbatch has been looked at. Each rank is one step ahead of the one before.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one rank looks at in one proof."""

    number: int
    """The proofs of the run before this one, the same on all ranks."""
    rank: int
    num_microbatches: int

    @property
    def microbatch(self) -> int:
        """The microbatch, from 0: each comes round in `num_microbatches` proofs."""
        return (self.number + self.rank) % self.num_microbatches

    @property
    def part(self) -> int:
        """Counts the parts of tensors: of n parts, part p is looked at where this is p modulo n.

        Each part is looked at in each microbatch in n · `num_microbatches` proofs.
        """
        return self.number // self.num_microbatches + self.rank
