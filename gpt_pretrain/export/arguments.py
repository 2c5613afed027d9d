"""What `python -m gpt_pretrain.export` takes; names neither torch nor megatron-core: it is checked at once."""

from dataclasses import dataclass
from enum import Enum

from gpt_pretrain.config.help import Program
from gpt_pretrain.huggingface.architectures import Architecture


class Format(Enum):
    """What is written."""

    hf = "hf"


class WeightType(Enum):
    """Type of the written weights; the values are torch's names."""

    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportArguments:
    """The arguments."""

    checkpoint: str
    """A checkpoint's directory, RUN_DIR/checkpoints/step_…, of any parallel layout."""
    out: str
    """The directory to write; it must not exist, or be empty."""
    format: Format = Format.hf
    """hf: a directory that Hugging Face `transformers` loads."""
    dtype: WeightType | None = None
    """Type of the weights; null: as in the checkpoint, where FP8 weights are BF16."""
    architecture: Architecture | None = None
    """Class in `transformers`; null: the one that the model's fields say, llama where mistral would do as well."""
    tokenizer: str | None = None
    """The model's tokenizer.json; null: found in the checkpoint or its run's directory."""
    max_shard_gib: float = 5.0
    """Most GiB of weights in one file."""


PROGRAM = Program(
    about="""\
gpt_pretrain.export: a checkpoint as a directory that transformers loads.

It reads GPT-2, Llama, Mistral and Qwen2.5 models from checkpoints of any
parallel layout, on any machine, with the memory of one layer. Every file of
the checkpoint is checked against its SHA-256 first.

Exit codes: 0 written; 2 a mistake in what was given, or a damaged checkpoint;
1 a crash; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.export checkpoint=outputs/mine/checkpoints/step_00000300 out=mine-hf
python -m gpt_pretrain.export checkpoint=… out=mine-hf dtype=bf16""",
)
