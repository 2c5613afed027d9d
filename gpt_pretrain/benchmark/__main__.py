r"""gpt_pretrain.benchmark: variants of a run, measured under the same knobs.

It takes every argument of python -m gpt_pretrain and keeps nothing that it
trains. Each of benchmark.variants runs in processes of its own, as many as
trainer.devices says; what a variant adds to the command line wins. It prints
step times, tokens/s, TFLOP/s, MFU against this machine's own matrix products,
memory, loss and ratios, and writes benchmark.json and Markdown into run_dir.

Exit codes: 0 all variants measured; 1 at least one failed, with its reason in
the table; 2 a mistake in what was given; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.benchmark                  the loop against the bare one
    python -m gpt_pretrain.benchmark model=gpt3_1_3b data=mock \
        benchmark.variants=[bf16,fp8_delayed,fp8_tensorwise]
    python -m gpt_pretrain.benchmark model=llama3_8b parallelism=dp \
        trainer.devices=4 benchmark.rounds=2 benchmark.profile=true
    python -m gpt_pretrain.benchmark \
        'benchmark.variants=[app,"model.micro_batch_size=4"]'
"""

import sys
from collections.abc import Sequence

from gpt_pretrain.benchmark.campaign import Campaign
from gpt_pretrain.benchmark.document import WIDTH
from gpt_pretrain.benchmark.variants import benchmark_problems
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.commands.door import refuse_launcher_and_sweep, run_with_config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir
from gpt_pretrain.report.console import console_of_width
from gpt_pretrain.rules.gate import Job

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def measure(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
        check_run_dir(jobs[0].config, "a benchmark")
        console = console_of_width(WIDTH)
        campaign = Campaign(jobs[0].config, request.loader.source, request.overrides, given, console)
        return 0 if campaign.run() else FAILED

    def refuse(request: Request, launch: Launch) -> None:
        refuse_launcher_and_sweep(request, launch, "a benchmark", "benchmark.variants")

    return run_with_config(__doc__, measure, given, rules=benchmark_problems, refuse=refuse, name="benchmark")


if __name__ == "__main__":
    raise SystemExit(main())
