"""What `--help` prints of the programs that take a run's command line: how to start, groups with options, every key.

Values are those of the command line it is asked with, so that `model=llama3_8b --help` shows that model's. It is
written to be read at 80 columns and to be searched: a key and its documentation are whole lines.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from gpt_pretrain.config.keys import Key, schema_keys, schema_sections
from gpt_pretrain.config.typed import written


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What distinguishes the help of one program from the other's: they take the same arguments."""

    about: str
    """What it does, what it leaves, how it ends; printed first."""
    examples: str


TRAINING = Program(
    about="gpt_pretrain: pretrain a GPT on megatron-core, configured by Hydra.",
    examples="""\
python -m gpt_pretrain                            a tiny GPT on real text
python -m gpt_pretrain trainer.max_steps=50 model.optim.lr=1e-3
torchrun --nproc-per-node 8 -m gpt_pretrain model=llama3_8b parallelism=dp
python -m gpt_pretrain data=text 'model.data.text_files=["corpus/*.jsonl"]'
python -m gpt_pretrain -m model.seed=1,2,3        a sweep, one after another
python -m gpt_pretrain --config-dir my_conf --config-name my_run
python -m gpt_pretrain --cfg job model=gpt2_124m  show it, run nothing""",
)

PLAN = Program(
    about="""\
gpt_pretrain.plan: what a training command would do, without a GPU.

It takes every argument of python -m gpt_pretrain and trains nothing. It shows
where each setting lands, which matrix products run in FP8, memory per GPU and
the predicted speed on the machine that plan.gpu and plan.num_gpus name, and
writes plan.json into run_dir (outputs/DATE/TIME_NAME where none is given).

Exit codes: 0 planned; 2 training would be refused, with the same errors;
1 a crash; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.plan                       the tiny GPT on one H200
python -m gpt_pretrain.plan model=llama3_8b parallelism=dp plan.num_gpus=8
python -m gpt_pretrain.plan model=gpt3_1_3b fp8=delayed plan.gpu=h100
python -m gpt_pretrain.plan -m fp8=none,delayed,tensorwise   one plan each""",
)

BENCHMARK = Program(
    about="""\
gpt_pretrain.benchmark: variants of a run, measured under the same knobs.

It takes every argument of python -m gpt_pretrain and keeps nothing that it
trains. Each of benchmark.variants runs in processes of its own, as many as
trainer.devices says; what a variant adds to the command line wins. It prints
step times, tokens/s, TFLOP/s, MFU against this machine's own matrix products,
memory, loss and ratios, and writes benchmark.json and Markdown into run_dir.

Exit codes: 0 all variants measured; 1 at least one failed, with its reason in
the table; 2 a mistake in what was given; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.benchmark                  the loop against the bare one
python -m gpt_pretrain.benchmark model=gpt3_1_3b data=mock \\
    benchmark.variants=[bf16,fp8_delayed,fp8_tensorwise]
python -m gpt_pretrain.benchmark model=llama3_8b parallelism=dp \\
    trainer.devices=4 benchmark.rounds=2 benchmark.profile=true
python -m gpt_pretrain.benchmark \\
    'benchmark.variants=[app,"model.micro_batch_size=4"]'""",
)

PREPARE_DATA = Program(
    about="""\
gpt_pretrain.prepare_data: prepare the data of a training command, without a GPU.

It takes every argument of python -m gpt_pretrain and trains nothing: it
tokenises, checks the tokens and fixes the order of the samples in
model.data.cache_dir, where the run then finds them.

Exit codes: 0 prepared; 2 refused, with what to mend; 1 a crash; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.prepare_data data=text 'model.data.text_files=["corpus/*.jsonl"]'
python -m gpt_pretrain.prepare_data model=llama3_8b data=mmap model.data.data_prefix=[tokens]""",
)

OPTIONS = """\
--help, -h               this text, with the values the other arguments give
--cfg, -c job|hydra|all  show the configuration instead of running it;
                         -p PACKAGE: a part; --resolve: no interpolations
--multirun, -m           run every combination of values given as KEY=A,B
--config-name, -cn NAME  start from NAME.yaml instead of config.yaml
--config-dir, -cd DIR    search DIR too, after conf/
--config-path, -cp DIR   search DIR instead of conf/
--info, -i               what Hydra knows: search path, defaults, plugins
--hydra-help, --version  Hydra's own help; Hydra's version"""


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _print_groups(console: Console, groups: Mapping[str, Sequence[str]], choices: Mapping[str, str]) -> None:
    _heading(console, "Groups: choose an option with GROUP=OPTION (* is chosen)")
    width = max(map(len, groups))
    for group, options in groups.items():
        shown = [f"{option}*" if option == choices.get(group) else option for option in options]
        indent = " " * (width + 4)
        lines = textwrap.wrap(", ".join(shown) or "none yet", console.width - width - 4)
        console.print(Text.assemble("  ", (group.ljust(width), "cyan"), "  ", f"\n{indent}".join(lines)))


def _print_key(console: Console, key: Key, values: Mapping[str, Any]) -> None:
    line = Text.assemble("  ", (key.path, "cyan"), f" = {written(values[key.path])}" if key.path in values else "")
    line.append(f"   ({key.type_text})", style="dim")
    console.print(line, soft_wrap=True)
    console.print(textwrap.fill(key.doc, console.width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6))


def print_command_help(program: Program, keys: Mapping[str, Key], values: Mapping[str, Any]) -> None:
    """Prints the help of a command that takes a few `KEY=VALUE` and nothing else.

    Args:
        program: Which one.
        keys: What it takes.
        values: What it takes for those that may be left out.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(program.about, soft_wrap=True)
    _heading(console, "Examples")
    console.print(textwrap.indent(program.examples, "  "), soft_wrap=True)
    _heading(console, "Keys: give each as KEY=VALUE; those without a value here are needed")
    for key in keys.values():
        _print_key(console, key, values)


def print_help(
    groups: Mapping[str, Sequence[str]],
    choices: Mapping[str, str],
    values: Mapping[str, Any],
    console: Console | None = None,
    *,
    program: Program = TRAINING,
) -> None:
    """Prints the help.

    Args:
        groups: Each group's options.
        choices: Each group's chosen option.
        values: Dotted key to the value it has; open values are left out.
        console: Where to print; standard output when not given.
        program: Which program is asked.
    """
    console = console or Console(highlight=False, markup=False, emoji=False)
    console.print(program.about, soft_wrap=True)
    _heading(console, "Examples")
    console.print(textwrap.indent(program.examples, "  "), soft_wrap=True)
    _heading(console, "Options")
    console.print(textwrap.indent(OPTIONS, "  "), soft_wrap=True)
    _print_groups(console, groups, choices)
    _heading(console, "Keys: set one with KEY=VALUE; ++KEY=VALUE is the same")
    section = ""
    for path, key in schema_keys().items():
        parent = path.rpartition(".")[0]
        if parent != section and parent:
            doc = schema_sections()[parent].__doc__ or ""
            console.print()
            console.print(textwrap.fill(doc.replace("`", ""), console.width), style="bold")
        section = parent
        _print_key(console, key, values)
