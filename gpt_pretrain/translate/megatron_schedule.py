"""Megatron-LM's learning rate and length of a run: in iterations, or in samples, which a growing batch makes tokens."""

import math
from fractions import Fraction

from gpt_pretrain.translate.common import set_betas
from gpt_pretrain.translate.translation import Source, Translation

_SCHED = "model.optim.sched"
# Of the rate: what floating point leaves of zero.
_ZERO = 1e-9


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
    _phases(source, translation, samples or (steps * batch if batch else None), batch)
    if batch and source.get("seq_length"):
        _one_step_on(source, translation, batch * source.get("seq_length"))


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


def _phases(source: Source, translation: Translation, run_samples: int | None, batch: int | None) -> None:
    """The phases of the rate in a run of so many samples: in steps, or in tokens where they end within a step."""
    length, is_wsd = source.get("seq_length"), source.get("lr_decay_style") == "WSD"

    def take(phase: str, samples: Fraction | int | None, name: str, what: str = "") -> None:
        """Sets the length of a phase that is given in samples, or else in iterations."""
        if not samples or not batch:
            translation.derive(f"{_SCHED}.{phase}_steps", source.get(f"lr_{phase}_iters"), f"lr_{phase}_iters")
        elif length and samples % batch:
            how = f"{what or f'{samples:,} samples'} × {length:,} tokens: no whole number of steps of {batch:,}"
            translation.derive(f"{_SCHED}.{phase}_tokens", round(samples * length), name, how=how)
        else:
            how = f"{what or f'{samples:,} samples'} / {batch:,}"
            translation.derive(f"{_SCHED}.{phase}_steps", max(1, round(samples / batch)), name, how=how)

    decay, fraction = source.get("lr_decay_samples"), source.get("lr_warmup_fraction")
    # The rate decays over all samples of a run, also those that make no whole step.
    if decay is None and source.get("train_samples") and batch and run_samples and run_samples % batch:
        take("decay", run_samples, "train_samples")
    else:
        take("decay", decay, "lr_decay_samples")
    if fraction is None:
        take("warmup", source.get("lr_warmup_samples"), "lr_warmup_samples")
    else:
        iterations = source.get("lr_decay_iters")
        samples = decay or (iterations * batch if iterations and batch else run_samples)
        of_decay = None if samples is None else Fraction(str(fraction)) * samples
        take("warmup", of_decay, "lr_warmup_fraction", f"{fraction:g} × {samples or 0:,} samples of decay")
    if is_wsd and not (source.get("lr_wsd_decay_samples") or source.get("lr_wsd_decay_iters")):
        translation.up_to_you.append((f"{_SCHED}.wsd_decay_steps", "--lr-wsd-decay-iters is not given"))
    elif is_wsd:
        take("wsd_decay", source.get("lr_wsd_decay_samples"), "lr_wsd_decay_samples")


def _one_step_on(source: Source, translation: Translation, step_tokens: int) -> None:
    """The same rates, if ours can have them: step n of Megatron-LM trains with the rate of n - 1, ours with that of n.

    A warmup from 0 would begin below it here: its step 1, which changes nothing there, is left out, and told.
    """
    steps, tokens = (translation.value(f"{_SCHED}.warmup_{unit}") for unit in ("steps", "tokens"))
    warmup, step = (steps, 1) if tokens is None else (tokens, step_tokens)
    rate, first = source.get("lr"), source.get("lr_warmup_init") or 0.0
    if not (rate and warmup):
        return
    begin = first - (rate - first) * step / warmup
    if begin < -_ZERO * rate:
        translation.notes.append(f"rates are one step ahead of Megatron-LM's, whose first step has the rate {first:g}")
        return
    how = "a step more: the rate of step n is that of n - 1 there"
    begin = float(f"{begin:.12g}") if begin > _ZERO * rate else 0.0
    translation.derive(f"{_SCHED}.init_lr", begin, "lr_warmup_init", how="of a step before")
    if translation.value(f"{_SCHED}.decay_tokens") is None and translation.value(f"{_SCHED}.decay_steps") is None:
        translation.derive(f"{_SCHED}.decay_steps", translation.value("trainer.max_steps"), "train_iters")
    for phase in ("warmup", "decay"):
        for unit, more in (("steps", 1), ("tokens", step_tokens)):
            key = f"{_SCHED}.{phase}_{unit}"
            if (length := translation.value(key)) is not None:
                translation.set(key, length + more, f"{translation.settings[key].origin}: {how}")


def _decoupled(source: Source, translation: Translation) -> None:
    rate, least = source.get("decoupled_lr"), source.get("decoupled_min_lr")
    if rate is not None and least is not None and not math.isclose(least, rate / 10):
        there = "the rate of embeddings and LM head fell to it"
        translation.lose(source.shown("decoupled_min_lr"), there, f"it falls to a tenth, {rate / 10:g}")
