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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from gpt_pretrain.config.choices import CrossEntropyFusion, CudaGraphImpl, MomentDtype, Precision
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.install import how_to_install
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.spec.kernels import plan_kernels
from gpt_pretrain.spec.multicast import multicast_problems, multicast_variables
from gpt_pretrain.spec.obstacles import WIDEST, WIDEST_ON_BLACKWELL
from gpt_pretrain.spec.platform_fp8 import (
    describe_gpu,
    fp8_platform_problems,
    has_fp8,
    is_hopper,
    recipe_variables,
)

if TYPE_CHECKING:
    import torch

# The first that was tried, and what of it `megatron.flash_attention` calls.
_OLDEST_FLASH_ATTENTION = "4.0.0b36"
_FLASH_ATTENTION = "flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"
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
    flash_attention: str | None
    """Version of FlashAttention-4, if it imports on this machine."""
    flash_attention_problem: str | None
    """Why FlashAttention-4, though installed, is not used."""
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


def _why_it_does_not_load(module: str, *names: str) -> str | None:
    """What an installed module's import, or that of names from it, ended with; None where all load."""
    try:
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name)
    # Shared libraries and compilers that do not fit the driver or PyTorch fail in as many ways as there are of them
    # (OSError, RuntimeError, AssertionError), each told to the user.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _transformer_engine() -> tuple[str | None, str | None]:
    if importlib.util.find_spec("transformer_engine") is None:
        return None, None
    problem = _why_it_does_not_load("transformer_engine.pytorch")
    return (importlib.metadata.version("transformer_engine") if problem is None else None), problem


def flash_attention() -> tuple[str | None, str | None]:
    """The fields of `Platform` about FlashAttention-4: its version, or why it is not used where it is installed."""
    try:
        # The distribution's: the module has none, and flash_attn beside it is another package's.
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    if Version(version) < Version(_OLDEST_FLASH_ATTENTION):
        return None, f"{_OLDEST_FLASH_ATTENTION} or newer is needed, and {version} is installed"
    problem = _why_it_does_not_load(*_FLASH_ATTENTION)
    return (version if problem is None else None), problem


def apex_parts() -> dict[str, bool]:
    """The fields of `Platform` about apex: which of its parts load."""
    return {field: all(map(_imports, modules)) for field, modules in _APEX_PARTS.items()}


def detect_platform() -> Platform:
    """Looks up what is there; imports Transformer Engine, FlashAttention-4 and apex where they are installed."""
    import torch

    cuda = torch.cuda.is_available()
    te_version, te_problem = _transformer_engine() if cuda else (None, None)
    flash_version, flash_problem = flash_attention() if cuda else (None, None)
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
        flash_attention=flash_version,
        flash_attention_problem=flash_problem,
        **(apex_parts() if cuda else dict.fromkeys(_APEX_PARTS, False)),
    )


def platform_notes(config: Config, platform: Platform) -> list[str]:
    """What the user should know about this machine before the run starts."""
    notes = []
    model = config.model
    unasked = model.transformer_engine is None and not model.fp8_emulate
    if platform.cuda and platform.transformer_engine is None and unasked:
        why = platform.transformer_engine_problem or f"it is not installed; {how_to_install('te')}"
        notes.append(f"This GPU runs megatron-core's local layers, without Transformer Engine: {why}")
    if platform.flash_attention_problem is not None and model.use_flash_attention is None:
        mended = replace(platform, flash_attention=_OLDEST_FLASH_ATTENTION)
        if plan_kernels(config, mended).use_flash_attention:
            notes.append(f"Attention is Transformer Engine's, not FlashAttention-4: {platform.flash_attention_problem}")
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


def _why_no_flash_attention(config: Config, platform: Platform) -> str | None:
    """Why FlashAttention-4, which was asked for, cannot be used."""
    capability = platform.compute_capability
    if capability is None:
        return "there is no CUDA device"
    if platform.transformer_engine is None:
        return "it takes the place of Transformer Engine's attention"
    if not (9, 0) <= capability < (11, 0):
        return f"it is for compute capability 9.x and 10.x here, and this is {describe_gpu(platform)}"
    width = kv_channels(config.model)
    # flash_attn.cute.interface._validate_head_dims.
    if capability >= (10, 0) and WIDEST_ON_BLACKWELL < width < WIDEST:
        return f"on {describe_gpu(platform)} it takes heads of up to {WIDEST_ON_BLACKWELL} channels, not of {width}"
    if platform.flash_attention is None:
        return platform.flash_attention_problem or f"it is not installed; {how_to_install('flash')}"
    return None


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
    problems += [
        f"model.{key}=true needs Transformer Engine layers; use null or false"
        for key in ("apply_rope_fusion", "fused_single_qkv_rope", "moe_grouped_gemm")
        if getattr(model, key) and not te
    ]
    if model.use_flash_attention and (why := _why_no_flash_attention(config, platform)) is not None:
        problems.append(
            f"model.use_flash_attention=true, but FlashAttention-4 cannot be used here: {why}. Use null or false"
        )
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
