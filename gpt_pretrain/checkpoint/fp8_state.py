"""Scales and amax histories in a checkpoint: restored into the recipe that saved them, or on purpose not at all.

Delayed scaling keeps them, and FP8 attention its own; the other recipes take each scale from its tensor and have
nothing to restore. Transformer Engine would take another recipe's state, or drop it, without a word.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_pretrain.checkpoint.differences import differences
from gpt_pretrain.config.errors import UserError, written
from gpt_pretrain.spec.fp8 import Fp8Settings

# Where Transformer Engine's layers keep this state, and emulated ones as well.
EXTRA_STATE = "_extra_state"


def describe_fp8_state(settings: Fp8Settings | None) -> dict[str, str]:
    """What decides the shape and the meaning of the state; empty where there is none to keep."""
    if settings is None or (not settings.recipe.keeps_history and not settings.dot_product_attention):
        return {}
    described = {
        "model.fp8_recipe": settings.recipe.name,
        "format of gradients": settings.gradient_format,
        "model.fp8_amax_history_len": str(settings.amax_history_len),
        "model.fp8_dot_product_attention": written(settings.dot_product_attention),
        "model.fp8_exclude": written(list(settings.exclude)),
        "model.fp8_emulate": written(settings.emulate),
    }
    if not settings.emulate:
        described["Transformer Engine"] = importlib.metadata.version("transformer_engine")
    return described


def keeps_fp8_state(path: Path, current: Mapping[str, str], saved: Mapping[str, str], *, reset: bool) -> bool:
    """Whether the state is restored: not where either side has none.

    Args:
        path: The checkpoint.
        current: What this run's state is like.
        saved: What the checkpoint's is like.
        reset: `checkpoint.reset_fp8_state`.

    Raises:
        UserError: The checkpoint's state is of another kind.
    """
    if reset or not current or not saved:
        return False
    different = differences(current, saved)
    if different:
        raise UserError(
            f"{path} holds the FP8 scales of another recipe: {different}; resume with the saved values, or "
            "let scales and amax histories start anew with checkpoint.reset_fp8_state=true"
        )
    return True


def take_extra_states(state: dict[str, Any]) -> list[str]:
    """Takes the entries of FP8 scales and histories out of a model's state, and names them.

    Experts that are one module have an entry each: `…_extra_state`, `…_extra_state1`, `…_extra_state2`.
    """
    keys = [key for key in state if re.search(rf"{EXTRA_STATE}\d*$", key)]
    for key in keys:
        del state[key]
    return keys
