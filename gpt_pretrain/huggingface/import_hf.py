"""Imports a Hugging Face directory as a checkpoint of weights, with the configuration that belongs to them.

    config.json → architecture and the fields of `model.` → Config, checked by the rules of every run
    safetensors, tensor by tensor → names and layouts of a checkpoint

The written directory is the checkpoint. It also holds `tokenizer.json` and `experiment/imported.yaml`, which a run
finds with `--config-dir`.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import safetensors
import torch
from omegaconf import OmegaConf

from gpt_pretrain.checkpoint.manifest import Manifest, hash_files, installed_versions, write_manifest
from gpt_pretrain.checkpoint.saved_model import PlannedTensor, write_weights
from gpt_pretrain.checkpoint.state import architecture as architecture_of
from gpt_pretrain.checkpoint.state import describe_weights, layout
from gpt_pretrain.config.choices import Precision, TokenizerLibrary
from gpt_pretrain.config.errors import ConfigError, UserError, shell_word, visible, written
from gpt_pretrain.config.files import read_foreign_json
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from gpt_pretrain.features.resolve import build_run_spec, detect_platform
from gpt_pretrain.huggingface.architectures import Architecture
from gpt_pretrain.huggingface.export import (
    INDEX,
    SINGLE,
    WEIGHT_TYPES,
    check_disk_space,
    check_new_directory,
    out_directory,
)
from gpt_pretrain.huggingface.published_config import from_hf_config
from gpt_pretrain.huggingface.tensors import Rule, differences, tensor_rules
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.model import translate_transformer
from gpt_pretrain.rules.check import model_problems, ranges
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.products import resolve

_EXPERIMENT = "imported"
# Longer samples are for long-context training, which sets model.encoder_seq_length.
_MAX_SAMPLE_LENGTH = 8192
# What an imported model's experiment sets beside what describes its weights.
BESIDE_WEIGHTS = ("make_vocab_size_divisible_by", "max_position_embeddings", "encoder_seq_length")
# Published tensors that are not weights: masks and rope's frequencies.
_NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
# Tied embeddings are one tensor, and some files hold it twice: as the LM head, too.
_HEADS = ("lm_head.weight", "embed_out.weight")


@contextmanager
def _open_weights(directory: Path, architecture: Architecture) -> Iterator[dict[str, Any]]:
    """The tensors in all safetensors files of a directory, by name, as slices that read nothing yet."""
    tensors = {}
    with ExitStack() as stack:
        for path in _weight_paths(directory):
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(f"{path} cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 - no dict
                # GPT-2 is published without the first part of its names.
                is_bare = architecture is Architecture.gpt2 and not name.startswith(("transformer.", "lm_head."))
                if not name.endswith(_NO_WEIGHTS):
                    tensors[f"transformer.{name}" if is_bare else name] = file.get_slice(name)
        yield tensors


def _weight_paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if (directory / SINGLE).is_file():
            return [directory / SINGLE]
        raise UserError(
            f"{directory} holds neither {SINGLE} nor {INDEX}; transformers' save_pretrained converts weights "
            "in other files (pytorch_model.bin)"
        )
    weight_map = read_foreign_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and PurePath(name).name == name for name in names):
        raise UserError(f"{index} cannot be read: its weight_map names no files of this directory")
    return [directory / name for name in sorted(set(names))]


def import_hf(source: Path, out: Path) -> str:
    """Writes a published model as a checkpoint with the same weights to the bit, and returns what the command prints.

    Raises:
        UserError: The directory does not hold a model of a known architecture, this application would compute it
            otherwise, tensors are missing or of another shape, or there is no space for the checkpoint.
    """
    source, out = source.absolute(), out.absolute()
    check_new_directory(out)
    config_file = source / "config.json"
    try:
        values = read_foreign_json(config_file)
    except FileNotFoundError:
        raise UserError(
            f"{config_file} does not exist; path=… names a directory of transformers' save_pretrained"
        ) from None
    architecture, fields = from_hf_config(values, str(config_file))
    tokenizer = load_tokenizer(source / TOKENIZER_FILE, "path") if (source / TOKENIZER_FILE).is_file() else None
    fields["encoder_seq_length"] = min(fields["max_position_embeddings"], _MAX_SAMPLE_LENGTH)
    with _open_weights(source, architecture) as published:
        types = {tensor.get_dtype() for tensor in published.values()}
        config = _config(fields, out, tokenizer, Precision.fp32 if "F32" in types else Precision.bf16)
        rules = tensor_rules(config.model, architecture)
        tensors = plan_tensors(source, published, rules, "its config.json")
        write_imported(out, tensors, config, fields, source=source, tokenizer=tokenizer)
        # Without the rows that pad the vocabulary.
        num_parameters = sum(math.prod(published[name].get_shape()) for rule in rules for name in rule.names)
    return (
        f"written: {visible(str(out))}\n"
        f"  {architecture.value}, {num_parameters:,} parameters in {', '.join(sorted(types))}\n"
        + how_to_continue(out)
        + ("  no tokenizer.json found: give model.tokenizer, or data of token ids\n" if tokenizer is None else "")
    )


def how_to_continue(out: Path) -> str:
    """The lines that say how a run starts from what was imported."""
    return (
        f"continue with: python -m gpt_pretrain --config-dir {shell_word(str(out))} experiment={_EXPERIMENT} data=…\n"
        f"or, with settings of your own for this model: checkpoint.init_from={shell_word(str(out))}\n"
    )


def write_imported(
    out: Path,
    tensors: Sequence[PlannedTensor],
    config: Config,
    fields: Mapping[str, Any],
    *,
    source: Path,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a checkpoint of weights with its manifest, and the experiment that starts from it.

    `fields` are those of `model.` that the experiment sets; its comment names `source`.

    Raises:
        UserError: There is no space for it, or the directory cannot be written.
    """
    check_disk_space(out, sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors))
    with out_directory(out) as directory:
        write_weights(directory, tensors, num_layers=config.model.num_layers)
        if tokenizer is not None:
            tokenizer.save(directory / TOKENIZER_FILE)
        files = hash_files(directory, [path.name for path in directory.iterdir()])
        write_manifest(directory, _manifest(config, tokenizer, files))
        _write_experiment(directory / "experiment" / f"{_EXPERIMENT}.yaml", source, fields, config, out)


def plan_tensors(
    source: Path, published: Mapping[str, Any], rules: Sequence[Rule], described_by: str
) -> list[PlannedTensor]:
    """The tensors of a checkpoint of ours from those of `transformers`, slices as safetensors has them.

    Raises:
        UserError: They are not exactly the model's, which `described_by` describes.
    """
    _check_tensors(source, published, rules, described_by)
    return [_planned(rule, [published[name] for name in rule.names]) for rule in rules]


def _check_tensors(source: Path, published: Mapping[str, Any], rules: Sequence[Rule], described_by: str) -> None:
    """Refuses files that do not hold exactly the model's tensors, in their shapes and in a type that weights have.

    The parts of what becomes one tensor, such as a matrix of all layers, must have one type.
    """
    expected = {name: tuple(part.shape) for rule in rules for name, part in rule.parts(torch.float32).items()}
    needed = {name: tensor for name, tensor in published.items() if name in expected or name not in _HEADS}
    problems = differences(expected, {name: tuple(tensor.get_shape()) for name, tensor in needed.items()})
    # For each tensor of ours, each type of its parts with the first part that has it.
    first_of_type: dict[str, dict[str, str]] = {}
    for rule in rules:
        for name in rule.names:
            if name in published:
                kind = published[name].get_dtype()
                if kind not in WEIGHT_TYPES:
                    problems.append(f"has {name} in {kind} instead of {', '.join(WEIGHT_TYPES)}")
                first_of_type.setdefault(rule.key, {}).setdefault(kind, name)
    problems += [
        f"has {' and '.join(f'{name} in {kind}' for kind, name in mixed.items())}, which are parts of one tensor here"
        for mixed in first_of_type.values()
        if len(mixed) > 1
    ]
    if problems:
        shown = ", ".join(problems[:20]) + (", …" if len(problems) > 20 else "")
        raise UserError(f"{source} does not hold the model of {described_by}: it {shown}")


def _planned(rule: Rule, parts: Sequence[Any]) -> PlannedTensor:
    return PlannedTensor(
        key=rule.key,
        layer=rule.layer,
        shape=rule.shape,
        dtype=WEIGHT_TYPES[parts[0].get_dtype()],
        load=lambda: rule.conversion.to_ours([part[:] for part in parts]),
    )


def _config(fields: Mapping[str, Any], out: Path, tokenizer: Tokenizer | None, precision: Precision) -> Config:
    """The default configuration of a run with the imported model, which must pass this application's rules."""
    config = load_config(["model=base", *(f"model.{name}={written(value)}" for name, value in fields.items())])
    return checked_config(config, out, tokenizer, precision)


def checked_config(config: Config, out: Path, tokenizer: Tokenizer | None, precision: Precision) -> Config:
    """A configuration with an imported model's tokenizer and type; a ConfigError if the model breaks a rule."""
    model, kind = config.model, TokenizerLibrary.none if tokenizer is None else TokenizerLibrary.file
    file = None if tokenizer is None else str(out / TOKENIZER_FILE)
    model = replace(model, tokenizer=replace(model.tokenizer, library=kind, model=file))
    config = replace(config, model=model, trainer=replace(config.trainer, precision=precision))
    if problems := [*ranges(config), *model_problems(resolve(config))]:
        raise ConfigError(problems)
    return config


def imported_fields(config: Config) -> dict[str, Any]:
    """The fields of `model.` that the experiment of a configured model sets."""
    values = config_to_dict(config)["model"]
    names = [key.removeprefix("model.") for key in describe_weights(config.model)]
    return {name: values[name] for name in (*names, *BESIDE_WEIGHTS)}


def _manifest(config: Config, tokenizer: Tokenizer | None, files: Mapping[str, Any]) -> Manifest:
    transformer_config = translate_transformer(build_run_spec(config, read_launch({}), detect_platform()))
    return Manifest(
        step=0,
        consumed_samples=0,
        time_unix=time.time(),
        versions=installed_versions(),
        config=config_to_dict(config),
        # Without a tokenizer the entry is missing, and a run may bring the one that the model had.
        data={} if tokenizer is None else {"tokenizer": tokenizer.fingerprint},
        architecture=architecture_of(config.model, transformer_config),
        layout=layout(config.model, 1),
        fp8={},
        files=files,
    )


def _write_experiment(path: Path, source: Path, fields: Mapping[str, Any], config: Config, out: Path) -> None:
    tokenizer = {"library": config.model.tokenizer.library.name, "model": config.model.tokenizer.model}
    model = {**fields, **({} if tokenizer["model"] is None else {"tokenizer": tokenizer})}
    values = OmegaConf.create(config_to_dict({"model": model, "checkpoint": {"init_from": str(out)}}))
    path.parent.mkdir()
    path.write_text(
        "# @package _global_\n"
        f"# {visible(source.name)}, imported. Start with its weights, and name the data:\n"
        f"#     python -m gpt_pretrain --config-dir {shell_word(str(out))} experiment={_EXPERIMENT} data=text …\n"
        "defaults:\n  - override /model: base\n\n" + OmegaConf.to_yaml(values),
        encoding="utf-8",
    )
