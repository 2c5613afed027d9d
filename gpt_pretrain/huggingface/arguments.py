"""What exporting and importing take, checked before torch is imported."""

from dataclasses import dataclass
from enum import Enum

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
    """What `python -m gpt_pretrain.export` takes."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """What `python -m gpt_pretrain.import_hf` takes."""

    path: str
    """A Hugging Face directory: config.json and safetensors, with or without a tokenizer.json."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""
