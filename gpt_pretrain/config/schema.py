"""Every key of the configuration: its name, type, unit, meaning and facts. The values live in `conf/`.

Names and places follow NeMo 1.x and megatron-core, so a NeMo command line reads the same here: architecture, parallel
layout, batch, data and optimizer are all under `model.` (`schema_model`, `schema_data`).

`python -m gpt_pretrain --help` prints the string below a field. A field that may be null says what null means. Pure
functions resolve null (`config.derived`, `run`); the configuration itself never changes. `config.facts` says what else
a field can tell.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import (
    CudaGraphImpl,
    Fp8ProofMode,
    OnSaveError,
    Precision,
    TokenizerLibrary,
)
from gpt_pretrain.config.facts import key, unread_with
from gpt_pretrain.config.schema_commands import (
    BenchmarkConfig,
    CompareConfig,
    CoordinateCheckConfig,
    GateConfig,
    PlanConfig,
)
from gpt_pretrain.config.schema_data import DataConfig, OptimConfig, ScheduleConfig, TokenizerConfig
from gpt_pretrain.config.schema_model import ModelConfig

__all__ = [
    "BenchmarkConfig",
    "CheckpointConfig",
    "CompareConfig",
    "Config",
    "CoordinateCheckConfig",
    "DataConfig",
    "EvaluationConfig",
    "GateConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimConfig",
    "PlanConfig",
    "SampleConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainerConfig",
]

_WITHOUT_VALIDATION = unread_with("trainer.limit_val_batches", 0)
_WITHOUT_TOKENIZER = unread_with("model.tokenizer.library", TokenizerLibrary.none, because=": no text can be sampled")
_WITHOUT_TEXT = unread_with("model.tokenizer.library", TokenizerLibrary.none, because=": tasks are texts")
_WITHOUT_SAMPLE = unread_with("sample.max_new_tokens", 0)
_WITHOUT_TASKS = unread_with("evaluation.tasks", [], instead="null, or evaluation.tasks=[hellaswag,…]")
_WITHOUT_FP8 = unread_with("model.fp8", False)
_WITHOUT_PROOF = unread_with("logging.fp8_proof", Fp8ProofMode.never, because=": nothing is proven")
_WITH_GRAPHS = unread_with(
    "model.cuda_graph_impl", CudaGraphImpl.local, because=": a replay reports none of its products"
)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: length of the run, intervals, guards and hardware."""

    devices: int | None = key(minimum=1, largest=2**20)
    """Processes per node, which must match what the launcher started; null: whatever it started."""
    num_nodes: int | None = key(minimum=1, largest=2**20)
    """Number of nodes, which must match what the launcher started; null: whatever it started."""
    precision: Precision = key(aliases=["bf16"], planned=True)
    """auto (bf16 on a GPU, fp32 without), fp32 or bf16."""
    max_steps: int | None = key(minimum=1, largest=2**31 - 1, aliases=["train_iters", "training.steps"])
    """Optimizer steps of the whole run, including resumed parts; null: max_tokens ends it."""
    max_tokens: int | None = key(minimum=1, before=None)
    """Training tokens of the whole run, which ends with the step that reaches them; needs max_steps=null."""
    max_time: str | None
    """Stop training after this time, "DD:HH:MM:SS" from the first step. The run then saves a checkpoint, without a
    final validation or sample. null: no limit."""
    log_every_n_steps: int = key(minimum=1, aliases=["log_interval"])
    """Steps between logged records, the only points at which the host waits for the GPU."""
    val_check_interval: int | None = key(
        minimum=1, aliases=["eval_interval"], idle=[None], unread=[_WITHOUT_VALIDATION]
    )
    """Steps between validations; null: only at the end."""
    limit_val_batches: int = key(minimum=0, aliases=["eval_iters"])
    """Global batches per validation; 0: no validation."""
    validate_at_start: bool = key(idle=[False], unread=[_WITHOUT_VALIDATION])
    """Validate before the first step, so that a broken validation set shows at once."""
    gradient_clip_val: float = key(
        minimum=0, aliases=["clip_grad", "max_grad_norm"], core=["OptimizerConfig.clip_grad"]
    )
    """Clip the gradient norm (L2, over all parameters) to this value; 0: no clipping."""
    max_skipped_steps: int = key(minimum=1)
    """End the run after this many consecutive steps with a NaN or infinite loss or gradient, with exit code 1 and a
    file in RUN_DIR/dumps that names the first bad tensor. Such a step updates nothing; its samples count as seen."""
    spike_threshold: float | None = key(minimum=1)
    """Warn if a step's loss exceeds the median of up to 64 previous ones by more than this many standard deviations
    (1.4826 times their median absolute deviation); null: no warnings."""
    max_spike_rewinds: int | None = key(minimum=1, before=None)
    """How often in all the run may return from such a spike to the newest checkpoint before it and continue with the
    samples after the spike; the next spike ends the run, with exit code 1 and a file in RUN_DIR/dumps. null: training
    continues through spikes."""
    spike_margin: int = key(minimum=1, before=100, unread=[unread_with("trainer.max_spike_rewinds", None)])
    """Fewest steps between the checkpoint to return to and any spike, on either side of it: what ruined the weights
    happened before the loss shows it. If no such checkpoint precedes a spike, training continues through it."""
    hang_timeout: float | None = key(minimum=1)
    """Seconds without progress after which a rank counts as hung and the run ends on all ranks with stack traces and
    exit code 71. A save or the building of an index must fit. After a few steps, a step is allowed less: 10 times the
    longest after the first, but at least 40 s. A rank that dies ends the run likewise. null: no watchdog, for a
    debugger."""
    gc_interval: int = key(minimum=0)
    """Steps between garbage collections, which run at the same step on all ranks; 0: leave them to Python."""
    deterministic: bool = key(core=["TransformerConfig.deterministic_mode"])
    """Use only kernels whose results do not vary from run to run (slower on a GPU)."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """`checkpoint`: what a run saves and what it starts from."""

    save_interval: int | None = key(minimum=1, aliases=["save_steps", "checkpoint.interval"])
    """Steps between checkpoints; null: no saves by step."""
    save_interval_minutes: float | None = key(above=0, use="30, or null for no such saves", before=None)
    """Save when this many minutes have passed by rank 0's clock since the start or the last save. The next checkpoint
    replaces this one, unless save_interval is null and keep_last is a number. null: no saves by the clock."""
    save_at_end: bool
    """Save a checkpoint when the run ends, including by Ctrl-C or max_time."""
    async_save: bool
    """Continue training while a checkpoint is written; the run pauses only to copy its state to host memory."""
    keep_last: int | None = key(minimum=1, aliases=["save_total_limit"])
    """How many of the newest checkpoints to keep; the oldest is deleted once a new one is complete. null: keep all
    except those of save_interval_minutes."""
    keep_every: int | None = key(minimum=1)
    """Never delete checkpoints whose step is a multiple of this, whatever keep_last says; null: none."""
    keep_best: bool = key(before=False)
    """Keep the checkpoint with the lowest validation loss, too, until one with a lower loss is complete."""
    on_save_error: OnSaveError
    """If a checkpoint cannot be written (disk full, not writable): stop with exit code 1, or continue and try again at
    the next interval. If the last checkpoint of a run fails, the exit code is always 1."""
    resume: str
    """auto (from the newest checkpoint of run_dir, if any), never, or the path of a checkpoint; from any parallel
    layout. A path counts once: started again with it, the run goes on from its own checkpoints."""
    fall_back: bool
    """If the checkpoint to resume from is damaged, resume from the newest earlier one that verifies, and say so."""
    init_from: str | None
    """Path of a checkpoint whose weights a new run starts from, without optimizer, schedule or position in the data. A
    run that has its own checkpoints resumes from those. null: fresh weights."""
    allow_data_change: bool
    """Allow data or a tokenizer that differ from the checkpoint's; consumed samples count in the new data. With
    init_from: allow token ids of which nobody knows the tokenizer."""
    allow_optimizer_change: bool = key(before=False)
    """Allow another optimizer than the checkpoint's, which goes on from its weights and step with moments of zero."""
    reset_fp8_state: bool
    """Drop the checkpoint's FP8 scales and amax histories on purpose, after a change of recipe, history or TE version,
    or to BF16. Only when resuming, and once: started again with it, the run keeps those collected since."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """`logging`: what a run reports besides checkpoints."""

    tensorboard: bool
    """Write TensorBoard events to RUN_DIR/tensorboard."""
    wandb: bool
    """Log to Weights & Biases; needs the extra `wandb`."""
    wandb_project: str = key(idle=[""], unread=[unread_with("logging.wandb", False)])
    """Project of the W&B run."""
    wandb_entity: str | None = key(unread=[unread_with("logging.wandb", False, instead="null, or logging=wandb")])
    """Team or user of the W&B run; null: the account's default."""
    mlflow: bool = key(before=False)
    """Log to MLflow; needs the extra `mlflow`."""
    mlflow_tracking_uri: str | None = key(
        before=None, unread=[unread_with("logging.mlflow", False, instead="null, or logging=mlflow")]
    )
    """MLflow's tracking server or database: http://host:5000, sqlite:////shared/mlflow.db; null: MLFLOW_TRACKING_URI of
    the environment, which must be set then. Name and password are MLFLOW_TRACKING_USERNAME and _PASSWORD."""
    mlflow_experiment_name: str = key(before="gpt_pretrain", idle=[""], unread=[unread_with("logging.mlflow", False)])
    """MLflow's experiment, made if there is none of the name."""
    fp8_proof: Fp8ProofMode = key(before=Fp8ProofMode.stop, unread=[_WITHOUT_FP8])
    """If FP8 does not run as planned: stop with exit code 2, after a checkpoint; or warn and go on. never: nothing is
    proven, and the header says so."""
    fp8_proof_interval: int | None = key(
        minimum=1, use="1 or more, or null for none", before=None, unread=[_WITHOUT_FP8, _WITHOUT_PROOF, _WITH_GRAPHS]
    )
    """Steps between FP8 proofs, beside those of the first, 10th, 100th and 1,000th step of each start; null: the first
    step alone. Layers that CUDA graphs replay are proven only in the first step."""
    fp8_statistics_interval: int | None = key(
        minimum=1,
        use="1 or more, or null for none",
        unread=[unread_with("model.fp8", False, instead="model.fp8=true, or null")],
    )
    """Steps between statistics of every FP8 tensor: amax, scale, saturated and flushed values; null: none."""
    fp8_saturation_threshold: float = key(above=0, maximum=1, unread=[_WITHOUT_FP8])
    """Warn if more than this fraction of a tensor's values is at the end of the FP8 range."""
    norms: bool = key(before=False)
    """Log norms of gradients and weights by layer with each training record, and of all weights."""
    peak_tflops: float | None = key(above=0, use="null for the table's value")
    """Peak TFLOP/s of one GPU, for the MFU; null: from the table of known GPUs; no MFU for other GPUs."""


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """`sample`: the text that the model generates at the end of a run."""

    prompt: str = key(unread=[_WITHOUT_SAMPLE, _WITHOUT_TOKENIZER])
    """Text to continue."""
    max_new_tokens: int = key(minimum=0, largest=2**20, idle=[0], unread=[_WITHOUT_TOKENIZER])
    """Tokens to generate; 0: no sample."""
    temperature: float = key(minimum=0, unread=[_WITHOUT_SAMPLE, _WITHOUT_TOKENIZER])
    """Divisor of the logits; 0: greedy."""


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """`evaluation`: tasks of lm-evaluation-harness that a run scores its model on; needs the extra `evaluate`."""

    tasks: list[str] = key(before=[], idle=[[]], unread=[_WITHOUT_TEXT])
    """Names of tasks, groups or tags whose tasks score given texts: [hellaswag,arc_easy]; []: no evaluations."""
    interval: int | None = key(minimum=1, before=None, unread=[_WITHOUT_TASKS])
    """Steps between evaluations; null: only at the end. The run's loss does not depend on them."""
    limit: int | None = key(minimum=1, before=None, unread=[_WITHOUT_TASKS])
    """The first documents of each task to score; null: all."""
    num_fewshot: int | None = key(minimum=0, before=None, unread=[_WITHOUT_TASKS])
    """Examples in each prompt, unless a task's own file says 0; null: what each task's file says."""
    include_path: str | None = key(before=None, unread=[_WITHOUT_TASKS])
    """Folder of task files of your own, beside the library's. They may hold code, so only the command line may name
    it. null: none."""


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole run."""

    name: str
    """Name of the run, part of the default run directory and of the W&B run."""
    run_dir: str | None = key(aliases=["output_dir"])
    """Directory that the run writes to; an existing one is resumed (see checkpoint.resume); null:
    outputs/DATE/TIME_NAME."""
    extensions: list[str] = key(before=[])
    """Your modules to import before anything is checked, in this order: what they register joins the run. Give it on
    the command line or in the file of --config-name; no other file may."""
    model: ModelConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    sample: SampleConfig
    evaluation: EvaluationConfig
    plan: PlanConfig
    benchmark: BenchmarkConfig
    compare: CompareConfig
    coordinate_check: CoordinateCheckConfig
