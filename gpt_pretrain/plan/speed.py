"""The speed of a run, in BF16 and in FP8: one optimizer step on the slowest path through the pipeline.

Collectives take the time of their bytes over the links that a group's ranks share; only what computation does not hide
counts. Ranks are laid out with TP fastest, then CP, DP and PP (`gpt_pretrain.megatron.parallel`): a group whose ranks
lie on one node talks over NVLink, any other over the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from gpt_pretrain.config.choices import Fp8RecipeName, RecomputeGranularity, RecomputeMethod
from gpt_pretrain.config.derived import qkv_parts, shards_gradients, shards_weights, uses_distributed_optimizer
from gpt_pretrain.config.recipes import RECIPES, Use
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.plan.experts import BUSIEST_EXPERT, on_rank, rank_load
from gpt_pretrain.plan.kernel_times import head_s, host_layer_s, layer_s, memory_s, recompute_s
from gpt_pretrain.plan.machine import EFFICIENCY, link_bytes_per_s
from gpt_pretrain.plan.muon import orthogonalization_s
from gpt_pretrain.plan.stages import Stage, keeps_transposes, per_layer, plan_stages
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.run.gpus import Gpu
from gpt_pretrain.run.optimizers import optimizer_of
from gpt_pretrain.run.products import FC1, FC2, PROJ, QKV, Linear
from gpt_pretrain.run.run_spec import RunSpec

# Share of a microbatch that its backward pass takes: two products of three.
BACKWARD_SHARE = 2 / 3
# What a layer computes twice; None: nothing.
type Recomputed = RecomputeGranularity | None


def tensor_parallel_s(gpu: Gpu, spec: RunSpec, layer: list[Linear]) -> float:
    """Seconds of one layer's tensor parallel collectives for one microbatch; no product hides them.

    Without sequence parallelism: one all-reduce for each of the two blocks, forward and backward. With it: gathered
    inputs and scattered outputs forward, gathered gradients and inputs and scattered gradients backward. What an FP8
    product reads is gathered in FP8 (TE 2.12, `gather_along_first_dim`).
    """
    model, layout = spec.model, spec.layout
    if layout.tp == 1:
        return 0.0
    share = (layout.tp - 1) / layout.tp
    values = layer[0].tokens * model.hidden_size
    rate = link_bytes_per_s(gpu, layout, layout.tp)
    if not model.sequence_parallel:
        return 4 * 2 * share * values * 2 / rate + 4 * EFFICIENCY.kernel_s
    moved = 0.0
    for linear in layer[:2] if model.num_moe_experts is not None else layer:
        gathered = 1 if linear.precision == "fp8" else 2
        # Column-parallel: gather x, scatter dx, gather x again for dw. Row-parallel: scatter y, gather dy.
        moved += values * share * (2 * gathered + 2 if linear.kind in (QKV, FC1) else 2 + gathered)
    return moved / rate + 10 * EFFICIENCY.kernel_s


def expert_parallel_s(gpu: Gpu, spec: RunSpec, layer: list[Linear]) -> float:
    """Seconds of one layer's exchanges of tokens between the ranks that share experts, for one microbatch.

    Each of these ranks sends an equal part of the rows that a rank's experts compute, and gets it back; so with their
    gradients. The links of the fullest rank decide; no product hides an exchange.
    """
    model, layout = spec.model, spec.layout
    ranks = layout.ep * layout.etp
    if model.num_moe_experts is None or ranks == 1:
        return 0.0
    experts = layer[-2]
    moved = 4 * experts.tokens * experts.count * model.hidden_size * 2 * (ranks - 1) / ranks
    return moved / link_bytes_per_s(gpu, layout, ranks) + 4 * EFFICIENCY.kernel_s


def _zeroed_gradients(spec: RunSpec, stage: Stage) -> int:
    """Parameters whose sharded gradients are set to zero in each microbatch: those that no product writes over."""
    fp8 = spec.fp8
    # `megatron.sharded_gradients` marks them.
    finds_mark = fp8 is None or fp8.params or fp8.in_local_layers
    if not (spec.kernels.gradient_accumulation_fusion and finds_mark):
        return stage.num_parameters
    dense = [linear for linear in stage.linears if linear.kind in (QKV, PROJ, FC1, FC2)]
    return stage.num_parameters - sum(each.num_weights for each in dense if fp8 is None or each.precision == "fp8")


# Of the time that gathering each layer's weights takes over NVLink. Four H100s lost 77 ms of a step of Llama 3 8B with
# FP8 weights to it, of 181 by their rate (benchmarks/llama3_8b_4xh100.md, zero2 and fsdp).
_LOST_TO_GATHERS = 0.42


def data_parallel_s(gpu: Gpu, spec: RunSpec, stage: Stage, *, backward_s: float) -> float:
    """Seconds per step of gradient reduction and parameter gathering that computation does not hide.

    Overlapped reduction over a network hides behind the backward pass of the last microbatch, `backward_s`. Sharded
    gradients are reduced in each one, which costs about as much memory traffic again. Sharded weights are gathered
    twice in each.
    """
    model, layout = spec.model, spec.layout
    rate = link_bytes_per_s(gpu, layout, layout.tp * layout.shards)
    # A rank sends all but its own part of what is sharded.
    others = stage.num_parameters - stage.expert_weights
    moved = others * (1 - 1 / layout.shards) + stage.expert_weights * (1 - 1 / layout.expert_shards)
    gradient = 4 if model.grad_reduce_in_fp32 else 2
    num_reductions = layout.num_microbatches if shards_gradients(model) else 1
    if not uses_distributed_optimizer(model):
        reduce_s, gather_s = 2 * moved * gradient / rate, 0.0
    else:
        reduce_s = num_reductions * moved * gradient / rate
        # Weights of experts are not stored in FP8 (`rules.experts`).
        in_fp8 = stage.fp8_weights if spec.fp8 is not None and spec.fp8.params else 0
        num_gathers = 2 * layout.num_microbatches if shards_weights(model) else 1
        gather_s = num_gathers * (2 * moved - in_fp8 * (1 - 1 / layout.shards)) / rate
    # Over NVLink it counts in full, since it slows products down and makes ranks wait: steps of 4 and 32 layers of
    # Llama 3 8B on two and four H200s were longer by about that or more, in BF16 and FP8. A profile found 52 to 60 of
    # the 92 ms on four (benchmarks/llama3_8b_4xh200.md). What a network adds is assumed to be hidden.
    lost = rate / link_bytes_per_s(gpu, layout, 1)
    hidden_reduce = num_reductions * backward_s if model.overlap_grad_reduce else 0.0
    # The forward pass is half as long as the backward pass.
    hidden_gather = backward_s / 2 if model.overlap_param_gather else 0.0
    lost_gather = lost
    if shards_weights(model) and model.overlap_param_gather:
        # Each microbatch's forward and backward pass.
        hidden_gather = 3 * hidden_gather * layout.num_microbatches
        lost_gather *= _LOST_TO_GATHERS
    # With experts, gradients are averaged in a pass of their own (`megatron.core_fields.ddp_fields`).
    averages = model.num_moe_experts is not None and layout.shards > 1
    passed: float = 2 * gradient * stage.num_parameters * averages
    if shards_gradients(model):
        # In each microbatch, the rank's part is read and added to a sum.
        passed = num_reductions * gradient * (_zeroed_gradients(spec, stage) + 3 * stage.optimizer_parameters(spec))
    if layout.instances > 1:
        # Once a step, and hidden by nothing.
        own = gradient * stage.optimizer_parameters(spec)
        between = link_bytes_per_s(gpu, layout, layout.tp * layout.dp * layout.cp)
        passed_on = 2 * own * (1 - 1 / layout.instances) / between
    else:
        passed_on = 0.0
    exposed = (
        passed_on
        + max(lost * reduce_s, reduce_s - hidden_reduce)
        + max(lost_gather * gather_s, gather_s - hidden_gather)
    )
    return exposed + (memory_s(gpu, passed) if passed else 0.0)


def context_parallel_s(gpu: Gpu, spec: RunSpec, layer: list[Linear], attention_s: float) -> float:
    """Seconds of one layer's ring exchange of keys and values that attention does not hide."""
    model, layout = spec.model, spec.layout
    if layout.cp == 1:
        return 0.0
    _, keys, values = qkv_parts(model, layer[0].out_features)
    # Forward once, backward keys and values and their gradients.
    moved = 3 * (layout.cp - 1) * layer[0].tokens * (keys + values) * 2
    return max(0.0, moved / link_bytes_per_s(gpu, layout, layout.tp * layout.cp) - attention_s)


def pipeline_send_s(gpu: Gpu, spec: RunSpec, tokens: int) -> float:
    """Seconds of handing one microbatch to the next stage and its gradient back."""
    model, layout = spec.model, spec.layout
    if layout.pp == 1:
        return 0.0
    spread = layout.tp if model.sequence_parallel else 1
    sent = 2 * tokens // spread * model.hidden_size * 2
    return sent / link_bytes_per_s(gpu, layout, layout.world_size // layout.pp + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A predicted optimizer step."""

    step_s: float
    tokens_per_s_per_gpu: float
    seconds: Mapping[str, float]
    """The step of the slowest stage's GPU by kind of work; adds up to `step_s`."""


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Adds the seconds of a part to a total, by kind of work."""
    for name, value in part.items():
        total[name] = total.get(name, 0.0) + value


def _transformer_layer_s(gpu: Gpu, spec: RunSpec, recomputed: Recomputed, layer: list[Linear]) -> dict[str, float]:
    """Seconds of one layer and one microbatch, forward and backward, with all exchanges but those of pipelines."""
    seconds = layer_s(gpu, spec, layer)
    if recomputed is not None:
        seconds["recomputation"] = recompute_s(gpu, spec, layer, whole=recomputed is RecomputeGranularity.full)
    seconds["tensor parallel"] = tensor_parallel_s(gpu, spec, layer)
    seconds["expert parallel"] = expert_parallel_s(gpu, spec, layer)
    if spec.model.overlap_moe_expert_parallel_comm:
        # The first forward and the last backward pass have no other microbatch beside them.
        seconds["expert parallel"] /= spec.layout.num_microbatches
    seconds["context parallel"] = context_parallel_s(gpu, spec, layer, seconds["attention"])
    return seconds


def _expert_layer_s(gpu: Gpu, spec: RunSpec, recomputed: Recomputed, layer: list[Linear]) -> dict[str, float]:
    """The same for a layer with experts, where all ranks wait for the fullest one, and each layer for the host."""
    seconds = _transformer_layer_s(gpu, spec, recomputed, on_rank(layer, 1.0))
    uneven = _transformer_layer_s(gpu, spec, recomputed, on_rank(layer, rank_load(spec.model, BUSIEST_EXPERT)))
    seconds["uneven experts"] = sum(uneven.values()) - sum(seconds.values())
    again = EFFICIENCY.host_forward if recomputed is RecomputeGranularity.full else 0.0
    host = host_layer_s(spec) * (1 + again)
    seconds["waiting for the host"] = max(EFFICIENCY.count_wait_s_per_layer, host - sum(seconds.values()))
    return seconds


def _recomputed(model: ModelConfig, stage: Stage) -> list[Recomputed]:
    """What each layer of the stage computes twice: its forward pass (full), its attention (selective), or nothing."""
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    positions = range(len(stage.layers))
    if granularity is RecomputeGranularity.full and method is RecomputeMethod.block:
        first = model.activations_checkpoint_num_layers or 0
        return [granularity if position % stage.layers_per_chunk < first else None for position in positions]
    return [granularity for _ in positions]


def _microbatch_s(gpu: Gpu, spec: RunSpec, stage: Stage) -> dict[str, float]:
    """Seconds of one microbatch on one stage, forward and backward."""
    total: dict[str, float] = {}
    time_layer = _transformer_layer_s if spec.model.num_moe_experts is None else _expert_layer_s
    recomputed = _recomputed(spec.model, stage)
    seconds = {each: per_layer(stage, partial(time_layer, gpu, spec, each)) for each in set(recomputed)}
    for layer, each in zip(stage.layers, recomputed, strict=True):
        _add(total, seconds[each][layer])
    if stage.head is not None:
        _add(total, head_s(gpu, spec, stage.head))
    total["pipeline sends"] = spec.layout.vp * pipeline_send_s(gpu, spec, stage.linears[0].tokens)
    return total


def _optimizer_s(gpu: Gpu, spec: RunSpec, stage: Stage) -> dict[str, float]:
    """Seconds of the optimizer step: the gradient's norm, the update, and the new weights.

    The whole gradient is zeroed (4 bytes per parameter), unless it is sharded; the rest is of the rank's shard.
    """
    model, layout, settings = spec.model, spec.layout, spec.fp8
    updated = stage.optimizer_parameters(spec)
    zeroed = 0 if shards_gradients(model) else stage.num_parameters * 4
    # The average reads the master and itself, and writes itself.
    averaging = 0 if model.optim.ema_decay is None else 12
    moved = zeroed + (optimizer_of(model.optim.name).moved_bytes + averaging) * updated
    seconds = {
        "optimizer": memory_s(gpu, moved, kernels=20),
        "orthogonalization": orthogonalization_s(gpu, spec, stage),
    }
    if settings is None:
        return seconds
    if settings.params:
        # `megatron.stored_weights` reads masters, writes BF16, reads that and writes FP8; all recipes but delayed read
        # the masters once more, for their amax. For local layers it passes over fp32 in place of BF16. That is of a
        # rank's shard, since FP8 parameters need the distributed optimizer; transposes are of whole weights.
        cast = 17 if settings.in_local_layers else 9 if settings.recipe.keeps_history else 13
        transposes = 2 if keeps_transposes(settings, spec.platform) else 0
        seconds["FP8 parameters"] = memory_s(gpu, stage.fp8_weights * (cast / layout.shards + transposes))
    else:
        # BF16 weights are cast once per step.
        passes = 4 + 2 * settings.recipe.cost.searches_amax
        in_fp8 = (linear for linear in stage.linears if linear.precision == "fp8")
        seconds["FP8 casts"] = sum(memory_s(gpu, linear.num_weights * passes) for linear in in_fp8)
    return seconds


def _predict(gpu: Gpu, spec: RunSpec) -> Speed:
    """The speed of a checked configuration on Transformer Engine layers."""
    model, layout, stages = spec.model, spec.layout, plan_stages(spec)
    microbatches = [_microbatch_s(gpu, spec, stage) for stage in stages]
    times = [sum(seconds.values()) for seconds in microbatches]
    slowest = max(range(len(stages)), key=times.__getitem__)
    total = {name: layout.num_microbatches * value for name, value in microbatches[slowest].items()}
    # 1F1B: the first microbatch passes the other stages once, each chunk of it with the interleaved schedule.
    total["pipeline bubble"] = (sum(times) - times[slowest]) / layout.vp
    _add(total, _optimizer_s(gpu, spec, stages[slowest]))
    backward_s = times[slowest] * BACKWARD_SHARE
    total["data parallel"] = data_parallel_s(gpu, spec, stages[slowest], backward_s=backward_s)
    # The host runs ahead while the optimizer has few kernels, and while the GPU waits for others.
    twice = _recomputed(model, stages[slowest]).count(RecomputeGranularity.full)
    launched = layout.num_microbatches * (len(stages[slowest].layers) + EFFICIENCY.host_forward * twice)
    idle = EFFICIENCY.host_s_per_step + launched * host_layer_s(spec) - sum(total.values())
    _add(total, {"waiting for the host": max(0.0, idle)})
    step_s = sum(total.values())
    tokens = model.global_batch_size * model.encoder_seq_length
    return Speed(
        step_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / layout.world_size,
        seconds={name: value for name, value in total.items() if value > 0},
    )


def batch_step_s(gpu: Gpu, spec: RunSpec, num_samples: int) -> float:
    """Seconds of a step of so many samples, of a run with Transformer Engine layers."""
    model = replace(spec.model, global_batch_size=num_samples, rampup_batch_size=None, step_batch_size_schedule=None)
    return _predict(gpu, build_run_spec(replace(spec.config, model=model), spec.launch, spec.platform)).step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedForecast:
    """The speed of the run, and of the same run in BF16 and in FP8."""

    run: Speed
    bf16: Speed
    fp8: Speed | None
    """None where a rule refuses FP8."""
    fp8_recipe: str
    """The recipe of `fp8`: the run's own; for a run in BF16 the fastest, or with experts the fastest they allow."""
    problem: str
    """The rule that refuses FP8, if any."""

    @property
    def ratio(self) -> float | None:
        """FP8 ÷ BF16."""
        return None if self.fp8 is None else self.bf16.step_s / self.fp8.step_s


def forecast_speed(spec: RunSpec, gpu: Gpu) -> SpeedForecast:
    """The speeds of a checked configuration on Transformer Engine layers."""
    model = spec.model

    def speed_of(model: ModelConfig) -> Speed:
        # Kernels depend on FP8.
        return _predict(gpu, build_run_spec(replace(spec.config, model=model), spec.launch, spec.platform))

    # Optimizer states stay sharded as they are.
    bf16 = speed_of(
        replace(
            model,
            fp8=False,
            fp8_params=False,
            fp8_dot_product_attention=False,
            use_distributed_optimizer=uses_distributed_optimizer(model),
        )
    )
    if spec.fp8 is not None:
        run = _predict(gpu, spec)
        return SpeedForecast(run=run, bf16=bf16, fp8=run, fp8_recipe=spec.fp8.recipe.preset, problem="")
    experts = model.num_moe_experts is not None
    recipe = next(recipe for recipe in RECIPES.values() if not (experts and recipe.why_not(Use.num_moe_experts)))
    in_fp8 = replace(
        model, fp8=True, fp8_backend=None, fp8_recipe=Fp8RecipeName[recipe.name], fp8_hybrid=True, fp8_e4m3=None
    )
    problems = config_problems(replace(spec.config, model=in_fp8), spec.launch)
    fp8 = None if problems else speed_of(in_fp8)
    return SpeedForecast(run=bf16, bf16=bf16, fp8=fp8, fp8_recipe=recipe.name, problem="".join(problems[:1]))
