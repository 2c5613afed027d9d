"""Runs loaded tasks on a model: numbers with standard errors, a table, and the library's whole report."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gpt_pretrain.data.tokenizer import Tokenizer
from gpt_pretrain.evaluation.tasks import drawing, seed_examples
from gpt_pretrain.report.columns import format_loss

# For standard errors that have no formula. The library's 100,000 would take minutes while all GPUs wait.
_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What tasks and groups have measured."""

    numbers: Mapping[str, float]
    """By task and metric, such as "arc_easy/acc_norm"."""
    standard_errors: Mapping[str, float]
    """Of those numbers that have one."""
    report: Mapping[str, Any]
    """As `lm_eval.evaluator.evaluate` returns it."""
    warnings: tuple[str, ...]
    """What the user should know of the numbers."""

    def to_json(self, **about: Any) -> str:
        """The report with what it is about."""
        return json.dumps({**about, **self.report, "warnings": self.warnings}, indent=1, default=str) + "\n"

    def table(self) -> Table:
        """A row for each number."""
        table = Table()
        for index, heading in enumerate(("task", "examples", "documents", "metric", "value", "standard error")):
            table.add_column(heading, justify="left" if index in (0, 3) else "right")
        for name, value in self.numbers.items():
            task, _, metric = name.rpartition("/")
            error = self.standard_errors.get(name)
            documents = self.report["n-samples"].get(task, {}).get("effective", "")
            examples = self.report["n-shot"].get(task, "")
            table.add_row(task, str(examples), str(documents), metric, f"{value:.4f}", format_loss(error))
        return table


def run_tasks(
    loaded: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    limit: int | None,
    score: Callable[[Sequence[tuple[Sequence[int], int]]], Sequence[tuple[float, bool]]],
) -> Results:
    """Evaluates tasks of `load_tasks`; `limit` is the number of documents of each, None for all.

    `score` turns up to `max_length` + 1 token ids, with the number of last ones that are scored, into their
    log-likelihood in nats and whether each is the likeliest token.
    """
    from lm_eval.evaluator import evaluate

    from gpt_pretrain.evaluation.language_model import ScoredModel

    outputs = sys.stdout, sys.stderr

    def score_audibly(asked: Sequence[tuple[Sequence[int], int]]) -> Sequence[tuple[float, bool]]:
        # Whatever ends the run meanwhile says so.
        with redirect_stdout(outputs[0]), redirect_stderr(outputs[1]):
            return score(asked)

    seed_examples(loaded["tasks"])
    model = ScoredModel(tokenizer, max_length, score_audibly)
    with drawing() as warnings, _in_one_process():
        report = evaluate(model, loaded, limit=limit, bootstrap_iters=_RESAMPLES, log_samples=False)
    told = list(dict.fromkeys(warnings))
    if model.num_truncated:
        told.append(
            f"{model.num_truncated} of {model.num_requests} texts are longer than the model's context "
            f"({max_length} tokens) and were scored without their beginning"
        )
    values = dict(_values({**report["results"], **report.get("groups", {})}))
    return Results(
        numbers={name: value for name, value in values.items() if not _is_error(name)},
        standard_errors={name: values[error] for name in values if (error := f"{name}_stderr") in values},
        report=report,
        warnings=tuple(told),
    )


def _is_error(name: str) -> bool:
    return name.endswith("_stderr")


def _values(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """From "acc_stderr,none" of a task to TASK/acc_stderr; filters other than none come before the metric."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if comma and isinstance(value, int | float):
                yield f"{task}/{'' if chosen == 'none' else f'{chosen},'}{metric}", float(value)


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Inside, the library resamples without forking: a process that holds a GPU must not be forked."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
