"""Where runs come from: any directory or file, recognized by its content, never by its name.

    directory   metrics.jsonl: one of our runs, or a folder of them; event files: one run per folder
    file        a copy of metrics.jsonl, one event file, the output of Megatron-LM or torchtitan

Then each run gets a name, and our runs that differ only in the seed become one variant. Our own runs,
finished or not, are read here. Their configuration is read as plain values because earlier versions had other keys.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from gpt_pretrain.compare.comparability import variant_settings
from gpt_pretrain.compare.comparison import Curve, RunRecord
from gpt_pretrain.compare.console_logs import read_console_log
from gpt_pretrain.compare.event_files import MAX_DEPTH, find_event_files, read_event_files
from gpt_pretrain.compare.series import (
    KEPT_POINTS,
    accumulated,
    as_configuration,
    check_size,
    read_number,
    read_seed,
    thinned,
    validated,
)
from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.errors import UserError, show
from gpt_pretrain.config.files import read_foreign_text
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.yaml_files import UNREADABLE, check_yaml
from gpt_pretrain.launch.run_dir import check_run_lock
from gpt_pretrain.report.metrics_file import Metrics, load_records, metrics_path
from gpt_pretrain.report.records import DONE
from gpt_pretrain.report.summary import mean_tokens_per_s

_FILES = "metrics.jsonl, a TensorBoard event file, or the output of Megatron-LM or torchtitan"
_METRICS = "metrics.jsonl"


def read_runs(places: Sequence[str]) -> list[RunRecord]:
    """Reads the runs of directories and files, in this order, and names runs and variants.

    Raises `UserError` if a place is missing, damaged, given twice, or holds no run.
    """
    given: dict[Path, str] = {}
    for place in places:
        resolved = Path(place).resolve()
        if (other := given.get(resolved)) is not None:
            what = f"{place} is given twice" if other == place else f"{other} and {place} are the same"
            raise UserError(f"runs: {what}; give each run once")
        given[resolved] = place
    return _named([run for place in places for run in _read(Path(place))])


def _read(place: Path) -> list[RunRecord]:
    if not place.exists():
        raise UserError(f"runs: {place} does not exist; give directories of runs, or logs")
    return _read_directory(place) if place.is_dir() else _read_file(place)


def _read_directory(place: Path) -> list[RunRecord]:
    if metrics_path(place).exists():
        return [read_run_dir(place)]
    # Before event files, which our runs also have: read from those, the runs would lose their configurations.
    if below := sorted(path.parent for depth in range(1, MAX_DEPTH) for path in place.glob("*/" * depth + _METRICS)):
        return [read_run_dir(run) for run in below]
    if events := find_event_files(place):
        return [series.build() for series in read_event_files(place, events)]
    raise UserError(
        f"runs: {place} holds neither metrics.jsonl nor TensorBoard's event files; give the directory of a run"
    )


def _read_file(place: Path) -> list[RunRecord]:
    check_size(place)
    with place.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise UserError(f"runs: {place} is empty; expected {_FILES}")
    if start.lstrip().startswith(b"{") and b'"kind"' in start.splitlines()[0]:
        return [read_run_dir(place)]
    # Every event file begins with this version.
    if b"brain.Event:" in start[:64]:
        return [series.build() for series in read_event_files(place, [place])]
    if log := read_console_log(place):
        return [log.build()]
    raise UserError(f"runs: {place}:1: no run in it; expected {_FILES}")


def _named(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Gives every run its variant and a unique name."""
    # Logs of other codes do not tell enough to know that they differ only in seeds.
    keys = [
        tuple(variant_settings(run).items()) if run.format == "gpt_pretrain" and run.configuration else index
        for index, run in enumerate(runs)
    ]
    firsts = dict(zip(reversed(keys), reversed(runs), strict=True))
    order = list(dict.fromkeys(keys))
    variants = dict(zip(order, _variant_names([firsts[key] for key in order]), strict=True))
    by_name: dict[str, RunRecord] = {}
    for key, run in zip(keys, runs, strict=True):
        variant = variants[key]
        name = variant if keys.count(key) == 1 else f"{variant} seed {run.seed}"
        if name in by_name:
            same = f"{by_name[name].source} and {run.source} have equal settings and model.seed={run.seed}"
            raise UserError(f"runs: {same}, so the second tells nothing about seeds; give one of them")
        by_name[name] = replace(run, variant=variant, name=name)
    return list(by_name.values())


def _variant_names(firsts: Sequence[RunRecord]) -> list[str]:
    """A name for each variant, given its first run: the precision, or of namesakes the place."""
    names = [_plain_name(run) for run in firsts]
    for longer in ([Path(run.source).name for run in firsts], [run.source for run in firsts]):
        # Of several runs in one place, each has a label.
        labeled = [f"{text} {run.name}".strip() for text, run in zip(longer, firsts, strict=True)]
        names = [more if names.count(name) > 1 else name for name, more in zip(names, labeled, strict=True)]
    return names


def _plain_name(run: RunRecord) -> str:
    if run.format != "gpt_pretrain" or not run.configuration:
        return run.name or Path(run.source).stem
    if run.configuration.get("model.fp8") == "true":
        recipe, backend = run.configuration.get("model.fp8_recipe"), run.configuration.get("model.fp8_backend")
        if backend == Fp8Backend.torchao.name:
            return f"fp8_{backend}_{'tensorwise' if recipe in (None, 'null') else recipe}"
        return f"fp8_{'delayed' if recipe in (None, 'null') else recipe}"
    precision = run.configuration.get("trainer.precision")
    return "no_fp8" if precision in (None, "auto") else precision


def _read_config(path: Path) -> dict[str, str]:
    """Every dotted key with its value as YAML text; empty if the file is missing."""
    try:
        check_yaml(path)
        content = yaml.safe_load(read_foreign_text(path))
        if not isinstance(content, dict):
            raise yaml.YAMLError("it holds no keys")
        settings = {
            key: show(value) if value is None or isinstance(value, bool) else str(value)
            for key, value in flatten(content)
        }
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        raise UserError(f"{path} is not the configuration of a run: {error}; restore it, or remove it") from error
    return _with_widths(settings)


def _with_widths(settings: dict[str, str]) -> dict[str, str]:
    """The settings with the widths that null stands for, because other codes log the numbers."""
    hidden, heads = (read_number(settings.get(key)) for key in ("model.hidden_size", "model.num_attention_heads"))
    if hidden is None or heads is None:
        return settings
    implied = {
        "model.ffn_hidden_size": str(4 * hidden),
        "model.num_query_groups": str(heads),
        "model.kv_channels": str(hidden // heads),
    }
    return settings | {key: value for key, value in implied.items() if settings.get(key) == "null"}


def read_run_dir(place: Path) -> RunRecord:
    """Reads a run from its directory, or from a copy of its `metrics.jsonl`; name and variant are still empty.

    Raises `UserError` if a file is missing or damaged, or no training step was logged.
    """
    path = metrics_path(place) if place.is_dir() else place
    check_size(path)
    metrics = load_records(path)
    if not metrics.train:
        raise UserError(f"{path} has no record of kind train; expected one every trainer.log_every_n_steps steps")
    # The files beside a copy under another name belong to other runs.
    is_copy = metrics_path(path.parent) != path
    settings = {} if is_copy else _read_config(path.parent / "config.yaml")
    train = metrics.train
    gpus = max(1, round(train[-1].tokens_per_s / train[-1].tokens_per_s_per_gpu)) if _has_rates(metrics) else None
    steps = tuple(record.step for record in train)
    last = metrics.starts[-1] if metrics.starts else None
    training = Curve(
        steps=steps,
        losses=tuple(record.loss for record in train),
        tokens=tuple(record.consumed_tokens for record in train),
        gpu_seconds=() if gpus is None else accumulated(steps, [gpus * s for s in _seconds_per_step(metrics)]),
    )
    return RunRecord(
        name="",
        variant="",
        seed=read_seed(settings),
        source=str(place),
        format="gpt_pretrain",
        state=_state(path, metrics),
        num_gpus=gpus,
        training=thinned(training, KEPT_POINTS),
        validation=validated({record.step: record.loss for record in metrics.validation}, training),
        validation_sets=metrics.validation[-1].losses if metrics.validation else None,
        tokens_per_s=mean_tokens_per_s(metrics) if gpus is not None else None,
        memory_gib=max((record.memory_gib for record in train if record.memory_gib is not None), default=None),
        skipped_steps=len(metrics.skipped_steps),
        fp8_share=None if metrics.fp8_coverage is None else metrics.fp8_coverage.gemm_flops_share,
        configuration=as_configuration(settings),
        versions=last.versions if last else None,
        command=last.command if last else None,
    )


def _has_rates(metrics: Metrics) -> bool:
    rates = [rate for record in metrics.train for rate in (record.tokens_per_s, record.tokens_per_s_per_gpu)]
    return all(0 < rate < math.inf for rate in rates) and all(record.step_time_s > 0 for record in metrics.train)


def _seconds_per_step(metrics: Metrics) -> list[float]:
    """At each record; the first one after a start or rewind counts as the median of the others."""
    warm_ups = metrics.warm_up_steps()
    usual = [record.step_time_s for record in metrics.train if record.step not in warm_ups]
    pace = statistics.median(usual or [record.step_time_s for record in metrics.train])
    return [pace if record.step in warm_ups else record.step_time_s for record in metrics.train]


def _state(path: Path, metrics: Metrics) -> str:
    if metrics.summary is not None:
        reason = metrics.summary.end_reason
        return "finished" if reason in DONE else f"ended early: {reason}"
    try:
        # A killed run leaves its lock, but no living process that holds it.
        check_run_lock(path.parent)
    except (UserError, OSError):
        # The age of a lock is unknown in a directory that we cannot write, such as another user's.
        return "running"
    return "ended without a summary"
