"""gpt_pretrain.translate: a configuration of another program as an experiment, and back.

The YAML goes to stdout, with a comment at each key that says what it comes from
and, at the top, what has no counterpart here and what is up to you. The whole
report goes to stderr. Files are read as data: nothing in them runs.

    python -m gpt_pretrain.translate [--from FORMAT] [--env NAME=VALUE]… FILE… [ARGUMENT…]
    python -m gpt_pretrain.translate --to megatron-lm [OVERRIDE…]

--from    megatron-lm (arguments, or a shell script with them), nemo (1.x),
          torchtitan, automodel, megatron-bridge (run_config.yaml), nanotron,
          litgpt, gpt-neox, accelerate (with DeepSpeed's JSON);
          found out from the file if it is not given
--to      megatron-lm: the command for one of our configurations, which has no
          options of ours; stderr has what the command does not say
--env     a variable that only the environment of a script knows ($1 is called
          1), or WORLD_SIZE for files that do not say how many processes run
ARGUMENT  the other program's own, which counts after the files

Exit codes: 0 translated, and our own check accepts the result; 3 translated,
and it does not, or the model is another one: the report says why;
2 a mistake in what was given; 1 a crash.

Examples:
    python -m gpt_pretrain.translate pretrain_llama3_8b_fp8.sh > conf/experiment/mine.yaml
    python -m gpt_pretrain.translate --env DATA_PATH=web_text train.sh --lr 1e-4
    python -m gpt_pretrain.translate --from nemo megatron_gpt_config.yaml '++model.fp8=True'
    python -m gpt_pretrain.translate --env WORLD_SIZE=8 llama3_8b.toml --training.steps=1000
    python -m gpt_pretrain.translate --to megatron-lm model=llama3_8b data=mock trainer.devices=8
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from gpt_pretrain.commands.command import importing_torch, run_alone
from gpt_pretrain.config.errors import ConfigError

REFUSED = 3


def _value(words: list[str], name: str) -> str:
    """The value of an option of ours at the head of `words`, which loses it."""
    word = words.pop(0)
    _, equals, value = word.partition("=")
    if equals:
        return value
    if not words:
        raise ConfigError([f"{name} has no value; write {name} …"])
    return words.pop(0)


def translate(arguments: Sequence[str]) -> int:
    """Translates, prints YAML and report, and returns the exit code."""
    words, environment, chosen = list(arguments), dict[str, str](), None
    while words and words[0].partition("=")[0] in ("--from", "--env", "--to"):
        name = words[0].partition("=")[0]
        value = _value(words, name)
        if name == "--to":
            return _translate_back(value, words)
        if name == "--from":
            chosen = value
            continue
        variable, equals, text = value.partition("=")
        if not equals:
            raise ConfigError([f"--env {value} has no =; write --env {value}=VALUE"])
        environment[variable] = text
    files: list[Path] = []
    while words and not words[0].startswith("-") and ("=" not in words[0] or Path(words[0]).is_file()):
        files.append(Path(words.pop(0)))
    if words[:1] == ["--"]:
        words.pop(0)
    if not files and not words:
        raise ConfigError(["there is nothing to translate; give a file, or the other program's arguments"])
    with importing_torch():
        from gpt_pretrain.translate.experiment import build_experiment
        from gpt_pretrain.translate.formats import FORMATS, Given, format_of
        from gpt_pretrain.translate.report import report_lines

        given = Given(files=files, words=words, environment=environment)
        format = format_of(given) if chosen is None else chosen
        if format not in FORMATS:
            raise ConfigError([f"--from {format}: there is no such format; known: {', '.join(FORMATS)}"])
        translation = FORMATS[format](given)
    experiment = build_experiment(translation)
    sys.stdout.write(experiment.text)
    sys.stderr.write("".join(f"{line}\n" for line in report_lines(translation, experiment)))
    return REFUSED if experiment.problems else 0


def _translate_back(format: str, overrides: Sequence[str]) -> int:
    """Prints the command for a configuration of ours."""
    if format != "megatron-lm":
        raise ConfigError([f"--to {format}: there is no such format; known: megatron-lm"])
    with importing_torch():
        from gpt_pretrain.rules.jobs import load_config
        from gpt_pretrain.translate.to_megatron_lm import command_line

        command = command_line(load_config(overrides))
    sys.stdout.write(command.text)
    sys.stderr.write("".join(f"{each}\n" for each in command.different))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_alone(__doc__, translate, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
