"""Every key of the configuration: its name, type, unit and meaning. The values live in `conf/`.

Names and places follow NeMo 1.x and megatron-core, so a NeMo command line reads the same here: architecture, parallel
layout, batch, data and optimizer are all under `model.`.

`python -m gpt_pretrain --help` prints the string below a field. A field that may be null says what null means. Pure
functions resolve null (`config.derived`, `run`); the configuration itself never changes.
"""

from dataclasses import dataclass
from typing import Any

from gpt_pretrain.config import choices


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """`model.tokenizer`: how text becomes token ids."""

    library: choices.TokenizerLibrary
    """Tokenizer: bpe (trained on the corpus), file (`model.tokenizer.model`), none (only for mmap or mock data)."""
    model: str | None
    """library=file: path of a Hugging Face `tokenizer.json`."""
    vocab_size: int
    """library=bpe: number of tokens to train, including the end-of-document token."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """`model.data`: the corpus, its splits and its caches."""

    data_impl: choices.DataImpl
    """Corpus: mmap (.bin/.idx files of `data_prefix`), text (`text_files`), stdlib (Python's own sources), mock."""
    data_prefix: list[Any]
    """data_impl=mmap: paths without .bin/.idx, or alternating weights and paths: [0.7,web,0.3,code]."""
    splits_string: str
    """Proportions of documents for training, validation and test, e.g. "900,50,50"."""
    text_files: list[str]
    """data_impl=text: files or glob patterns (.txt: one document per file; .jsonl and .parquet: one per row)."""
    text_key: str
    """Field (.jsonl) or column (.parquet) that holds the text."""
    cache_dir: str | None
    """Directory of tokenized corpora and index caches; null: $XDG_CACHE_HOME/gpt_pretrain or ~/.cache/gpt_pretrain."""
    num_dataset_builder_threads: int
    """Threads that build the sample indices of blended datasets."""
    num_workers: int
    """Processes per rank that prepare batches in advance; 0: the training process prepares them."""
    eod_mask_loss: bool
    """Exclude the end-of-document token from the loss."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """`model.optim.sched`: the learning rate schedule."""

    name: choices.ScheduleName
    """Decay after the warmup: constant, linear, cosine, wsd (warmup, stable, decay)."""
    warmup_steps: int | None
    """Optimizer steps of linear warmup from `init_lr` to `model.optim.lr`; null: decay_steps / 10, at most
    2,000."""
    decay_steps: int | None
    """Step at which the rate reaches `min_lr`, warmup included; null: trainer.max_steps."""
    init_lr: float
    """Learning rate at step 0 of the warmup."""
    min_lr: float | None
    """Learning rate after the decay; null: a tenth of `model.optim.lr`."""
    wsd_decay_steps: int | None
    """name=wsd: steps of the final decay; required with wsd, refused otherwise."""
    wsd_decay_style: choices.WsdDecay
    """name=wsd: shape of the final decay."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`model.optim`: the optimizer and its schedule."""

    name: choices.OptimizerName
    """The optimizer; adam is AdamW."""
    lr: float
    """Peak learning rate."""
    betas: list[float]
    """Adam's two exponential decay rates."""
    eps: float
    """Adam's denominator term."""
    momentum: float
    """SGD's momentum."""
    weight_decay: float
    """Weight decay, decoupled with adam (AdamW); biases and norm weights are exempt, as in megatron-core."""
    use_precision_aware_optimizer: bool
    """Adam keeps masters and moments in the types that the next four keys set, and reads gradients in the type of their
    reduction (`model.grad_reduce_in_fp32`). Needs BF16 parameters and the distributed optimizer. See docs/plan.md."""
    main_params_dtype: choices.MainParamsDtype
    """Type of the masters: fp32, or fp16 with stochastic rounding of updates."""
    store_param_remainders: bool
    """Store only the 16 bits of an fp32 master that its BF16 weight lacks: 2 bytes instead of 4, without loss."""
    exp_avg_dtype: choices.MomentDtype
    """Type of Adam's first moment: fp32, bf16, fp16 or fp8."""
    exp_avg_sq_dtype: choices.MomentDtype
    """Type of Adam's second moment: fp32, bf16 or fp16."""
    sched: ScheduleConfig


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """`model`: architecture, batch, parallel layout, precision of the layers, kernels, data and optimizer."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int | None
    """Inner width of the MLP (with swiglu, of each half); null: 4 × hidden_size."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int | None
    """Key/value heads (grouped-query attention); null: num_attention_heads."""
    kv_channels: int | None
    """Width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: int
    """Vocabulary size of the model before padding; the tokenizer may have fewer tokens, not more."""
    make_vocab_size_divisible_by: int
    """The embedding is padded to a multiple of this, whatever the tensor parallel size."""
    max_position_embeddings: int
    """Upper limit of encoder_seq_length, and the number of rows of a learned position table."""
    position_embedding_type: choices.PositionEmbedding
    """learned_absolute or rope."""
    rotary_percentage: float
    """Fraction of each head's channels that rope rotates."""
    rotary_base: int
    """Base period (theta) of rope."""
    rope_scaling_factor: float | None
    """Factor that stretches rope's periods beyond 8,192 tokens (Llama 3.1 uses 8); null: no stretching."""
    normalization: choices.Normalization
    """layernorm or rmsnorm."""
    layernorm_epsilon: float
    """Epsilon of the normalization."""
    activation: choices.Activation
    """MLP activation: gelu, gelu_tanh, swiglu."""
    bias: bool
    """Biases in the linear layers."""
    qkv_bias: bool
    """Bias in the query/key/value projection even if bias=false (Qwen2.5)."""
    qk_layernorm: bool
    """Normalize the queries and keys of each head before rotation (Qwen3)."""
    share_embeddings_and_output_weights: bool
    """The LM head reuses the embedding matrix (tied embeddings)."""
    init_method_std: float
    """Standard deviation of the initial weights; projections into the residual stream use std/sqrt(2·num_layers)."""
    hidden_dropout: float
    """Dropout probability after attention, MLP and embedding."""
    attention_dropout: float
    """Dropout probability of attention weights."""

    num_moe_experts: int | None
    """Experts that replace the MLP of every layer; a router picks some for each token. null: one MLP."""
    moe_ffn_hidden_size: int | None
    """Inner width of an expert; null: ffn_hidden_size."""
    moe_router_topk: int
    """Experts per token; a softmax over their router scores, in fp32, weights their results."""
    moe_router_load_balancing_type: choices.MoeLoadBalancing
    """Tokens that the auxiliary loss balances: of a microbatch (aux_loss), of each sequence (seq_aux_loss), or none."""
    moe_aux_loss_coeff: float
    """Weight of the load-balancing loss in the gradient; the logged loss is the cross entropy only."""
    moe_z_loss_coeff: float | None
    """Weight of the router's z-loss, the mean squared logsumexp of its scores; null: none."""
    moe_token_dispatcher_type: choices.MoeTokenDispatcher
    """How tokens reach their experts: alltoall (each goes to its experts' ranks), allgather (all go to all ranks)."""
    overlap_moe_expert_parallel_comm: bool
    """Exchange tokens between expert-parallel ranks while another microbatch computes: the forward pass of each
    microbatch overlaps the backward pass of the previous one. Needs memory for one more layer's activations."""
    moe_grouped_gemm: bool | None
    """One grouped GEMM for all experts of a rank; needs Transformer Engine layers; null: on with them."""
    moe_grouped_kernel: choices.MoeGroupedKernel | None
    """Implementation of the grouped GEMM: transformer_engine (cuBLAS, expert by expert) or triton (one BF16 kernel, so
    the experts stay out of FP8); null: triton for many small experts per rank."""
    moe_permute_fusion: bool | None
    """Sort tokens by expert, and back, in TE's fused kernels; needs Transformer Engine layers; null: on with them,
    unless each expert-parallel rank gathers all tokens."""
    moe_router_padding_for_quantization: bool
    """Route extra tokens of weight zero until each expert's count suits FP8; false: pad each expert's input."""

    encoder_seq_length: int
    """Tokens per training sample."""
    micro_batch_size: int
    """Samples per forward pass and data-parallel rank."""
    global_batch_size: int
    """Samples per optimizer step, over all ranks."""
    seed: int
    """Seed for weights, data order and dropout."""

    tensor_model_parallel_size: int
    """TP: ranks that split each layer's matrices."""
    pipeline_model_parallel_size: int
    """PP: stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks per pipeline rank (interleaved schedule); null: one chunk, plain 1F1B."""
    context_parallel_size: int
    """CP: ranks that split each sequence; needs Transformer Engine."""
    expert_model_parallel_size: int
    """EP: ranks, taken from those with different samples, that split the experts; must divide num_moe_experts."""
    expert_tensor_parallel_size: int | None
    """Ranks that split each expert's matrices; null: tensor_model_parallel_size."""
    sequence_parallel: bool
    """Split norms and dropout along the sequence over the TP ranks; needs TP > 1."""
    use_distributed_optimizer: bool | None
    """Shard optimizer states and masters over the data-parallel ranks; null: only if fp8_params needs it."""
    data_parallel_sharding_strategy: choices.ShardingStrategy | None
    """optim_grads: shard gradients, too, and reduce those of each microbatch at once; null: each rank has all gradients
    and reduces them once a step. Weights are whole in both."""
    overlap_grad_reduce: bool
    """Overlap the reduction of gradients with the backward pass."""
    overlap_param_gather: bool
    """Overlap the gathering of parameters with the forward pass; needs use_distributed_optimizer and
    overlap_grad_reduce."""
    ddp_bucket_size: int | None
    """Approximate number of values in one exchange of overlap_grad_reduce and overlap_param_gather; null: a 16th of a
    rank's layers, at most 400 million, but at least 40 million and 1 million per data-parallel rank; with sharded
    gradients that minimum."""
    tp_comm_overlap: bool
    """Overlap the exchange of activations between TP ranks with GEMMs, in TE's user buffers; needs
    sequence_parallel."""
    grad_reduce_in_fp32: bool
    """Accumulate and reduce gradients in fp32 even if parameters are bf16."""

    fp8: bool
    """FP8 matrix products in the transformer layers; the group fp8= sets this key and the following ones."""
    fp8_backend: choices.Fp8Backend | None
    """FP8 implementation: transformer_engine (faster) or torchao; null: transformer_engine."""
    fp8_recipe: choices.Fp8RecipeName | None
    """Scaling recipe: delayed, tensorwise, blockwise or mxfp8; with torchao: tensorwise, rowwise or rowwise_with_gw_hp;
    null: delayed, with torchao tensorwise."""
    fp8_hybrid: bool | None
    """E4M3 forward, E5M2 for the gradients of outputs; null: on for delayed and tensorwise, unless fp8_e4m3.
    TorchAO's recipes fix their formats."""
    fp8_e4m3: bool | None
    """E4M3 in both directions, even if fp8_hybrid is set; null: on for blockwise and mxfp8, unless fp8_hybrid."""
    fp8_margin: int | None
    """delayed: scales leave a headroom of 2^margin, with margin 0 to 14; null: 0."""
    fp8_interval: int | None
    """delayed: steps between new scales. Transformer Engine computes them at every step, so only 1 is allowed."""
    fp8_amax_history_len: int | None
    """delayed: length of the amax history in forward passes (for gradients: backward passes); null: 1024."""
    fp8_amax_compute_algo: choices.AmaxComputeAlgo | None
    """delayed: which amax of the history sets the scale, max or most_recent; null: max."""
    fp8_wgrad: bool | None
    """Compute weight gradients in FP8; false: in the run's precision (delayed, and only emulated); null: true, except
    with rowwise_with_gw_hp."""
    fp8_params: bool
    """Store and gather the layers' weights in FP8, with fp32 masters; needs the distributed optimizer."""
    fp8_dot_product_attention: bool
    """Compute attention's own two products in FP8 (delayed or tensorwise; only Transformer Engine's fused
    attention)."""
    first_last_layers_bf16: bool
    """Keep the first and last layers out of FP8; with delayed, use fp8_exclude instead."""
    num_layers_at_start_in_bf16: int | None
    """first_last_layers_bf16: layers kept out at the start, at most as many as a pipeline stage has; null: 1."""
    num_layers_at_end_in_bf16: int | None
    """first_last_layers_bf16: layers kept out at the end, at most as many as a pipeline stage has; null: 1."""
    fp8_exclude: list[str]
    """Patterns (*, ?, [..]) of linear layers kept out of FP8: ["decoder.layers.0.*", "*.linear_fc2"]. auto, alone or
    among them, stands for layers too small to gain, with TorchAO's tensorwise and rowwise."""
    fp8_emulate: bool
    """Emulate FP8 on a machine without it, slowly: round values to the FP8 grids, then multiply."""

    transformer_engine: bool | None
    """Use Transformer Engine's layers; null: if a GPU and TE are present; true: refuse to start without them."""
    compile: bool
    """Compile whole layers with torch.compile, without Transformer Engine or FP8; the first step takes a minute."""
    bias_activation_fusion: bool | None
    """Fuse bias and activation of the MLP; null: on a GPU."""
    activation_cast_fusion: bool | None
    """One kernel for the MLP's activation and its cast to FP8, another for the gradients; null: on Hopper."""
    bias_dropout_add_fusion: bool | None
    """Fuse bias, dropout and residual; null: on a GPU."""
    masked_softmax_fusion: bool | None
    """Fuse scale, mask and softmax in layers without TE; null: if apex's kernels are installed."""
    use_flash_attention: bool | None
    """Use FlashAttention-4; null: on Hopper with flash-attn-4 installed, for heads of 128, or of 64 without rope."""
    apply_rope_fusion: bool | None
    """TE's fused rope; null: with rope on TE layers."""
    fused_single_qkv_rope: bool | None
    """Split queries, keys and values and apply rope in one kernel; null: with rope on TE layers, without CUDA
    graphs."""
    gradient_accumulation_fusion: bool | None
    """Accumulate weight gradients into the main gradient inside the GEMM; null: on a GPU, without emulation."""
    embedding_gradient_fusion: bool | None
    """Add embedding gradients only to the rows of their tokens; null: on a GPU, for few tokens and a large table."""
    cross_entropy_loss_fusion: bool | None
    """Fused vocabulary-parallel cross entropy; null: on a GPU in bf16, unless trainer.deterministic."""
    cross_entropy_fusion_impl: choices.CrossEntropyFusion | None
    """Fused cross entropy: native (from all logits) or linear (includes the LM head, never holds all logits); null:
    linear."""
    cuda_graph_impl: choices.CudaGraphImpl | None
    """Replay each layer as CUDA graphs: none, or local (megatron-core's own); null: local for small tensorwise
    layers."""
    activations_checkpoint_granularity: choices.RecomputeGranularity | None
    """Activation recomputation: selective (core attention) or full (whole layers); null: none."""
    activations_checkpoint_method: choices.RecomputeMethod | None
    """granularity=full: uniform (every n layers) or block (the first n layers of each stage)."""
    activations_checkpoint_num_layers: int | None
    """granularity=full: the n of the method."""

    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: length of the run, intervals, guards and hardware."""

    devices: int | None
    """Processes per node, which must match what the launcher started; null: whatever it started."""
    num_nodes: int | None
    """Number of nodes, which must match what the launcher started; null: whatever it started."""
    precision: choices.Precision
    """auto (bf16 on a GPU, fp32 without), fp32 or bf16."""
    max_steps: int
    """Optimizer steps of the whole run, including resumed parts."""
    max_time: str | None
    """Stop training after this time, "DD:HH:MM:SS" from the first step. The run then saves a checkpoint, without a
    final validation or sample. null: no limit."""
    log_every_n_steps: int
    """Steps between logged records, the only points at which the host waits for the GPU."""
    val_check_interval: int | None
    """Steps between validations; null: only at the end."""
    limit_val_batches: int
    """Global batches per validation; 0: no validation."""
    validate_at_start: bool
    """Validate before the first step, so that a broken validation set shows at once."""
    gradient_clip_val: float
    """Clip the gradient norm (L2, over all parameters) to this value; 0: no clipping."""
    max_skipped_steps: int
    """End the run after this many consecutive steps with a NaN or infinite loss or gradient, with exit code 1 and a
    file in RUN_DIR/dumps that names the first bad tensor. Such a step updates nothing; its samples count as seen."""
    spike_threshold: float | None
    """Warn if a step's loss exceeds the median of up to 64 previous ones by more than this many standard deviations
    (1.4826 times their median absolute deviation); null: no warnings."""
    max_spike_rewinds: int | None
    """How often in all the run may return from such a spike to the newest checkpoint before it and continue with the
    samples after the spike; the next spike ends the run, with exit code 1 and a file in RUN_DIR/dumps. null: training
    continues through spikes."""
    spike_margin: int
    """Fewest steps between the checkpoint to return to and any spike, on either side of it: what ruined the weights
    happened before the loss shows it. If no such checkpoint precedes a spike, training continues through it."""
    hang_timeout: float | None
    """Seconds without progress after which a rank counts as hung and the run ends on all ranks with stack traces and
    exit code 71. A save or the building of an index must fit. After a few steps, a step is allowed less: 10 times the
    longest after the first, but at least 40 s. A rank that dies ends the run likewise. null: no watchdog, for a
    debugger."""
    gc_interval: int
    """Steps between garbage collections, which run at the same step on all ranks; 0: leave them to Python."""
    deterministic: bool
    """Use only kernels whose results do not vary from run to run (slower on a GPU)."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """`checkpoint`: what a run saves and what it starts from."""

    save_interval: int | None
    """Steps between checkpoints; null: no saves by step."""
    save_interval_minutes: float | None
    """Save when this many minutes have passed by rank 0's clock since the start or the last save. The next checkpoint
    replaces this one, unless save_interval is null and keep_last is a number. null: no saves by the clock."""
    save_at_end: bool
    """Save a checkpoint when the run ends, including by Ctrl-C or max_time."""
    async_save: bool
    """Continue training while a checkpoint is written; the run pauses only to copy its state to host memory."""
    keep_last: int | None
    """How many of the newest checkpoints to keep; the oldest is deleted once a new one is complete. null: keep all
    except those of save_interval_minutes."""
    keep_every: int | None
    """Never delete checkpoints whose step is a multiple of this, whatever keep_last says; null: none."""
    on_save_error: choices.OnSaveError
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
    wandb_project: str
    """Project of the W&B run."""
    wandb_entity: str | None
    """Team or user of the W&B run; null: the account's default."""
    fp8_proof: choices.Fp8ProofMode
    """If FP8 does not run as planned: stop with exit code 2, after a checkpoint; or warn and go on. never: nothing is
    proven, and the header says so."""
    fp8_proof_interval: int | None
    """Steps between FP8 proofs, beside those of the first, 10th, 100th and 1,000th step of each start; null: the first
    step alone. Layers that CUDA graphs replay are proven only in the first step."""
    fp8_statistics_interval: int | None
    """Steps between statistics of every FP8 tensor: amax, scale, saturated and flushed values; null: none."""
    fp8_saturation_threshold: float
    """Warn if more than this fraction of a tensor's values is at the end of the FP8 range."""
    peak_tflops: float | None
    """Peak TFLOP/s of one GPU, for the MFU; null: from the table of known GPUs; no MFU for other GPUs."""


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """`sample`: the text that the model generates at the end of a run."""

    prompt: str
    """Text to continue."""
    max_new_tokens: int
    """Tokens to generate; 0: no sample."""
    temperature: float
    """Divisor of the logits; 0: greedy."""


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """`plan`: the machine that `python -m gpt_pretrain.plan` plans for; training does not read it."""

    gpu: choices.PlanGpu
    """GPU to forecast memory and speed for: h100 (SXM), h200 or b200."""
    num_gpus: int | None
    """Number of GPUs; null: trainer.devices × trainer.num_nodes if given, else the fewest that the layout needs."""


@dataclass(kw_only=True, slots=True)
class BenchmarkConfig:
    """`benchmark`: what `python -m gpt_pretrain.benchmark` measures; training does not read it."""

    variants: list[str]
    """Variants to compare; ratios refer to the first. Each is a name of `benchmark.overrides` or overrides themselves
    ("fp8=delayed model.fp8_params=true"). bare is megatron-core's own loop without overrides, bare:… that loop with
    either."""
    overrides: dict[str, str]
    """Overrides that each variant, by its name, adds to the command line; +benchmark.overrides.NAME='…' adds one."""
    warmup_steps: int
    """Untimed steps at the start of each process."""
    steps: int
    """Timed steps of each process, a multiple of `benchmark.interval`."""
    interval: int
    """Steps between readings of the clock, each of which waits for the GPU and gives one mean step time."""
    rounds: int
    """How often all variants run; every second round is in reverse order to cancel drift of the machine."""
    profile: bool
    """Record three more steps of each variant's first process: a Perfetto trace and a breakdown of their time."""
    forecast: bool
    """Show the forecast of `python -m gpt_pretrain.plan` for plan.gpu beside the measurements."""
    markdown: str | None
    """File for the tables with command, machine and versions; null: RUN_DIR/benchmark.md."""


@dataclass(kw_only=True, slots=True)
class GateConfig:
    """What `python -m gpt_pretrain.compare` demands of every variant; exit code 4 if a demand is missed or unknown."""

    max_loss_gap: str | None
    """Largest final loss above the first variant's, as a percentage: 0.5%. The whole confidence interval must lie
    below it. The verdict calls such a gap as good. null: no demand, and 0.5% for the verdict."""
    min_speedup: float | None
    """Smallest speedup: the first variant's GPU-seconds to the same loss over each other variant's. The whole
    confidence interval must lie above. null: no demand."""


@dataclass(kw_only=True, slots=True)
class CompareConfig(GateConfig):
    """`compare`: what `python -m gpt_pretrain.compare` trains and demands; training does not read it."""

    variants: list[str]
    """Variants to compare, the baseline first. Each is a name of `benchmark.overrides` or overrides themselves
    ("fp8=delayed model.fp8_params=true")."""
    seeds: int
    """Runs of each variant, with model.seed and the numbers after it. With one, noise is estimated from the baseline
    repeated with other microbatches; with two or more, from the seeds."""


@dataclass(kw_only=True, slots=True)
class Config:
    """The whole run."""

    name: str
    """Name of the run, part of the default run directory and of the W&B run."""
    run_dir: str | None
    """Directory that the run writes to; an existing one is resumed (see checkpoint.resume); null:
    outputs/DATE/TIME_NAME."""
    extensions: list[str]
    """Your modules to import before anything is checked, in this order: what they register joins the run. Give it on
    the command line or in the file of --config-name; no other file may."""
    model: ModelConfig
    trainer: TrainerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    sample: SampleConfig
    plan: PlanConfig
    benchmark: BenchmarkConfig
    compare: CompareConfig
