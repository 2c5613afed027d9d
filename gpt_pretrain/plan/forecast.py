"""The plan of one run: settings, linear layers, memory, speed and checkpoints, and verdicts that sum them up."""

from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from gpt_pretrain.config.choices import LayerName
from gpt_pretrain.config.derived import flops_per_token, max_time_s, save_interval_s
from gpt_pretrain.config.errors import format_bytes
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.small_states import saved_bytes
from gpt_pretrain.megatron.core_fields import Dtype, params_dtype
from gpt_pretrain.plan.effective import PlannedLinear, Setting, effective_settings, plan_linears
from gpt_pretrain.plan.machine import planned_spec
from gpt_pretrain.plan.memory import MemoryForecast, forecast_memory
from gpt_pretrain.plan.muon import AVERAGE_BYTES, fp32_state_bytes
from gpt_pretrain.plan.out_of_memory import plan_remedies
from gpt_pretrain.plan.schedule import RunSchedule, plan_steps
from gpt_pretrain.plan.speed import SpeedForecast, batch_step_s, forecast_speed
from gpt_pretrain.plan.stages import count_parameters, plan_stages
from gpt_pretrain.run.gpus import GPUS, Gpu
from gpt_pretrain.run.run_spec import RunSpec

# Predictions are off by some percent: a run cannot count on a gain over BF16 that is smaller than this.
WORTHWHILE = 1.05
# Forecasts of memory have been within 2%: a run that needs a larger share than this may still run out of memory.
CLOSE = 0.95
# What the forecasts for experts were fitted to.
CALIBRATED_ON = (
    "forecasts for experts are calibrated only on two layers of Mixtral 8x7B and four of Qwen3-30B-A3B on one to four "
    "GPUs (benchmarks/experts.md, benchmarks/mixtral_8x7b_2layers_4xh200.md), on no other model or machine."
)
# Why there is no prediction.
_EMULATED = (
    "not predicted. model.fp8_emulate=true computes FP8's values in the run's precision, many times slower "
    "than BF16: for trying recipes, not for training at length. Memory is forecast as without FP8."
)
_ON_LOCAL_LAYERS = (
    "not predicted for layers without Transformer Engine; leave model.transformer_engine, model.compile and "
    "trainer.precision out to train at full speed."
)
_OWN_LAYERS = (
    "model.layer={} is an extension's and not counted: weights, memory, products and speed are those of the program's "
    "own layer in the same sizes."
)


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """One sentence on a plan."""

    label: str
    """The subject of the sentence."""
    text: str
    is_bad: bool = False
    """Whether the sentence speaks against the run, or against FP8 in the run."""

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"


def _memory_verdict(memory: MemoryForecast, gpu: Gpu, spec: RunSpec) -> PlanVerdict:
    """Whether the run fits, and if not, which changes need less memory, by the same forecast."""
    used = f"{memory.needed_gib:.1f} of {gpu.memory_gib:.1f} GiB"
    where = f" on the GPUs of pipeline stage {memory.worst.stage}" if spec.layout.pp > 1 else ""
    if memory.needed_gib <= gpu.memory_gib:
        share = memory.needed_gib / gpu.memory_gib
        tight = "; that is close, so watch the first steps" if share > CLOSE else ""
        return PlanVerdict("Memory", f"fits, with {used}{where}{tight}.")
    return PlanVerdict("Memory", f"DOES NOT FIT, it needs {used}{where}. {_ways_out(gpu, spec)}.", is_bad=True)


def _ways_out(gpu: Gpu, spec: RunSpec) -> str:
    remedies = plan_remedies(spec, attrgetter("needed_gib"))
    enough = [remedy for remedy in remedies if remedy.needed_gib <= gpu.memory_gib]
    told = "; ".join(f"{remedy.overrides} ({remedy.needed_gib:.1f} GiB)" for remedy in enough or remedies)
    if enough:
        return f"Ways out, each alone: {told}"
    less = f"; these need less, each alone: {told}" if told else ""
    return f"Ways out: more GPUs (plan.num_gpus), a smaller model, or several changes{less}"


def _fp8_verdict(speed: SpeedForecast, *, is_on: bool) -> PlanVerdict:
    """Whether FP8 pays."""
    bf16, fp8, ratio = speed.bf16, speed.fp8, speed.ratio
    if fp8 is None or ratio is None:
        return PlanVerdict("FP8", f"would be refused here: {speed.problem}")
    saved = bf16.seconds["GEMMs"] - fp8.seconds["GEMMs"]
    overhead = sum(fp8.seconds.get(name, 0.0) for name in ("FP8 casts", "FP8 parameters"))
    share = bf16.seconds["GEMMs"] / bf16.step_s
    why = (
        f"its GEMMs save {_ms(saved)} of a step of {_ms(bf16.step_s)}, and its casts cost {_ms(overhead)}; "
        f"{share:.0%} of the BF16 step is GEMMs that FP8 can take"
    )
    waits = fp8.seconds.get("waiting for the host", 0.0)
    if waits > overhead:
        why += f"; the GPU waits {_ms(waits)} for the host to launch many small kernels; larger microbatches need fewer"
    if ratio >= WORTHWHILE:
        pays = "pays" if is_on else f"would pay (fp8={speed.fp8_recipe})"
        return PlanVerdict("FP8", f"{pays}, {ratio:.2f}× BF16: {why}.")
    advice = "use fp8=none, or larger layers or microbatches" if is_on else "stay with BF16"
    text = f"{'will' if is_on else 'would'} not pay, {ratio:.2f}× BF16: {why}. Advice: {advice}."
    return PlanVerdict("FP8", text, is_bad=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointForecast:
    """A checkpoint, of which each GPU writes about the same part."""

    num_bytes: int
    """Weights, masters, moments and averaged weights, once, however many GPUs hold copies."""
    bytes_per_gpu: int
    """Of each GPU's part; an `async_save` takes as much host memory."""
    saves: str
    """`describe_saves`."""

    @property
    def verdict(self) -> PlanVerdict:
        """On the run's checkpoints."""
        if not self.saves:
            return PlanVerdict("Checkpoints", "NONE is written.", is_bad=True)
        size = f"{format_bytes(self.num_bytes)} each, {format_bytes(self.bytes_per_gpu)} a GPU"
        return PlanVerdict("Checkpoints", f"{self.saves}; {size}.")


def describe_saves(config: Config) -> str:
    """When a run saves: "every 500 steps, every 30 minutes, at the end"; empty where it never does."""
    saves, interval, limit = config.checkpoint, save_interval_s(config.checkpoint), max_time_s(config.trainer)
    times = [f"every {saves.save_interval} steps"] if saves.save_interval is not None else []
    # A run may end before the first save by the clock.
    if interval is not None and (limit is None or interval < limit):
        times.append(f"every {saves.save_interval_minutes:g} minutes")
    times += ["at the end"] if saves.save_at_end else []
    return ", ".join(times)


def forecast_checkpoint(spec: RunSpec, num_parameters: int) -> CheckpointForecast:
    """The checkpoints of a checked configuration."""
    optim = spec.model.optim
    weight = 2 if params_dtype(spec) is Dtype.bf16 else 4
    master, moments = 0.0 if weight == 4 else 4.0, fp32_state_bytes(spec, plan_stages(spec))
    if optim.use_precision_aware_optimizer:
        master, moments = saved_bytes(optim)
    moments += 0 if optim.ema_decay is None else AVERAGE_BYTES
    num_bytes = round(num_parameters * (weight + master + moments))
    return CheckpointForecast(
        num_bytes=num_bytes,
        bytes_per_gpu=num_bytes // spec.launch.world_size,
        saves=describe_saves(spec.config),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a checked configuration would do."""

    spec: RunSpec
    gpu: Gpu
    settings: tuple[Setting, ...]
    linears: tuple[PlannedLinear, ...]
    num_parameters: int
    """Of the whole model; tied embeddings counted once."""
    memory: MemoryForecast
    checkpoint: CheckpointForecast
    flops_per_token: float
    fp8_flops_share: float
    """Of a step's matrix operations, attention and LM head included."""
    speed: SpeedForecast | None
    """None where no measurement supports a prediction."""
    schedule: RunSchedule
    """All steps of the run."""
    verdicts: tuple[PlanVerdict, ...]
    """What a person should know before starting the run, the most important first."""

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough memory."""
        return self.memory.needed_gib <= self.gpu.memory_gib


def build_plan(config: Config) -> Plan:
    """Plans a configuration that breaks no rule, also of the planned machine."""
    gpu, spec = GPUS[config.plan.gpu], planned_spec(config)
    memory = forecast_memory(spec)
    num_parameters = count_parameters(spec.model)
    checkpoint = forecast_checkpoint(spec, num_parameters)
    verdicts = [_memory_verdict(memory, gpu, spec)]
    speed = None
    if spec.fp8 is not None and spec.fp8.emulate:
        verdicts.append(PlanVerdict("Speed", _EMULATED))
    elif spec.fp8 is None and not spec.kernels.transformer_engine:
        verdicts.append(PlanVerdict("Speed", _ON_LOCAL_LAYERS))
    else:
        speed = forecast_speed(spec, gpu)
        verdicts.append(_fp8_verdict(speed, is_on=spec.fp8 is not None))
    schedule = plan_steps(spec, None if speed is None else partial(batch_step_s, gpu, spec))
    if schedule.unfinished:
        verdicts.append(PlanVerdict("Batch", f"{schedule.unfinished}.", is_bad=True))
    if spec.model.layer is not LayerName.gpt:
        verdicts.append(PlanVerdict("Layers", _OWN_LAYERS.format(spec.model.layer.name)))
    if spec.model.num_moe_experts is not None:
        verdicts.append(PlanVerdict("Experts", CALIBRATED_ON))
    return Plan(
        spec=spec,
        gpu=gpu,
        settings=tuple(effective_settings(spec)),
        linears=tuple(plan_linears(spec)),
        num_parameters=num_parameters,
        memory=memory,
        checkpoint=checkpoint,
        flops_per_token=flops_per_token(spec.model, config.plan.document_length),
        fp8_flops_share=spec.fp8_flops_share_of(spec.linears, config.plan.document_length),
        speed=speed,
        schedule=schedule,
        verdicts=(*verdicts, checkpoint.verdict),
    )
