"""The configuration from Python and from a run directory, and back to YAML: for training, scripts and tests."""

from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.typed import read_config


def config_to_dict(value: Any) -> Any:
    """The configuration, or a part of it, as plain values: dictionaries, lists, enums by name."""
    if is_dataclass(value):
        return {field.name: config_to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return [config_to_dict(item) for item in value]
    if isinstance(value, dict):
        return {name: config_to_dict(item) for name, item in value.items()}
    # A literal ${…} in a prompt must not become an interpolation when the file is read again.
    return value.replace("${", "\\${") if isinstance(value, str) else value


def config_to_yaml(config: Config) -> str:
    """The configuration as YAML: every value resolved, enums by name; `load_saved_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))


def load_saved_config(path: Path) -> Config:
    """Reads the `config.yaml` of a run directory.

    Raises:
        ConfigError: The file is missing, is no YAML, or does not fit the schema.
    """
    try:
        composed = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file; a run writes its configuration there"]) from None
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    if not isinstance(composed, DictConfig):
        raise ConfigError([f"{path} holds no configuration but a list"])
    config, problems = read_config(composed)
    if config is None:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config
