"""An evaluation: the scores of tasks, on the model in memory, in any layout.

Rank 0 alone loads the tasks and runs lm-evaluation-harness, which asks it to score token ids. It hands each request to
all ranks, which score it together; the others wait for requests in between. Nothing here draws from the generators of
the training, moves its data or changes the state of its FP8 layers.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.schema import EvaluationConfig
from gpt_pretrain.data.tokenizer import Tokenizer
from gpt_pretrain.evaluation.results import Results, run_tasks
from gpt_pretrain.evaluation.tasks import load_tasks
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.report.records import EvaluationRecord, Record
from gpt_pretrain.training.inference import Continuation, Score, score_continuations
from gpt_pretrain.training.watchdog import Watchdog


class Evaluation:
    """Tasks to evaluate models on; every rank makes it in open process groups, before it builds a model.

    `prefix` is that of the keys' names in messages.

    Raises:
        UserError: A task cannot be evaluated here, or its data cannot be had.
    """

    def __init__(self, settings: EvaluationConfig, tokenizer: Tokenizer, *, prefix: str = "evaluation.") -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._loaded: dict[str, Any] = {}

        def load() -> None:
            self._loaded = load_tasks(
                settings.tasks,
                include_path=settings.include_path,
                num_fewshot=settings.num_fewshot,
                prefix=prefix,
            )

        on_rank_zero(load)

    def run(self, model: Model, on_batch: Callable[[], None] = lambda: None) -> Results:
        """What the tasks measure; every rank calls it inside `Model.newest_parameters`.

        `on_batch` is called before each batch.

        Raises:
            UserError: A task cannot be evaluated on this model.
        """
        score = partial(score_continuations, model, on_batch=on_batch)
        if torch.distributed.get_rank() > 0:
            while not isinstance(message := _from_rank_zero(None), Results):
                if isinstance(message, str):
                    raise UserError(message)
                score(_continuations(message))
            return message

        def score_on_all_ranks(asked: Sequence[tuple[Sequence[int], int]]) -> Sequence[Score]:
            _from_rank_zero(asked)
            return score(_continuations(asked))

        try:
            results = run_tasks(
                self._loaded,
                self._tokenizer,
                max_length=model.spec.model.encoder_seq_length,
                limit=self._settings.limit,
                score=score_on_all_ranks,
            )
        except UserError as error:
            _from_rank_zero(str(error))
            raise
        _from_rank_zero(results)
        return results

    def log(self, model: Model, step: int, run_dir: Path, *, watchdog: Watchdog, log: Callable[[Record], None]) -> None:
        """Logs what the tasks measure after a step, and writes their report; arguments and errors as for `run`."""
        began = time.monotonic()
        with watchdog.busy("an evaluation"):
            results = self.run(model, partial(watchdog.progress, "a batch of the evaluation"))
            on_rank_zero(lambda: write_results(results, run_dir / "evaluations" / f"step_{step:08d}.json", step=step))
        log(
            EvaluationRecord(
                step=step,
                numbers=results.numbers,
                standard_errors=results.standard_errors,
                time_s=time.monotonic() - began,
                warnings=results.warnings,
            )
        )


def _continuations(asked: Sequence[tuple[Sequence[int], int]]) -> list[Continuation]:
    return [Continuation(*each) for each in asked]


def _from_rank_zero(message: Any) -> Any:
    """Rank 0's message, on all ranks: token ids to score, or at the end the results, or why there are none."""
    holder = [message]
    torch.distributed.broadcast_object_list(holder, src=0, device=torch.device(torch.cuda.current_device()))
    return holder[0]


def write_results(results: Results, path: Path, **about: Any) -> None:
    """Writes the whole report as JSON, with what it is about."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, results.to_json(**about))
