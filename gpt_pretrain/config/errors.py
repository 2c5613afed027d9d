"""What a user can mend. The entry point prints these without a traceback and exits with code 2."""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in what the user gave: the message names the key or file, the value, the rule and the way out."""


class ConfigError(UserError):
    """One or more configuration mistakes, listed together so that they can be mended together.

    Args:
        problems: One message per mistake; never empty.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ConfigError lists at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """What ended a run and is no mistake in what was given: printed without a traceback, exit code 1."""
