"""Every key of the configuration: its name, type, unit and meaning, and no value.

The values live in `conf/`; `tests/test_config_schema.py` asserts that both have the same set of keys. Names and
places are NeMo 1.x's and megatron-core's, so that a NeMo command line reads the same here: whatever shapes the
model, its parallel layout, its batch, its data and its optimizer is under `model.`.

The string below a field is its documentation; `python -m gpt_pretrain --help` prints it.
A field that may be null says what null means. `model.vocab_size=null` style defaults that depend on the machine are
resolved by pure functions (`gpt_pretrain.config.derived`, `gpt_pretrain.megatron.model`), never by mutation.
"""

from dataclasses import dataclass
from typing import Any

from gpt_pretrain.config import choices


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """`model.tokenizer`: from text to token ids."""

    library: choices.TokenizerLibrary
    """Which tokenizer: bpe (trained on the corpus), file (`model.tokenizer.model`), none (mmap or mock data only)."""
    model: str | None
    """Path of a Hugging Face `tokenizer.json`; with library=file."""
    vocab_size: int
    """Number of tokens that library=bpe trains, the end-of-document token included."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """`model.data`: the corpus, its splits and its caches."""

    data_impl: choices.DataImpl
    """Kind of corpus: mmap (.bin/.idx by `data_prefix`), text (`text_files`), stdlib (Python's own sources), mock."""
    data_prefix: list[Any]
    """data_impl=mmap: one path without .bin/.idx, several, or weights and paths in turn: [0.7,web,0.3,code]."""
    splits_string: str
    """Shares of documents for training, validation and test, e.g. "900,50,50"."""
    text_files: list[str]
    """data_impl=text: files or glob patterns (.txt: one document a file; .jsonl and .parquet: one a row)."""
    text_key: str
    """Field (.jsonl) or column (.parquet) that holds the text."""
    cache_dir: str | None
    """Where tokenised corpora and index caches are; null: $XDG_CACHE_HOME/gpt_pretrain or ~/.cache/gpt_pretrain."""
    num_dataset_builder_threads: int
    """Threads that build the sample indices of blended datasets."""
    num_workers: int
    """Processes that prepare batches ahead of each rank; 0 prepares them in the training process."""
    eod_mask_loss: bool
    """Leave the end-of-document token out of the loss."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """`model.optim.sched`: learning rate over steps."""

    name: choices.ScheduleName
    """Decay after the warmup: constant, linear, cosine, wsd (warmup, stable, decay)."""
    warmup_steps: int | None
    """Optimizer steps of linear warmup from `init_lr` to `model.optim.lr`; null: a tenth of them, at most 2,000."""
    decay_steps: int | None
    """Step at which `min_lr` is reached (warmup included); null: trainer.max_steps."""
    init_lr: float
    """Learning rate at step 0 of the warmup."""
    min_lr: float | None
    """Learning rate after the decay; null: a tenth of `model.optim.lr`."""
    wsd_decay_steps: int | None
    """Steps of the final decay of name=wsd; must be set with it, and only with it."""
    wsd_decay_style: choices.WsdDecay
    """Shape of the final decay of name=wsd."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`model.optim`: the optimizer and its schedule."""

    name: choices.OptimizerName
    """adam (AdamW) or sgd."""
    lr: float
    """Peak learning rate."""
    betas: list[float]
    """Adam's two exponential decay rates."""
    eps: float
    """Adam's denominator term."""
    momentum: float
    """SGD's momentum."""
    weight_decay: float
    """Decoupled weight decay; biases and norm weights are exempt, as in megatron-core."""
    use_precision_aware_optimizer: bool
    """Adam keeps masters and moments in the types of the four keys below and reads gradients as they were reduced
    (`model.grad_reduce_in_fp32`); needs BF16 parameters and the distributed optimizer. docs/plan.md."""
    main_params_dtype: choices.MainParamsDtype
    """Masters: fp32, or fp16, to which updates are rounded at random."""
    store_param_remainders: bool
    """Of an fp32 master keep only the 16 bits that its BF16 weight lacks: 2 bytes instead of 4, and nothing is lost."""
    exp_avg_dtype: choices.MomentDtype
    """Adam's first moment: fp32, bf16, fp16 or fp8."""
    exp_avg_sq_dtype: choices.MomentDtype
    """Adam's second moment: fp32, bf16 or fp16."""
    sched: ScheduleConfig


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """`model`: architecture, batch, parallel layout, precision of the layers, kernels, data and optimizer."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int | None
    """Inner width of the MLP (each of the two halves with swiglu); null: 4 × hidden_size."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int | None
    """Key/value heads (grouped-query attention); null: num_attention_heads."""
    kv_channels: int | None
    """Width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: int
    """Tokens of the model before padding; the tokenizer may have fewer, not more."""
    make_vocab_size_divisible_by: int
    """The embedding is padded to a multiple of this, at every tensor parallel size alike."""
    max_position_embeddings: int
    """Longest sequence: rows of the learned position table, and the limit of encoder_seq_length."""
    position_embedding_type: choices.PositionEmbedding
    """learned_absolute or rope."""
    rotary_percentage: float
    """Share of each head that rope rotates."""
    rotary_base: int
    """Base period (theta) of rope."""
    rope_scaling_factor: float | None
    """Stretches rope's periods beyond 8,192 tokens by this factor, as Llama 3.1 does with 8; null: as they are."""
    normalization: choices.Normalization
    """layernorm or rmsnorm."""
    layernorm_epsilon: float
    """Epsilon of the normalisation."""
    activation: choices.Activation
    """MLP activation: gelu, gelu_tanh, swiglu."""
    bias: bool
    """Biases in the linear layers."""
    qkv_bias: bool
    """A bias in the query/key/value projection even where bias=false (Qwen2.5)."""
    qk_layernorm: bool
    """Normalise the queries and keys of each head before they are rotated (Qwen3)."""
    share_embeddings_and_output_weights: bool
    """The LM head reuses the embedding matrix (tied embeddings)."""
    init_method_std: float
    """Standard deviation of the initial weights; projections back into the residual use std/sqrt(2·num_layers)."""
    hidden_dropout: float
    """Dropout after attention, MLP and embedding."""
    attention_dropout: float
    """Dropout of attention probabilities."""

    num_moe_experts: int | None
    """Experts in place of the MLP of every layer, of which a router picks some for each token; null: one MLP."""
    moe_ffn_hidden_size: int | None
    """Inner width of an expert; null: ffn_hidden_size."""
    moe_router_topk: int
    """Experts that compute each token; their results are weighed by a softmax over their router scores, in fp32."""
    moe_router_load_balancing_type: choices.MoeLoadBalancing
    """What the auxiliary loss balances: tokens of a microbatch (aux_loss), of each sequence (seq_aux_loss), or none."""
    moe_aux_loss_coeff: float
    """Weight of the load-balancing loss in the gradient; the logged loss is the cross entropy alone."""
    moe_z_loss_coeff: float | None
    """Weight of the router's z-loss, the mean squared logsumexp of its scores; null: none."""
    moe_token_dispatcher_type: choices.MoeTokenDispatcher
    """How tokens reach the ranks of their experts: alltoall (each goes where it has to), allgather (all go to all)."""
    overlap_moe_expert_parallel_comm: bool
    """Exchange rows between ranks of experts while the layers of another microbatch compute: the forward pass of each
    microbatch runs beside the backward pass of the one before. Needs the memory of one more layer's activations."""
    moe_grouped_gemm: bool | None
    """One grouped product for all experts of a rank; null: with Transformer Engine layers, which it needs."""
    moe_grouped_kernel: choices.MoeGroupedKernel | None
    """What computes the grouped product: transformer_engine (cuBLAS, expert by expert) or triton (one BF16 kernel; FP8
    leaves the experts out); null: triton for many small experts on a rank."""
    moe_permute_fusion: bool | None
    """Sort tokens by expert, and back, in TE's fused kernels; null: with Transformer Engine layers, which it needs,
    unless each rank of experts gathers all tokens."""
    moe_router_padding_for_quantization: bool
    """Route more tokens, of weight zero, until each expert's number suits FP8; false: pad each expert's input."""

    encoder_seq_length: int
    """Tokens of a training sample."""
    micro_batch_size: int
    """Samples per forward pass and data-parallel rank."""
    global_batch_size: int
    """Samples per optimizer step, over all ranks."""
    seed: int
    """Seed of weights, data order and dropout."""

    tensor_model_parallel_size: int
    """TP: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int
    """PP: ranks that the layers are split over."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks per pipeline rank (interleaved schedule); null: one chunk, plain 1F1B."""
    context_parallel_size: int
    """CP: ranks that share each sequence; needs Transformer Engine."""
    expert_model_parallel_size: int
    """EP: ranks, of those with different samples, that share the experts out; divides num_moe_experts."""
    expert_tensor_parallel_size: int | None
    """Ranks that share each expert's matrices; null: tensor_model_parallel_size."""
    sequence_parallel: bool
    """Split norms and dropout along the sequence over the TP ranks; needs TP > 1."""
    use_distributed_optimizer: bool | None
    """Shard optimizer states and masters over the data-parallel ranks; null: where fp8_params needs it."""
    overlap_grad_reduce: bool
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool
    """Gather parameters while the forward pass runs; needs use_distributed_optimizer and overlap_grad_reduce."""
    ddp_bucket_size: int | None
    """Values that overlap_grad_reduce and overlap_param_gather exchange at once, about; null: a 16th of a rank's
    layers, no more than 400 million, and at least 40 million and 1 million per data-parallel rank."""
    tp_comm_overlap: bool
    """Exchange activations between TP ranks while their products run, in TE's user buffers; needs sequence_parallel."""
    nccl_ub: bool
    """Gradients and parameters in buffers that NCCL knows; refused, as megatron-core 0.19 turns multicast on for it."""
    grad_reduce_in_fp32: bool
    """Accumulate and reduce gradients in fp32 also where parameters are bf16."""

    fp8: bool
    """FP8 matrix products in the transformer layers; the group fp8= sets it together with what follows."""
    fp8_backend: choices.Fp8Backend | None
    """Whose FP8: transformer_engine, the faster one, or torchao; null: transformer_engine."""
    fp8_recipe: choices.Fp8RecipeName | None
    """Where scales come from: delayed, tensorwise, blockwise, mxfp8; of torchao: tensorwise, rowwise or
    rowwise_with_gw_hp; null: delayed, of torchao tensorwise."""
    fp8_hybrid: bool | None
    """E4M3 forward, E5M2 for the gradients of outputs; null: with delayed and tensorwise, unless fp8_e4m3.
    TorchAO's recipes have formats of their own."""
    fp8_e4m3: bool | None
    """E4M3 in both directions, also where fp8_hybrid is set; null: with blockwise and mxfp8, unless fp8_hybrid."""
    fp8_margin: int | None
    """delayed: scales leave 2^margin of headroom, margin 0 to 14; null: 0."""
    fp8_interval: int | None
    """delayed: steps between new scales. Transformer Engine updates them at every step, so 1 is the only value."""
    fp8_amax_history_len: int | None
    """delayed: forward passes (of gradients: backward passes) that the amax history remembers; null: 1024."""
    fp8_amax_compute_algo: choices.AmaxComputeAlgo | None
    """delayed: the amax of the history that counts, max or most_recent; null: max."""
    fp8_wgrad: bool | None
    """Weight gradients in FP8; false: in the run's precision (delayed, emulated only). null: true."""
    fp8_params: bool
    """Store and gather the layers' weights in FP8; masters stay in fp32. Needs the distributed optimizer."""
    fp8_dot_product_attention: bool
    """Attention's own two products in FP8 (delayed, tensorwise; Transformer Engine's fused attention only)."""
    fp8_multi_head_attention: bool
    """FP8 tensors between projections and attention; refused, as TE 2.12 turns FP8 attention on for it unasked."""
    first_last_layers_bf16: bool
    """Keep the first and last layers out of FP8; not with delayed, where fp8_exclude does it."""
    num_layers_at_start_in_bf16: int | None
    """Layers kept out at the start, with first_last_layers_bf16, at most those of a pipeline stage; null: 1."""
    num_layers_at_end_in_bf16: int | None
    """Layers kept out at the end, with first_last_layers_bf16, at most those of a pipeline stage; null: 1."""
    fp8_exclude: list[str]
    """Patterns (*, ?, [..]) of linear layers kept out of FP8: ["decoder.layers.0.*", "*.linear_fc2"]; auto, alone or
    among them: those too small to gain, with TorchAO's tensorwise and rowwise."""
    fp8_emulate: bool
    """Compute FP8 exactly, but slowly, on a machine without FP8: values rounded to the FP8 grids, then multiplied."""

    transformer_engine: bool | None
    """Layers from Transformer Engine; null: where a GPU and TE are present; true: or the run does not start."""
    compile: bool
    """Compile whole layers by torch.compile, without Transformer Engine and FP8; the first step takes a minute."""
    bias_activation_fusion: bool | None
    """Fuse bias and activation of the MLP; null: on a GPU."""
    activation_cast_fusion: bool | None
    """One kernel for the MLP's activation and its cast to FP8, one for gradients; null: on Hopper."""
    bias_dropout_add_fusion: bool | None
    """Fuse bias, dropout and residual; null: on a GPU."""
    masked_softmax_fusion: bool | None
    """Fuse scale, mask and softmax in layers without TE; null: where apex's kernels are present."""
    use_flash_attention: bool | None
    """FlashAttention-4 for attention; null: on Hopper with flash-attn-4, heads of 128, of 64 without rope."""
    apply_rope_fusion: bool | None
    """TE's fused rope; null: with rope on TE layers."""
    fused_single_qkv_rope: bool | None
    """Split queries, keys and values and apply rope in one kernel; null: with rope on TE layers without graphs."""
    gradient_accumulation_fusion: bool | None
    """Add weight gradients into the main gradient inside the GEMM; null: on a GPU, without emulation."""
    embedding_gradient_fusion: bool | None
    """Add gradients of embeddings to rows of their tokens alone; null: on a GPU, for few tokens and a large table."""
    cross_entropy_loss_fusion: bool | None
    """A fused vocabulary-parallel cross entropy; null: on a GPU in bf16, unless trainer.deterministic."""
    cross_entropy_fusion_impl: choices.CrossEntropyFusion | None
    """Which: native (of all logits) or linear (with the LM head, without all logits at once); null: linear."""
    cuda_graph_impl: choices.CudaGraphImpl | None
    """Replay each layer as CUDA graphs: none, or local (megatron-core's); null: local for small tensorwise layers."""
    activations_checkpoint_granularity: choices.RecomputeGranularity | None
    """Activation recomputation: null (none), selective, full."""
    activations_checkpoint_method: choices.RecomputeMethod | None
    """With granularity=full: uniform or block."""
    activations_checkpoint_num_layers: int | None
    """With granularity=full: the n of the method."""

    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: how long, how often, on what."""

    devices: int | None
    """Processes per node; null: what the launcher started. A number is checked against it."""
    num_nodes: int | None
    """Nodes; null: what the launcher started. A number is checked against it."""
    precision: choices.Precision
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
    """How often in the whole run such a step sends it back to the newest checkpoint before the step, and on with the
    samples after it; the next spike ends the run, with exit code 1 and a file in RUN_DIR/dumps. null: a spike is
    trained on."""
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
    """Steps between checkpoints; null: none by steps."""
    save_interval_minutes: float | None
    """Minutes by rank 0's clock after which a run saves, counted from its start or its last save; the next checkpoint
    replaces this one, unless save_interval is null and keep_last a number. null: none by the clock."""
    save_at_end: bool
    """Write a checkpoint when the run ends, also by Ctrl-C or max_time."""
    async_save: bool
    """Train on while a checkpoint is written; the run stands still only while its state is copied to host memory."""
    keep_last: int | None
    """How many of the newest checkpoints stay; the oldest goes once a new one is complete. null: all stay but those of
    save_interval_minutes."""
    keep_every: int | None
    """Checkpoints of steps that this divides stay for ever, whatever keep_last says; null: none."""
    on_save_error: choices.OnSaveError
    """If a checkpoint cannot be written (disk full, not writable): stop, exit code 1, or continue and try again at the
    next interval. The last checkpoint of a run has no next one, and its failure always ends with exit code 1."""
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
    """Drop the FP8 scales and amax histories of the checkpoint, on purpose: after a change of recipe, history or TE
    version, or to BF16. Only on a resume."""


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
    fp8_proof_interval: int | None
    """Steps between proofs of FP8 after that of a start's first step; null: none. Layers that CUDA graphs replay are
    proven in the first step only."""
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

    gpu: choices.PlanGpu
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


@dataclass(kw_only=True, slots=True)
class GateConfig:
    """What `python -m gpt_pretrain.compare` demands of every variant; exit code 4 where it is missed or unknown."""

    max_loss_gap: str | None
    """Largest loss at the end over the first variant's, as a percentage: 0.5%. The whole confidence interval must lie
    below. Without it, 0.5% is what the verdict calls as good. null: no such demand."""
    min_speedup: float | None
    """Smallest ratio of GPU-seconds to the same loss, the first variant's over each other's; the whole confidence
    interval must lie above. null: no such demand."""


@dataclass(kw_only=True, slots=True)
class CompareConfig(GateConfig):
    """`compare`: what `python -m gpt_pretrain.compare` trains and demands; training reads none of it."""

    variants: list[str]
    """What is compared, the first being the baseline: names of `benchmark.overrides`, or overrides themselves
    ("fp8=delayed model.fp8_params=true")."""
    seeds: int
    """Runs of each variant: model.seed and the numbers after it. With one, the noise is the baseline's against itself
    with other microbatches; with two or more, the seeds'."""


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole run."""

    name: str
    """Name of the run: part of the default run directory, and the W&B run's name."""
    run_dir: str | None
    """Where the run writes; null: outputs/DATE/TIME_NAME. An existing one is resumed (see checkpoint.resume)."""
    model: ModelConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    sample: SampleConfig
    plan: PlanConfig
    benchmark: BenchmarkConfig
    compare: CompareConfig
