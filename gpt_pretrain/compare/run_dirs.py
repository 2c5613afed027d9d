"""Our own runs, read from what they leave, `metrics.jsonl` and `config.yaml`: finished or not, from any machine.

The configuration is read as plain values: an earlier version's run has other keys, and is compared all the same.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import yaml

from gpt_pretrain.compare.document import Curve, Role, RunRecord
from gpt_pretrain.compare.series import (
    accumulated,
    as_settings,
    check_size,
    read_number,
    read_seed,
    thinned,
    thinned_records,
)
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.foreign import check_yaml, read_foreign_text
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.launch.run_dir import lock_path
from gpt_pretrain.report.metrics_file import Metrics, load_records, metrics_path
from gpt_pretrain.report.summary import mean_tokens_per_s


def _read_config(path: Path) -> dict[str, str]:
    """Every dotted key with its value as YAML has it; nothing where there is no file.

    Raises:
        UserError: It is damaged.
    """
    try:
        check_yaml(path)
        content = yaml.safe_load(read_foreign_text(path))
        if not isinstance(content, dict):
            raise yaml.YAMLError("it holds no keys")
        settings = {key: _written(value) for key, value in flatten(content)}
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not the configuration of a run: {error}; restore it, or remove it") from error
    return _resolved(settings)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolved(settings: dict[str, str]) -> dict[str, str]:
    """With the widths that null stands for, so that a log which tells them can be compared."""
    model = {key.removeprefix("model."): value for key, value in settings.items()}
    hidden, heads = (read_number(model.get(key)) for key in ("hidden_size", "num_attention_heads"))
    if hidden is not None and heads is not None:
        implied = {
            "ffn_hidden_size": str(4 * hidden),
            "num_query_groups": str(heads),
            "kv_channels": str(hidden // heads),
        }
        settings |= {f"model.{key}": value for key, value in implied.items() if model.get(key) == "null"}
    return settings


def read_run_dir(
    place: Path, *, name: str = "", variant: str = "", role: Role = "seed", seed: int | None = None
) -> RunRecord:
    """Reads a run.

    Args:
        place: Its directory, or a copy of its `metrics.jsonl` alone.
        name: See `RunRecord`; likewise what follows. What is not given here is given by what tells runs apart.
        variant: Of the run.
        role: Of the run.
        seed: From the configuration where it is not given.

    Raises:
        UserError: A file is missing or damaged, or no training step was logged.
    """
    path = metrics_path(place) if place.is_dir() else place
    check_size(path)
    try:
        metrics = load_records(path)
    except (RecursionError, OverflowError) as error:
        raise UserError(f"{path}: a line is no record: {error}; restore the file") from error
    if not metrics.train:
        raise UserError(f"{path} has no record of kind train; expected one every trainer.log_every_n_steps steps")
    # A copy under another name lies among other runs' files.
    is_copy = metrics_path(path.parent) != path
    settings = {} if is_copy else _read_config(path.parent / "config.yaml")
    train = metrics.train
    gpus = max(1, round(train[-1].tokens_per_s / train[-1].tokens_per_s_per_gpu)) if _has_rates(metrics) else None
    steps = tuple(record.step for record in train)
    last = metrics.starts[-1] if metrics.starts else None
    memory = [record.memory_gib for record in train if record.memory_gib is not None]
    return RunRecord(
        name=name,
        variant=variant,
        role=role,
        seed=read_seed(settings) if seed is None else seed,
        source=str(place),
        format="gpt_pretrain",
        state=_state(path, metrics),
        num_gpus=gpus,
        training=thinned(
            Curve(
                steps=steps,
                losses=tuple(record.loss for record in train),
                tokens=tuple(record.consumed_tokens for record in train),
                gpu_seconds=() if gpus is None else accumulated(steps, [gpus * s for s in _seconds_per_step(metrics)]),
            )
        ),
        validation=Curve(
            steps=tuple(record.step for record in metrics.validation),
            losses=tuple(record.loss for record in metrics.validation),
            tokens=(),
            gpu_seconds=(),
        ),
        tokens_per_s=mean_tokens_per_s(metrics) if gpus is not None else None,
        memory_gib=max(memory, default=None),
        skipped_steps=len(metrics.skipped_steps),
        fp8_share=None if metrics.fp8_coverage is None else metrics.fp8_coverage.gemm_flops_share,
        fp8=thinned_records(metrics.fp8),
        configuration=as_settings(settings),
        versions=last.versions if last else None,
        command=last.command if last else None,
    )


def _has_rates(metrics: Metrics) -> bool:
    rates = [rate for record in metrics.train for rate in (record.tokens_per_s, record.tokens_per_s_per_gpu)]
    return all(0 < rate < math.inf for rate in rates) and all(record.step_time_s > 0 for record in metrics.train)


def _seconds_per_step(metrics: Metrics) -> list[float]:
    """At each record; the warm-up of each start, and what a rewind took, at the pace of the other steps."""
    restarts = [restart.step for restart in (*metrics.starts, *metrics.rewinds)]
    first_after = {next((record.step for record in metrics.train if record.step > step), 0) for step in restarts}
    usual = [record.step_time_s for record in metrics.train if record.step not in first_after]
    pace = statistics.median(usual or [record.step_time_s for record in metrics.train])
    return [pace if record.step in first_after else record.step_time_s for record in metrics.train]


def _state(path: Path, metrics: Metrics) -> str:
    if metrics.summary is None:
        return "running" if lock_path(path.parent).exists() else "ended without a summary"
    return "finished" if metrics.summary.end_reason == "max_steps" else f"ended early: {metrics.summary.end_reason}"
