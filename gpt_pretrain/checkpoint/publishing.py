"""How a checkpoint comes into a run's directory in one piece, and which others go then.

Names that begin with a dot are of what is being written or removed: nothing reads them, and whatever a killed process
has left of them goes at the next save.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.checkpoint.directory import POINTER, checkpoint_path, complete_checkpoints, step_of
from gpt_pretrain.checkpoint.durable import fsync, write_durably

_UNFINISHED, _REMOVED = ".unfinished", ".removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints of a run stay once another is complete."""

    keep_last: int | None
    """How many of those saved last; None: all."""
    keep_every: int | None
    """Those of steps that it divides stay for ever; None: none."""

    def superseded(self, complete: list[Path]) -> list[Path]:
        """What goes of the checkpoints that are there, in the order in which they were saved; never the last."""
        if self.keep_last is None:
            return []
        return [path for path in complete[: -self.keep_last] if not self._stays(path)]

    def _stays(self, path: Path) -> bool:
        return self.keep_every is not None and step_of(path) % self.keep_every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a checkpoint goes."""

    directory: Path
    """The run's checkpoints, `RUN_DIR/checkpoints`."""
    step: int
    retention: Retention

    @property
    def path(self) -> Path:
        """The checkpoint's own directory."""
        return checkpoint_path(self.directory, self.step)

    @property
    def unfinished(self) -> Path:
        """Where it is written, until it is complete."""
        return self.directory / f".{self.path.name}{_UNFINISHED}"

    def clear(self) -> None:
        """Makes the run's directory of checkpoints, and removes what killed saves have left in it.

        Raises:
            OSError: It cannot be made.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for suffix in (_UNFINISHED, _REMOVED):
            for left in self.directory.glob(f".step_*{suffix}"):
                shutil.rmtree(left, ignore_errors=True)

    def publish(self) -> None:
        """Gives the complete checkpoint its name, makes `latest` name it, and removes those that it supersedes.

        What has its name already is replaced.

        Raises:
            OSError: A name cannot be changed; `latest` names a complete checkpoint in any case.
        """
        fsync(self.unfinished)
        replaced = out_of_the_way(self.path) if self.path.exists() else None
        self.unfinished.rename(self.path)
        fsync(self.directory)
        write_durably(self.directory / POINTER, self.path.name + "\n")
        # The new one is the last, whatever a clock that was set back says.
        others = [other for other in complete_checkpoints(self.directory) if other != self.path]
        superseded = self.retention.superseded([*others, self.path])
        for left in filter(None, [replaced, *(out_of_the_way(old) for old in superseded)]):
            # A file that cannot be removed now is tried again at the next save.
            shutil.rmtree(left, ignore_errors=True)


def out_of_the_way(path: Path) -> Path:
    """Renames a checkpoint that is to be removed, in one step, so that a half removed one is never taken for a whole.

    Returns:
        Its new name, which the next save removes if nobody else does.

    Raises:
        OSError: It cannot be renamed.
    """
    removed = path.with_name(f".{path.name}{_REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    return path.rename(removed)
