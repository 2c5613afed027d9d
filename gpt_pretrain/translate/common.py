"""What several formats translate alike: rows of the vocabulary, decays, sharded data parallelism, weighted paths."""

import math
from typing import Any

from gpt_pretrain.config.derived import padded_rows
from gpt_pretrain.translate.translation import Source, Translation

GPT2_TOKENS = 50257
DECAY_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
"""`model.optim.sched.name` by megatron-core's names of decays, without those that have no counterpart."""


def set_vocabulary_rows(
    source: Source, translation: Translation, tokens: int | None, divisor_name: str, tp_name: str
) -> None:
    """Pads the embedding as Megatron-LM does, to multiples of divisor × TP; here the divisor counts alone."""
    divisor, tp = source.get(divisor_name), source.get(tp_name, 1)
    if not isinstance(divisor, int) or not isinstance(tp, int):
        return
    padded, ours = (None if not tokens else padded_rows(tokens, each) for each in (divisor * tp, divisor))
    key = "model.make_vocab_size_divisible_by"
    if padded == ours and ours is not None and ours % tp == 0:
        translation.derive(key, divisor, divisor_name)
    else:
        how = f"times {tp} tensor-parallel ranks" + (f", {padded:,} rows" if padded else "")
        translation.derive(key, divisor * tp, divisor_name, tp_name, how=how)


def set_sharding(translation: Translation, strategy: str | None, *names: str) -> None:
    """Sharded data parallelism with what it needs here; `strategy` None: every rank has everything."""
    translation.derive("model.data_parallel_sharding_strategy", strategy, *names)
    if strategy is not None:
        how = "sharding needs it here"
        for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            translation.derive(f"model.{key}", True, *names, how=how)


def set_full_recomputation(translation: Translation, name: str) -> None:
    """Recomputes every layer, because of the setting `name`."""
    for key, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
        translation.derive(f"model.activations_checkpoint_{key}", value, name)


def set_betas(translation: Translation, *names: str) -> None:
    """Adam's betas, which are two settings there."""
    given = any(name in translation.source.given for name in names)
    shown = ", ".join(map(translation.source.shown, names))
    translation.set("model.optim.betas", [translation.source.get(name) for name in names], shown, given=given)


def set_saves(translation: Translation, interval: int | None, name: str, saves: bool, *because: str) -> None:
    """Saves by steps alone, and at the end; `because` of these settings there are any."""
    translation.derive("checkpoint.save_interval", interval if saves else None, name, *because)
    how = "saves go by steps alone"
    translation.derive("checkpoint.save_interval_minutes", None, *(because or [name]), how=how)
    translation.derive("checkpoint.save_at_end", saves, *(because or [name]))


def set_preset(translation: Translation, preset: str | None, *names: str) -> None:
    """The model that a preset is, or none, by its names there."""
    if preset is None:
        translation.preset = "base"
        shown = ", ".join(map(translation.source.shown, names))
        translation.lose(shown, "the model", "no preset is the same; choose model=…")
        return
    translation.preset = preset
    translation.not_needed += [(translation.source.shown(name), f"model={preset} is it") for name in names]


def set_sizes(translation: Translation, ffn: str, channels: str, groups: str) -> None:
    """Widths that follow from hidden size and heads where they are not given."""
    hidden, heads = translation.value("model.hidden_size"), translation.value("model.num_attention_heads")
    if hidden and heads:
        derived = {"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads, "num_query_groups": heads}
        for (key, value), name in zip(derived.items(), (ffn, channels, groups), strict=True):
            translation.derive(f"model.{key}", translation.source.get(name) or value, name)


def set_init(translation: Translation, layers: int, std: float | None, output: float | None, *names: str) -> None:
    """Deviations of initial weights and of output projections, which here are smaller by the root of 2 × layers."""
    shown = ", ".join(map(translation.source.shown, names))
    if std is not None:
        translation.derive("model.init_method_std", float(f"{std:.6g}"), names[0])
    ours = translation.value("model.init_method_std", 0.02) / math.sqrt(2 * layers)
    if std is None or output is None or not math.isclose(ours, output, rel_tol=0.01):
        there = f"output projections began with a deviation of {output:.4g}" if output else "weights began that way"
        translation.lose(shown, there, f"they begin with {ours:.4g}")


def data_parallel_ranks(translation: Translation, model_ranks: int) -> int:
    """Ranks that have samples of their own; 0 if the number of processes is not known."""
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    return devices * nodes // model_ranks if devices else 0


def blend(words: list[Any]) -> list[Any]:
    """Weights and paths in turn, or paths alone; a text that is a number is a weight."""

    def entry(word: Any) -> Any:
        if not isinstance(word, str):
            return word
        try:
            return float(word) if "." in word or "e" in word.lower() else int(word)
        except ValueError:
            return word

    return [entry(word) for word in words] if len(words) > 1 else list(words)
