"""What several formats translate alike: rows of the vocabulary, sharded data parallelism, weighted paths."""

from typing import Any

from gpt_pretrain.translate.translation import Source, Translation

GPT2_TOKENS = 50257


def set_vocabulary_rows(
    source: Source, translation: Translation, tokens: int | None, divisor_name: str, tp_name: str
) -> None:
    """Pads the embedding as Megatron-LM does, to multiples of divisor × TP; here the divisor counts alone."""
    divisor, tp = source.get(divisor_name), source.get(tp_name, 1)
    if not isinstance(divisor, int) or not isinstance(tp, int):
        return
    padded = None if not tokens else -(-tokens // (divisor * tp)) * divisor * tp
    ours = None if not tokens else -(-tokens // divisor) * divisor
    key = "model.make_vocab_size_divisible_by"
    if padded == ours and ours is not None and ours % tp == 0:
        translation.derive(source, key, divisor, divisor_name)
    else:
        how = f"times {tp} tensor-parallel ranks" + (f", {padded:,} rows" if padded else "")
        translation.derive(source, key, divisor * tp, divisor_name, tp_name, how=how)


def set_sharding(source: Source, translation: Translation, strategy: str | None, *names: str) -> None:
    """Sharded data parallelism with what it needs here; `strategy` None: every rank has everything."""
    translation.derive(source, "model.data_parallel_sharding_strategy", strategy, *names)
    if strategy is not None:
        how = "sharding needs it here"
        for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            translation.derive(source, f"model.{key}", True, *names, how=how)


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
