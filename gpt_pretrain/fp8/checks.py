"""Comparisons of numbers on the device, collected during a step and read once at its end."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpt_pretrain.fp8.observer import Difference


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """A comparison whose numbers are on the device."""

    module: str
    what: str
    planned: str
    """With places for the numbers, like `live`."""
    live: str
    numbers: torch.Tensor
    """fp64 [3]: above 0 where they differ, the number expected, the number found."""


def _numbers(off: torch.Tensor, expected: torch.Tensor | float, found: torch.Tensor | float) -> torch.Tensor:
    return torch.stack(
        [torch.as_tensor(each, device=off.device).double().reshape(()) for each in (off, expected, found)]
    )


class Checks:
    """The comparisons of one step."""

    def __init__(self) -> None:
        self._checks: list[_Check] = []

    def add(
        self,
        module: str,
        what: str,
        off: torch.Tensor,
        expected: torch.Tensor | float,
        found: torch.Tensor | float,
        *,
        planned: str = "{0:.6g}",
        live: str = "{1:.6g}",
    ) -> None:
        """Adds a comparison.

        `off`, [], is above 0, or NaN, where it differs. `planned` and `live` are texts with places for both numbers.
        """
        numbers = _numbers(off, expected, found)
        self._checks.append(_Check(module=module, what=what, planned=planned, live=live, numbers=numbers))

    def add_fault(self, module: str, what: str, planned: str, live: str) -> None:
        """Adds what is known to differ."""
        fault = torch.ones(3, dtype=torch.float64, device=torch.cuda.current_device())
        self._checks.append(_Check(module=module, what=what, planned=planned, live=live, numbers=fault))

    def differences(self) -> Iterator[Difference]:
        """The first difference of each kind in each layer."""
        if not self._checks:
            return
        told: set[tuple[str, str]] = set()
        for check, (off, *numbers) in zip(
            self._checks, torch.stack([check.numbers for check in self._checks]).tolist(), strict=True
        ):
            if (off > 0 or math.isnan(off)) and (check.module, check.what) not in told:
                told.add((check.module, check.what))
                expected, found = numbers
                yield Difference(
                    module=check.module,
                    what=check.what,
                    planned=check.planned.format(expected, found),
                    live=check.live.format(expected, found),
                )
