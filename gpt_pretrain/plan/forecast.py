"""The plan of one run, put together: settings, products, memory, speed and what follows from them."""

from dataclasses import dataclass, replace

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.effective import Setting, effective_settings
from gpt_pretrain.plan.hardware import EFFICIENCY, GPUS, Gpu
from gpt_pretrain.plan.kernels import Machine
from gpt_pretrain.plan.machine import planned_platform
from gpt_pretrain.plan.memory import MemoryForecast, forecast_memory, plan_storage
from gpt_pretrain.plan.products import Product, plan_products
from gpt_pretrain.plan.speed import Speed, variant_speed, with_usual_fp8, without_fp8
from gpt_pretrain.plan.stages import Layout, Stage, plan_layout, plan_stages
from gpt_pretrain.plan.verdict import emulation_verdict, fp8_verdict, memory_verdict, unknown_speed
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.spec.fp8 import fp8_settings
from gpt_pretrain.spec.kernels import Kernels, plan_kernels
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.products import fp8_flops_share


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

    config: Config
    launch: Launch
    gpu: Gpu
    kernels: Kernels
    layout: Layout
    stages: tuple[Stage, ...]
    settings: tuple[Setting, ...]
    products: tuple[Product, ...]
    fp8_flops_share: float
    num_parameters: int
    """Of the whole model; tied embeddings counted once."""
    memory: MemoryForecast
    flops_per_token: float
    speed: SpeedForecast | None
    """None where nothing has been measured that a prediction could rest on."""
    sentences: tuple[str, ...]
    """What a person should know before starting the run, the most important first."""


def _num_parameters(config: Config) -> int:
    """Parameters of the whole model: of one pipeline stage without tensor parallelism."""
    whole = replace(
        config.model,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
    (stage,) = plan_stages(
        whole, Layout(tp=1, pp=1, vp=1, cp=1, dp=1, ep=1, etp=1, num_microbatches=1, gpus_per_node=1)
    )
    return stage.num_parameters


def _forecast_speed(config: Config, launch: Launch, machine: Machine, platform: Platform) -> tuple[SpeedForecast, str]:
    """The speeds, and why FP8 could not run where it could not."""
    model = config.model

    def speed_of(varied: Config) -> Speed:
        # FP8 decides about kernels, too.
        kernels = plan_kernels(varied, platform, launch.world_size)
        return variant_speed(machine, varied.model, launch, kernels)

    bf16 = speed_of(replace(config, model=without_fp8(model)))
    if model.fp8:
        settings = fp8_settings(model)
        assert settings is not None
        run = speed_of(config)
        return SpeedForecast(run=run, bf16=bf16, fp8=run, fp8_recipe=settings.recipe.name), ""
    varied = replace(config, model=with_usual_fp8(model))
    assert varied.model.fp8_recipe is not None
    problems = config_problems(varied, launch)
    fp8 = None if problems else speed_of(varied)
    return SpeedForecast(run=bf16, bf16=bf16, fp8=fp8, fp8_recipe=varied.model.fp8_recipe.name), "".join(problems[:1])


def forecast_run_memory(config: Config, launch: Launch, platform: Platform, gpu: Gpu) -> MemoryForecast:
    """The memory of a configuration on a machine.

    Args:
        config: The configuration.
        launch: The run's processes.
        platform: The machine: which kernels it has.
        gpu: Its GPU.
    """
    kernels = plan_kernels(config, platform, launch.world_size)
    layout = plan_layout(config.model, launch)
    storage = plan_storage(
        config,
        transformer_engine=kernels.transformer_engine,
        fused_activation=kernels.bias_activation_fusion,
        fused_softmax=kernels.masked_softmax_fusion,
    )
    stages = plan_stages(config.model, layout)
    return forecast_memory(config, layout, stages, storage, gpu, kernels=kernels)


def build_plan(config: Config, launch: Launch) -> Plan:
    """Plans a configuration that all rules and the planned machine let pass.

    Args:
        config: The configuration.
        launch: The planned run's processes.
    """
    model, gpu = config.model, GPUS[config.plan.gpu]
    platform = planned_platform(config, launch)
    kernels = plan_kernels(config, platform, launch.world_size)
    layout = plan_layout(model, launch)
    stages = plan_stages(model, layout)
    memory = forecast_run_memory(config, launch, platform, gpu)
    sentences = [memory_verdict(memory, gpu, layout, config)]
    settings = fp8_settings(model)
    speed = None
    if settings is not None and settings.emulate:
        sentences.append(emulation_verdict())
    elif not kernels.transformer_engine:
        sentences.append(unknown_speed())
    else:
        speed, problem = _forecast_speed(config, launch, Machine(gpu=gpu, efficiency=EFFICIENCY), platform)
        sentences.append(
            fp8_verdict(bf16=speed.bf16, fp8=speed.fp8, recipe=speed.fp8_recipe, is_on=model.fp8, problem=problem)
        )
    return Plan(
        config=config,
        launch=launch,
        gpu=gpu,
        kernels=kernels,
        layout=layout,
        stages=tuple(stages),
        settings=tuple(effective_settings(config, platform, kernels, layout.shards)),
        products=tuple(
            plan_products(model, high_precision="FP32" if config.trainer.precision is Precision.fp32 else "BF16")
        ),
        fp8_flops_share=fp8_flops_share(model),
        num_parameters=_num_parameters(config),
        memory=memory,
        flops_per_token=flops_per_token(model),
        speed=speed,
        sentences=tuple(sentences),
    )
