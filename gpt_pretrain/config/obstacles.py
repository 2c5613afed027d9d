"""What an optimisation does not go with: refused where it is asked for, and a reason for `null` to leave it out."""

from collections.abc import Iterable, Iterator

# A setting, and why the optimisation does not go with it.
type Obstacle = tuple[str, str]


def refusals(asked: str, obstacles: Iterable[Obstacle], instead: str) -> Iterator[str]:
    """A problem for each obstacle.

    Args:
        asked: The setting that asks for the optimisation, `model.key=value`.
        obstacles: What it does not go with here.
        instead: Its values that would go.
    """
    for setting, why in obstacles:
        yield f"{asked} does not go with {setting}: {why}; use {instead}"
