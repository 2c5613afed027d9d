"""What a run writes to `metrics.jsonl`: one JSON object a line, each of a kind that this module defines.

The records are the contract between a run and whatever looks at it later (the console, comparisons, plots, a user's
own scripts), so they are plain data: no torch, no configuration. The string below a field is its documentation, and
`docs/metrics.md` repeats it; a test keeps both the same.

JSON has no NaN and no infinity. A loss that diverged is the record one least wants to lose, so those values are
written as the strings "nan", "inf" and "-inf"; null means that the value was not measured. Readers ignore kinds and
fields they do not know, so that the files of a newer version stay readable.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args, get_type_hints

type JsonValue = str | int | float | None

EndReason = Literal["max_steps", "max_time", "interrupted", "terminated"]
"""Why a run ended: all steps done, the time used up, Ctrl-C, or a SIGTERM. One that fails leaves no summary."""


def _to_json(value: JsonValue) -> JsonValue:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _from_json(value: JsonValue, accepted: tuple[object, ...]) -> JsonValue:
    """Undoes `_to_json`, and lets a whole number stand where a float is expected, as JSON writers do."""
    if float in accepted and value in ("nan", "inf", "-inf"):
        return float(value)
    if float in accepted and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kinds = tuple(kind for kind in accepted if isinstance(kind, type))
    if not isinstance(value, kinds) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{value!r} is not {names}")
    return value


def _accepted(hint: object) -> tuple[object, ...]:
    """Python types that a field's annotation accepts: `float | None` gives (float, NoneType)."""
    kinds: list[object] = []
    for part in get_args(hint) or (hint,):
        kinds.append(type(part) if isinstance(part, str) else part)
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of `metrics.jsonl`; `kind` tells which of the classes below it is."""

    kind: ClassVar[str]

    step: int
    """Optimizer steps done, from the start of the whole run."""

    def to_line(self) -> str:
        """This record as one line of JSON, without the newline."""
        values: dict[str, JsonValue] = {"kind": self.kind}
        values |= {field.name: _to_json(getattr(self, field.name)) for field in fields(self)}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, values: Mapping[str, JsonValue]) -> Self:
        """Builds the record from a line's JSON object.

        Raises:
            ValueError: A field is missing or has another type than this class says.
        """
        hints = get_type_hints(cls)
        arguments: dict[str, Any] = {}
        for field in fields(cls):
            accepted = _accepted(hints[field.name])
            if field.name not in values and type(None) not in accepted:
                raise ValueError(f'a record of kind "{cls.kind}" has no field "{field.name}"')
            try:
                arguments[field.name] = _from_json(values.get(field.name), accepted)
            except ValueError as error:
                raise ValueError(f'field "{field.name}" of a record of kind "{cls.kind}": {error}') from None
        return cls(**arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord(Record):
    """A process started the run (step 0) or resumed it; what an earlier one wrote about later steps is superseded."""

    kind: ClassVar[str] = "start"

    time_unix: float
    """Seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecord(Record):
    """Training, every `trainer.log_every_n_steps` steps; times and rates are means over the steps since the last."""

    kind: ClassVar[str] = "train"

    consumed_samples: int
    """Training samples seen up to this step."""
    consumed_tokens: int
    """Training tokens seen up to this step."""
    loss: float
    """Cross entropy in nats per token, over all ranks."""
    lr: float
    """Learning rate of this step."""
    grad_norm: float | None
    """L2 norm of the gradient over all parameters, before clipping; null if the optimizer did not compute it."""
    step_time_s: float
    """Seconds per step."""
    tokens_per_s: float
    """Tokens per second, all ranks together."""
    tokens_per_s_per_gpu: float
    """Tokens per second and rank."""
    tflops_per_gpu: float | None
    """Model TFLOP/s of one rank (the products a step needs, recomputation not counted); null if not computed."""
    mfu: float | None
    """tflops_per_gpu over the GPU's peak, 0 to 1; null where the peak is not known."""
    memory_gib: float | None
    """Peak memory allocated on rank 0's GPU; without a GPU, rank 0's resident memory."""
    eta_s: float | None
    """Seconds left to the last step at this pace; null where it is not known."""
    time_unix: float
    """Seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord(Record):
    """One validation: `trainer.limit_val_batches` global batches of the validation split."""

    kind: ClassVar[str] = "validation"

    loss: float
    """Cross entropy in nats per token."""
    perplexity: float
    """exp(loss)."""
    num_samples: int
    """Samples it was computed on."""
    time_s: float
    """Seconds it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRecord(Record):
    """The end of a process of the run: what was reached, and why it stopped. A process that fails writes none."""

    kind: ClassVar[str] = "summary"

    consumed_samples: int
    """Training samples seen."""
    consumed_tokens: int
    """Training tokens seen."""
    end_reason: EndReason
    """Why it ended: max_steps, max_time, interrupted (Ctrl-C), terminated (SIGTERM)."""
    wall_time_s: float
    """Seconds of training in this process, validation and checkpoints included."""
    first_loss: float | None
    """First logged training loss of the run; null if none was logged."""
    last_loss: float | None
    """Last logged training loss."""
    best_loss: float | None
    """Lowest logged training loss."""
    first_validation_loss: float | None
    """First validation loss of the run; null without validation."""
    last_validation_loss: float | None
    """Last validation loss."""
    best_validation_loss: float | None
    """Lowest validation loss."""
    tokens_per_s: float | None
    """Tokens per second over all logged steps but those up to the first record of each start, which warm up."""
    tokens_per_s_per_gpu: float | None
    """The same, per rank."""
    checkpoint: str | None
    """The newest checkpoint; null if none was written."""
    sample_prompt: str | None
    """Prompt of the text sample; null without one."""
    sample_text: str | None
    """What the model wrote after the prompt."""


RECORD_KINDS: dict[str, type[Record]] = {
    record.kind: record for record in (StartRecord, TrainRecord, ValidationRecord, SummaryRecord)
}
