"""What a plan prints and writes: tables, readable at 100 columns, and `plan.json`, for scripts and comparisons.

In `plan.json` times are in seconds, memory in bytes, speeds in tokens per second and GPU. Its `version` grows when a
name changes its meaning or disappears; new names may appear.
"""

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpt_pretrain.config.derived import FLOPS_FORMULA
from gpt_pretrain.config.errors import counted, format_digits, format_short
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.mixtures import describe_lengths
from gpt_pretrain.config.schedule import batch_grows
from gpt_pretrain.features.registry import used_features
from gpt_pretrain.plan.effective import Setting, is_fp8_key
from gpt_pretrain.plan.forecast import Plan
from gpt_pretrain.plan.machine import EFFICIENCY
from gpt_pretrain.plan.memory import GIB, ITEMS
from gpt_pretrain.plan.schedule import RunSchedule, shortened
from gpt_pretrain.plan.speed import SpeedForecast
from gpt_pretrain.run.kernels import fused_parts
from gpt_pretrain.run.products import describe_kept_out

VERSION = 2
FILE_NAME = "plan.json"
# Columns of the tables, unless the terminal is narrower.
WIDTH = 100
# megatron-core's class names, shortened so that a field and its value stay on one line.
_SHORT = {"TransformerConfig": "TC", "DistributedDataParallelConfig": "DDP", "OptimizerConfig": "OPT"}
type Side = Literal["left", "right"]


def _table(title: str, *columns: tuple[str, Side]) -> Table:
    """A table with the name and alignment of each column."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in columns:
        # Keys and modules stay in one piece, so that a search finds them.
        whole = side == "right" or name in ("key", "linear layer")
        table.add_column(name, justify=side, no_wrap=whole, overflow="fold")
    return table


def _header(plan: Plan) -> RenderableType:
    model, layout = plan.spec.model, plan.spec.layout
    split = [("TP", layout.tp), ("PP", layout.pp), ("VP", layout.vp), ("CP", layout.cp), ("DP", layout.dp)]
    parts = " × ".join(f"{name} {size}" for name, size in split if size > 1) or "one process"
    tokens = model.global_batch_size * model.encoder_seq_length
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(
        "model",
        f"{format_short(plan.num_parameters)} parameters: {model.num_layers} layers × {model.hidden_size}, "
        f"sequence {model.encoder_seq_length}, vocabulary {model.vocab_size}",
    )
    grid.add_row(
        "machine",
        f"{layout.world_size} × {plan.gpu.name}: {plan.gpu.memory_gib:.1f} GiB, {plan.gpu.bandwidth_tb_s:g} TB/s, "
        f"BF16 {plan.gpu.bf16_tflops:,.0f} and FP8 {plan.gpu.fp8_tflops:,.0f} TFLOP/s dense",
    )
    experts = f", experts over EP {layout.ep}" if layout.ep > 1 else ""
    grid.add_row("layout", f"{parts}{' + SP' if model.sequence_parallel else ''}{experts}")
    grid.add_row(
        "batch",
        f"{model.global_batch_size} samples ({format_short(tokens)} tokens) a step: "
        f"{counted(layout.num_microbatches, 'microbatch', 'es')} of {model.micro_batch_size} per data-parallel rank",
    )
    if lengths := describe_lengths(model.data, model.encoder_seq_length):
        grid.add_row("samples", f"cut into {lengths}; times and memory are those of {model.encoder_seq_length:,}")
    grid.add_row("length", _length(plan.schedule))
    grid.add_row("rate", plan.schedule.rates)
    emulated = "emulated " if model.fp8 and model.fp8_emulate else ""
    layers = "Transformer Engine" if plan.spec.kernels.transformer_engine else "megatron-core's local layers"
    share = f"{plan.fp8_flops_share:.0%} of the matrix operations in {emulated}FP8"
    grid.add_row("layers", "; ".join([layers, share, *describe_kept_out(plan.spec)]))
    grid.add_row("fused", fused_parts(plan.spec.kernels))
    return Panel(grid, title=Text(f"plan: {plan.spec.config.name}", style="bold"), title_align="left", width=WIDTH)


def _documents(plan: Plan) -> str:
    """What attention is counted for, where documents do not see each other."""
    if not plan.spec.model.data.inter_document_masking:
        return ""
    if (length := plan.spec.config.plan.document_length) is None:
        return ", for samples of one document each: at most; prepare_data tells plan.document_length"
    return f", with {length:,.0f} tokens, of plan.document_length, in place of the sequence"


def _length(schedule: RunSchedule) -> str:
    time = "" if schedule.time_s is None else f", {_hours(schedule.time_s)} hours without validations and saves"
    return f"{counted(schedule.num_steps, 'step')}, {format_short(schedule.num_tokens)} tokens{time}"


def _hours(seconds: float | None) -> str:
    return "" if seconds is None else format_digits(seconds / 3600)


def _fields(setting: Setting) -> list[tuple[str, str]]:
    """The fields that a key sets, and their value. Fields with one value share a line; `…` is the key's own name.

    After the first field, those that stay off are left out.
    """
    by_value: dict[str, list[str]] = {}
    own_name = setting.key.rpartition(".")[2]
    for index, (field, value) in enumerate(setting.effective.items()):
        owner, _, name = field.partition(".")
        if index > 0 and value == "false" and name != own_name:
            continue
        short = f"{_SHORT[owner]}.{'…' if name == own_name else name}" if owner in _SHORT else field
        by_value.setdefault(value, []).append(short)
    return [(", ".join(shorts), value) for value, shorts in by_value.items()]


def _print_settings(plan: Plan, console: Console) -> None:
    """The keys that have an effect, with the fields that they set; then the others, with the reasons."""
    table = _table(
        "Requested → effective", ("key", "left"), ("requested", "left"), ("lands in", "left"), ("value", "left")
    )
    inert = _table("Keys without effect in this run", ("key", "left"), ("why", "left"))
    off = [setting for setting in plan.settings if is_fp8_key(setting.key) and not plan.spec.model.fp8]
    for setting in plan.settings:
        key = setting.key.removeprefix("model.")
        if setting.inert:
            if setting not in off:
                inert.add_row(Text(key, style="dim"), Text(setting.inert))
            continue
        requested = setting.requested
        for fields, value in _fields(setting):
            table.add_row(Text(key, style="cyan"), Text(requested), Text(fields, style="dim"), Text(value))
            key = requested = ""
    if off:
        inert.add_row(Text(f"all {len(off)} other FP8 keys", style="dim"), Text(off[0].inert))
    console.print(table)
    legend = ", ".join(f"{short} is {name}" for name, short in _SHORT.items())
    keys = "Keys without a dot are model.KEY: fp8 is model.fp8"
    console.print(Text(f"{keys}. {legend}; … is the key's own name.\n", style="dim"))
    if inert.row_count:
        console.print(inert)


def _linears(plan: Plan) -> Table:
    table = _table(
        "Linear layers of one GPU: rows of a microbatch × weights",
        *[(name, "left") for name in ("layers", "linear layer")],
        *[(name, "right") for name in ("times", "rows", "in", "out")],
        ("runs in", "left"),
    )
    for linear in plan.linears:
        runs_in = Text(linear.precision, style="green" if linear.precision == "FP8" else "")
        if linear.reason:
            runs_in.append(f" ({linear.reason})", style="dim")
        sizes = [str(size) for size in (linear.count, linear.rows, linear.inputs, linear.outputs)]
        table.add_row(linear.layers, linear.module, *sizes, runs_in)
    return table


def _memory(plan: Plan) -> Table:
    memory, stages, pipeline = plan.memory, plan.memory.stages, plan.spec.layout.pp > 1
    worst = memory.worst
    # If not all stages fit side by side, the worst and both ends say most.
    shown = stages if len(stages) <= 6 else [stages[index] for index in sorted({0, worst.stage, len(stages) - 1})]
    headers = [f"stage {each.stage}{' *' if each is worst else ''}" if pipeline else "GiB" for each in shown]
    title = "Memory of one GPU at its peak, GiB" + ("   (* needs most)" if pipeline else "")
    table = _table(title, ("", "left"), *[(header, "right") for header in headers])
    for name in sorted({name for stage in stages for name in stage.items}, key=ITEMS.index):
        table.add_row(name, *[f"{each.items[name] / GIB:.2f}" if name in each.items else "" for each in shown])
    table.add_section()
    table.add_row("peak of torch's allocator", *[f"{each.peak / GIB:.2f}" for each in shown], style="bold")
    return table


def _speed(plan: Plan, speed: SpeedForecast) -> Table:
    columns = {"BF16": speed.bf16}
    if speed.fp8 is not None:
        columns[f"FP8 {speed.fp8_recipe}"] = speed.fp8
    table = _table("One optimizer step, predicted, ms", ("", "left"), *[(name, "right") for name in columns])
    variants = columns.values()
    for name in dict.fromkeys(name for variant in variants for name in variant.seconds):
        table.add_row(name, *[f"{v.seconds[name] * 1e3:.1f}" if name in v.seconds else "" for v in variants])
    table.add_section()
    table.add_row("step", *[f"{v.step_s * 1e3:.1f}" for v in variants], style="bold")
    table.add_row("tokens/s per GPU", *[f"{v.tokens_per_s_per_gpu:,.0f}" for v in variants], style="bold")
    tflops = [v.tokens_per_s_per_gpu * plan.flops_per_token / 1e12 for v in variants]
    table.add_row("TFLOP/s per GPU", *[f"{value:.0f}" for value in tflops])
    return table


def _steps(schedule: RunSchedule) -> Table:
    names = ("from step", "after tokens", "samples a step", "microbatches", "steps", "tokens", "hours")
    table = _table("Steps of the run, with a batch that grows", *[(name, "right") for name in names])
    for stage in shortened(schedule.stages):
        if stage is None:
            table.add_row(*"…" * len(names))
            continue
        counts = (stage.first_step, stage.begin_tokens, stage.global_batch_size, stage.num_microbatches)
        numbers = [f"{number:,}" for number in (*counts, stage.num_steps, stage.num_tokens)]
        table.add_row(*numbers, _hours(stage.time_s))
    table.add_section()
    totals = [f"{number:,}" for number in (schedule.num_steps, schedule.num_tokens)]
    table.add_row("", "", "", "whole run", *totals, _hours(schedule.time_s), style="bold")
    return table


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a plan."""
    console.print(_header(plan))
    _print_settings(plan, console)
    console.print(_linears(plan))
    console.print(_memory(plan))
    outside = f"Another {plan.memory.outside_gib:.1f} GiB is outside of torch's allocator or lost in it (assumed).\n"
    console.print(Text(outside, style="dim"))
    console.print(Text.assemble(("FLOPs per token: ", "bold"), format_short(plan.flops_per_token)))
    hidden = ", what windows hide left out" if plan.spec.model.window_size is not None else _documents(plan)
    console.print(Text(f"{FLOPS_FORMULA}{hidden}\n", style="dim"))
    if plan.speed is not None:
        console.print(_speed(plan, plan.speed))
        shares = f"{EFFICIENCY.bf16:.0%} of the BF16 peak and {EFFICIENCY.bandwidth:.0%} of the memory's bandwidth"
        left_out = "".join(f"; {used.not_forecast}" for used in used_features(plan.spec) if used.not_forecast)
        basis = f"Roofline with {shares}, calibrated on an H200{left_out}.\n"
        console.print(Text(basis, style="dim"))
    if batch_grows(plan.spec.model):
        console.print(_steps(plan.schedule))
    for verdict in plan.verdicts:
        style = "bold yellow" if verdict.is_bad else "bold green"
        console.print(Text.assemble((f"{verdict.label}:", style), f" {verdict.text}"))


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    memory, speed, layout = plan.memory, plan.speed, plan.spec.layout
    kernels = plan.spec.kernels.values().items()
    of_speed: dict[str, Any] = {}
    if speed is not None:
        of_speed = {**asdict(speed), "fp8_over_bf16": speed.ratio}
    return {
        "version": VERSION,
        "name": plan.spec.config.name,
        "gpu": asdict(plan.gpu),
        "layout": {"num_gpus": layout.world_size, **asdict(layout)},
        "num_parameters": plan.num_parameters,
        "kernels": {name: value.value if isinstance(value, Enum) else value for name, value in kernels},
        "settings": [asdict(setting) for setting in plan.settings],
        "linear_layers": [asdict(linear) for linear in plan.linears],
        "fp8_flops_share": plan.fp8_flops_share,
        "memory": {
            "fits": plan.fits,
            "needed_gib": memory.needed_gib,
            "worst_stage": memory.worst.stage,
            **asdict(memory),
        },
        "checkpoint": asdict(plan.checkpoint),
        "flops_per_token": plan.flops_per_token,
        "speed": of_speed or None,
        "schedule": asdict(plan.schedule),
        "sentences": [str(verdict) for verdict in plan.verdicts],
    }


def write_plan(plan: Plan, run_dir: Path) -> Path:
    """Writes `plan.json`, the only file that a plan leaves, and returns its path."""
    path = run_dir / FILE_NAME
    write_file(path, json.dumps(plan_document(plan), indent=2, ensure_ascii=False) + "\n", wait_for_disk=False)
    return path
