"""gpt_pretrain.generate: text from a checkpoint, in one process, on CPU or GPU.

It takes checkpoints of any parallel layout. FP8 models compute in BF16. There
is no key/value cache: it is for looking at a model, not for serving it.

Exit codes: 0 done; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.generate checkpoint=outputs/mine/checkpoints/step_00000300 prompt="def "
    python -m gpt_pretrain.generate checkpoint=… prompt="Once" temperature=0 max_new_tokens=40
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from gpt_pretrain.commands.command import importing_torch, run_with_arguments
from gpt_pretrain.config.errors import ConfigError, UserError, visible
from gpt_pretrain.config.facts import key
from gpt_pretrain.launch.ranks import read_launch


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArguments:
    """What the command takes."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    prompt: str
    """Text to continue, taken literally."""
    max_new_tokens: int = key(default=160, largest=2**20)
    """Tokens to generate; fewer where a document ends, or the sequence length of the training."""
    temperature: float = 0.7
    """0: the likeliest token each time; otherwise the divisor of the logits."""
    top_k: int | None = None
    """Draw among this many likeliest tokens; null: among all."""
    seed: int = key(default=1234, largest=2**32 - 1)
    """Seed of the draws; sample n of several has seed + n."""
    num_samples: int = 1
    """Continuations of the same prompt."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""
    extensions: list[str] = field(default_factory=list)
    """Modules of your own that the model needs: the one that registers its layer, [my_lab.layers]."""


def _problems(arguments: GenerateArguments) -> Iterator[str]:
    for name in ("max_new_tokens", "top_k", "num_samples"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield f"{name}={value} is not positive; use 1 or more{' or null' if name == 'top_k' else ''}"
    if arguments.temperature < 0:
        yield f"temperature={arguments.temperature} is negative; use 0 for the likeliest token, or more"
    if arguments.temperature == 0 and arguments.num_samples > 1:
        yield f"num_samples={arguments.num_samples} would be the same text with temperature=0; use 1, or a temperature"


def generate(arguments: GenerateArguments) -> None:
    """Prints the prompt with each of its continuations as soon as it is complete."""
    if problems := list(_problems(arguments)):
        raise ConfigError(problems)
    launch = read_launch()
    if launch.world_size > 1:
        raise UserError(f"{launch.launcher} started {launch.world_size} processes; start this command in one")
    with importing_torch():
        from gpt_pretrain.training.generation import continuations

    asked = {name: value for name, value in asdict(arguments).items() if name != "extensions"}
    for number, text in enumerate(continuations(**asked)):
        if arguments.num_samples > 1:
            sys.stdout.write(f"--- sample {number + 1} of {arguments.num_samples}\n")
        continued = f"{arguments.prompt}{text}\n"
        # A file or a pipe gets the text itself.
        sys.stdout.write(visible(continued, keep="\n\t") if sys.stdout.isatty() else continued)
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, GenerateArguments, generate, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
