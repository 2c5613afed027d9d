"""One enum for each key of `config.schema` that has choices."""

from enum import Enum
from pathlib import Path
from pkgutil import iter_modules
from typing import Self

AUTO = "auto"
"""The entry of `model.fp8_exclude` that stands for the layers too small to gain by FP8."""


class OpenChoice(Enum):
    """A choice to which others add names: extensions (`gpt_pretrain.extend`), and the recipes of FP8."""

    @classmethod
    def add(cls, name: str) -> Self:
        """A new member after the others, found and listed like them."""
        member = object.__new__(cls)
        member._name_ = member._value_ = name
        cls._member_map_[name] = cls._value2member_map_[name] = member
        cls._member_names_.append(name)
        return member

    @classmethod
    def add_modules(cls, folder: str) -> None:
        """A member for each module in a folder of this package, of the module's name, unless there is one."""
        for module in iter_modules([str(Path(__file__).parents[1] / folder)]):
            if module.name not in cls.__members__:
                cls.add(module.name)


class Normalization(Enum):
    """Normalization layer; the values are megatron-core's names."""

    layernorm = "LayerNorm"
    rmsnorm = "RMSNorm"


class Activation(Enum):
    """MLP activation. `gelu` is the exact (erf) form, `gelu_tanh` GPT-2's tanh approximation, `swiglu` gated SiLU.

    `squared_relu` is Primer's (So et al. 2021, arXiv 2109.08668).
    """

    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    swiglu = "swiglu"
    squared_relu = "squared_relu"


class PositionEmbedding(Enum):
    """Position encoding: a learned table added to the embeddings, or rotary embeddings."""

    learned_absolute = "learned_absolute"
    rope = "rope"


class LayerName(OpenChoice):
    """The transformer layer."""

    gpt = "gpt"


class LossName(OpenChoice):
    """The training loss of a token."""

    cross_entropy = "cross_entropy"


class MoeLoadBalancing(Enum):
    """Tokens that the auxiliary loss of a mixture of experts balances; the names are megatron-core's."""

    aux_loss = "aux_loss"
    seq_aux_loss = "seq_aux_loss"
    none = "none"


class MoeTokenDispatcher(Enum):
    """How tokens reach the ranks that hold their experts; the names are megatron-core's."""

    alltoall = "alltoall"
    allgather = "allgather"


class MoeGroupedKernel(Enum):
    """What multiplies the rows of a rank's experts: cuBLAS, expert by expert, or one Triton kernel for all."""

    transformer_engine = "transformer_engine"
    triton = "triton"


class CrossEntropyFusion(Enum):
    """Fused cross entropy; the names are megatron-core's.

    `native`: compiled, from the logits of all tokens. `linear`: from the hidden states, including the LM head, a few
    thousand tokens at a time.
    """

    native = "native"
    linear = "linear"


class CudaGraphImpl(Enum):
    """What records CUDA graphs; the names are megatron-core's. `local`: its own, one per layer and direction."""

    none = "none"
    local = "local"


class ShardingStrategy(Enum):
    """What data-parallel ranks share out, by megatron-core's names: optimizer states and gradients, or weights too."""

    optim_grads = "optim_grads"
    optim_grads_params = "optim_grads_params"


class OuterSharding(Enum):
    """What groups of ranks that each share a model out (HSDP) share with each other, by megatron-core's names."""

    no_shard = "no_shard"
    optim = "optim"


class RecomputeGranularity(Enum):
    """What is recomputed in the backward pass instead of kept: core attention alone, or whole layers."""

    selective = "selective"
    full = "full"


class RecomputeMethod(Enum):
    """With `full`: checkpoint every n layers (`uniform`) or the first n layers of each stage (`block`)."""

    uniform = "uniform"
    block = "block"


class Precision(Enum):
    """Parameter and activation type. `auto` is bf16 on a GPU and fp32 without one; the header says which."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


class Fp8Backend(Enum):
    """The library whose layers multiply in FP8: Transformer Engine, or TorchAO's float8 training."""

    transformer_engine = "transformer_engine"
    torchao = "torchao"


class Fp8RecipeName(OpenChoice):
    """How FP8 tensors are scaled; the names are megatron-core's and TorchAO's, one for each record of `config.recipes`.

    `delayed`: one scale per tensor, from the largest values of past steps. `tensorwise`: one per tensor, from itself.
    `blockwise`: one per 1×128 values of activations and gradients and per 128×128 of weights, powers of two.
    `mxfp8`: one per 32 values, powers of two; needs Blackwell. `rowwise`: one per row or column along which a product
    sums, powers of two. `rowwise_with_gw_hp`: the same, but one for the whole weight in dgrad, and weight gradients
    outside FP8. TorchAO has these two and tensorwise.
    """


class AmaxComputeAlgo(Enum):
    """Which amax of the history sets a delayed scale."""

    max = "max"
    most_recent = "most_recent"


class Fp8ProofMode(Enum):
    """What a proof of FP8 that fails does."""

    stop = "stop"
    warn = "warn"
    never = "never"


# The functional form, because `continue` is a keyword of Python.
OnSaveError = Enum("OnSaveError", ["stop", "continue"])


class PlanGpu(Enum):
    """A GPU that `python -m gpt_pretrain.plan` knows: NVIDIA H100 (SXM), H200 or B200."""

    h100 = "h100"
    h200 = "h200"
    b200 = "b200"


class OptimizerName(OpenChoice):
    """Optimizer; `adam` is decoupled (AdamW), `muon` updates the layers' matrices and leaves the rest to Adam."""

    adam = "adam"
    muon = "muon"


class MuonCoefficientType(Enum):
    """Coefficients of Newton-Schulz iteration, by their names in emerging-optimizers."""

    simple = "simple"
    quintic = "quintic"
    polar_express = "polar_express"
    cans = "cans"
    aol = "aol"
    deepseekv4 = "deepseekv4"


class MuonScaleMode(Enum):
    """What an orthogonalized matrix is multiplied by."""

    spectral = "spectral"
    unit_rms_norm = "unit_rms_norm"
    shape_scaling = "shape_scaling"


class MuonMatmulPrec(Enum):
    """Numbers of Newton-Schulz iteration: BF16 (medium), TF32 where the GPU has it (high), fp32 (highest)."""

    medium = "medium"
    high = "high"
    highest = "highest"


class MuonTpMode(Enum):
    """How matrices are orthogonalized that tensor parallelism cuts."""

    duplicated = "duplicated"
    distributed = "distributed"
    blockwise = "blockwise"


class MainParamsDtype(Enum):
    """Type of the optimizer's master weights."""

    fp32 = "fp32"
    fp16 = "fp16"


class MomentDtype(Enum):
    """Type of Adam's moments; 256 values of `fp16` or `fp8` (E4M3, first moment only) share a power-of-two scale."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class ScheduleName(Enum):
    """Learning rate decay after the warmup; the values are megatron-core's names."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "WSD"


class WsdDecay(Enum):
    """Shape of the decay phase of `wsd`."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


class DataImpl(OpenChoice):
    """Where tokens come from: indexed files, the user's text, Python's standard library, or random tokens."""

    mmap = "mmap"
    text = "text"
    mock = "mock"

    @property
    def files_key(self) -> str | None:
        """The key of `model.data` that names its files; only this kind reads it. None if it has none."""
        return {DataImpl.mmap: "data_prefix", DataImpl.text: "text_files"}.get(self)

    @property
    def has_tokens(self) -> bool:
        """Whether it holds token ids; text needs a tokenizer."""
        return self in (DataImpl.mmap, DataImpl.mock)


class TokenizerLibrary(OpenChoice):
    """`bpe` trains a byte-level BPE on the corpus, `file` reads a `tokenizer.json`, `none` takes token ids as given."""

    bpe = "bpe"
    file = "file"
    none = "none"


OptimizerName.add_modules("run/optimizers")
DataImpl.add_modules("data/sources")
