"""gpt_pretrain.prepare_data: prepare the data of a training command, without a GPU.

It takes the arguments of python -m gpt_pretrain and trains nothing. It
tokenizes, checks the tokens and fixes the order of the samples in
model.data.cache_dir, where the run then finds them.

Exit codes: 0 prepared; 2 refused, with the way out; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.prepare_data data=text 'model.data.text_files=["corpus/*.jsonl"]'
    python -m gpt_pretrain.prepare_data model=llama3_8b data=mmap model.data.data_prefix=[tokens]
"""

import sys
from collections.abc import Sequence

from gpt_pretrain.commands.command import ALONE, print_job, run_with_config
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.config.schedule import last_step, num_train_samples
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.signals import ended_at_once
from gpt_pretrain.plan.machine import planned_problems
from gpt_pretrain.rules.jobs import Job


def prepare(request: Request, jobs: Sequence[Job], launch: Launch) -> None:
    """Prepares the data of each job of a checked command line, and prints what it is.

    Raises:
        UserError: The configured data cannot be trained on.
    """
    prepare_libraries()
    # Imported late: they load torch and megatron-core, which a refused command line need not wait for.
    with ended_at_once():
        from gpt_pretrain.data.corpus import prepare_corpus
        from gpt_pretrain.data.datasets import build_datasets

    for number, job in enumerate(jobs):
        print_job(number, jobs)
        config = job.config
        corpus = prepare_corpus(config, show_progress=True)
        if corpus.is_mock:
            sys.stdout.write("nothing to prepare: data=mock is random tokens\n")
            continue
        train, _ = build_datasets(config, corpus, num_train_samples=num_train_samples(config))
        sys.stdout.write(
            f"prepared: {corpus.train.num_tokens:,} tokens to train on in {corpus.train.num_documents:,} documents, "
            f"{train.num_epochs:.2f} epochs in {last_step(config):,} steps\n"
            + "".join(
                f"    {name}: {each:.2f} epochs\n" for name, each in train.epochs.items() if len(train.epochs) > 1
            )
            + (
                f"    attention to documents of {train.attended:,.0f} tokens on average, in samples of "
                f"{config.model.encoder_seq_length:,}: plan.document_length={train.attended:.0f}\n"
                if config.model.data.inter_document_masking
                else ""
            )
            + "".join(f"    {prefix}.bin\n" for prefix in corpus.files)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    # The ranks are those that the run is planned for: how the data is prepared does not depend on them.
    return run_with_config(__doc__, prepare, arguments, launch=ALONE, rules=planned_problems)


if __name__ == "__main__":
    raise SystemExit(main())
