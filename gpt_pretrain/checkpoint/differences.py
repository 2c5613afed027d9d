"""What a run has otherwise than the checkpoint that it resumes from, in the words of the command line."""

from collections.abc import Mapping


def differences(current: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """The keys of `current` whose saved values are others, as `key=value (saved with value)`; empty where none is."""
    return ", ".join(
        f"{key}={value} (saved {f'with {saved[key]}' if key in saved else 'without it'})"
        for key, value in current.items()
        if value != saved.get(key)
    )
