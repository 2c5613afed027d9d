"""Small whole runs of the application for tests: the overrides that make them small, and what they left behind."""

import email
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from gpt_pretrain.report.metrics_file import Metrics, load_metrics
from tests.forked_runs import fork_ranks
from tests.launching import gpu_environment, run_ranks

# A model of four layers that learns something in twenty steps.
SMALL_RUN = (
    "data=text",
    "model.data.splits_string='700,300,0'",
    "model.tokenizer.vocab_size=320",
    "model.vocab_size=384",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.encoder_seq_length=64",
    # Two microbatches in a step, which cost the same whatever is in them.
    "model.micro_batch_size=4",
    "model.global_batch_size=8",
    "model.optim.lr=2e-3",
    "trainer.max_steps=20",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=10",
    "trainer.limit_val_batches=2",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
)

# The same with dimensions that Transformer Engine's kernels are made for: heads of 64, everything a multiple of 16.
# Their microbatches leave each of four ranks one.
SMALL_GPU_RUN = (
    "model.micro_batch_size=2",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.encoder_seq_length=128",
    "trainer.limit_val_batches=0",
    "checkpoint.save_at_end=false",
)


# The fixtures `trained` and `run_dir` hold such a run.
SAVED = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "checkpoint.save_at_end=true")


def run_small(
    num_ranks: int, run_dir: Path, cache_dir: Path, overrides: Sequence[str] = (), *, on_gpus: bool = False
) -> Metrics:
    """Trains a small run to its end, on CPUs or with a GPU for each rank, and returns what it logged."""
    arguments = small_run_arguments(run_dir, cache_dir, overrides)
    if on_gpus:
        done = run_ranks(num_ranks, arguments, env=gpu_environment(num_ranks))
    else:
        done = fork_ranks(num_ranks, arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return load_metrics(run_dir)


def means_of_ten(losses: Sequence[float]) -> list[float]:
    """Means of each ten steps, as a run logs by default: single ones jitter by up to 1% where a curve is steepest."""
    return [mean(losses[start : start + 10]) for start in range(0, len(losses), 10)]


def small_run_arguments(run_dir: Path, cache_dir: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Arguments of Python or torchrun for a small run on real text that no change of this repository changes."""
    small = SMALL_RUN
    if [each for each in overrides if "limit_val_batches=" in each][-1:] == ["trainer.limit_val_batches=0"]:
        # Without validation its interval would be refused.
        small = tuple(override for override in small if not override.startswith("trainer.val_check_interval="))
    return ["-m", "gpt_pretrain", *small, *small_corpus(cache_dir), f"run_dir={run_dir}", *overrides]


def small_corpus(cache_dir: Path) -> list[str]:
    """Overrides for the sources of Python's `email`, with data=text."""
    corpus = cache_dir / "sources.jsonl"
    if not corpus.exists():
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path(email.__file__).parent.rglob("*.py"))]
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text), encoding="utf-8")
    return [f"model.data.text_files=[{corpus}]", f"model.data.cache_dir={cache_dir}"]
