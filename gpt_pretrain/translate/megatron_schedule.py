"""Megatron-LM's learning rate and length of a run: in iterations, or in samples, which a growing batch makes tokens."""

import math

from gpt_pretrain.translate.common import set_betas
from gpt_pretrain.translate.translation import Source, Translation

_SCHED = "model.optim.sched"


def _steps(samples: int, batch: int) -> tuple[int, str]:
    """Steps that take so many samples, and the calculation."""
    exact = samples / batch
    return max(1, round(exact)), f"{samples:,} samples / {batch:,} = {exact:,.1f} steps"


def schedule(source: Source, translation: Translation) -> None:
    """Betas, rates, the run's length, and the phases of the rate."""
    set_betas(translation, "adam_beta1", "adam_beta2")
    if source.get("lr") is None:
        translation.up_to_you.append(("model.optim.lr", "there is no --lr"))
    else:
        translation.take("model.optim.lr", "lr")
    _decoupled(source, translation)
    batch = translation.value("model.global_batch_size")
    samples, steps, how = source.get("train_samples"), source.get("train_iters"), ""
    if samples and source.get("seq_length") and _grows(source):
        _in_tokens(source, translation, source.get("seq_length"))
        return
    if samples and batch:
        steps, how = samples // batch, f"{samples:,} samples / {batch:,}, rounded down"
    if not steps:
        translation.up_to_you.append(("trainer.max_steps", "there is no --train-iters or --train-samples"))
        return
    translation.derive("trainer.max_steps", steps, "train_samples" if samples else "train_iters", how=how)
    decay = _length(source, translation, "decay", batch)
    _warmup(source, translation, decay or steps, batch)
    wsd = _length(source, translation, "wsd_decay", batch) if source.get("lr_decay_style") == "WSD" else None
    if source.get("lr_decay_style") == "WSD" and wsd is None:
        translation.up_to_you.append((f"{_SCHED}.wsd_decay_steps", "--lr-wsd-decay-iters is not given"))


def _grows(source: Source) -> bool:
    return any(source.get(name) is not None for name in ("rampup_batch_size", "step_batch_size_schedule"))


def _in_tokens(source: Source, translation: Translation, length: int) -> None:
    """A run that counts samples and whose batch grows: no division makes them steps."""
    translation.derive("trainer.max_steps", None, "train_samples", how="trainer.max_tokens ends the run")

    def derive(key: str, samples: int, name: str) -> None:
        how = f"{samples:,} samples × {length:,} tokens"
        translation.derive(key, samples * length, name, how=how)

    derive("trainer.max_tokens", source.get("train_samples"), "train_samples")
    decay, fraction = source.get("lr_decay_samples"), source.get("lr_warmup_fraction")
    if decay:
        derive(f"{_SCHED}.decay_tokens", decay, "lr_decay_samples")
    if fraction is None:
        derive(f"{_SCHED}.warmup_tokens", source.get("lr_warmup_samples") or 0, "lr_warmup_samples")
    else:
        tokens = (decay or source.get("train_samples")) * length
        how = f"{fraction:g} × {tokens:,} tokens of decay"
        translation.derive(f"{_SCHED}.warmup_tokens", round(fraction * tokens), "lr_warmup_fraction", how=how)
    if source.get("lr_decay_style") == "WSD":
        if samples := source.get("lr_wsd_decay_samples"):
            derive(f"{_SCHED}.wsd_decay_tokens", samples, "lr_wsd_decay_samples")
        else:
            why = "--lr-wsd-decay-samples is not given"
            translation.up_to_you.append((f"{_SCHED}.wsd_decay_tokens", why))


def _length(source: Source, translation: Translation, phase: str, batch: int | None) -> int | None:
    """Sets the steps of a phase of the schedule, from iterations or samples."""
    key = f"{_SCHED}.{phase}_steps"
    iterations, samples = source.get(f"lr_{phase}_iters"), source.get(f"lr_{phase}_samples")
    if samples and batch:
        steps, how = _steps(samples, batch)
        translation.derive(key, steps, f"lr_{phase}_samples", how=how)
        return steps
    translation.derive(key, iterations, f"lr_{phase}_iters")
    return iterations if isinstance(iterations, int) else None


def _warmup(source: Source, translation: Translation, decay: int, batch: int | None) -> None:
    key = f"{_SCHED}.warmup_steps"
    fraction, samples = source.get("lr_warmup_fraction"), source.get("lr_warmup_samples")
    if fraction is not None:
        how = f"{fraction:g} × {decay:,} steps of decay"
        translation.derive(key, round(fraction * decay), "lr_warmup_fraction", how=how)
    elif samples and batch:
        steps, how = _steps(samples, batch)
        translation.derive(key, steps, "lr_warmup_samples", how=how)
    else:
        translation.take(key, "lr_warmup_iters")


def _decoupled(source: Source, translation: Translation) -> None:
    rate, least = source.get("decoupled_lr"), source.get("decoupled_min_lr")
    if rate is not None and least is not None and not math.isclose(least, rate / 10):
        there = "the rate of embeddings and LM head fell to it"
        translation.lose(source.shown("decoupled_min_lr"), there, f"it falls to a tenth, {rate / 10:g}")
