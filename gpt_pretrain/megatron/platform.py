"""What this machine offers to the run: GPU, Transformer Engine, apex, and what is refused without them.

megatron-core picks its fused kernels by what it can import. `detect_platform` looks the same things up once, so that
null in the configuration ("where it is there") becomes a value that the header prints, and an explicit `true` that
cannot be met is an error and not a slower run. torch is imported by what asks the machine only: what follows from a
`Platform` is told without it, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt_pretrain.config.choices import (
    CrossEntropyFusion,
    CudaGraphImpl,
    Fp8RecipeName,
    MomentDtype,
    PositionEmbedding,
    Precision,
)
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.fp8 import fp8_settings
from gpt_pretrain.config.install import how_to_install
from gpt_pretrain.config.launch import Launch
from gpt_pretrain.config.rules_fused_kernels import activation_cast_obstacles, embedding_gradient_obstacles
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.platform_fp8 import (
    describe_gpu,
    fp8_platform_problems,
    has_fp8,
    is_hopper,
    recipe_variables,
)
from gpt_pretrain.megatron.platform_graphs import plan_graphs
from gpt_pretrain.megatron.platform_multicast import multicast_problems, multicast_variables

if TYPE_CHECKING:
    import torch

# What each part of apex needs: its Python module, where it has one, and its compiled kernels.
_APEX_PARTS = {
    "apex_layer_norm": ("apex.normalization", "fused_layer_norm_cuda"),
    "apex_optimizer": ("apex.optimizers", "amp_C"),
    "apex_softmax": ("scaled_upper_triang_masked_softmax_cuda",),
    "apex_weight_gradient": ("fused_weight_gradient_mlp_cuda",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Hardware and optional libraries of this process."""

    cuda: bool
    """A CUDA device is there."""
    num_gpus: int
    """CUDA devices that this process sees."""
    device_name: str
    """Name of the GPU, or of the processor's kind."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability of the GPU: (9, 0) is Hopper; None without one."""
    torch_cuda: str | None
    """CUDA version that PyTorch was built for: "13.0"; None without a GPU."""
    transformer_engine: str | None
    """Version of Transformer Engine, if it imports on this machine."""
    transformer_engine_problem: str | None
    """Why Transformer Engine, though installed, does not import."""
    recipe_variables: Mapping[str, str]
    """Environment variables that are set and could change what an FP8 recipe computes."""
    multicast_variables: Mapping[str, str]
    """Environment variables that are set and say whether libraries may use NVLink multicast."""
    apex_layer_norm: bool
    """apex's fused layer norm."""
    apex_optimizer: bool
    """apex's fused Adam and multi-tensor kernels; TE brings its own."""
    apex_softmax: bool
    """The fused scale-mask-softmax kernels for layers without TE."""
    apex_weight_gradient: bool
    """apex's GEMM that accumulates weight gradients into the main gradient."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")


def _imports(module: str) -> bool:
    """Whether a module is there and loads; a compiled extension built for another torch is there and does not."""
    if importlib.util.find_spec(module.split(".", 1)[0]) is None:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _transformer_engine() -> tuple[str | None, str | None]:
    if importlib.util.find_spec("transformer_engine") is None:
        return None, None
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Loading TE's shared libraries fails in many ways (OSError, RuntimeError, AssertionError), each told to the user.
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return importlib.metadata.version("transformer_engine"), None


def apex_parts() -> dict[str, bool]:
    """The fields of `Platform` about apex: which of its parts load."""
    return {field: all(map(_imports, modules)) for field, modules in _APEX_PARTS.items()}


def detect_platform() -> Platform:
    """Looks up what is there; imports Transformer Engine and apex where they are installed."""
    import torch

    cuda = torch.cuda.is_available()
    te_version, te_problem = _transformer_engine() if cuda else (None, None)
    return Platform(
        cuda=cuda,
        num_gpus=torch.cuda.device_count() if cuda else 0,
        device_name=torch.cuda.get_device_name() if cuda else "CPU",
        compute_capability=torch.cuda.get_device_capability() if cuda else None,
        torch_cuda=torch.version.cuda if cuda else None,
        transformer_engine=te_version,
        transformer_engine_problem=te_problem,
        recipe_variables=recipe_variables(),
        multicast_variables=multicast_variables(),
        **(apex_parts() if cuda else dict.fromkeys(_APEX_PARTS, False)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which implementation each part of the model runs on: the configuration's nulls, resolved for this machine."""

    transformer_engine: bool
    bias_activation_fusion: bool
    activation_cast_fusion: bool
    bias_dropout_add_fusion: bool
    masked_softmax_fusion: bool
    apply_rope_fusion: bool
    gradient_accumulation_fusion: bool
    embedding_gradient_fusion: bool
    cross_entropy_loss_fusion: CrossEntropyFusion | None
    """None: megatron-core's loss of separate operations."""
    moe_grouped_gemm: bool
    cuda_graph_impl: CudaGraphImpl | None
    """None: no CUDA graphs."""


def plan_kernels(config: Config, platform: Platform, world_size: int = 1) -> Kernels:
    """Resolves each `null` of the kernel keys; explicit values stand.

    Args:
        config: The configuration.
        platform: The machine.
        world_size: Processes of the run; one where a model is built alone.
    """
    model = config.model
    # Emulated FP8 is computed by local layers, also where TE is there.
    otherwise_te = platform.transformer_engine is not None and not model.fp8_emulate

    def choose(value: bool | None, otherwise: bool) -> bool:
        return otherwise if value is None else value

    te = choose(model.transformer_engine, otherwise_te)
    graphs = plan_graphs(config, world_size, transformer_engine=te)
    settings = fp8_settings(model)
    # Emulated layers compute their weight gradients themselves.
    accumulates = choose(model.gradient_accumulation_fusion, platform.cuda and not model.fp8_emulate)
    tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
    rows = model.vocab_size // model.tensor_model_parallel_size
    return Kernels(
        transformer_engine=te,
        # These two are compiled by torch.compile: worth it on a GPU, minutes of C++ compilation without one.
        # The fused GELU adds the bias itself and computes the tanh form; SwiGLU has no such limits.
        bias_activation_fusion=choose(
            model.bias_activation_fusion,
            platform.cuda
            and (model.activation.value == "swiglu" or (model.activation.value == "gelu_tanh" and model.bias)),
        ),
        # With tensorwise scaling the losses of 200 steps have been 0.55% apart (benchmarks/llama3_8b_leads_*.md).
        activation_cast_fusion=choose(
            model.activation_cast_fusion,
            te
            and is_hopper(platform)
            and settings is not None
            and settings.recipe is Fp8RecipeName.delayed
            and graphs is None
            and not any(activation_cast_obstacles(model, sizes_known=True)),
        ),
        bias_dropout_add_fusion=choose(model.bias_dropout_add_fusion, platform.cuda),
        masked_softmax_fusion=choose(model.masked_softmax_fusion, platform.apex_softmax and not te),
        apply_rope_fusion=choose(
            model.apply_rope_fusion, te and model.position_embedding_type is PositionEmbedding.rope
        ),
        gradient_accumulation_fusion=accumulates,
        # With more tokens in a microbatch, the table is not what costs: 16,384 tokens and 51,200 rows gain, 131,072 and
        # 50,304 lose, and nothing between them was measured (benchmarks/llama3_8b_leads_*.md).
        embedding_gradient_fusion=choose(
            model.embedding_gradient_fusion,
            platform.cuda
            and accumulates
            and graphs is None
            and 3 * tokens <= rows
            and not any(embedding_gradient_obstacles(config)),
        ),
        cross_entropy_loss_fusion=_plan_loss(config, platform),
        moe_grouped_gemm=choose(model.moe_grouped_gemm, te and model.num_moe_experts is not None),
        cuda_graph_impl=graphs,
    )


def _plan_loss(config: Config, platform: Platform) -> CrossEntropyFusion | None:
    fused, implementation = config.model.cross_entropy_loss_fusion, config.model.cross_entropy_fusion_impl
    if fused is None:
        # Runs that are deterministic or in fp32 are there to be compared with: they keep the plain loss.
        to_compare = config.trainer.deterministic or config.trainer.precision is Precision.fp32
        fused = implementation is not None or (platform.cuda and not to_compare)
    return (implementation or CrossEntropyFusion.linear) if fused else None


def fused_parts(kernels: Kernels) -> str:
    """The keys of `Kernels` that are on, or what they are, in a line."""
    values = {name: getattr(kernels, name) for name in Kernels.__dataclass_fields__ if name != "transformer_engine"}
    active = [name if value is True else f"{name} ({value.value})" for name, value in values.items() if value]
    return ", ".join(active) or "none"


def describe_kernels(kernels: Kernels, platform: Platform) -> Mapping[str, str]:
    """One line per part of the model for the run's header."""
    layers = (
        f"Transformer Engine {platform.transformer_engine}" if kernels.transformer_engine else "megatron-core local"
    )
    apex = [
        name.removeprefix("apex_").replace("_", " ")
        for name in Platform.__dataclass_fields__
        if name.startswith("apex_") and getattr(platform, name)
    ]
    return {
        "layers": layers,
        "fused": fused_parts(kernels),
        "apex": ", ".join(apex) or "not installed: nothing is lost but speed",
    }


def platform_notes(config: Config, platform: Platform) -> list[str]:
    """What the user should know about this machine before the run starts."""
    notes = []
    model = config.model
    unasked = model.transformer_engine is None and not model.fp8_emulate
    if platform.cuda and platform.transformer_engine is None and unasked:
        why = platform.transformer_engine_problem or f"it is not installed; {how_to_install('te')}"
        notes.append(f"This GPU runs megatron-core's local layers, without Transformer Engine: {why}")
    if model.fp8_emulate and platform.transformer_engine is not None and has_fp8(platform):
        notes.append(
            "FP8 is emulated on a GPU that multiplies in FP8 itself, and slower than BF16; leave "
            "model.fp8_emulate out to use the hardware"
        )
    return notes


def why_no_transformer_engine(platform: Platform) -> str:
    """Why Transformer Engine cannot be used, asked where it cannot."""
    return platform.transformer_engine_problem or (
        f"it is not installed; {how_to_install('te')}" if platform.cuda else "there is no CUDA device"
    )


def _loss_problems(config: Config, platform: Platform) -> list[str]:
    if config.model.cross_entropy_fusion_impl is not CrossEntropyFusion.native:
        return []
    native = "model.cross_entropy_fusion_impl=native"
    if not platform.cuda:
        return [f"{native} is compiled for a GPU, and there is no CUDA device; use null or linear"]
    if config.trainer.precision is Precision.fp32:
        return [f"{native} rounds the gradient of the logits to BF16, and trainer.precision=fp32; use null or linear"]
    return []


def _optimizer_problems(config: Config, platform: Platform) -> list[str]:
    optim = config.model.optim
    if not optim.use_precision_aware_optimizer:
        return []
    if not platform.cuda and config.trainer.precision is Precision.auto:
        return [
            "model.optim.use_precision_aware_optimizer=true is for weights in BF16, and trainer.precision=auto is fp32 "
            "without a CUDA device; use trainer.precision=bf16, or false"
        ]
    if platform.cuda and optim.exp_avg_dtype is MomentDtype.fp8 and not has_fp8(platform):
        # What Triton can read and write.
        return [
            "model.optim.exp_avg_dtype=fp8 needs a GPU with E4M3 (compute capability 8.9 or newer), and this is "
            f"{describe_gpu(platform)}; use fp16, bf16 or fp32"
        ]
    return []


def check_platform(config: Config, platform: Platform, launch: Launch) -> None:
    """Refuses explicit settings that this machine cannot meet.

    Raises:
        ConfigError: Each such setting, its reason and the way out.
    """
    model = config.model
    problems: list[str] = []
    no_te = why_no_transformer_engine(platform)
    kernels = plan_kernels(config, platform, launch.world_size)
    te = kernels.transformer_engine
    problems += fp8_platform_problems(config, platform, no_te)
    if model.transformer_engine and platform.transformer_engine is None:
        problems.append(
            f"model.transformer_engine=true, but Transformer Engine cannot be used here: {no_te}. "
            "Use null (where it is there) or false"
        )
    elif model.context_parallel_size > 1 and not te:
        problems.append(
            f"model.context_parallel_size={model.context_parallel_size} needs Transformer Engine's attention: "
            f"{no_te if platform.transformer_engine is None else 'model.transformer_engine=false excludes it'}. Use 1"
        )
    if model.apply_rope_fusion and not te:
        problems.append("model.apply_rope_fusion=true needs Transformer Engine layers; use null or false")
    if model.masked_softmax_fusion and (te or not platform.apex_softmax):
        why = "Transformer Engine layers have their own attention" if te else "apex's softmax kernels are not installed"
        problems.append(f"model.masked_softmax_fusion=true has no effect: {why}; use null or false")
    problems += [
        f"model.{setting} needs Transformer Engine layers: {no_te}; use {instead}"
        for setting, asked, instead in (
            ("cuda_graph_impl=local", model.cuda_graph_impl is CudaGraphImpl.local, "null or none"),
            ("tp_comm_overlap=true", model.tp_comm_overlap, "false"),
        )
        if asked and platform.transformer_engine is None
    ]
    if model.activation_cast_fusion and platform.cuda and not is_hopper(platform):
        problems.append(
            "model.activation_cast_fusion=true writes what Hopper's products read, and this is "
            f"{describe_gpu(platform)}; use null or false"
        )
    if kernels.embedding_gradient_fusion and not kernels.gradient_accumulation_fusion:
        problems.append(
            "model.embedding_gradient_fusion=true needs model.gradient_accumulation_fusion=true, which null leaves out "
            "here; set it, or use null or false"
        )
    problems += multicast_problems(config, platform)
    if model.moe_grouped_gemm and not te:
        problems.append("model.moe_grouped_gemm=true needs Transformer Engine layers; use null or false")
    if not platform.cuda:
        problems += [
            f"model.{key}=true is compiled for a GPU, and there is no CUDA device; use null or false"
            for key in ("bias_activation_fusion", "bias_dropout_add_fusion")
            if getattr(model, key)
        ]
    problems += _loss_problems(config, platform)
    if te and config.trainer.precision is Precision.fp32:
        problems.append(
            "trainer.precision=fp32 with Transformer Engine layers, which multiply in TF32; use bf16, or "
            "model.transformer_engine=false"
        )
    problems += _optimizer_problems(config, platform)
    own_gpu = launch.launcher == "srun" and platform.num_gpus == 1
    if platform.cuda and launch.local_rank >= platform.num_gpus and not own_gpu:
        problems.append(
            f"the launcher started {launch.local_world_size} processes on this node, which has "
            f"{platform.num_gpus} GPU(s); start one per GPU"
        )
    if problems:
        raise ConfigError(problems)
