"""A checkpoint as others see it: which model, which tokenizer, and whether its files are what was written.

The configuration is the manifest's. The tokenizer lies beside the tensors, where an imported model has it, or in the
run's directory two levels up; it is known by its fingerprint, so that no other one can take its place.
"""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from gpt_pretrain.checkpoint.manifest import Manifest, check_files, read_manifest
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.load import read_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import NO_TOKENIZER
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """What a checkpoint says of its model."""

    path: Path
    manifest: Manifest
    config: Config
    """Of the run that saved it."""
    tokenizer: Tokenizer | None
    """None where token ids were taken as they are (`model.tokenizer.library=none`), or an import had none."""

    def check_files(self) -> None:
        """Reads every byte of the checkpoint.

        Raises:
            UserError: A file is missing or not what was written; names each.
        """
        problems = check_files(self.path, self.manifest)
        if problems:
            raise UserError("\n".join([*problems, "use another checkpoint of the run"]))


def open_checkpoint(path: Path, tokenizer: Path | None = None) -> SavedModel:
    """Reads what a checkpoint says of itself; no tensor yet.

    Args:
        path: Its directory.
        tokenizer: The tokenizer's file, where it is neither in the checkpoint nor in the run's directory.

    Raises:
        UserError: There is no checkpoint, its configuration is of another version, or the tokenizer is not found.
    """
    path = path.absolute()
    manifest = read_manifest(path)
    config, problems = read_config(OmegaConf.create(dict(manifest.config)))
    if config is None:
        listed = "; ".join(problems)
        raise UserError(
            f"{path} was saved with another version's configuration: {listed}; use the version that wrote it: "
            f"{manifest.versions.get('gpt_pretrain')}"
        )
    return SavedModel(
        path=path, manifest=manifest, config=config, tokenizer=_find_tokenizer(path, manifest, config, tokenizer)
    )


def _find_tokenizer(path: Path, manifest: Manifest, config: Config, given: Path | None) -> Tokenizer | None:
    expected = manifest.data.get("tokenizer")
    if expected == NO_TOKENIZER:
        return None
    if expected is None:
        # Imported without one: whoever gives one knows it.
        return None if given is None else load_tokenizer(given, "tokenizer")
    in_config = config.model.tokenizer.model
    beside = [path / TOKENIZER_FILE, path.parent.parent / TOKENIZER_FILE]
    places = [given] if given is not None else [*beside, *([Path(in_config)] if in_config else [])]
    for place in places:
        if place == given or place.is_file():
            tokenizer = load_tokenizer(place, "tokenizer")
            if tokenizer.fingerprint == expected:
                return tokenizer
    looked_at = ", ".join(map(str, places))
    raise UserError(
        f"{path} was trained with a tokenizer that is not the one of {looked_at}; "
        "give its file with tokenizer=…/tokenizer.json"
    )
