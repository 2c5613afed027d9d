"""A validation task: how well the model copies; "validation/lab_copying/…" has its numbers."""

from random import Random
from statistics import fmean

from gpt_pretrain import extend


@extend.validation_task("lab_copying")
def copying(run: extend.Run, evaluate: extend.Evaluate) -> dict[str, float]:
    """Loss of random tokens, and of the same tokens again, which a copying model knows (arXiv 2209.11895)."""
    model, draw = run.config.model, Random(0).randrange
    half = model.encoder_seq_length // 2
    sequences = [2 * [draw(model.vocab_size) for _ in range(half)] for _ in range(16)]
    losses = evaluate(sequences)
    return {
        "new": fmean(fmean(each[: half - 1]) for each in losses),
        "repeated": fmean(fmean(each[half:]) for each in losses),
    }
