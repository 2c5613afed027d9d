"""What a run writes to `metrics.jsonl`: one JSON object a line, each of a kind that this module defines.

The records are the contract between a run and everything that reads it later (the console, comparisons, plots, users'
scripts), so they are plain data: no torch, no configuration. `make docs` prints the strings below the fields on its
page about metrics.

Numbers that are not finite are written as strings (`config.json_objects`). Readers ignore unknown kinds.
"""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.config.mixtures import ConsumedSource

EndReason = Literal[
    "max_steps", "callback", "max_time", "interrupted", "terminated", "warned", "not_finite", "loss_spike"
]
DONE: Set[EndReason] = {"max_steps", "callback"}
"""The run has trained as long as it was to."""
"""Why a run ended: all steps done, the time used up, Ctrl-C, SIGTERM or SIGHUP, SIGUSR1 (Slurm's warning), too many
consecutive steps whose loss or gradient was not finite, or more loss spikes than rewinds allowed. A run that fails in
another way leaves no summary."""

RECORD_KINDS: dict[str, type["Record"]] = {}
"""Kind → its class, in the order of this module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(JsonObject):
    """One line of `metrics.jsonl`; `kind` names the class."""

    kind: ClassVar[str]
    step: int
    """Optimizer steps done, from the start of the whole run."""

    def __init_subclass__(cls) -> None:
        # A dataclass with slots is created twice; the second class, which stays, replaces the first.
        RECORD_KINDS[cls.kind] = cls

    @classmethod
    def described(cls) -> str:
        """Its name in messages."""
        return f'a record of kind "{cls.kind}"'

    def to_line(self) -> str:
        """This record as one line of JSON, without the newline."""
        return json.dumps({"kind": self.kind, **self.to_json()}, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord(Record):
    """A process started the run (step 0) or resumed it; earlier records about later steps are superseded."""

    kind: ClassVar[str] = "start"
    time_unix: float
    """Seconds since 1970-01-01 UTC."""
    command: str | None = None
    """The process's command line; null in files of earlier versions, like `versions`."""
    versions: str | None = None
    """Of Python and the libraries that matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecord(Record):
    """Training, every `trainer.log_every_n_steps` steps; times and rates are means since the last such record."""

    kind: ClassVar[str] = "train"
    consumed_samples: int
    """Training samples seen up to this step, including those passed over in rewinds."""
    consumed_tokens: int
    """Training tokens seen up to this step."""
    consumed_flops: float | None = None
    """Operations of the matrix products for these tokens, as tflops_per_gpu counts them; where documents do not see
    each other, at their mean length since the last record. Null in files of earlier versions."""
    global_batch_size: int | None = None
    """Samples of this step, where the batch grows; null if all steps have `model.global_batch_size`."""
    loss: float
    """Cross entropy in nats per token, over all ranks."""
    lr: float
    """Learning rate of this step."""
    decoupled_lr: float | None = None
    """That of word embeddings and LM head; null if it is `lr`."""
    hidden_lr: float | None = None
    """That of the layers' matrices with muP; null if it is `lr`."""
    grad_norm: float | None
    """L2 norm of the gradient over all parameters, before clipping; null if the optimizer did not compute it."""
    max_attention_logit: float | None = None
    """Largest attention logit of this step, before model.qk_clip; null without it or model.log_max_attention_logit."""
    skipped_steps: int | None
    """Steps since the last record that updated nothing because loss, gradient or FP8 tensors were not finite; loss does
    not include them."""
    step_time_s: float
    """Seconds per step."""
    tokens_per_s: float
    """Tokens per second, all ranks together."""
    tokens_per_s_per_gpu: float
    """Tokens per second and rank."""
    tflops_per_gpu: float | None
    """Model TFLOP/s per rank (the matrix products of a step, without recomputation); null if not computed."""
    mfu: float | None
    """tflops_per_gpu over the GPU's peak, 0 to 1; null if the peak is unknown."""
    memory_gib: float | None
    """Peak memory allocated on rank 0's GPU; without a GPU, rank 0's resident memory."""
    eta_s: float | None
    """Seconds to the last step at this pace; null if unknown."""
    time_unix: float
    """Seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormsRecord(Record):
    """L2 norms of the step (`logging.norms`), with every `train` record: embedding, layers.0, …, output_layer."""

    kind: ClassVar[str] = "norms"
    gradients: Mapping[str, float]
    """Before clipping, by layer; together they are grad_norm."""
    weights: Mapping[str, float]
    """After the update, by layer, in the precision of the masters."""
    weight_norm: float
    """Of all weights together."""


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
    bits_per_byte: float | None = None
    """Cross entropy in bits per byte of text, which does not depend on the tokenizer; null if nobody can say how many
    bytes a token stands for, for the reason that the run's header gives."""
    losses: Mapping[str, float] | None = None
    """loss of each validation set, by its name; null if there is one set. `loss` is their mean, weighted as the sources
    are in training."""
    set_bits_per_byte: Mapping[str, float] | None = None
    """bits_per_byte of each set; null if there is one set, or bits_per_byte is null."""
    ema_loss: float | None = None
    """`loss` with the weights averaged over steps; null without model.optim.ema_decay."""


def validation_record(
    step: int,
    losses: Mapping[str, float],
    weights: Mapping[str, float],
    bytes_per_token: Sequence[float] | None,
    *,
    averaged_losses: Mapping[str, float] | None = None,
    num_samples: int,
    time_s: float,
) -> ValidationRecord:
    """The record of a validation from the loss in nats per token of each set; weights sum to 1.

    `averaged_losses` are those with the weights averaged over steps.
    """
    loss = _mean_loss(losses, weights)
    bits, of_sets = None, None
    if bytes_per_token is not None:
        size = dict(zip(losses, bytes_per_token, strict=True))
        bits = loss / math.log(2) / math.fsum(weights[name] * size[name] for name in losses)
        of_sets = {name: losses[name] / math.log(2) / size[name] for name in losses}
    return ValidationRecord(
        step=step,
        loss=loss,
        perplexity=math.inf if loss > 700 else math.exp(loss),
        num_samples=num_samples,
        time_s=time_s,
        bits_per_byte=bits,
        losses=losses if len(losses) > 1 else None,
        set_bits_per_byte=of_sets if len(losses) > 1 else None,
        ema_loss=None if averaged_losses is None else _mean_loss(averaged_losses, weights),
    )


def _mean_loss(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if len(losses) == 1:
        return next(iter(losses.values()))
    return math.fsum(weights[name] * losses[name] for name in losses)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcesRecord(Record):
    """What a run with several sources has read of each, with every `train` record."""

    kind: ClassVar[str] = "sources"
    sources: Mapping[str, ConsumedSource]
    """By the source's name (see the next table)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationTasksRecord(Record):
    """What the validation tasks of extensions measured, after a validation."""

    kind: ClassVar[str] = "validation_tasks"
    numbers: Mapping[str, float]
    """By task and name, such as "lab_copying/repeated"."""
    time_s: float
    """Seconds that they took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord(Record):
    """One evaluation on the tasks of `evaluation.tasks`; RUN_DIR/evaluations has its whole report."""

    kind: ClassVar[str] = "evaluation"
    numbers: Mapping[str, float]
    """By task and metric, such as "arc_easy/acc_norm"."""
    standard_errors: Mapping[str, float]
    """Of those numbers that have one."""
    time_s: float
    """Seconds it took."""
    warnings: tuple[str, ...]
    """What the user should know of the numbers, such as texts longer than the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStepRecord(Record):
    """A step whose loss or gradient was not finite: no rank updated weights or moments, and the run continued."""

    kind: ClassVar[str] = "skipped_step"
    loss: float
    """Cross entropy in nats per token, over all ranks."""
    grad_norm: float
    """L2 norm of the gradient over all parameters, before clipping."""
    in_a_row: int
    """Consecutive skipped steps including this one; `trainer.max_skipped_steps` of them end the run."""
    first_sample: int
    """The first of its training samples, counted from the start of the whole run."""
    num_samples: int
    """How many; they count as seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpikeRecord(Record):
    """A step whose loss spiked (`trainer.spike_threshold`); training went on unless a `rewind` follows."""

    kind: ClassVar[str] = "loss_spike"
    loss: float
    """Cross entropy in nats per token, over all ranks."""
    median: float
    """Median of up to 64 losses before it."""
    limit: float
    """The largest loss that would not have been a spike."""
    first_sample: int
    """The first of its training samples, counted from the start of the whole run."""
    num_samples: int
    """How many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindRecord(Record):
    """The run went back to this step, before a loss spike; earlier records about later steps are superseded."""

    kind: ClassVar[str] = "rewind"
    spike_step: int
    """The step with the spike."""
    first_sample: int
    """The first of the samples that were passed over, counted from the start of the whole run."""
    num_samples: int
    """How many, up to the last of the spike's step; 0 with a problem."""
    rewinds: int
    """Rewinds of the whole run including this one; after `trainer.max_spike_rewinds` the next spike ends it."""
    time_s: float
    """Seconds to restore the checkpoint."""
    problem: str | None
    """Why the run did not go back but continued; null if it did."""
    warnings: tuple[str, ...]
    """Later checkpoints that failed verification, so that the run went back to this one (`checkpoint.fall_back`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord(Record):
    """A checkpoint was saved or could not be; logged when that was known, possibly some steps later."""

    kind: ClassVar[str] = "checkpoint"
    saved_step: int
    """The checkpoint's step."""
    num_bytes: int
    """Bytes of all its files; 0 if it could not be saved."""
    stall_s: float
    """Seconds that training waited for it."""
    time_s: float
    """Seconds until it was complete on the disk or had failed."""
    problem: str | None
    """Why it could not be saved; null if it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8CoverageRecord(Record):
    """How much of the model runs in FP8, written whenever a step has proven the plan on the layers."""

    kind: ClassVar[str] = "fp8_coverage"
    gemm_flops_share: float
    """Share of the FLOPs of a step's matrix products, attention and LM head included, that ran in FP8, 0 to 1; 0 if
    the proof failed and the run goes on (logging.fp8_proof=warn)."""
    parameter_bytes_share: float
    """Share of the bytes of all parameters that are stored in FP8, 0 to 1; above 0 only with model.fp8_params."""
    time_s: float
    """Seconds for reading back and comparing, without the step itself."""
    first_scale_passes: int = 0
    """Passes of this start over its first batch without updates, for the first scales of delayed scaling."""
    layers_kept_out: tuple[str, ...] = ()
    """Names of linear layers that settings keep out of FP8 (`model.fp8_exclude`, `model.first_last_layers_bf16`)."""
    proof: int | None = None
    """How many proofs the run has had with this one; null in files of earlier versions, as in the next two."""
    microbatch: int | None = None
    """The microbatch that rank 0 looked at, from 0; each further rank looked at the next."""
    part: int | None = None
    """Of a tensor in n parts, rank 0 looked at the one with this number modulo n; each further rank at the next."""
    warnings: tuple[str, ...] = ()
    """What was unusual, or under logging.fp8_proof=warn wrong: the console's warnings at this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Tensor(JsonObject):
    """An FP8 tensor of a linear layer in one step, over all microbatches and all ranks that hold it."""

    layer: str
    """Linear layer in the whole model: decoder.layers.3.mlp.linear_fc1."""
    tensor: str
    """input, weight, or output_gradient."""
    amax: float | None
    """Largest magnitude before the cast; inf also stands for NaN; null if the layer does not expose it."""
    scale_min: float | None
    """Smallest factor that values were multiplied by before rounding; inf also stands for NaN."""
    scale_max: float | None
    """Largest such factor; equal to scale_min if one scale served the whole tensor for the whole step."""
    saturated: float | None
    """Share of values at the format's largest magnitude in casts whose amax · scale exceeds it; null without amax."""
    flushed: float
    """Share of values that are zero in FP8, including those that were zero before the cast."""
    amax_history_used: int | None
    """Amaxes that determine the tensor's next scale, including the newest; null unless fp8_recipe=delayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Record(Record):
    """FP8 in one step: statistics every `logging.fp8_statistics_interval` steps, warnings at logged steps."""

    kind: ClassVar[str] = "fp8"
    tensors: tuple[Fp8Tensor, ...]
    """One object per tensor (see the next table), layers in forward order; empty in a record that only warns."""
    warnings: tuple[str, ...]
    """The console's warnings at this step, and what to do about them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsRecord(Record):
    """A mixture of experts, with every `train` record: over all its layers and the steps since the last record."""

    kind: ClassVar[str] = "experts"
    load_balancing_loss: float | None
    """Load-balancing loss before its coefficient, mean over layers: 1 if experts are balanced; null without one."""
    z_loss: float | None
    """The routers' z-loss before its coefficient, mean over layers; null without one."""
    busiest_expert: float
    """Tokens of the busiest expert of any layer, over the mean of that layer's experts; 1 if all get the same."""
    idlest_expert: float
    """Tokens of the least busy expert of any layer, over the same mean; 0 if one got none."""
    idle_experts: int | None = None
    """Experts without tokens in all layers together; null in files of earlier versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTime(JsonObject):
    """How long the passes of one rank took in one step."""

    rank: int
    """Rank in the run."""
    host: str
    """Its host's name."""
    time_s: float
    """Seconds of its passes in this step, in which it waits for no replica and no other pipeline stage."""
    over_median: float
    """time_s over the median of the ranks of its pipeline stage; with two replicas over the faster one's."""
    is_slow: bool
    """Whether it was slow when that was last judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimesRecord(Record):
    """The slowest ranks in this step, every `trainer.log_every_n_steps` steps of a run whose ranks have replicas."""

    kind: ClassVar[str] = "rank_times"
    slowest_over_median: float
    """over_median of the slowest rank."""
    slowest: tuple[RankTime, ...]
    """Up to three objects (see the next table), the slowest rank first."""
    warnings: tuple[str, ...]
    """The console's warnings at this step: hosts that have become slow."""

    @property
    def slow_host(self) -> str | None:
        """The host of the slowest of the slow ranks; None if none is slow."""
        return next((rank.host for rank in self.slowest if rank.is_slow), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRecord(Record):
    """The end of a process of the run: what it reached and why it stopped. A process that fails writes none."""

    kind: ClassVar[str] = "summary"
    consumed_samples: int
    """Training samples seen."""
    consumed_tokens: int
    """Training tokens seen."""
    end_reason: EndReason
    """Why it ended: max_steps, callback (an extension's), max_time, interrupted (Ctrl-C), terminated (SIGTERM,
    SIGHUP), warned (SIGUSR1), not_finite, loss_spike."""
    exit_code: int | None
    """Exit code of the process: 0 done, 75 start it again for the remaining steps, 130 Ctrl-C, 1 given up."""
    skipped_steps: int | None
    """Steps of the whole run that updated nothing because loss or gradient was not finite."""
    wall_time_s: float
    """Seconds of training in this process, including validation and checkpoints."""
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
    """Tokens per second over all logged steps except those up to the first record of each start or rewind."""
    tokens_per_s_per_gpu: float | None
    """The same per rank."""
    checkpoint: str | None
    """The newest checkpoint; null if none was written."""
    sample_prompt: str | None
    """Prompt of the text sample; null without one."""
    sample_text: str | None
    """What the model wrote after the prompt."""
    fp8_proofs: int | None = None
    """Proofs of FP8 in the whole run; 0 if it is unproven; null without FP8 and in files of earlier versions."""
    fp8_proofs_with_warnings: int | None = None
    """Proofs that found something unusual, or under logging.fp8_proof=warn something wrong."""
    slow_host: str | None = None
    """The host that had the slowest rank most often while that rank was slow; null if none was."""
    slow_host_share: float | None = None
    """In which share of the records of kind `rank_times`, 0 to 1; null without a slow host."""
