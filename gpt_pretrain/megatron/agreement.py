"""Do all ranks run the same configuration? Each composes its own, from files and an environment that may differ.

A rank with another layout, batch or recipe would leave the others waiting in a collective, or train something that
nobody asked for.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpt_pretrain.config.errors import UserError

_KEYS_SHOWN = 5


def check_ranks_agree(values: Mapping[str, Any]) -> None:
    """Compares the values of all ranks; every rank calls it.

    Args:
        values: Dotted keys and plain values.

    Raises:
        UserError: They differ; names the keys, the values and a rank that has them.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    world_size = torch.distributed.get_world_size()
    digests = [""] * world_size
    torch.distributed.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everybody: list[Mapping[str, Any]] = [{}] * world_size
    torch.distributed.all_gather_object(everybody, values)
    different = list(_differences(everybody))
    more = f" and {len(different) - _KEYS_SHOWN} more" if len(different) > _KEYS_SHOWN else ""
    raise UserError(
        f"the ranks do not run the same configuration: {'; '.join(different[:_KEYS_SHOWN])}{more}. Give all of them "
        "the same command line, and the same files where --config-dir or --config-path names some"
    )


def _differences(everybody: list[Mapping[str, Any]]) -> Iterator[str]:
    for key in dict.fromkeys(key for values in everybody for key in values):
        value = everybody[0].get(key)
        other = next((rank for rank, values in enumerate(everybody) if values.get(key) != value), None)
        if other is not None:
            yield f"{key}={json.dumps(value)} on rank 0 and {json.dumps(everybody[other].get(key))} on rank {other}"
