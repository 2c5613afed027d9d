"""`python -m gpt_pretrain.prepare_data`: what a run would do to its data before it trains, without GPUs.

    command line → training's gate → corpus: tokenised, checked → the order of the samples, in model.data.cache_dir

It takes every command line that `python -m gpt_pretrain` takes. The run itself then finds it all in the cache: on a
cluster no GPU waits for a tokenizer. What is in the cache already is only checked.
"""

import sys
from collections.abc import Sequence

from gpt_pretrain.commands.command_line import check_request, parse_command_line, run_hydra, show_help
from gpt_pretrain.commands.door import exit_code, print_job
from gpt_pretrain.commands.help import PREPARE_DATA
from gpt_pretrain.config.derived import num_train_samples
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.plan.world import NO_LAUNCHER, planned_problems


def prepare(config: Config) -> None:
    """Prepares one run's data and says what it is.

    Raises:
        UserError: The data, or what the configuration says of it, cannot be trained on.
    """
    # torch and megatron-core take seconds to load: not before the gate has let the command line through.
    from gpt_pretrain.data.corpus import prepare_corpus
    from gpt_pretrain.data.datasets import build_datasets

    corpus = prepare_corpus(config, show_progress=True)
    if corpus.is_mock:
        sys.stdout.write("nothing to prepare: data=mock is random tokens\n")
        return
    train, _ = build_datasets(
        config,
        corpus,
        num_train_samples=num_train_samples(config),
        num_valid_samples=config.trainer.limit_val_batches * config.model.global_batch_size,
    )
    sys.stdout.write(
        f"prepared: {corpus.train.num_tokens:,} tokens to train on in {corpus.train.num_documents:,} documents, "
        f"{train.num_epochs:.2f} epochs in {config.trainer.max_steps:,} steps\n"
        + "".join(f"    {prefix}.bin\n" for prefix in corpus.prefixes)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares the data of a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.prepare_data`; `sys.argv` when not given.
    """

    def read_and_prepare() -> None:
        request = parse_command_line(sys.argv[1:] if arguments is None else arguments)
        # The ranks are those that the run is planned for: how the data is prepared does not depend on them.
        jobs = check_request(request, NO_LAUNCHER, planned_problems)
        if not request.runs:
            show_help(request, PREPARE_DATA) if request.options.help else run_hydra(request, lambda _: None)
            return
        prepare_libraries()
        names = [" ".join(job.overrides) for job in jobs]
        for number, job in enumerate(jobs):
            print_job(number, names)
            prepare(job.config)

    return exit_code(read_and_prepare)
