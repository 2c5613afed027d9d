"""A comparison as data: the runs as they were read, the answers, the verdicts. `compare.json` is this.

Console and page show a `Comparison` and nothing else. Losses are in nats per token, gaps and shares are fractions
(0.01 is 1%). Times are GPU-seconds: seconds of training times GPUs, without validation, checkpoints and the warm-up of
compilation.

An empty tuple or null means that the run or log does not say. JSON has no NaN and no infinity: losses that diverged
are the strings "nan", "inf" and "-inf", as in `metrics.jsonl`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.json_objects import JsonObject

VERSION = 3
FILE_NAME = "compare.json"

Format = Literal["gpt_pretrain", "megatron", "torchtitan", "tensorboard"]
"""What wrote the metrics: this application, a code whose output was saved, event files."""
Judgement = Literal["as_good", "better", "worse", "cannot_tell", "not_comparable"]
"""Of the final loss, against the baseline and the allowed gap."""
NoiseSource = Literal["paired seeds", "seeds", "none"]
"""What an interval's width comes from; `statistics` has the methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve(JsonObject):
    """Losses over a run: rising steps, and in each tuple that is not empty one entry per step."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Of the training batches since the previous point, or of a validation."""
    tokens: tuple[int, ...]
    """Training tokens seen; empty if batch size or sequence length is unknown."""
    gpu_seconds: tuple[float, ...]
    """Since the start of training; empty if times or the number of GPUs are unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord(JsonObject):
    """One run, as read from its directory or its log."""

    name: str
    """Unique: the variant, and the seed if the variant has several runs."""
    variant: str
    """Runs of one variant differ only in their seeds."""
    seed: int | None
    source: str
    """The directory or file."""
    format: Format
    state: str
    """finished, running, or in words why it ended early."""
    num_gpus: int | None
    training: Curve
    validation: Curve
    validation_sets: Mapping[str, float] | None = None
    """The last validation loss of each set, by its name; None without several sets."""
    tokens_per_s: float | None
    """All GPUs together, without the warm-up of each start."""
    memory_gib: float | None
    """Peak of the GPU that was logged."""
    skipped_steps: int | None
    """Steps that updated nothing because loss, gradient or FP8 tensors were not finite."""
    fp8_share: float | None = None
    """Share of the matrix products' FLOPs that ran in FP8, 0 to 1."""
    configuration: Mapping[str, str]
    """Values by key, under our names where we have one."""
    versions: str | None = None
    """Python and libraries."""
    command: str | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """The rate of one GPU."""
        return None if self.tokens_per_s is None or self.num_gpus is None else self.tokens_per_s / self.num_gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle(JsonObject):
    """A difference from the baseline that makes losses incomparable: other data, batch, tokenizer or model."""

    run: str
    key: str
    baseline_value: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDifference(JsonObject):
    """A key in which configurations differ, obstacles included."""

    key: str
    values: tuple[str, ...]
    """One per run, in the order of `Comparison.runs`; "" if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval(JsonObject):
    """An estimate and its confidence interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures(JsonObject):
    """What a variant's runs measured."""

    variant: str
    num_runs: int
    last_loss: float | None
    """Mean of the last 5% of the logged losses of all runs; runs of different lengths end at different steps."""
    tokens_per_s_per_gpu: float | None
    """Mean over the runs."""
    memory_gib: float | None
    """Largest of the runs."""
    skipped_steps: int | None
    """Sum over the runs."""
    fp8_share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GapCurve(JsonObject):
    """The relative gap between smoothed losses during training; positive if the variant's loss is higher."""

    steps: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()
    lows: tuple[float, ...] = ()
    """Lower ends of the confidence interval; empty if the noise is unknown."""
    highs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeToLoss(JsonObject):
    """GPU-seconds until the smoothed loss reaches a level, geometric means over the runs."""

    loss: float
    baseline_gpu_s: float
    gpu_s: float
    speedup: Interval
    """baseline_gpu_s ÷ gpu_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(JsonObject):
    """One variant against the baseline; the defaults mean that nothing is known yet."""

    variant: str
    judgement: Judgement
    sentence: str = ""
    """The verdict."""
    reasons: tuple[str, ...] = ()
    """Why the answer says no more, and what to do about it."""
    final_losses: tuple[float, ...] = ()
    """The variant's and the baseline's smoothed losses at the last tokens that both have, geometric means over the
    runs; empty if nothing could be compared."""
    loss_gap: Interval | None = None
    """The variant's final loss ÷ the baseline's − 1."""
    noise_from: NoiseSource = "none"
    gap_curve: GapCurve = GapCurve()
    time_to_loss: TimeToLoss | None = None
    """To the lowest loss that all runs reached."""
    throughput_ratio: float | None = None
    """Tokens/s per GPU, variant ÷ baseline."""

    @property
    def speedup(self) -> Interval | None:
        """To the lowest loss that all runs reached."""
        return None if self.time_to_loss is None else self.time_to_loss.speedup


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate(JsonObject):
    """What every variant must show, and what was missed."""

    max_loss_gap: float | None
    """Relative: 0.005 is 0.5%."""
    min_speedup: float | None
    missed: tuple[str, ...] = ()
    """One sentence per missed demand; empty if the gate is passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(JsonObject):
    """The whole comparison."""

    version: int
    """Grows when a name changes its meaning or disappears."""
    date: str
    command: str
    confidence: float
    """Of every interval: 0.95."""
    baseline: str
    """The variant that ratios and gaps refer to."""
    runs: tuple[RunRecord, ...]
    """The baseline's first."""
    obstacles: tuple[Obstacle, ...]
    differences: tuple[ConfigDifference, ...]
    unchecked: tuple[str, ...]
    """What is unknown of data, batch, tokenizer and model, in words."""
    figures: tuple[Figures, ...]
    """One per variant, the baseline first."""
    answers: tuple[Answer, ...]
    """One per variant except the baseline."""
    methods: tuple[str, ...]
    """How the figures were computed: smoothing, intervals and their assumptions."""
    gate: Gate | None


def save_comparison(comparison: Comparison, directory: Path) -> Path:
    """Writes `compare.json` into a directory; see `write_result`."""
    text = json.dumps(comparison.to_json(), ensure_ascii=False, allow_nan=False)
    return write_result(directory / FILE_NAME, text + "\n")


def write_result(path: Path, text: str) -> Path:
    """Writes a file of a comparison and returns its path.

    Raises:
        UserError: It cannot be written.
    """
    try:
        write_file(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; give another run_dir") from error
    return path
