"""The keys of `model.tokenizer`, `model.data` and `model.optim`: text, corpora, and the optimizer with its schedule."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from gpt_pretrain.config.choices import (
    DataImpl,
    MainParamsDtype,
    MomentDtype,
    MuonCoefficientType,
    MuonMatmulPrec,
    MuonScaleMode,
    MuonTpMode,
    OptimizerName,
    ScheduleName,
    TokenizerLibrary,
    WsdDecay,
)
from gpt_pretrain.config.facts import Unread, key, read_with, unread_with

_SMALL_STATES = "model.optim.use_precision_aware_optimizer"
_WITH_PLAIN_STATES = unread_with(_SMALL_STATES, False)
_WITHOUT_SMALL_STATES = unread_with(
    _SMALL_STATES, False, instead=f"{{key}}={{idle}}, or {_SMALL_STATES}=true with model.use_distributed_optimizer=true"
)
_WITH_WHOLE_MASTERS = unread_with(
    "model.optim.main_params_dtype", MainParamsDtype.fp16, because=", which is stored whole"
)
_ONLY_MUON = read_with(
    "model.optim.name",
    OptimizerName.muon,
    because=": only muon reads it",
    instead="model.optim.name=muon, or {key}={idle}",
)
_SCHEDULE = "model.optim.sched.name"
_WITH_CONSTANT_RATE = unread_with(
    _SCHEDULE,
    ScheduleName.constant,
    because=": only linear, cosine or wsd reads it",
    instead=f"null, or {_SCHEDULE}=cosine or linear",
)
_SOURCE, _TOKENIZER = "model.data.data_impl", "model.tokenizer.library"
_WITH_RANDOM_TOKENS = unread_with(_SOURCE, DataImpl.mock, because=", whose random tokens come from no file")
# Of emerging-optimizers. States here have the shape of a rank's part of a weight.
_ABSENT = {
    "normuon": "it divides by second moments of whole rows or columns, and ranks hold pieces of a matrix",
    "adaptive_muon": "second moments of orthogonalized updates are not kept",
    "soap": "it keeps two square matrices and their eigenvectors for each weight, which are not shaped like it",
}
_muon_key = partial(key, core=["OptimizerConfig"], unread=[_ONLY_MUON])


def _with_wsd(instead: str = "") -> Unread:
    return read_with(_SCHEDULE, ScheduleName.wsd, because=": only wsd reads it", instead=instead)


def _with_data(*impl: DataImpl, instead: str = "") -> Unread:
    return read_with(_SOURCE, *impl, because=", which does not read it", instead=instead)


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """`model.tokenizer`: how text becomes token ids."""

    library: TokenizerLibrary = key(identity="tokenizer")
    """Tokenizer: bpe (trained on the corpus), file (`model.tokenizer.model`), none (only for mmap or mock data)."""
    model: str | None = key(
        identity="tokenizer",
        unread=[read_with(_TOKENIZER, TokenizerLibrary.file, instead="null, or model.tokenizer.library=file")],
    )
    """library=file: path of a Hugging Face `tokenizer.json`."""
    vocab_size: int = key(largest=2**31 - 1, identity="tokenizer", unread=[read_with(_TOKENIZER, TokenizerLibrary.bpe)])
    """library=bpe: number of tokens to train, including the end-of-document token."""
    eod_token: str | None = key(
        before=None,
        identity="tokenizer",
        unread=[unread_with(_TOKENIZER, TokenizerLibrary.none, TokenizerLibrary.bpe, instead="{key}=null")],
    )
    """Token that ends each document, e.g. "<eos>"; null: the known one that the tokenizer marks as special."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """`model.data`: the corpus, its splits and its caches."""

    data_impl: DataImpl = key(identity="data")
    """Corpus: mmap (.bin/.idx files of `data_prefix`), text (`text_files`), stdlib (Python's own sources), mock."""
    data_prefix: list[Any] = key(
        aliases=["data_path"],
        identity="data",
        unread=[_with_data(DataImpl.mmap, instead="data=mmap, or leave data_prefix empty")],
    )
    """data_impl=mmap: paths or URLs (s3://, gs://, hf://, http://, https://) without .bin/.idx, or alternating weights
    and paths: [0.7,web,0.3,code]."""
    validation_prefix: list[Any] = key(
        before=[],
        identity="data",
        unread=[
            _with_data(DataImpl.mmap, instead="model.data.validation_prefix=[]"),
            unread_with(
                "trainer.limit_val_batches",
                0,
                instead="trainer.limit_val_batches=8, or model.data.validation_prefix=[]",
            ),
        ],
    )
    """data_impl=mmap: files to validate on, in the form of `data_prefix`, whose files are then all for training; empty:
    the validation split of `data_prefix`."""
    splits_string: str = key(identity="data", unread=[_WITH_RANDOM_TOKENS])
    """Proportions of documents for training, validation and test, e.g. "900,50,50"; each is a sample of each source."""
    text_files: list[str] = key(
        identity="data", unread=[_with_data(DataImpl.text, instead="data=text, or leave text_files empty")]
    )
    """data_impl=text: files, glob patterns or URLs (s3://, gs://, hf://, http://, https://) of .txt (one document per
    file), .jsonl or .json (one per line; these also with .gz, .zst or .bz2), .parquet and .arrow (one per row), folders
    of Hugging Face's save_to_disk (one per row), or alternating weights and patterns:
    [0.7,"web/*.jsonl",0.3,"code/*.parquet"]."""
    text_key: str = key(identity="data", unread=[_with_data(DataImpl.text)])
    """Field (.jsonl) or column (.parquet, .arrow) that holds the text; meta.text is the field text of meta."""
    temperature: float | None = key(
        above=0,
        use="1 (by size) or more",
        before=None,
        identity="data",
        unread=[_with_data(DataImpl.mmap, DataImpl.text, instead="model.data.temperature=null")],
    )
    """Weights the paths of `data_prefix` or `text_files` as sources by their tokens to the power of 1/temperature: 1 by
    size, more favors small ones; null: the weights that are given, or all paths as one source."""
    stages: list[str] = key(
        before=[],
        identity="data",
        unread=[_with_data(DataImpl.mmap, DataImpl.text, instead="model.data.stages=[]")],
    )
    """Parts of the run with their own weights for the paths of `data_prefix` or `text_files`: tokens, then weights by
    the sources' names, ["10e9 web=0.7 code=0.3","web=0.4 math=0.6"]; the last stage lasts to the end. In
    "10e9 seq_length=2048 web=1" each sample of encoder_seq_length tokens is trained on in pieces of 2,048."""
    max_epochs: float | None = key(above=0, use="4 or another", before=None, unread=[_WITH_RANDOM_TOKENS])
    """Refuse a run that would read any source more often than this; null: no bound."""
    cache_dir: str | None = key(unread=[_WITH_RANDOM_TOKENS])
    """Directory of tokenized corpora and index caches; null: $XDG_CACHE_HOME/gpt_pretrain or ~/.cache/gpt_pretrain."""
    num_dataset_builder_threads: int = key(minimum=1, largest=2**10, unread=[_WITH_RANDOM_TOKENS])
    """Threads that build the sample indices of several token files."""
    num_workers: int = key(minimum=0, largest=2**10)
    """Processes per rank that prepare batches in advance; 0: the training process prepares them."""
    eod_mask_loss: bool = key(identity="data")
    """Exclude the first token of each document, which nothing before it predicts, from the loss, as Megatron-LM does;
    the end-of-document token counts."""
    eod_mask_labels: bool = key(before=False, identity="data")
    """Exclude end-of-document tokens themselves from the loss: the model does not learn where documents end."""
    inter_document_masking: bool = key(
        before=False,
        identity="data",
        aliases=["reset_attention_mask", "reset_position_ids"],
        unread=[_WITH_RANDOM_TOKENS],
    )
    """Attention stays inside a document, and positions start again at 0 in each; a document that continues from the
    sample before starts at 0, too. Megatron-LM's --reset-attention-mask and --reset-position-ids in one."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """`model.optim.sched`: the learning rate schedule."""

    name: ScheduleName = key(aliases=["lr_decay_style"])
    """Decay after the warmup: constant, linear, cosine, wsd (warmup, stable, decay)."""
    warmup_steps: int | None = key(minimum=0, largest=2**31 - 1, aliases=["lr_warmup_iters"])
    """Optimizer steps of linear warmup from `init_lr` to `model.optim.lr`; null: a tenth of the decay's end, at most
    2,000."""
    warmup_tokens: int | None = key(minimum=0, before=None)
    """Tokens of the warmup, instead of warmup_steps. If one of the schedule's keys or trainer.max_tokens counts tokens,
    the rate follows tokens, and lengths in steps are those steps' tokens."""
    decay_steps: int | None = key(minimum=1, aliases=["lr_decay_iters"])
    """Step at which the rate reaches `min_lr`, warmup included; null: the end of the run."""
    decay_tokens: int | None = key(minimum=1, before=None)
    """Tokens after which the rate reaches `min_lr`, instead of decay_steps."""
    init_lr: float
    """Learning rate at step 0 of the warmup."""
    min_lr: float | None = key(unread=[_WITH_CONSTANT_RATE])
    """Learning rate after the decay; null: a tenth of `model.optim.lr`."""
    wsd_decay_steps: int | None = key(minimum=1, unread=[_with_wsd(f"{_SCHEDULE}=wsd, or {{key}}=null")])
    """name=wsd: steps of the final decay; wsd requires this or wsd_decay_tokens, others refuse both."""
    wsd_decay_tokens: int | None = key(minimum=1, before=None, unread=[_with_wsd(f"{_SCHEDULE}=wsd, or {{key}}=null")])
    """name=wsd: tokens of the final decay, instead of wsd_decay_steps."""
    wsd_decay_style: WsdDecay = key(unread=[_with_wsd()])
    """name=wsd: shape of the final decay."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`model.optim`: the optimizer and its schedule."""

    name: OptimizerName = key(absent=_ABSENT)
    """The optimizer; adam is AdamW."""
    lr: float = key(above=0, use="3e-4 or another", aliases=["learning_rate"], core=["OptimizerConfig"])
    """Peak learning rate."""
    decoupled_lr: float | None = key(above=0, use="3e-4 or another, or null", before=None, core=["OptimizerConfig"])
    """Peak learning rate of word embeddings and LM head, which decays to a tenth; null: `lr`, and `sched.min_lr`."""
    betas: list[float] = key(aliases=["adam_beta1", "adam_beta2"])
    """The two exponential decay rates of adam and lion."""
    eps: float = key(above=0, use="1e-8 or another", core=["OptimizerConfig.adam_eps"])
    """Adam's denominator term."""
    momentum: float = key(minimum=0, below=1, use="0.9 or another", core=["OptimizerConfig.sgd_momentum"])
    """SGD's momentum."""
    weight_decay: float = key(minimum=0, core=["OptimizerConfig"])
    """Weight decay, decoupled with adam (AdamW); biases and norm weights are exempt, as in megatron-core."""
    ema_decay: float | None = key(above=0, below=1, use="0.999 or another, or null", before=None)
    """Average the weights over steps: the share of the old average that a step keeps. The average is validated beside
    the weights, saved with them, and exported by weights=ema; null: none is kept."""
    use_precision_aware_optimizer: bool = key(before=False, planned=True)
    """Adam keeps masters and moments in the types that the next four keys set, and reads gradients in the type of their
    reduction (`model.grad_reduce_in_fp32`). Needs BF16 weights and the distributed optimizer. See docs/layouts.md."""
    main_params_dtype: MainParamsDtype = key(before=MainParamsDtype.fp32, planned=True, unread=[_WITHOUT_SMALL_STATES])
    """Type of the masters: fp32, or fp16 with stochastic rounding of updates."""
    store_param_remainders: bool = key(before=True, planned=True, unread=[_WITH_PLAIN_STATES, _WITH_WHOLE_MASTERS])
    """Store only the 16 bits of an fp32 master that its BF16 weight lacks: 2 bytes instead of 4, without loss."""
    exp_avg_dtype: MomentDtype = key(before=MomentDtype.fp32, planned=True, unread=[_WITHOUT_SMALL_STATES])
    """Type of Adam's first moment: fp32, bf16, fp16 or fp8."""
    exp_avg_sq_dtype: MomentDtype = key(before=MomentDtype.fp32, planned=True, unread=[_WITHOUT_SMALL_STATES])
    """Type of Adam's second moment: fp32, bf16 or fp16."""
    muon_momentum: float = _muon_key(minimum=0, below=1, use="0.95 or another", before=0.95)
    """Muon's momentum: the share of the old mean of gradients that a step keeps."""
    muon_nesterov: bool = _muon_key(before=True)
    """Muon looks one step ahead: it orthogonalizes the momentum mixed once more with the gradient."""
    muon_split_qkv: bool = _muon_key(before=True)
    """Muon orthogonalizes queries, keys and values as three matrices, not the one matrix that they are stored in."""
    muon_num_ns_steps: int = _muon_key(minimum=1, largest=100, before=5)
    """Iterations of Newton-Schulz."""
    muon_coefficient_type: MuonCoefficientType = _muon_key(before=MuonCoefficientType.quintic)
    """Coefficients of Newton-Schulz iteration: quintic and simple are made for 5 iterations, aol for 4, cans for 5 or
    more, polar_express for 5 to 8, deepseekv4 for 10."""
    muon_scale_mode: MuonScaleMode = _muon_key(before=MuonScaleMode.spectral)
    """What an orthogonalized matrix [out, in] is multiplied by: spectral √max(out, in), unit_rms_norm √(out / in),
    shape_scaling √max(1, out / in)."""
    muon_extra_scale_factor: float = _muon_key(above=0, use="0.2 or another", before=0.2)
    """A factor beside muon_scale_mode; 0.2 with spectral gives updates the size of Adam's, so that `lr` serves both."""
    muon_fp32_matmul_prec: MuonMatmulPrec = _muon_key(before=MuonMatmulPrec.medium)
    """Numbers of Newton-Schulz iteration: medium (BF16), high (TF32), highest (fp32)."""
    muon_tp_mode: MuonTpMode = _muon_key(before=MuonTpMode.duplicated)
    """How matrices that tensor parallelism cuts are orthogonalized: duplicated (whole, on every rank), distributed
    (whole, the ranks sum products), blockwise (each rank's block by itself: another update for another layout)."""
    sched: ScheduleConfig
