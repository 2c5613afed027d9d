"""What may be compared: the settings that two losses must share to mean the same, and those in which runs differ.

Logs of other codes have some settings under their own names; their readers translate these into our keys, so that one
table serves all. A setting that a log lacks is taken for equal, and the comparison says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from gpt_pretrain.compare.document import Difference, Obstacle, RunRecord

# Losses mean the same where these agree: what is learned, from how much at once, in which units, by which model.
IDENTITY: Mapping[str, tuple[str, ...]] = {
    "data": (
        "model.data.data_impl",
        "model.data.data_prefix",
        "model.data.text_files",
        "model.data.text_key",
        "model.data.splits_string",
        "model.data.eod_mask_loss",
    ),
    "batch": ("model.global_batch_size", "model.encoder_seq_length"),
    "tokenizer": (
        "model.tokenizer.library",
        "model.tokenizer.model",
        "model.tokenizer.vocab_size",
        "model.vocab_size",
    ),
    "model": (
        "model.num_layers",
        "model.hidden_size",
        "model.ffn_hidden_size",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.kv_channels",
        "model.position_embedding_type",
        "model.rotary_percentage",
        "model.rotary_base",
        "model.rope_scaling_factor",
        "model.normalization",
        "model.activation",
        "model.bias",
        "model.qkv_bias",
        "model.qk_layernorm",
        "model.share_embeddings_and_output_weights",
        "model.num_moe_experts",
        "model.moe_ffn_hidden_size",
        "model.moe_router_topk",
    ),
}
_PATHS = frozenset({"model.data.data_prefix", "model.data.text_files", "model.tokenizer.model"})
SEED, MICROBATCH = "model.seed", "model.micro_batch_size"
# Where a run writes and what it shows change nothing that is compared.
_PLACES = ("run_dir", "name", "benchmark.", "plan.", "compare.", "sample.", "logging.", "model.data.cache_dir")


def _comparable(key: str, value: str) -> str:
    """A value as it is compared: the same file may lie elsewhere on another machine."""
    if key not in _PATHS:
        return value
    return ",".join(PurePath(part.strip(" '\"")).name for part in value.strip("[]").split(","))


def settings_of(run: RunRecord) -> dict[str, str]:
    """The settings that may matter, by key."""
    return {each.key: each.value for each in run.configuration if not each.key.startswith(_PLACES)}


def find_obstacles(runs: Sequence[RunRecord], baseline: RunRecord) -> list[Obstacle]:
    """What keeps runs from being compared with the baseline."""
    known = settings_of(baseline)
    return [
        Obstacle(run=run.name, key=key, baseline_value=known[key], value=value)
        for run in runs
        for key, value in settings_of(run).items()
        if key in known
        and any(key in keys for keys in IDENTITY.values())
        and _comparable(key, value) != _comparable(key, known[key])
    ]


def find_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """The settings that have several values among the runs that tell them, seeds left out."""
    settings = [settings_of(run) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if key != SEED]
    return [
        Difference(key=key, values=tuple(each.get(key, "") for each in settings))
        for key in keys
        if len({_comparable(key, each[key]) for each in settings if key in each}) > 1
    ]


def find_unchecked(runs: Sequence[RunRecord]) -> Iterator[str]:
    """What has to be equal, and some runs do not tell."""
    told = {
        what: [any(run.setting(key) is not None for key in keys) for run in runs] for what, keys in IDENTITY.items()
    }
    silent: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        what = ", ".join(what for what, tells in told.items() if not tells[index])
        if what:
            silent.setdefault(what, []).append(run.name)
    for what, names in silent.items():
        yield f"not told by {', '.join(names)}: {what}; taken for equal, check it yourself"


def variant_settings(run: RunRecord) -> dict[str, str]:
    """What makes one of our runs a variant: all settings but seed and microbatches."""
    return {key: value for key, value in settings_of(run).items() if key not in (SEED, MICROBATCH)}
