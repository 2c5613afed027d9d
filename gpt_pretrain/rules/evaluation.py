"""Rules about the tasks of evaluations, in a run and by the command."""

from collections.abc import Iterator, Sequence

from gpt_pretrain.config.errors import how_to_install, list_argument
from gpt_pretrain.launch.environment import installed_version


def task_problems(tasks: Sequence[str], key: str = "evaluation.tasks") -> Iterator[str]:
    """What is wrong with names of tasks before the library is asked; `key` has them."""
    given = list_argument(key, tasks)
    if twice := [name for name in dict.fromkeys(tasks) if tasks.count(name) > 1]:
        yield f"{given}: {', '.join(twice)} is named more than once; name each task once"
    if tasks and installed_version("lm_eval") is None:
        yield f"{given} needs the package lm-eval, which is not installed; {how_to_install('evaluate')}"
