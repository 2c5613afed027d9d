"""What `python -m gpt_pretrain.import_hf` takes; names neither torch nor megatron-core: it is checked at once."""

from dataclasses import dataclass

from gpt_pretrain.config.help import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportArguments:
    """The arguments."""

    path: str
    """A Hugging Face directory: config.json and safetensors, with or without a tokenizer.json."""
    out: str
    """The directory to write, a checkpoint; it must not exist, or be empty."""


PROGRAM = Program(
    about="""\
gpt_pretrain.import_hf: a published model, for training it on.

It reads GPT-2, Llama, Mistral and Qwen2.5 models from a directory of
transformers, and writes a checkpoint of their weights with an experiment file
that sets the model, its tokenizer and checkpoint.init_from. It needs no GPU,
and the memory of two tensors.

Exit codes: 0 written; 2 a mistake in what was given, or a model that would not
be the same here; 1 a crash; 130 Ctrl-C.""",
    examples="""\
python -m gpt_pretrain.import_hf path=mistral-7b-v0.3 out=start
python -m gpt_pretrain --config-dir start experiment=imported data=text \\
    'model.data.text_files=["corpus/*.jsonl"]'""",
)
