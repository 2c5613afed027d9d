"""What a run has otherwise than the checkpoint that it resumes from, in the words of the command line."""

from collections.abc import Mapping

# Checkpoints of earlier versions hold Python's names of these values.
_AS_WRITTEN = {"None": "null", "True": "true", "False": "false"}


def differences(current: Mapping[str, str], saved: Mapping[str, str]) -> str:
    """The keys of `current` whose saved values are others, as `key=value (saved with value)`; empty where none is."""
    saved = {key: _AS_WRITTEN.get(value, value) for key, value in saved.items()}
    return ", ".join(
        f"{key}={value} (saved {f'with {saved[key]}' if key in saved else 'without it'})"
        for key, value in current.items()
        if value != saved.get(key)
    )
