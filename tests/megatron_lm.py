"""The same training twice: by Megatron-LM, with the command line and the weights that we write for it, and by us."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.export import main as export_main
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.translate.to_megatron_lm import command_line
from tests.forked_runs import fork_ranks
from tests.token_files import write_token_file

STEPS = 20
# Llama's layers and GPT-2's, small, with sizes that FP8 takes.
_SIZES = (
    "model.num_layers=3",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.vocab_size=300",
    "model.encoder_seq_length=64",
    "model.max_position_embeddings=64",
    "model.micro_batch_size=2",
    "model.global_batch_size=8",
    "model.optim.lr=1e-3",
    "model.optim.sched.warmup_steps=5",
)
MODELS = {
    "llama": ("model=llama3_8b", *_SIZES, "model.num_query_groups=2"),
    "gpt2": ("model=gpt2_124m", *_SIZES),
}
_RUN = (
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=0",
    "trainer.validate_at_start=false",
    "model.data.splits_string='1,0,0'",
    "checkpoint.save_at_end=false",
    "checkpoint.save_interval_minutes=null",
    "checkpoint.allow_data_change=true",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
)
# Half of the last digit that Megatron-LM logs, of a loss above 1; step 2 is made of two logged numbers.
LOGGED = 3 * 5e-7


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Both programs' commands for one training."""

    config: Config
    ours: Sequence[str]
    """What follows Python, but for `run_dir`."""
    theirs: Sequence[str]

    def check(self, theirs: Sequence[float], ours: Sequence[float], tolerances: Sequence[float]) -> None:
        """Fails where losses lie farther apart than the number format explains, or nothing was learned."""
        assert len(theirs) == len(ours) == STEPS
        assert ours[-1] < ours[0] - 0.5
        for step, (one, other, tolerance) in enumerate(zip(theirs, ours, tolerances, strict=True), 1):
            assert one == pytest.approx(other, rel=tolerance + LOGGED), step


def make_twin(folder: Path, name: str, *overrides: str, sizes: Sequence[str] = ()) -> Twin:
    """Writes tokens, samples and first weights into `folder`, the weights for both programs; `sizes` change a model."""
    first, there, samples = folder / "first", folder / "there", folder / "samples.pt"
    # On a CPU, whatever trains from them.
    done = fork_ranks(1, ["tests/programs/first_weights.py", str(first), *MODELS[name], *sizes])
    assert done.returncode == 0, done.stderr[-4000:]
    (saved,) = (first / "checkpoints").glob("step_*")
    assert export_main([f"checkpoint={saved}", f"out={there}", "format=megatron"]) == 0
    keys = [*MODELS[name], *sizes, *_RUN, *overrides, *_data(folder), f"checkpoint.init_from={saved}"]
    config = load_config(keys)
    _write_samples(samples, config)
    program = ["tests/programs/megatron_lm_gpt.py", "--samples", str(samples), "--load", str(there)]
    return Twin(config=config, ours=["-m", "gpt_pretrain", *keys], theirs=[*program, *command_line(config).words])


def _data(folder: Path) -> list[str]:
    """A few tokens come often: a model learns that in twenty steps."""
    generator = numpy.random.default_rng(1)
    lengths = generator.integers(20, 200, size=200)
    documents = [(generator.geometric(0.05, size=each) % 300).tolist() for each in lengths]
    prefix = write_token_file(folder / "tokens", documents)
    return ["data=mmap", f"model.data.data_prefix=[{prefix}]", f"model.data.cache_dir={folder / 'cache'}"]


def _write_samples(path: Path, config: Config) -> None:
    """All samples of the run, in our order, with the token that follows each."""
    num_samples = STEPS * config.model.global_batch_size
    samples, _ = build_datasets(config, prepare_corpus(config, show_progress=False), num_train_samples=num_samples)
    rows = [torch.cat([samples[i]["tokens"], samples[i]["labels"][-1:]]) for i in range(num_samples)]
    torch.save(torch.stack(rows), path)


def logged_losses(output: str) -> list[float]:
    """The losses of all steps in Megatron-LM's log."""
    losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", output)]
    # It does not reset the sum when it logs step 1: the number of step 2 is the mean of both.
    losses[1] = 2 * losses[1] - losses[0]
    return losses
