"""Whether a run reads what the run of its checkpoint has read: tokens, their shares and splits, and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.corpus import NO_TOKENIZER, ORDER, TOKENIZER
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE


def compare_data(path: Path, current: Mapping[str, str], saved: Mapping[str, str], *, allowed: bool) -> list[str]:
    """Compares the data of a run with those of the checkpoint at a path; notes for the user.

    `current` and `saved` have `data.corpus.Corpus.fingerprints`, `allowed` is `checkpoint.allow_data_change`.

    Raises:
        UserError: Something has changed, and that is not allowed.
    """
    changed = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    if not changed:
        return []
    what = f"{path} was saved with other data: {', '.join(changed)} changed"
    if not allowed and ORDER in changed and ORDER in current:
        raise UserError(
            f"{path}: the version that saved it read documents in another order, which this one does not have; go on "
            "with that version, or in the new order, which may read documents again before others: "
            "checkpoint.allow_data_change=true"
        )
    if not allowed:
        new = "the new data" + (", whose token ids its embeddings do not know" if TOKENIZER in changed else "")
        raise UserError(
            f"{what}; give the run what the saved one had (model.data and model.tokenizer), or continue with {new}: "
            "checkpoint.allow_data_change=true"
        )
    return [f"{what}; continuing with the new data (checkpoint.allow_data_change=true)"]


def compare_tokenizers(path: Path, current: Mapping[str, str], saved: Mapping[str, str], *, allowed: bool) -> list[str]:
    """As `compare_data`, for a run that takes the weights alone: they are of use for their own token ids.

    Raises:
        UserError: They are another tokenizer's; or nobody knows, since a run was given token ids, and that is not
            allowed.
    """
    own, of_weights = current.get(TOKENIZER), saved.get(TOKENIZER)
    if of_weights is None or own == of_weights:
        return []
    what = f"{path} was saved with other data: tokenizer changed"
    if None not in (own, of_weights) and NO_TOKENIZER not in (own, of_weights):
        files = [each / TOKENIZER_FILE for each in (path, path.parent.parent) if (each / TOKENIZER_FILE).is_file()]
        file = files[0] if files else "the tokenizer.json of its run"
        raise UserError(
            f"{what}, and weights are of no use with other token ids; give the run its tokenizer: "
            f"model.tokenizer.library=file model.tokenizer.model={file}"
        )
    if not allowed:
        raise UserError(
            f"{what}: one of the two is not known (model.tokenizer.library=none); give the run the same one, or, if "
            "the token ids mean the same, continue with checkpoint.allow_data_change=true"
        )
    return [f"{what}: one of the two is not known, and its ids count as the same (checkpoint.allow_data_change=true)"]
