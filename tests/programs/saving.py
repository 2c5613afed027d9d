"""Two ranks save a tiny GPT with a distributed optimizer, in several ways: FOLDER.

Rank r writes FOLDER/r.json: by case, what came of the save, and at which of its polls the rank knew.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt_pretrain.checkpoint import writing
from gpt_pretrain.checkpoint.manifest import FileDigest, TrainingProgress
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import TINY, build_training

OVERRIDES = ("parallelism=dp", "model.micro_batch_size=1")
RANK = int(os.environ["RANK"])


@contextmanager
def rank_1_has(module: Any, name: str, other: Any) -> Iterator[None]:
    original = getattr(module, name)
    if RANK == 1:
        setattr(module, name, other(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def full_disk(original):
    def write_file(path, items):
        raise OSError(28, "No space left on device", str(path))

    return write_file


def slow_disk(original):
    def write_file(path, items):
        time.sleep(0.3)
        return original(path, items)

    return write_file


def disk_of_its_own(original):
    def write_file(path, items):
        _, results = original(path, items)
        path.unlink()
        return FileDigest(num_bytes=1, sha256=""), results

    return write_file


def little_memory(original):
    def copy(self, share):
        raise MemoryError("it is full")

    return copy


CASES = {
    "good": (writing, "_write_file", lambda original: original),
    "full disk": (writing, "_write_file", full_disk),
    "slow disk": (writing, "_write_file", slow_disk),
    "disk of its own": (writing, "_write_file", disk_of_its_own),
    "little memory": (writing.HostBuffer, "copy", little_memory),
}


def main() -> None:
    folder, told = Path(sys.argv[1]), {}
    install_cpu_device()
    with process_groups(load_config([*TINY, *OVERRIDES]).model, read_launch(), detect_platform()):
        training = build_training(*OVERRIDES)
        training.step()
        with CheckpointSaver(folder / "checkpoints", training.trainable, training.config, {}) as saver:
            for step, (name, sabotage) in enumerate(CASES.items(), start=1):
                with rank_1_has(*sabotage):
                    with training.trainable.model.newest_parameters():
                        outcomes = saver.save(TrainingProgress(step=step, consumed_samples=4 * step))
                    num_polls = 0
                    while not outcomes:
                        outcomes = saver.poll()
                        num_polls += 1
                        time.sleep(0.01)
                (outcome,) = outcomes
                told[name] = {"problem": outcome.problem, "num_polls": num_polls, "num_bytes": outcome.num_bytes}
    (folder / f"{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
