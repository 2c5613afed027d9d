"""Runs whose answers are known by hand: power laws of the tokens, with factors for gaps, seeds and speeds."""

from gpt_pretrain.compare.comparison import Curve, RunRecord

TOKENS_PER_STEP = 1000
SHARED = {
    "model.global_batch_size": "8",
    "model.vocab_size": "512",
    "model.num_layers": "2",
    "model.data.data_impl": "m",
}


def power_law(x):
    """A loss like those of language models: 8 at the first step, 3.2 at the thousandth."""
    return 8 * (x / TOKENS_PER_STEP) ** -0.13


def synthetic_run(
    variant,
    seed=1,
    *,
    gap=0.0,
    s_per_step=1.0,
    steps=1000,
    every=5,
    first=0,
    noise=lambda step: 0.0,
    num_gpus=1,
    loss=power_law,
    settings=SHARED,
    **fields,
):
    """A run of `steps` steps, logged `every` few, whose loss is `1 + gap` times the power law, plus the noise."""
    logged = range(first + every, first + steps + 1, every)
    losses = [loss(TOKENS_PER_STEP * step) * (1 + gap) * (1 + noise(step)) for step in logged]
    return RunRecord(
        name=f"{variant} seed {seed}",
        variant=variant,
        seed=seed,
        source="",
        format="gpt_pretrain",
        state="finished",
        num_gpus=num_gpus,
        training=fields.pop(
            "training",
            Curve(
                steps=tuple(logged),
                losses=tuple(losses),
                tokens=tuple(TOKENS_PER_STEP * step for step in logged),
                gpu_seconds=tuple((step - first) * s_per_step * num_gpus for step in logged),
            ),
        ),
        validation=Curve(steps=(), losses=(), tokens=(), gpu_seconds=()),
        tokens_per_s=TOKENS_PER_STEP / s_per_step,
        memory_gib=1.0,
        skipped_steps=0,
        fp8_share=None,
        configuration={key: str(value) for key, value in {**settings, "model.seed": seed}.items()},
        versions=None,
        command=None,
        **fields,
    )
