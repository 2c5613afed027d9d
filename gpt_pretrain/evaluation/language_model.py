"""lm-evaluation-harness' view of a model: texts become token ids as in its own models, and `score` does the rest."""

from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, override

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.tokenizer import Tokenizer


class ScoredModel(TemplateLM):  # type: ignore[misc]  # the library has no types that hold
    """A model of one context length; `score` is that of `results.run_tasks`.

    Texts without context follow the end of a document, as in training.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        score: Callable[[Sequence[tuple[Sequence[int], int]]], Sequence[tuple[float, bool]]],
    ) -> None:
        super().__init__()
        self._encode, self._max_length, self._score = tokenizer.encode, max_length, score
        self._eod = tokenizer.eod
        self.num_requests = self.num_truncated = 0

    @property
    @override
    def eot_token_id(self) -> int:
        return self._eod

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._encode(string)

    @override
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return]

    @override
    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> list[Any]:
        """Scores of (texts, context, continuation); contexts that are too long lose their beginning."""
        asked = []
        for _, context, continuation in requests:
            if len(continuation) > self._max_length:
                raise UserError(
                    f"a task asks for the likelihood of {len(continuation)} tokens, and the model's context has "
                    f"{self._max_length} (model.encoder_seq_length); leave the task out"
                )
            # All ranks get these: lists would take nine times the memory.
            tokens = array("i", (context + continuation)[-self._max_length - 1 :])
            self.num_truncated += len(tokens) < len(context) + len(continuation)
            asked.append((tokens, len(continuation)))
        self.num_requests += len(asked)
        return list(self._score(asked))

    @override
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context's length."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self._encode(text), prefix_token=self._eod, max_seq_len=self._max_length, context_len=1
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        asked = [(array("i", context + part), len(part)) for of_text in windows for context, part in of_text]
        scores = iter(self._score(asked))
        return [sum(score for score, _ in islice(scores, len(of_text))) for of_text in windows]

    @override
    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        raise AssertionError("such tasks are refused when they are loaded")
