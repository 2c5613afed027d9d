"""gpt_pretrain.export: a checkpoint as a directory that transformers or Megatron-LM loads.

For transformers it reads GPT-2, Llama, Mistral, Qwen2.5, Qwen3, Phi-4, Mixtral,
Qwen3-MoE, SmolLM 3, StarCoder 2 and GPT-NeoX models, for Megatron-LM all that it
has arguments for, from checkpoints of any parallel layout, on any machine, with
the memory of one layer. Every file of the checkpoint is checked against its
SHA-256 first.

Exit codes: 0 written; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.export checkpoint=outputs/mine/checkpoints/step_00000300 out=mine-hf
    python -m gpt_pretrain.export checkpoint=… out=mine-hf dtype=bf16
    python -m gpt_pretrain.export checkpoint=… out=mine-megatron format=megatron
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gpt_pretrain.commands.arguments import defaults_of
from gpt_pretrain.commands.command import importing_torch, run_with_arguments
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.huggingface.architectures import Architecture


class Format(Enum):
    """What is written."""

    hf = "hf"
    megatron = "megatron"


class WeightType(Enum):
    """Type of the written weights; the values are torch's names."""

    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


class Weights(Enum):
    """Which weights of a checkpoint are written."""

    raw = "raw"
    ema = "ema"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportArguments:
    """What the command takes."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    out: str
    """The directory to write; it must not exist, or be empty."""
    average: list[str] = field(default_factory=list)
    """Other checkpoints, such as the run's last ones, whose mean with it is written."""
    weights: Weights = Weights.raw
    """raw: the newest ones; ema: those averaged over steps, of a run with model.optim.ema_decay."""
    format: Format = Format.hf
    """hf: a directory that Hugging Face `transformers` loads; megatron: one for Megatron-LM's --load (torch_dist)."""
    dtype: WeightType | None = None
    """Type of the weights; null: as in the checkpoint, where FP8 weights are BF16."""
    architecture: Architecture | None = None
    """Class in `transformers`, for format=hf; null: the one that the fields say, llama where mistral would do, too."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""
    max_shard_gib: float = 5.0
    """Most GiB of weights in one file, with format=hf."""
    extensions: list[str] = field(default_factory=list)
    """Modules of your own that the model needs: the one that registers its layer, [my_lab.layers]."""


_DEFAULTS = defaults_of(ExportArguments)


def export(arguments: ExportArguments) -> None:
    """Exports, and prints what was written."""
    with importing_torch():
        from gpt_pretrain.huggingface.export import export_hf
        from gpt_pretrain.megatron_lm.export import export_megatron

    checkpoint, out = Path(arguments.checkpoint), Path(arguments.out)
    average = [Path(path) for path in arguments.average]
    averaged = arguments.weights is Weights.ema
    dtype = None if arguments.dtype is None else arguments.dtype.value
    tokenizer = None if arguments.tokenizer is None else Path(arguments.tokenizer)
    if arguments.format is Format.megatron:
        others = [name for name in ("architecture", "max_shard_gib") if getattr(arguments, name) != _DEFAULTS[name]]
        if others:
            raise ConfigError([f"{name} does nothing with format=megatron; leave it out" for name in others])
        written = export_megatron(checkpoint, out, average=average, averaged=averaged, dtype=dtype, tokenizer=tokenizer)
    else:
        written = export_hf(
            checkpoint,
            out,
            average=average,
            averaged=averaged,
            dtype=dtype,
            architecture=arguments.architecture,
            tokenizer=tokenizer,
            max_shard_gib=arguments.max_shard_gib,
        )
    sys.stdout.write(written)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(__doc__, ExportArguments, export, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
