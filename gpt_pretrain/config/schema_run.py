"""Every key of the sections beside `model`: how long a run trains and on what, what it saves and logs, what is planned.

`config.schema` says how keys are written down.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import OnSaveError, PlanGpu, Precision


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: how long, how often, on what."""

    devices: int | None
    """Processes per node; null: what the launcher started. A number is checked against it."""
    num_nodes: int | None
    """Nodes; null: what the launcher started. A number is checked against it."""
    precision: Precision
    """auto (bf16 on a GPU, fp32 without), fp32 or bf16."""
    max_steps: int
    """Optimizer steps of the whole run, resumed parts included."""
    max_time: str | None
    """Stop training once it has taken this long, "DD:HH:MM:SS" from the first step on; a checkpoint follows, but no
    last validation and no sample. null: no limit."""
    log_every_n_steps: int
    """Steps between two logged records; the only point at which the host waits for the GPU."""
    val_check_interval: int | None
    """Steps between validations; null: only at the end."""
    limit_val_batches: int
    """Global batches per validation; 0: no validation."""
    validate_at_start: bool
    """Validate before the first step, so that a broken validation set shows before hours are spent."""
    gradient_clip_val: float
    """Largest gradient norm (L2, over all parameters); 0: no clipping."""
    max_skipped_steps: int
    """Steps in a row with a loss or gradient that is NaN or infinite after which the run ends, with exit code 1 and a
    file in RUN_DIR/dumps that names the first bad tensor. Each of them updates nothing; its samples count as seen."""
    spike_threshold: float | None
    """Warn of a step whose loss is above the median of up to 64 before it by more than this many standard deviations
    (1.4826 times their median absolute deviation); null: no warnings."""
    max_spike_rewinds: int | None
    """Go back to the newest checkpoint before such a step, and on with the samples after it, so often in the whole run;
    the next spike ends it, with exit code 1 and a file in RUN_DIR/dumps. null: a spike is trained on."""
    spike_margin: int
    """Steps that must lie between a spike and a checkpoint to go back to, on either side: what ruined the weights came
    before the loss shows it. A spike that no such checkpoint lies before is trained on."""
    hang_timeout: float | None
    """Seconds without progress after which a rank counts as hung and the run ends on all ranks with stack traces, exit
    code 71; a save or the building of an index must fit. Steps soon have less: 10 times the longest so far, and no less
    than 40 s. Ranks that die end the run likewise. null: no watchdog, for a debugger."""
    gc_interval: int
    """Steps between garbage collections, at the same step on all ranks; 0: leave it to Python."""
    deterministic: bool
    """Only kernels whose result does not vary from run to run (slower on a GPU)."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """`checkpoint`: what is kept and where a run starts from."""

    save_interval: int | None
    """Steps between checkpoints; null: only at the end."""
    save_at_end: bool
    """Write a checkpoint when the run ends, also by Ctrl-C or max_time."""
    async_save: bool
    """Train on while a checkpoint is written; the run stands still only while its state is copied to host memory."""
    keep_last: int | None
    """Checkpoints that stay: so many of those saved last; older ones go once a new one is complete. null: all."""
    keep_every: int | None
    """Checkpoints of steps that this divides stay for ever, whatever keep_last says; null: none."""
    on_save_error: OnSaveError
    """If a checkpoint cannot be written (disk full, not writable): stop, exit code 1, or continue and try again at the
    next save_interval. The last checkpoint of a run has no next one, and its failure always ends with exit code 1."""
    resume: str
    """auto (from the newest checkpoint of run_dir, if it has one), never, or the path of a checkpoint; from any
    parallel layout."""
    fall_back: bool
    """Where the checkpoint to resume from is damaged, go on from the newest earlier one that verifies, and say so."""
    init_from: str | None
    """Path of a checkpoint whose weights a new run starts from, without optimizer, schedule and position in the data;
    a run with checkpoints of its own resumes from those. null: fresh weights."""
    allow_data_change: bool
    """Go on with other data or another tokenizer than the checkpoint's; consumed samples count in the new data."""
    reset_fp8_state: bool
    """Resume with fresh FP8 scales and amax histories, on purpose: after a change of recipe, history or TE version."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """`logging`: what a run leaves on disk besides checkpoints."""

    tensorboard: bool
    """Write TensorBoard events to RUN_DIR/tensorboard."""
    wandb: bool
    """Log to Weights & Biases; needs the extra `wandb`."""
    wandb_project: str
    """Project of the W&B run."""
    wandb_entity: str | None
    """Team or user of the W&B run; null: the account's default."""
    fp8_statistics_interval: int | None
    """Steps between statistics of every FP8 tensor: amax, scale, saturated and flushed values; null: none."""
    fp8_saturation_threshold: float
    """Share of a tensor's values at the end of the FP8 range above which a warning is printed."""
    peak_tflops: float | None
    """Peak of one GPU in TFLOP/s for the MFU; null: from the table of known GPUs, no MFU if it has none."""


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """`sample`: the text that the model writes at the end of a run."""

    prompt: str
    """Text to continue."""
    max_new_tokens: int
    """Tokens to generate; 0: no sample."""
    temperature: float
    """0: greedy; otherwise the divisor of the logits."""


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """`plan`: which machine `python -m gpt_pretrain.plan` plans for; training reads none of it."""

    gpu: PlanGpu
    """The GPU whose memory and speed are forecast: h100 (SXM), h200 or b200."""
    num_gpus: int | None
    """GPUs of the planned run; null: trainer.devices × trainer.num_nodes if given, else the fewest for the layout."""


@dataclass(kw_only=True, slots=True)
class BenchmarkConfig:
    """`benchmark`: what `python -m gpt_pretrain.benchmark` measures; training reads none of it."""

    variants: list[str]
    """What is compared, the first being what ratios refer to: names of `benchmark.overrides`, or overrides themselves
    ("fp8=delayed model.fp8_params=true"); bare, and bare:… of either, is megatron-core's own loop with the same."""
    overrides: dict[str, str]
    """Name of a variant to the overrides that make it out of the command line; +benchmark.overrides.NAME='…' adds."""
    warmup_steps: int
    """Steps of each process that are not timed."""
    steps: int
    """Timed steps of each process, a multiple of `benchmark.interval`."""
    interval: int
    """Steps between two readings of the clock, which wait for the GPU; each gives one mean step time."""
    rounds: int
    """Times that all variants run, every second time in reverse order, so that a drift of the machine cancels."""
    profile: bool
    """Record three more steps of each variant's first process: a trace for Perfetto, and where their time went."""
    forecast: bool
    """Put the forecast of `python -m gpt_pretrain.plan` for plan.gpu beside what is measured."""
    markdown: str | None
    """File that receives the tables with command, machine and versions; null: RUN_DIR/benchmark.md."""
