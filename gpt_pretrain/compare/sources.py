"""Where runs come from: any directory or file, recognised by what it holds, never by its name.

    directory   metrics.jsonl: one of our runs; compare.json: those of a comparison; TensorBoard's files: a run a folder
    file        a copy of metrics.jsonl or compare.json, one event file, what Megatron-LM, NeMo or torchtitan printed,
                an exported table

Then each run gets a name, and runs of ours that differ in seeds or microbatches alone become one variant.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpt_pretrain.compare.comparability import variant_settings
from gpt_pretrain.compare.console_logs import read_console_log
from gpt_pretrain.compare.document import FILE_NAME, RunRecord, load_comparison
from gpt_pretrain.compare.run_dirs import read_run_dir
from gpt_pretrain.compare.series import check_size
from gpt_pretrain.compare.tables import find_event_files, read_event_files, read_table
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.report.metrics_file import metrics_path

_FILES = (
    "metrics.jsonl, compare.json, a TensorBoard event file, the output of Megatron-LM, NeMo or torchtitan, or a table "
    "that W&B or MLflow exported as CSV"
)


def read_runs(places: Sequence[str]) -> list[RunRecord]:
    """Reads every run of the directories and files, in their order, and names runs and variants.

    Raises:
        UserError: One is missing, damaged, or holds no run; says what was expected.
    """
    return _named([run for place in places for run in _read(Path(place))])


def _read(place: Path) -> list[RunRecord]:
    if not place.exists():
        raise UserError(f"runs: {place} does not exist; give directories of runs, or logs")
    return _read_directory(place) if place.is_dir() else _read_file(place)


def _read_directory(place: Path) -> list[RunRecord]:
    if metrics_path(place).exists():
        return [read_run_dir(place)]
    if (place / FILE_NAME).exists():
        return [*load_comparison(place / FILE_NAME).runs]
    if events := find_event_files(place):
        return [series.build() for series in read_event_files(place, events)]
    below = sorted(str(path.parent) for path in place.glob("*/metrics.jsonl"))[:20]
    instead = f"give the runs in it: runs=[{','.join(below)}]" if below else "give the directory of a run"
    raise UserError(f"runs: {place} holds neither metrics.jsonl nor TensorBoard's event files; {instead}")


def _read_file(place: Path) -> list[RunRecord]:
    check_size(place)
    with place.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise UserError(f"runs: {place} is empty; expected {_FILES}")
    if start.lstrip().startswith(b"{") and b'"kind"' in start.splitlines()[0]:
        return [read_run_dir(place)]
    if start.startswith(b'{"version": '):
        return [*load_comparison(place).runs]
    # The version that begins every event file.
    if b"brain.Event:" in start[:64]:
        found = read_event_files(place, [place])
    elif (log := read_console_log(place)) is not None:
        found = [log]
    else:
        found = read_table(place) or []
    if not found:
        raise UserError(f"runs: {place}:1: no run in it; expected {_FILES}")
    return [series.build() for series in found]


def _named(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Gives every run its variant, its role, and a name that no other has."""
    groups: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    # Two logs of one name are two variants: a place tells them apart.
    for index, run in enumerate(runs):
        key: tuple[tuple[str, str], ...] = (("", str(index)),)
        if run.variant:
            key = (("variant", run.variant),)
        elif run.format == "gpt_pretrain" and run.configuration:
            key = tuple(sorted(variant_settings(run).items()))
        groups.setdefault(key, []).append(run)
    names = _variant_names([members[0] for members in groups.values()])
    variants = {id(run): name for name, members in zip(names, groups.values(), strict=True) for run in members}
    seeds: set[tuple[str, int | None]] = set()
    named: list[RunRecord] = []
    sizes = Counter(variants.values())
    for run in runs:
        variant = variants[id(run)]
        repeats = run.role == "repeat" or (run.seed is not None and (variant, run.seed) in seeds)
        seeds.add((variant, run.seed))
        name = variant if sizes[variant] == 1 else f"{variant} seed {run.seed}" + " again" * repeats
        # Those of a comparison have names, variants and roles already.
        given = run.name if run.variant else name
        named.append(replace(run, variant=variant, role="repeat" if repeats else "seed", name=given))
    return _unique(named)


def _unique(runs: Sequence[RunRecord]) -> list[RunRecord]:
    taken: Counter[str] = Counter()
    unique = []
    for run in runs:
        taken[run.name] += 1
        unique.append(run if taken[run.name] == 1 else replace(run, name=f"{run.name} {taken[run.name]}"))
    return unique


def _variant_names(firsts: Sequence[RunRecord]) -> list[str]:
    """What each variant is called, given its first run: its precision, and what else differs from its namesakes."""
    plain = [_plain_name(run) for run in firsts]
    names = []
    for run, name in zip(firsts, plain, strict=True):
        namesakes = [variant_settings(other) for other, same in zip(firsts, plain, strict=True) if same == name]
        own = variant_settings(run)
        differing = [key for key in own if not run.variant and any(other.get(key) != own[key] for other in namesakes)]
        names.append(" ".join([name, *(f"{key.rpartition('.')[2]}={own[key]}" for key in differing[:3])]))
    taken: Counter[str] = Counter()
    for index, name in enumerate(names):
        taken[name] += 1
        if taken[name] > 1:
            names[index] = f"{name} {taken[name]}"
    return names


def _plain_name(run: RunRecord) -> str:
    if run.variant:
        return run.variant
    if run.format != "gpt_pretrain" or not run.configuration:
        return run.name or Path(run.source).stem
    if run.setting("model.fp8") == "true":
        recipe = run.setting("model.fp8_recipe")
        return f"fp8_{'delayed' if recipe in (None, 'null') else recipe}"
    precision = run.setting("trainer.precision")
    return "no_fp8" if precision in (None, "auto") else precision
