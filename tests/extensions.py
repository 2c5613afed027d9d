"""Extensions for tests: modules in a folder of their own, imported by processes that find them there."""

import os
import textwrap
from pathlib import Path

from tests.forked_runs import fork_ranks
from tests.launching import REPOSITORY

# Random tokens, a layer of 32 and steps of 64 tokens.
TINY = (
    "data=mock",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.vocab_size=64",
    "model.encoder_seq_length=32",
    "model.micro_batch_size=1",
    "model.global_batch_size=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "logging.tensorboard=false",
)


def write_module(folder: Path, source: str, name: str = "lab") -> Path:
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def run_extended(folder, *arguments, num_ranks=1, module="gpt_pretrain", start=fork_ranks):
    """Runs a command whose Python also finds the modules of a folder outside the checkout."""
    path = os.pathsep.join([str(REPOSITORY), str(folder)])
    return start(num_ranks, ["-m", module, *arguments], env={"PYTHONPATH": path})
