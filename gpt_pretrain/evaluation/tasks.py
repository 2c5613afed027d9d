"""Tasks of lm-evaluation-harness: found by name, loaded with their data and tried before anything expensive.

The library is imported when tasks are loaded. It draws examples from the generators of Python and NumPy; `drawing`
gives it a seed and leaves a run's generators as they were.
"""

import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy

from gpt_pretrain.config.errors import UserError, list_argument, one_of, reason
from gpt_pretrain.config.keys import did_you_mean, nearest_name

# The library's own default, so that examples of few-shot prompts are those of other programs.
_SEED = 1234
_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


class _Warnings(logging.Handler):
    """Keeps the library's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def drawing() -> Iterator[list[str]]:
    """Inside, the library draws from its seed and prints nothing; gives the warnings that it logs."""
    python, of_numpy = random.getstate(), numpy.random.get_state()
    logger, handler = logging.getLogger("lm_eval"), _Warnings()
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield handler.texts
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        logger.removeHandler(handler)
        logger.propagate = propagates


def load_tasks(
    names: Sequence[str], *, include_path: str | None, num_fewshot: int | None, prefix: str = ""
) -> dict[str, Any]:
    """The tasks and groups of these names, as `lm_eval.tasks.TaskManager.load` gives them; their data are downloaded.

    Args:
        names: Of tasks, groups and tags.
        include_path: A folder of task files beside the library's; None: only those.
        num_fewshot: Examples in each prompt; None: what each task says.
        prefix: Of the names of keys in messages.

    Raises:
        UserError: A name is unknown, data cannot be had, or a task asks for more than scores of given texts.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"{prefix}include_path={include_path!r} is no folder; name the one that holds the tasks' files")
    given = list_argument(f"{prefix}tasks", names)
    with drawing():
        manager = _manager(names, include_path)
        if unknown := [name for name in names if name not in manager.task_index]:
            told = [f"no task {name!r}{did_you_mean(nearest_name(name, manager.all_tasks))}" for name in unknown]
            has = f"{prefix}include_path={include_path} have" if include_path else "has"
            raise UserError(f"{given}: lm-evaluation-harness {'and ' if include_path else ''}{has} {', '.join(told)}")
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            try:
                found = manager.load([name])
                for task in found["tasks"].values():
                    _prepare(task, num_fewshot)
            except UserError as error:
                raise UserError(f"{given}: {error}") from None
            except Exception as error:
                raise UserError(f"{given}: {name} cannot be loaded: {reason(error)}{_offline()}") from error
            for part, content in found.items():
                loaded[part] |= content
    return loaded


def _manager(names: Sequence[str], include_path: str | None) -> Any:
    """An index of tasks; of the library's 14,000, which take seconds to read, only if some are asked for."""
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=include_path)


def _prepare(task: Any, num_fewshot: int | None) -> None:
    """Sets the number of examples, as the library's command does, and builds the prompt of the first document.

    Raises:
        UserError: The task asks for more than scores.
    """
    kind = task.OUTPUT_TYPE
    if kind not in _SCORED or getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
        asks = "text to be generated" if kind == "generate_until" else f"{kind} of its own kind"
        raise UserError(
            f"{task.task_name} asks for {asks}, and only tasks of {one_of(_SCORED)} are scored; leave it out, or "
            "export the model (python -m gpt_pretrain.export) and use lm_eval itself"
        )
    # Where a task's file says 0, its prompts have no place for examples.
    if num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    task.set_fewshot_seed(seed=_SEED)
    task.build_all_requests(limit=1, rank=0, world_size=1)


def _offline() -> str:
    variables = [f"{name}={os.environ[name]}" for name in _OFFLINE if os.environ.get(name, "0") not in ("", "0")]
    if not variables:
        return ""
    return (
        f"; with {' and '.join(variables)} nothing is downloaded: load its data once where there is a network, into a "
        "cache that this machine sees (HF_HOME), or give include_path=FOLDER with a task of local data"
    )


def seed_examples(tasks: Mapping[str, Any]) -> None:
    """Makes each evaluation draw the same examples."""
    for task in tasks.values():
        task.set_fewshot_seed(seed=_SEED)
