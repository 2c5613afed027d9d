"""What `python -m gpt_pretrain.generate` takes; names neither torch nor megatron-core: it is checked at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.help import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArguments:
    """The arguments."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    prompt: str
    """Text to continue, to the letter."""
    max_new_tokens: int = 160
    """Tokens to generate; fewer where a document ends, or the sequence length of the training."""
    temperature: float = 0.7
    """0: the likeliest token each time; otherwise the divisor of the logits."""
    top_k: int | None = None
    """Draw among so many likeliest tokens; null: among all."""
    seed: int = 1234
    """Of the draws; sample n of several has seed + n."""
    num_samples: int = 1
    """Continuations of the same prompt."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""


PROGRAM = Program(
    about="""\
gpt_pretrain.generate: text from a checkpoint, in one process, on CPU or GPU.

It takes checkpoints of any parallel layout. FP8 models compute in BF16. There
is no key/value cache: it is for looking at a model, not for serving it.

Exit codes: 0 done; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.generate checkpoint=outputs/mine/checkpoints/step_00000300 prompt="def "
python -m gpt_pretrain.generate checkpoint=… prompt="Once" temperature=0 max_new_tokens=40""",
)


def check_values(arguments: GenerateArguments) -> None:
    """Refuses numbers that mean nothing.

    Raises:
        ConfigError: All of them.
    """
    problems = list(_problems(arguments))
    if problems:
        raise ConfigError(problems)


def _problems(arguments: GenerateArguments) -> Iterator[str]:
    for name in ("max_new_tokens", "top_k", "num_samples"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield f"{name}={value} is not positive; use 1 or more{' or null' if name == 'top_k' else ''}"
    if arguments.temperature < 0:
        yield f"temperature={arguments.temperature} is negative; use 0 for the likeliest token, or more"
    if arguments.temperature == 0 and arguments.num_samples > 1:
        yield f"num_samples={arguments.num_samples} would be the same text with temperature=0; use 1, or a temperature"
