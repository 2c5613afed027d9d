"""From runs to answers: what forbids a comparison, a verdict on each variant, the figures, and the gate.

A verdict depends on the whole interval of the loss gap (a test of non-inferiority, Schuirmann 1987). A gap within the
noise may still be real: if the noise exceeds the gap that counts, nobody can tell.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from statistics import fmean

from gpt_pretrain.compare.comparability import find_differences, find_obstacles, find_unchecked
from gpt_pretrain.compare.comparison import (
    VERSION,
    Answer,
    Comparison,
    Figures,
    Gate,
    Interval,
    Judgement,
    Obstacle,
    RunRecord,
    TimeToLoss,
)
from gpt_pretrain.compare.curves import WINDOW, Incomparable, Pair, diverged, relative
from gpt_pretrain.compare.gate import missed_demands
from gpt_pretrain.compare.intervals import CONFIDENCE
from gpt_pretrain.config.errors import UserError

# The largest relative gap that is as good, unless compare.max_loss_gap is given.
ALLOWED_GAP = 0.005

METHODS = (
    f"Smoothed losses are means over {WINDOW:.0%} of the tokens that all compared runs have; the final loss is the "
    "last of them. A gap is the ratio of two smoothed losses at the same tokens, less one.",
    f"Intervals are two-sided {CONFIDENCE:.0%} Student intervals of differences of logarithms: paired where the runs "
    "share their seeds, Welch's otherwise, with one side's variance where the other has one run. They assume that "
    "the logarithms of different seeds are normal and independent. Several variants of the same seeds count as equally "
    "noisy: the noise is what neither variant nor seed explains, in all of them together (randomized blocks).",
    "Time to loss is the GPU time at which the smoothed loss first reaches the lowest common one, without "
    "validation, checkpoints and warm-up; ratios are of geometric means.",
    f"A gap whose whole interval lies below {100 * ALLOWED_GAP:g}%, or below compare.max_loss_gap, is as good, below "
    "zero better; above zero, and partly above that limit, worse; anything else cannot be told. No p-value is given.",
)


def judge(gap: Interval, allowed: float) -> Judgement:
    """The verdict that the interval of the final relative gap allows; above zero the variant's loss is higher."""
    if gap.low is None or gap.high is None:
        return "cannot_tell"
    if gap.high < 0:
        return "better"
    if gap.high <= allowed:
        return "as_good"
    return "worse" if gap.low > 0 else "cannot_tell"


def compare_runs(runs: Sequence[RunRecord], *, command: str, gate: Gate | None) -> Comparison:
    """Compares runs of several variants, with the first run's as the baseline; raises `UserError` for one variant."""
    variants = list(dict.fromkeys(run.variant for run in runs))
    baseline = variants[0]
    if len(variants) == 1:
        of_several = f", whose {len(runs)} runs differ only in seeds" if len(runs) > 1 else ""
        raise UserError(f"there is only one variant, {baseline}{of_several}; add a run with other settings")
    runs = sorted(runs, key=lambda run: variants.index(run.variant))

    def of(variant: str) -> list[RunRecord]:
        return [run for run in runs if run.variant == variant]

    allowed = ALLOWED_GAP if gate is None or gate.max_loss_gap is None else gate.max_loss_gap
    obstacles = find_obstacles(runs)
    found = {
        variant: [each for each in obstacles if each.run in {run.name for run in of(variant)}] for variant in variants
    }
    answers = []
    for variant in variants[1:]:
        if found[variant]:
            answers.append(_not_comparable(variant, baseline, found[variant]))
            continue
        beside = [of(each) for each in variants[1:] if each != variant and not found[each]]
        answers.append(_compare_variant(of(variant), of(baseline), beside, allowed=allowed))
    if gate is not None:
        gate = replace(gate, missed=tuple(problem for answer in answers for problem in missed_demands(answer, gate)))
    return Comparison(
        version=VERSION,
        date=date.today().isoformat(),
        command=command,
        confidence=CONFIDENCE,
        baseline=baseline,
        runs=tuple(runs),
        obstacles=tuple(obstacles),
        differences=tuple(find_differences(runs)),
        unchecked=tuple(find_unchecked(runs)),
        figures=tuple(_figures(of(variant)) for variant in variants),
        answers=tuple(answers),
        methods=METHODS,
        gate=gate,
    )


def _not_comparable(variant: str, baseline: str, found: Sequence[Obstacle]) -> Answer:
    lines = (f"{each.key} is {each.value}, {baseline}'s is {each.baseline_value}" for each in found)
    reasons = tuple(dict.fromkeys(lines))
    text = f"{variant} cannot be compared with {baseline}: {'; '.join(reasons)}"
    return Answer(variant=variant, judgement="not_comparable", sentence=text, reasons=reasons)


def _compare_variant(
    ours: Sequence[RunRecord],
    theirs: Sequence[RunRecord],
    beside: Sequence[Sequence[RunRecord]],
    *,
    allowed: float,
) -> Answer:
    """Compares a variant's runs with the baseline's.

    `beside` are the runs of each other comparable variant, which help to estimate the noise.
    """
    variant, baseline = ours[0].variant, theirs[0].variant
    rates = [_mean([run.tokens_per_s_per_gpu for run in side]) for side in (ours, theirs)]
    ratio = rates[0] / rates[1] if rates[0] is not None and rates[1] is not None else None
    answer = Answer(variant=variant, judgement="cannot_tell", throughput_ratio=ratio)
    for run in (*theirs, *ours):
        if diverged(run):
            why = f"the loss of {run.name} is not finite at its end"
            if run.variant == baseline:
                return _unable(answer, baseline, why, "fix the baseline")
            text = f"{variant} trains worse than {baseline}: {why}"
            return replace(answer, judgement="worse", sentence=text, reasons=(why,))
    try:
        pair = Pair(ours, theirs, beside)
    except Incomparable as reason:
        return _unable(answer, baseline, str(reason), "run longer, or log more often")
    reasons = []
    if silent := [run.name for run in (*ours, *theirs) if not run.training.gpu_seconds]:
        reasons.append(f"no time to loss: {', '.join(silent)} has no times, or not on how many GPUs")
    if not pair.is_whole:
        reasons.append("the runs end at different steps: compared up to the end of the shortest")
    gap = relative(pair.gap_at(pair.end))
    answer = replace(
        answer,
        judgement=judge(gap, allowed),
        reasons=tuple(reasons),
        final_losses=pair.final_losses(),
        loss_gap=gap,
        noise_from=pair.noise_from,
        gap_curve=pair.gap_curve(),
        time_to_loss=pair.time_to_loss(),
    )
    return _with_sentence(answer, gap, baseline, allowed)


def _with_sentence(answer: Answer, gap: Interval, baseline: str, allowed: float) -> Answer:
    pace, is_sooner = _pace(answer.time_to_loss, baseline, answer.final_losses[1])
    loss = f"final loss {_gap_text(gap)}"
    if answer.judgement != "cannot_tell":
        verb = {"as_good": "trains as well as", "better": "trains better than", "worse": "trains worse than"}
        start = f"{answer.variant} {verb[answer.judgement]} {baseline}"
        if is_sooner and answer.judgement != "worse":
            return replace(answer, sentence=f"{answer.variant} {pace}; {loss}")
        return replace(answer, sentence="; ".join(filter(None, [start, loss, pace])))
    if gap.high is None:
        why = "one run of each shows no noise"
    else:
        why = f"up to {_percent(gap.high):+f}% is possible, and {100 * allowed:g}% counts"
    return _unable(answer, baseline, "; ".join(filter(None, [loss, why, pace])), "run longer or more seeds")


def _unable(answer: Answer, baseline: str, reason: str, way_out: str) -> Answer:
    text = f"cannot tell whether {answer.variant} trains as well as {baseline}: {reason}; {way_out}"
    return replace(answer, judgement="cannot_tell", sentence=text, reasons=(*answer.reasons, reason))


def _percent(share: float) -> Decimal:
    # A Decimal's format f never writes an exponent.
    return Decimal(f"{round(100 * share, 4) + 0.0:.2g}")


def _gap_text(gap: Interval) -> str:
    """A relative gap with its sign: +0.21%, -1.5%, +120%, +0%."""
    value = f"{_percent(gap.value):+f}%"
    if gap.low is None or gap.high is None:
        return value
    width = f"±{_percent((gap.high - gap.low) / 2):f}%"
    if gap.low <= 0 <= gap.high:
        return f"{value}, within the noise of seeds ({width})"
    return f"{value} ({width})"


def _pace(time: TimeToLoss | None, baseline: str, final_loss: float) -> tuple[str, bool]:
    """How soon the lowest common loss is reached, empty if times are unknown, and whether it is no later."""
    if time is None:
        return "", False
    ratio, loss = time.speedup, time.loss
    # With several seeds, the level is the highest of their final losses.
    what = f"{baseline}'s final loss, {loss:.4g}," if loss <= 1.001 * final_loss else f"a loss of {loss:.4g}"
    if ratio.value >= 1:
        return f"reaches {what} {format_speedup(ratio)} sooner", True
    return f"needs {1 / ratio.value:.2f}× the time to reach {what.rstrip(',')}", False


def format_speedup(ratio: Interval) -> str:
    """A ratio of times with its interval, if known: 1.25× (1.20 to 1.30)."""
    ends = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}×{ends}"


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _figures(runs: Sequence[RunRecord]) -> Figures:
    skipped = [run.skipped_steps for run in runs if run.skipped_steps is not None]
    return Figures(
        variant=runs[0].variant,
        num_runs=len(runs),
        last_loss=_mean([_last_loss(run) for run in runs]),
        tokens_per_s_per_gpu=_mean([run.tokens_per_s_per_gpu for run in runs]),
        memory_gib=max((run.memory_gib for run in runs if run.memory_gib is not None), default=None),
        skipped_steps=sum(skipped) if skipped else None,
        fp8_share=_mean([run.fp8_share for run in runs]),
    )


def _last_loss(run: RunRecord) -> float | None:
    """Mean of the losses in this run's last window of smoothing; at least the last one."""
    losses = run.training.losses[-max(1, round(WINDOW * len(run.training.losses))) :]
    return fmean(losses) if losses else None
