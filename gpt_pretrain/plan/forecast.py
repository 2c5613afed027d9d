"""The plan of one run, put together: settings, products, memory, speed, and what follows from them in sentences."""

from dataclasses import dataclass, replace

from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.checkpoints import CheckpointForecast, forecast_checkpoint
from gpt_pretrain.plan.effective import Setting, effective_settings
from gpt_pretrain.plan.experts import BUSIEST_EXPERT, BUSIEST_EXPERT_AT_FIRST, CALIBRATED_ON, rank_load
from gpt_pretrain.plan.hardware import EFFICIENCY, GPUS, Gpu
from gpt_pretrain.plan.kernels import Machine
from gpt_pretrain.plan.machine import planned_platform
from gpt_pretrain.plan.memory import MemoryForecast, forecast_memory
from gpt_pretrain.plan.products import Product, plan_products
from gpt_pretrain.plan.remedies import plan_more_gpus, plan_remedies
from gpt_pretrain.plan.speed import Speed, predict_speed, with_usual_fp8, without_fp8
from gpt_pretrain.plan.stages import Stage, plan_stages
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.spec.run_spec import RunSpec, build_run_spec

# Predictions are good to some percent: closer to BF16 than this is not a gain that a run can count on.
WORTHWHILE = 1.05
# Forecasts of memory have been within 2%; with less room than this a run may still end for lack of it.
CLOSE = 0.95
# Why there is no prediction.
_EMULATED = (
    "Speed: not predicted. model.fp8_emulate=true computes FP8's values in the run's precision, many times slower "
    "than BF16: for trying recipes, not for training at length. Memory is forecast as without FP8."
)
_ON_LOCAL_LAYERS = (
    "Speed: not predicted for layers without Transformer Engine; leave model.transformer_engine, model.compile and "
    "trainer.precision out to train at full speed."
)


def memory_verdict(memory: MemoryForecast, gpu: Gpu, spec: RunSpec) -> str:
    """Whether the run fits, and if not, which changes need less memory, by the same forecast."""
    used = f"{memory.needed_gib:.1f} of {gpu.memory_gib:.1f} GiB"
    where = f" on the GPUs of pipeline stage {memory.worst.stage}" if spec.layout.pp > 1 else ""
    if memory.fits:
        share = memory.needed_gib / gpu.memory_gib
        tight = "; that is close, so watch the first steps" if share > CLOSE else ""
        return f"Memory: fits, with {used}{where}{tight}."
    return f"Memory: DOES NOT FIT, it needs {used}{where}. {_ways_out(gpu, spec)}."


def _ways_out(gpu: Gpu, spec: RunSpec) -> str:
    def needed(forecast: MemoryForecast) -> float:
        return forecast.needed_gib

    remedies = plan_remedies(spec.config, spec.launch, spec.platform, needed)
    enough = [remedy for remedy in remedies if remedy.needed_gib <= gpu.memory_gib]
    enough += plan_more_gpus(spec.config, needed, gib=gpu.memory_gib)
    told = "; ".join(f"{remedy.overrides} ({remedy.needed_gib:.1f} GiB)" for remedy in enough or remedies)
    if enough:
        return f"Ways out, each alone: {told}"
    less = f"these need less, each alone: {told}" if told else "no change of layout makes it fit"
    return f"Ways out: a smaller model, or several changes; {less}"


def fp8_verdict(*, bf16: Speed, fp8: Speed | None, recipe: str, is_on: bool, problem: str) -> str:
    """Whether FP8 pays.

    `fp8` is None where a rule, whose message is `problem`, refuses it.
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


def experts_verdict(model: ModelConfig, run: Speed | None) -> str:
    """What the forecasts for experts rest on.

    Args:
        model: A model with experts.
        run: The predicted step; None where no speed is predicted.
    """
    at_first, later = (rank_load(model, busiest) for busiest in (BUSIEST_EXPERT_AT_FIRST, BUSIEST_EXPERT))
    told = [f"forecasts are calibrated on {CALIBRATED_ON} alone, and no other model or machine"]
    if at_first > 1:
        told.append(
            f"the fullest rank is taken to have {at_first:.2f} times the mean number of rows at first, for its memory, "
            f"and {later:.2f} times once routers balance, for speed"
        )
    waits = 0.0 if run is None else run.seconds.get("waiting for the host", 0.0)
    if run is not None and waits:
        alone = run.tokens_per_s_per_gpu * run.step_s / (run.step_s - waits)
        told.append(
            f"{_ms(waits)} of a step are waits for the host, and without them a GPU would reach {alone:,.0f} tokens/s"
        )
    return f"Experts: {'; '.join(told)}."


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedForecast:
    """The speed of the run, and of the same run with FP8 switched off, or on."""

    run: Speed
    bf16: Speed
    fp8: Speed | None
    """None where FP8 could not run: see `Plan.sentences`."""
    fp8_recipe: str
    """Of `fp8`: the run's own, or the usual one where the run is in BF16 (`with_usual_fp8`)."""

    @property
    def ratio(self) -> float | None:
        """FP8 ÷ BF16."""
        return None if self.fp8 is None else self.bf16.step_s / self.fp8.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a checked configuration would do."""

    spec: RunSpec
    gpu: Gpu
    stages: tuple[Stage, ...]
    settings: tuple[Setting, ...]
    products: tuple[Product, ...]
    num_parameters: int
    """Of the whole model; tied embeddings counted once."""
    memory: MemoryForecast
    checkpoint: CheckpointForecast
    flops_per_token: float
    speed: SpeedForecast | None
    """None where nothing has been measured that a prediction could rest on."""
    sentences: tuple[str, ...]
    """What a person should know before starting the run, the most important first."""


def _num_parameters(spec: RunSpec) -> int:
    """Parameters of the whole model: of one pipeline stage without tensor parallelism."""
    whole = replace(
        spec.model,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
    (stage,) = plan_stages(build_run_spec(replace(spec.config, model=whole), spec.launch, spec.platform))
    return stage.num_parameters


def _forecast_speed(spec: RunSpec, machine: Machine) -> tuple[SpeedForecast, str]:
    """The speeds, and why FP8 could not run where it could not."""

    def speed_of(model: ModelConfig) -> Speed:
        # FP8 decides about kernels, too.
        varied = build_run_spec(replace(spec.config, model=model), spec.launch, spec.platform)
        return predict_speed(machine, varied)

    bf16 = speed_of(without_fp8(spec.model))
    if spec.fp8 is not None:
        run = predict_speed(machine, spec)
        return SpeedForecast(run=run, bf16=bf16, fp8=run, fp8_recipe=spec.fp8.recipe.preset), ""
    usual = with_usual_fp8(spec.model)
    assert usual.fp8_recipe is not None
    problems = config_problems(replace(spec.config, model=usual), spec.launch)
    fp8 = None if problems else speed_of(usual)
    return SpeedForecast(run=bf16, bf16=bf16, fp8=fp8, fp8_recipe=usual.fp8_recipe.name), "".join(problems[:1])


def build_plan(config: Config, launch: Launch) -> Plan:
    """Plans a configuration that all rules and the planned machine let pass."""
    gpu = GPUS[config.plan.gpu]
    spec = build_run_spec(config, launch, planned_platform(config, launch))
    memory = forecast_memory(spec, gpu)
    num_parameters = _num_parameters(spec)
    checkpoint = forecast_checkpoint(spec, num_parameters)
    sentences = [memory_verdict(memory, gpu, spec)]
    speed = None
    if spec.fp8 is not None and spec.fp8.emulate:
        sentences.append(_EMULATED)
    elif spec.fp8 is None and not spec.kernels.transformer_engine:
        sentences.append(_ON_LOCAL_LAYERS)
    else:
        speed, problem = _forecast_speed(spec, Machine(gpu=gpu, efficiency=EFFICIENCY))
        sentences.append(
            fp8_verdict(
                bf16=speed.bf16, fp8=speed.fp8, recipe=speed.fp8_recipe, is_on=spec.fp8 is not None, problem=problem
            )
        )
    if spec.model.num_moe_experts is not None:
        sentences.append(experts_verdict(spec.model, None if speed is None else speed.run))
    return Plan(
        spec=spec,
        gpu=gpu,
        stages=tuple(plan_stages(spec)),
        settings=tuple(effective_settings(spec)),
        products=tuple(plan_products(spec)),
        num_parameters=num_parameters,
        memory=memory,
        checkpoint=checkpoint,
        flops_per_token=flops_per_token(spec.model),
        speed=speed,
        sentences=(*sentences, checkpoint.sentence),
    )
