"""What a plan comes to, in plain sentences: whether it fits, and whether FP8 pays."""

from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import Config
from gpt_pretrain.plan.hardware import Gpu
from gpt_pretrain.plan.memory import GIB, MemoryForecast
from gpt_pretrain.plan.speed import Speed
from gpt_pretrain.spec.layout import Layout

# Predictions are good to some percent: closer to BF16 than this is not a gain that a run can count on.
WORTHWHILE = 1.05
# Forecasts of memory have been within 2%; with less room than this a run may still end for lack of it.
CLOSE = 0.95


def memory_verdict(memory: MemoryForecast, gpu: Gpu, layout: Layout, config: Config) -> str:
    """Whether the run fits, and if not, what would make it."""
    used = f"{memory.needed_gib:.1f} of {gpu.memory_gib:.1f} GiB"
    where = f" on the GPUs of pipeline stage {memory.worst.stage}" if layout.pp > 1 else ""
    if memory.fits:
        share = memory.needed_gib / gpu.memory_gib
        tight = "; that is close, so watch the first steps" if share > CLOSE else ""
        return f"Memory: fits, with {used}{where}{tight}."
    ways = []
    others = memory.needed_gib - memory.worst.peak / GIB
    for name, peak in memory.recompute_peaks.items():
        if name != "none" and peak / GIB + others <= gpu.memory_gib:
            ways.append(f"model.activations_checkpoint_granularity={name}")
            break
    if config.model.micro_batch_size > 1:
        ways.append("a smaller model.micro_batch_size")
    if not uses_distributed_optimizer(config.model) and layout.dp > 1:
        ways.append("model.use_distributed_optimizer=true")
    ways.append("more GPUs (parallelism=dp shards the optimizer, tp2_sp and pp2 the layers)")
    return f"Memory: DOES NOT FIT, it needs {used}{where}. Ways out: {'; '.join(ways)}."


def fp8_verdict(*, bf16: Speed, fp8: Speed | None, recipe: str, is_on: bool, problem: str) -> str:
    """Whether FP8 pays.

    Args:
        bf16: The run without FP8.
        fp8: The run with it; None where a rule refuses it.
        recipe: The recipe of `fp8`.
        is_on: Whether the run is in FP8.
        problem: The rule's message.
    """
    if fp8 is None:
        return f"FP8: would be refused here: {problem}"
    ratio = bf16.step_s / fp8.step_s
    saved = bf16.seconds["GEMMs"] - fp8.seconds["GEMMs"]
    overhead = sum(fp8.seconds.get(name, 0.0) for name in ("FP8 casts", "FP8 parameters"))
    share = bf16.seconds["GEMMs"] / bf16.step_s
    why = (
        f"its GEMMs save {_ms(saved)} of a step of {_ms(bf16.step_s)}, and its casts cost {_ms(overhead)}; "
        f"{share:.0%} of the BF16 step is GEMMs that FP8 can take"
    )
    waits = fp8.seconds.get("waiting for the host", 0.0)
    if waits > overhead:
        why += f"; the GPU waits {_ms(waits)} for the host to launch so small kernels, fewer in larger microbatches"
    if ratio >= WORTHWHILE:
        return f"FP8: {'pays' if is_on else f'would pay (fp8={recipe})'}, {ratio:.2f}× BF16: {why}."
    advice = "use fp8=none, or larger layers or microbatches" if is_on else "stay with BF16"
    return f"FP8: {'will' if is_on else 'would'} not pay, {ratio:.2f}× BF16: {why}. Advice: {advice}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def emulation_verdict() -> str:
    """What emulation is for."""
    return (
        "Speed: not predicted. model.fp8_emulate=true computes FP8's values in the run's precision, many times slower "
        "than BF16: for trying recipes, not for training at length. Memory is forecast as without FP8."
    )


def unknown_speed() -> str:
    """Why there is no prediction on local layers."""
    return (
        "Speed: not predicted for layers without Transformer Engine, whose attention writes all scores to memory; "
        "leave model.transformer_engine and trainer.precision out to train at full speed."
    )
