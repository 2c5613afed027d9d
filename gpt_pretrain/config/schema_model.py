"""The keys of `model`: architecture, batch, parallel layout, FP8 and kernels."""

from dataclasses import dataclass
from functools import partial

from gpt_pretrain.config.choices import (
    AUTO,
    Activation,
    AmaxComputeAlgo,
    CrossEntropyFusion,
    CudaGraphImpl,
    Fp8Backend,
    Fp8RecipeName,
    LayerName,
    LossName,
    MoeGroupedKernel,
    MoeLoadBalancing,
    MoeTokenDispatcher,
    Normalization,
    OuterSharding,
    PositionEmbedding,
    RecomputeGranularity,
    RecomputeMethod,
    ShardingStrategy,
)
from gpt_pretrain.config.facts import Unread, key, read_with, unread_with
from gpt_pretrain.config.schema_data import DataConfig, OptimConfig, TokenizerConfig

_POSITIONS, _ROPE = "model.position_embedding_type", PositionEmbedding.rope
_WITH_ROPE = read_with(_POSITIONS, _ROPE)
_WITH_SCALED_ROPE = read_with(_POSITIONS, _ROPE, instead=f"null, or {_POSITIONS}=rope")
WITHOUT_EXPERTS = unread_with("model.num_moe_experts", None, instead="{idle}, or a number of experts")
_NO_FP8_KEYS = "leave all keys of FP8 out (fp8=none)"
_WITHOUT_FP8 = unread_with("model.fp8", False, instead=f"model.fp8=true, or {_NO_FP8_KEYS}")
# An engine may need more than FP8 to be on.
_ENGINE_WITHOUT_FP8 = unread_with("model.fp8", False, instead=f"null, or {_NO_FP8_KEYS}")
_KEPT_LAYERS = "model.first_last_layers_bf16"
_WITHOUT_KEPT_LAYERS = unread_with(_KEPT_LAYERS, False, instead=f"{_KEPT_LAYERS}=true, or null")
_OVERLAP = "model.overlap_grad_reduce"
_WITHOUT_OVERLAPPED_REDUCTION = unread_with(
    _OVERLAP, False, instead=f"null, or {_OVERLAP}=true (parallelism=dp has it so)"
)
_WITH_OWN_LOSS = read_with("model.loss", LossName.cross_entropy)
_BASE_WITHOUT_MUP = unread_with("model.use_mup", False, instead="model.use_mup=true, or {key}={idle}")
_WITHOUT_MUP = unread_with(
    "model.use_mup", False, instead="{key}={idle}, or model.use_mup with model.mup_base_hidden_size"
)
_clip_key = partial(
    key,
    unread=[unread_with("model.qk_clip", False, instead="model.qk_clip=true, or {key}={idle}")],
    core=["TransformerConfig"],
)
_LOSS = "model.cross_entropy_loss_fusion"
_WITHOUT_FUSED_LOSS = unread_with(_LOSS, False, instead=f"{_LOSS}=true, or {{key}}=null")

# What many keys share.
_expert_core_key = partial(key, unread=[WITHOUT_EXPERTS], core=["TransformerConfig"])
_expert_key = partial(key, unread=[WITHOUT_EXPERTS])
_fp8_key = partial(key, planned=True, unread=[_WITHOUT_FP8])
_layout_key = partial(key, planned=True, core=["TransformerConfig"])
_mup_key = partial(key, unread=[_WITHOUT_MUP], core=["TransformerConfig"])
_shape_key = partial(key, identity="model", core=["TransformerConfig"])


def _full_recomputation(other: str) -> Unread:
    granularity = "model.activations_checkpoint_granularity"
    instead = f"null, or {granularity}=full with model.activations_checkpoint_{other}"
    return read_with(granularity, RecomputeGranularity.full, instead=instead)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """`model`: architecture, batch, parallel layout, precision of the layers, kernels, data and optimizer."""

    num_layers: int = _shape_key(minimum=1, largest=2**10, aliases=["num_hidden_layers"])
    """Transformer layers."""
    hidden_size: int = _shape_key(minimum=1, largest=2**20, aliases=["dim"])
    """Width of the residual stream."""
    ffn_hidden_size: int | None = key(minimum=1, largest=2**24, aliases=["intermediate_size"], identity="model")
    """Inner width of the MLP (with swiglu, of each half); null: 4 × hidden_size."""
    num_attention_heads: int = _shape_key(minimum=1, largest=2**16, aliases=["num_heads"])
    """Query heads."""
    num_query_groups: int | None = key(
        minimum=1, largest=2**16, aliases=["num_key_value_heads", "n_kv_heads"], identity="model"
    )
    """Key/value heads (grouped-query attention); null: num_attention_heads."""
    kv_channels: int | None = key(minimum=1, largest=2**16, identity="model")
    """Width of a head; null: hidden_size / num_attention_heads."""
    vocab_size: int = key(minimum=1, largest=2**31 - 1, identity="tokenizer")
    """Vocabulary size of the model before padding; the tokenizer may have fewer tokens, not more."""
    make_vocab_size_divisible_by: int = key(minimum=1, largest=2**31 - 1)
    """The embedding is padded to a multiple of this, whatever the tensor parallel size."""
    max_position_embeddings: int = key(minimum=1, largest=2**24)
    """Upper limit of encoder_seq_length, and the number of rows of a learned position table."""
    position_embedding_type: PositionEmbedding = key(identity="model")
    """learned_absolute or rope."""
    rotary_percentage: float = key(above=0, maximum=1, identity="model", unread=[_WITH_ROPE])
    """Fraction of each head's channels that rope rotates."""
    rotary_base: int = key(minimum=1, aliases=["rope_theta"], identity="model", unread=[_WITH_ROPE])
    """Base period (theta) of rope."""
    rope_scaling_factor: float | None = key(
        above=1,
        use="more than 1 (Llama 3.1 has 8), or null",
        why="it stretches no period",
        before=None,
        identity="model",
        unread=[_WITH_SCALED_ROPE],
    )
    """Factor that stretches rope's periods beyond 8,192 tokens (Llama 3.1 uses 8), or beyond
    yarn_original_max_position_embeddings; null: no stretching."""
    yarn_original_max_position_embeddings: int | None = key(
        minimum=1,
        largest=2**24,
        before=None,
        identity="model",
        unread=[unread_with("model.rope_scaling_factor", None, instead="null, or model.rope_scaling_factor=4")],
    )
    """The context before rope_scaling_factor stretches it by YaRN (Peng et al. 2023, arXiv 2309.00071), which Qwen2.5
    and Qwen3 take for long texts: its ramp from 32 rotations to 1, and its larger logits. null: Llama 3.1's way."""
    no_rope_freq: int | None = _shape_key(minimum=1, largest=2**10, before=None, unread=[_WITH_SCALED_ROPE])
    """Every how many layers one rotates nothing: 4 leaves rope out of layers 4, 8, … (SmolLM 3); null: all rotate."""
    normalization: Normalization = _shape_key()
    """layernorm or rmsnorm."""
    layernorm_epsilon: float = key(above=0, use="1e-5 or another", aliases=["rms_norm_eps"], core=["TransformerConfig"])
    """Epsilon of the normalization."""
    activation: Activation = key(identity="model")
    """MLP activation: gelu, gelu_tanh, swiglu, squared_relu."""
    bias: bool = key(identity="model", core=["TransformerConfig.add_bias_linear"])
    """Biases in the linear layers."""
    qkv_bias: bool = key(identity="model", core=["TransformerConfig.add_qkv_bias"])
    """Bias in the query/key/value projection even if bias=false (Qwen2.5)."""
    qk_layernorm: bool = _shape_key(before=False)
    """Normalize the queries and keys of each head before rotation (Qwen3)."""
    value_embedding_freq: int | None = key(minimum=1, largest=2**10, before=None, identity="model")
    """Every how many layers, counted back from the last, attention adds a learned vector of each token to its value: 2
    is every other layer (nanochat); null: none does."""
    value_embedding_mult: float = key(
        above=0,
        use="1 or another",
        before=1.0,
        identity="model",
        unread=[unread_with("model.value_embedding_freq", None, instead="{idle}, or model.value_embedding_freq=2")],
    )
    """Factor of value embeddings; Adam's steps move what they add by as much more."""
    window_size: list[int] | None = key(before=None, aliases=["sliding_window"], identity="model")
    """How many tokens before itself a token attends to, and how many after: [4095,0] is Mistral 7B v0.1's window of
    4,096. null: all before it."""
    window_attn_skip_freq: list[int] | None = key(
        before=None,
        identity="model",
        core=["TransformerConfig"],
        unread=[unread_with("model.window_size", None, instead="null, or model.window_size=[4095,0]")],
    )
    """Layer by layer 1 where attention has the window, and 0 where it does not; null: all layers have it."""
    layer: LayerName = key(before=LayerName.gpt, identity="model")
    """The transformer layer: gpt, or one that an extension registers."""
    loss: LossName = key(before=LossName.cross_entropy, identity="model")
    """What training minimizes: cross_entropy, or a loss that an extension registers. Validation is cross entropy."""
    final_logit_softcapping: float | None = key(
        above=0, use="30 (Gemma 2) or another, or null", before=None, identity="model"
    )
    """Cap c of the logits: c · tanh(logits / c) replaces them, in the loss and wherever else they are used (Gemma 2 has
    30); null: none."""
    z_loss_coeff: float = key(
        minimum=0,
        maximum=1,
        before=0.0,
        aliases=["z_loss_multiplier", "auxiliary_loss_multiplier"],
        unread=[_WITH_OWN_LOSS],
    )
    """Weight of (log z)² beside the cross entropy, z being the sum of a token's exponentiated logits: PaLM's is 1e-4.
    A cap comes first. The logged loss leaves it out."""
    qk_clip: bool = key(before=False, core=["TransformerConfig"])
    """After each step, shrink the query and key projections of heads whose attention logits exceeded
    qk_clip_threshold in it (MuonClip)."""
    qk_clip_alpha: float = _clip_key(above=0, below=1, use="0.5 or another between 0 and 1", before=0.5)
    """The queries' share of what a clip shrinks logits by, as a power; the keys have the rest."""
    qk_clip_threshold: float = _clip_key(above=0, use="100 or another", before=100.0)
    """The largest attention logit that qk_clip leaves alone."""
    log_max_attention_logit: bool = key(before=False, core=["TransformerConfig"])
    """Log the largest attention logit of the model; qk_clip does so anyway."""
    features: list[str] = key(before=[])
    """Features that extensions register and that the run uses."""
    share_embeddings_and_output_weights: bool = key(aliases=["tie_word_embeddings"], identity="model")
    """The LM head reuses the embedding matrix (tied embeddings)."""
    init_method_std: float = key(above=0, use="0.02 or another", core=["TransformerConfig"])
    """Standard deviation of the initial weights; projections into the residual stream use std/sqrt(2·num_layers)."""
    use_mup: bool = key(before=False, core=["TransformerConfig"])
    """muP: `optim.lr`, found at width `mup_base_hidden_size`, serves `hidden_size`. See docs/train.md."""
    mup_base_hidden_size: int | None = key(
        minimum=1, largest=2**20, before=None, unread=[_BASE_WITHOUT_MUP], core=["TransformerConfig"]
    )
    """hidden_size of the model that hyperparameters were tuned on; required with use_mup, null without."""
    mup_embedding_mult: float = _mup_key(above=0, use="1.0 or another", before=1.0)
    """What embeddings are multiplied by, the same at all widths."""
    mup_output_mult: float | None = key(above=0, use="0.25 or another, or null", before=None, unread=[_WITHOUT_MUP])
    """What logits are multiplied by; null: mup_base_hidden_size / hidden_size."""
    mup_base_head_dim: float | None = _mup_key(above=0, use="64 or another, or null", before=None)
    """Attention's scale is √mup_base_head_dim / kv_channels^mup_attn_scale_power: with the base's kv_channels the base
    has the usual 1 / √kv_channels. null: 1."""
    mup_attn_scale_power: float = _mup_key(above=0, maximum=1, before=1.0)
    """Power of kv_channels in attention's scale: 1 is muP's, 0.5 the usual one."""
    hidden_dropout: float = key(minimum=0, below=1, core=["TransformerConfig"])
    """Dropout probability after attention, MLP and embedding."""
    attention_dropout: float = key(minimum=0, below=1, core=["TransformerConfig"])
    """Dropout probability of attention weights."""

    num_moe_experts: int | None = _shape_key(
        minimum=2, use="2 or more, or a model without experts", why="a router has no choice", largest=2**16, before=None
    )
    """Experts that replace the MLP of every layer; a router picks some for each token. null: one MLP."""
    moe_ffn_hidden_size: int | None = _expert_key(minimum=1, largest=2**24, before=None, identity="model")
    """Inner width of an expert; null: ffn_hidden_size."""
    moe_router_topk: int = _expert_core_key(
        minimum=1, use="2 or more", largest=2**16, before=2, aliases=["num_experts_per_tok"], identity="model"
    )
    """Experts per token; a softmax over their router scores, in fp32, weights their results."""
    moe_router_load_balancing_type: MoeLoadBalancing = _expert_core_key(before=MoeLoadBalancing.aux_loss)
    """Tokens that the auxiliary loss balances: of a microbatch (aux_loss), of each sequence (seq_aux_loss), or none."""
    moe_aux_loss_coeff: float = _expert_core_key(
        minimum=0, use="0.01 or another above 0", before=0.01, idle=[0.01, 0.0]
    )
    """Weight of the load-balancing loss in the gradient; the logged loss is the cross entropy only."""
    moe_z_loss_coeff: float | None = _expert_core_key(above=0, use="null for none", before=None)
    """Weight of the router's z-loss, the mean squared logsumexp of its scores; null: none."""
    moe_token_dispatcher_type: MoeTokenDispatcher = _expert_core_key(before=MoeTokenDispatcher.alltoall)
    """How tokens reach their experts: alltoall (each goes to its experts' ranks), allgather (all go to all ranks)."""
    overlap_moe_expert_parallel_comm: bool = _expert_core_key(before=False, planned=True)
    """Exchange tokens between expert-parallel ranks while another microbatch computes: the forward pass of each
    microbatch overlaps the backward pass of the previous one. Needs memory for one more layer's activations."""
    moe_grouped_gemm: bool | None = _expert_key(idle=[None, False])
    """One grouped GEMM for all experts of a rank; needs Transformer Engine layers; null: on with them."""
    moe_grouped_kernel: MoeGroupedKernel | None = _expert_key(before=None)
    """Implementation of the grouped GEMM: transformer_engine (cuBLAS, expert by expert) or triton (one BF16 kernel, so
    the experts stay out of FP8); null: triton for many small experts per rank."""
    moe_router_padding_for_quantization: bool = _expert_core_key(before=False)
    """Route extra tokens of weight zero until each expert's count suits FP8; false: pad each expert's input."""

    encoder_seq_length: int = key(minimum=1, largest=2**24, aliases=["seq_length", "seq_len"], identity="batch")
    """Tokens per training sample."""
    micro_batch_size: int = key(minimum=1, largest=2**20, aliases=["per_device_train_batch_size", "local_batch_size"])
    """Samples per forward pass and data-parallel rank."""
    global_batch_size: int = key(minimum=1, largest=2**24, aliases=["train_batch_size"], identity="batch")
    """Samples per optimizer step, over all ranks; those of the last steps where the batch grows. Validation has as many
    in a batch from the start."""
    rampup_batch_size: list[int] | None = key(before=None, identity="batch")
    """Grow the batch linearly: [start,increment,samples] begins with `start` samples and reaches global_batch_size over
    so many samples, by `increment` each time. null: no ramp."""
    step_batch_size_schedule: str | None = key(before=None, identity="batch")
    """Grow the batch in steps by tokens: "0:256 10B:512 50B:1024" trains with 512 samples after 10 billion tokens.
    K, M, B and T are suffixes; the last batch is global_batch_size. null: none."""
    seed: int = key(minimum=0, largest=2**32 - 1)
    """Seed for weights, data order and dropout."""

    tensor_model_parallel_size: int = _layout_key(minimum=1, largest=2**20, aliases=["tp"])
    """TP: ranks that split each layer's matrices."""
    pipeline_model_parallel_size: int = _layout_key(minimum=1, largest=2**20, aliases=["pp"])
    """PP: stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: int | None = _layout_key(minimum=1, largest=2**10)
    """Model chunks per pipeline rank (interleaved schedule); null: one chunk, plain 1F1B."""
    context_parallel_size: int = _layout_key(minimum=1, largest=2**20, aliases=["cp"])
    """CP: ranks that split each sequence; needs Transformer Engine."""
    expert_model_parallel_size: int = _expert_core_key(minimum=1, largest=2**20, before=1, aliases=["ep"], planned=True)
    """EP: ranks, taken from those with different samples, that split the experts; must divide num_moe_experts."""
    expert_tensor_parallel_size: int | None = _expert_key(minimum=1, largest=2**20, before=None, planned=True)
    """Ranks that split each expert's matrices; null: tensor_model_parallel_size."""
    sequence_parallel: bool = _layout_key()
    """Split norms and dropout along the sequence over the TP ranks; needs TP > 1."""
    use_distributed_optimizer: bool | None = key(planned=True)
    """Shard optimizer states and masters over the data-parallel ranks; null: only if fp8_params needs it."""
    data_parallel_sharding_strategy: ShardingStrategy | None = key(before=None, planned=True)
    """optim_grads: shard gradients, too, and reduce those of each microbatch at once; optim_grads_params: shard weights
    as well, and gather a layer's when it computes; null: each rank has all of both."""
    num_distributed_optimizer_instances: int = key(
        minimum=1, before=1, planned=True, core=["DistributedDataParallelConfig"]
    )
    """HSDP: groups of data-parallel ranks; ranks of a group share what data_parallel_sharding_strategy says, and the
    groups hold the same and reduce gradients with each other once a step."""
    outer_dp_sharding_strategy: OuterSharding = key(
        before=OuterSharding.no_shard, core=["DistributedDataParallelConfig"]
    )
    """HSDP: what the groups share out among each other. no_shard: nothing, each has all optimizer states; optim is
    refused."""
    overlap_grad_reduce: bool = key(planned=True, core=["DistributedDataParallelConfig"])
    """Overlap the reduction of gradients with the backward pass."""
    overlap_param_gather: bool = key(planned=True, core=["DistributedDataParallelConfig", "OptimizerConfig"])
    """Overlap the gathering of parameters with the forward pass; needs use_distributed_optimizer and
    overlap_grad_reduce."""
    ddp_bucket_size: int | None = key(minimum=1, before=None, planned=True, unread=[_WITHOUT_OVERLAPPED_REDUCTION])
    """Approximate number of values in one exchange of overlap_grad_reduce and overlap_param_gather; null: a 16th of a
    rank's layers, at most 400 million, but at least 40 million and 1 million per data-parallel rank; with sharded
    gradients that minimum."""
    tp_comm_overlap: bool = _layout_key(before=False)
    """Overlap the exchange of activations between TP ranks with GEMMs, in TE's user buffers; needs
    sequence_parallel."""
    grad_reduce_in_fp32: bool = key(planned=True, core=["DistributedDataParallelConfig"])
    """Accumulate and reduce gradients in fp32 even if parameters are bf16."""

    fp8: bool = key(planned=True)
    """FP8 matrix products in the transformer layers; the group fp8= sets this key and the following ones."""
    fp8_backend: Fp8Backend | None = key(before=None, planned=True, unread=[_ENGINE_WITHOUT_FP8])
    """FP8 implementation: transformer_engine (faster) or torchao; null: transformer_engine."""
    fp8_recipe: Fp8RecipeName | None = _fp8_key()
    """Scaling recipe: delayed, tensorwise, blockwise or mxfp8; with torchao: tensorwise, rowwise or rowwise_with_gw_hp;
    null: delayed, with torchao tensorwise."""
    fp8_hybrid: bool | None = _fp8_key()
    """E4M3 forward, E5M2 for the gradients of outputs; null: on for delayed and tensorwise, unless fp8_e4m3.
    TorchAO's recipes fix their formats."""
    fp8_e4m3: bool | None = _fp8_key()
    """E4M3 in both directions, even if fp8_hybrid is set; null: on for blockwise and mxfp8, unless fp8_hybrid."""
    fp8_margin: int | None = key(
        minimum=0,
        maximum=14,
        # E4M3 has full precision from 448 down to 2^-6, a span of 2^14.8.
        why="scales leave 2^margin of headroom, less than none saturates the largest values, and more than 14 leaves "
        "E4M3 no precision",
        use="0",
        largest=2**16,
        planned=True,
        unread=[_WITHOUT_FP8],
    )
    """delayed: scales leave a headroom of 2^margin, with margin 0 to 14; null: 0."""
    fp8_interval: int | None = _fp8_key()
    """delayed: steps between new scales. Transformer Engine computes them at every step, so only 1 is allowed."""
    fp8_amax_history_len: int | None = _fp8_key(minimum=1, use="1 or more (1024 is Transformer Engine's own)")
    """delayed: length of the amax history in forward passes (for gradients: backward passes); null: 1024."""
    fp8_amax_compute_algo: AmaxComputeAlgo | None = _fp8_key()
    """delayed: which amax of the history sets the scale, max or most_recent; null: max."""
    fp8_wgrad: bool | None = _fp8_key()
    """Compute weight gradients in FP8; false: in the run's precision (delayed, and only emulated); null: true, except
    with rowwise_with_gw_hp."""
    fp8_params: bool = _fp8_key(aliases=["fp8_param_gather", "enable_fsdp_float8_all_gather"])
    """Store and gather the layers' weights in FP8, with fp32 masters; needs the distributed optimizer."""
    fp8_dot_product_attention: bool = _fp8_key()
    """Compute attention's own two products in FP8 (delayed or tensorwise; only Transformer Engine's fused
    attention)."""
    first_last_layers_bf16: bool = _fp8_key()
    """Keep the first and last layers out of FP8; with delayed, use fp8_exclude instead."""
    num_layers_at_start_in_bf16: int | None = key(
        largest=2**10, planned=True, unread=[_WITHOUT_FP8, _WITHOUT_KEPT_LAYERS]
    )
    """first_last_layers_bf16: layers kept out at the start, at most as many as a pipeline stage has; null: 1."""
    num_layers_at_end_in_bf16: int | None = key(
        largest=2**10, planned=True, unread=[_WITHOUT_FP8, _WITHOUT_KEPT_LAYERS]
    )
    """first_last_layers_bf16: layers kept out at the end, at most as many as a pipeline stage has; null: 1."""
    fp8_exclude: list[str] = _fp8_key(word=AUTO, aliases=["filter_fqns"])
    """Patterns (*, ?, [..]) of linear layers kept out of FP8: ["decoder.layers.0.*", "*.linear_fc2"]. auto, alone or
    among them, stands for layers too small to gain, with TorchAO's tensorwise and rowwise."""
    fp8_emulate: bool = _fp8_key()
    """Emulate FP8 on a machine without it, slowly: round values to the FP8 grids, then multiply."""

    transformer_engine: bool | None = key(planned=True)
    """Use Transformer Engine's layers; null: if a GPU and TE are present; true: refuse to start without them."""
    compile: bool = key(before=False)
    """Compile whole layers with torch.compile, without Transformer Engine or FP8; the first step takes a minute."""
    bias_activation_fusion: bool | None
    """Fuse bias and activation of the MLP; null: on a GPU."""
    bias_dropout_add_fusion: bool | None
    """Fuse bias, dropout and residual; null: on a GPU."""
    masked_softmax_fusion: bool | None
    """Fuse scale, mask and softmax in layers without TE; null: if apex's kernels are installed."""
    apply_rope_fusion: bool | None
    """TE's fused rope; null: with rope on TE layers."""
    gradient_accumulation_fusion: bool | None
    """Accumulate weight gradients into the main gradient inside the GEMM; null: on a GPU, without emulation."""
    cross_entropy_loss_fusion: bool | None
    """Fused vocabulary-parallel cross entropy; null: on a GPU in bf16, unless trainer.deterministic."""
    cross_entropy_fusion_impl: CrossEntropyFusion | None = key(before=None, unread=[_WITHOUT_FUSED_LOSS])
    """Fused cross entropy: native (from all logits) or linear (includes the LM head, never holds all logits); null:
    linear."""
    cuda_graph_impl: CudaGraphImpl | None = key(before=None)
    """Replay each layer as CUDA graphs: none, or local (megatron-core's own); null: local for small tensorwise
    layers."""
    activations_checkpoint_granularity: RecomputeGranularity | None = key(
        aliases=["recompute_granularity"], planned=True, core=["TransformerConfig.recompute_granularity"]
    )
    """Activation recomputation: selective (core attention) or full (whole layers); null: none."""
    activations_checkpoint_method: RecomputeMethod | None = key(
        aliases=["recompute_method"],
        planned=True,
        unread=[_full_recomputation("num_layers=1")],
        core=["TransformerConfig.recompute_method"],
    )
    """granularity=full: uniform (every n layers) or block (the first n layers of each stage)."""
    activations_checkpoint_num_layers: int | None = key(
        minimum=1,
        largest=2**10,
        aliases=["recompute_num_layers"],
        planned=True,
        unread=[_full_recomputation("method=uniform")],
        core=["TransformerConfig.recompute_num_layers"],
    )
    """granularity=full: the n of the method."""

    tokenizer: TokenizerConfig
    data: DataConfig
    optim: OptimConfig
