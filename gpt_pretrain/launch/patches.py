"""Every change to another library's globals: what is replaced, why, and the upstream version that makes it unnecessary.

The replacements live with their subjects; `patch` puts them in place, or `patched` for a while. Nothing else in the
package assigns to what it imports from another library. If a library no longer has the patched name, that is an error
before the run starts. When raising a library's version, read the records' `until`.

One change to torch replaces no attribute and is not listed: without a GPU, `cpu.py` enters a `TorchFunctionMode`.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

type _Parameters = tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """Names of one module or class that are replaced together."""

    place: str
    """The module, or "module:Class"."""
    names: Mapping[str, _Parameters]
    """Each name with the parameters of its Python function; None for anything else."""
    absent_without: str | None = None
    """A library without which the names do not exist until they are patched."""
    what: str
    why: str
    until: str
    """The condition that ends the patch."""

    def owner(self) -> Any:
        """The module or class, imported."""
        module, _, name = self.place.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


def patch(record: Patch, **values: Any) -> None:
    """Replaces names of a record for the life of the process; a sweep's jobs repeat it with the same values.

    Raises:
        RuntimeError: The installed library lacks the name.
    """
    owner = record.owner()
    for name, value in values.items():
        _check(record, owner, name)
        setattr(owner, name, value)


@contextmanager
def patched(record: Patch, **values: Any) -> Iterator[None]:
    """Replaces names of a record, like `patch`, while the context lasts."""
    owner = record.owner()
    before = {}
    for name in values:
        _check(record, owner, name)
        # Not getattr, which would unwrap static and class methods.
        before[name] = vars(owner)[name]
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def hide_libraries(*names: str) -> None:
    """Makes later imports of these libraries fail, unless they are imported already (`CPU_LIBRARIES`)."""
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes an import fail


def _check(record: Patch, owner: Any, name: str) -> None:
    assert name in record.names, f"launch/patches.py does not list {record.place}.{name}"
    if not hasattr(owner, name) and record.absent_without is None:
        raise RuntimeError(
            f"{record.place} has no {name}, which is replaced because {record.why}; install the versions of "
            "constraints.txt, or adapt gpt_pretrain/launch/patches.py"
        )


def _without_cuda(place: str, names: Mapping[str, _Parameters], what: str) -> Patch:
    return Patch(
        place=place,
        names=names,
        what=what,
        why="megatron-core 0.19 calls CUDA on every machine, and this one has no CUDA device",
        until="megatron-core asks for its device instead of naming CUDA",
    )


CPU_DEVICE = _without_cuda(
    "torch.cuda",
    {
        "current_device": (),
        "Event": None,
        "Stream": None,
        "current_stream": ("device",),
        "default_stream": ("device",),
        "stream": ("stream",),
        "synchronize": ("device",),
        "empty_cache": (),
        "get_rng_state": ("device",),
        "set_rng_state": ("new_state", "device"),
        "manual_seed": ("seed",),
    },
    "device, streams and random states answer for the CPU",
)
CPU_TENSOR = _without_cuda("torch:Tensor", {"record_stream": None}, "memory belongs to no stream")
CPU_RANDOM_STATE = _without_cuda(
    "torch.cuda.random", {"get_rng_state": ("device",)}, "the random state is that of the CPU generator"
)
CPU_TRACKED_STATE = _without_cuda(
    "megatron.core.tensor_parallel.random",
    {"_set_cuda_rng_state": ("new_state", "device", "graph_safe")},
    "the tracker of dropout's random states switches the CPU generator",
)
CPU_RECOMPUTATION = _without_cuda(
    "megatron.core.tensor_parallel.random:CheckpointFunction",
    {"backward": ("ctx", "args")},
    "recomputation enters its own function mode: torch disables a mode in its handler, where backward passes run",
)
CPU_GROUPS = Patch(
    place="torch.distributed.distributed_c10d",
    names={"ProcessGroupGloo": None},
    what="all groups of a process share one message thread",
    why="torch 2.11 starts a thread per gloo group that polls 100 times a second, idle or not: for megatron-core's 20 "
    "groups that took 2% of a core on each rank and slowed the others",
    until="torch passes a group's options to ProcessGroupGloo, or gloo's threads wait for messages",
)
CPU_DISPATCHER = _without_cuda(
    "megatron.core.transformer.moe.token_dispatcher",
    {"maybe_move_tensor_to_cpu": ("tensor", "as_numpy", "record_stream")},
    "token counts, which are on the CPU already, become the numbers that collectives take",
)
CPU_GATHER = Patch(
    place="megatron.core.distributed.param_and_grad_buffer",
    names={"dist_all_gather_func": None},
    what="parameters are gathered as bytes",
    why="gloo assumes one type for all tensors of a call (torch 2.11): with FP8 and BF16 parameters it silently wrote "
    "codes as BF16 numbers",
    until="torch's ProcessGroupGloo.allgather_into_tensor_coalesced takes several types, or refuses them",
)
CPU_LIBRARIES = Patch(
    place="sys",
    names={"modules": None},
    what="Transformer Engine and apex do not import (hide_libraries)",
    why="megatron-core uses their optimizers and norms, which are CUDA kernels, wherever they import",
    until="megatron-core's caller can choose the implementations",
)

COMPILED_SHAPES = Patch(
    place="torch._dynamo.config",
    names={"recompile_limit": None},
    what="one function may be compiled for 64 shapes instead of 8",
    why="TorchAO's casts and products are one function each, and a model has more than 8 tensor shapes",
    until="torch.compile takes the limit as an argument",
)
COMPILED_GRAPHS = Patch(
    place="torch.compiler.config",
    names={"cache_key_tag": None},
    what="the key of torch.compile's cached graphs names the CPU's instruction set",
    why="torch 2.11 caches C++ for one instruction set under a key without it: with ATEN_CPU_CAPABILITY lowered, or a "
    "cache shared by unlike hosts, compiling it for another set fails (at::vec has not been declared) or reads vectors "
    "of another width",
    until="torch._inductor.codecache.FxGraphHashDetails has the instruction set",
)

GRADIENT_NORM = Patch(
    place="megatron.core.optimizer.clip_grads",
    names={"l2_norm_impl": None, "multi_tensor_scale_tensor_impl": None},
    what="gradient norm and clipping by torch's foreach kernels, without a wait",
    why="megatron-core 0.19 needs Transformer Engine's multi_tensor_scale_tensor, which 2.12 lacks, to compute them on "
    "the device; otherwise it reads each gradient's norm back to the host: 148 waits per step of GPT-2 small",
    until="Transformer Engine has multi_tensor_scale_tensor; it is then left in place",
)
SPLIT = Patch(
    place="megatron.core.transformer.attention",
    names={"SplitAlongDim": None},
    what="Transformer Engine's split of queries, keys and values",
    why="megatron-core 0.19 looks for it under a name that Transformer Engine 2.12 no longer has; torch's split copies "
    "the three gradients together: 14 of 312 ms in a step of GPT-2 small on an H200",
    until="megatron-core finds transformer_engine.pytorch.utils.SplitAlongDim; it is then left in place",
)
ROTATION = Patch(
    place="megatron.core.transformer.attention",
    names={"apply_fused_qkv_rotary_pos_emb": None, "HAVE_FUSED_QKV_ROPE": None},
    absent_without="transformer_engine",
    what="queries, keys and values split and rotated in one kernel (kernels.qkv_rope)",
    why="Transformer Engine 2.12's kernel of this name makes a step of Llama 3 8B no faster",
    until="Transformer Engine's apply_fused_qkv_rotary_pos_emb is as fast",
)
WEIGHT_GRADIENTS = Patch(
    place="megatron.core.tensor_parallel.layers",
    names={"fused_weight_gradient_mlp_cuda": None, "_grad_accum_fusion_available": None},
    absent_without="fused_weight_gradient_mlp_cuda",
    what="weight gradients added to the main gradient by torch's addmm, which computes them",
    why="column- and row-parallel layers use apex's module fused_weight_gradient_mlp_cuda, which is rarely installed",
    until="megatron-core fuses them without apex; apex's own is left in place",
)

GRADIENT_BUFFERS = Patch(
    place="megatron.core.distributed.distributed_data_parallel",
    names={
        "_ParamAndGradBuffer": None,
        "partition_buckets": ("buffers", "force_single_bucket_group", "reduce_scatter_with_fp32_accumulation"),
    },
    what="a rank keeps its part of the gradients, and sections share memory for whole ones (sharded_gradients.py)",
    why="megatron-core 0.19 shards gradients only in Megatron-FSDP, which gathers weights for each microbatch",
    until="DistributedDataParallel has a strategy that shards gradients, or takes the class of its buffers",
)
OPTIMIZERS = Patch(
    place="megatron.core.optimizer",
    names={"USING_PYTORCH_OPTIMIZER": None, "Adam": None, "SGD": None, "DistributedOptimizer": None},
    what="torch's optimizers, or PrecisionAwareAdam in PrecisionAwareOptimizer",
    why="Transformer Engine's and apex's skip a step only on the host's word, which is a wait; and the precision-aware "
    "optimizer supports FP8 weights under delayed scaling only",
    until="megatron-core lets its caller choose the classes of optimizers",
)
OPTIMIZER_STATES = Patch(
    place="megatron.core.optimizer.distrib_optimizer",
    names={"HAVE_APEX_OR_TE": None},
    what="states of torch's optimizers even if Transformer Engine or apex is installed",
    why="the distributed optimizer takes every optimizer for theirs if one of them imports",
    until="as the record above",
)
WEIGHT_CAST = Patch(
    place="megatron.core.optimizer.distrib_optimizer",
    names={
        "quantize_param_shard": (
            "model_params",
            "main_params",
            "start_offsets",
            "data_parallel_group",
            "fsdp_shard_model_params",
        )
    },
    what="FP8 weights cast from their masters shard by shard (stored_weights.cast_masters)",
    why="Transformer Engine 2.12 also transposes each shard as a matrix of one row, many times slower than reading and "
    "writing it, and holds all shards in BF16 at once",
    until="Transformer Engine's cast_master_weights_to_fp8 makes no transposes of shards",
)
FP8_RECIPE = Patch(
    place="megatron.core.fp8_utils",
    names={"get_fp8_recipe": ("config",)},
    what="a variant of a recipe that an extension has registered",
    why="megatron-core 0.19 makes Transformer Engine's recipes with their defaults",
    until="megatron-core takes a recipe object from its caller",
)
FP8_WEIGHTS = Patch(
    place="megatron.core.fp8_utils",
    names={
        "HAVE_TE_FP8_TENSOR_CLASS": None,
        "FP8_TENSOR_CLASS": None,
        "_modify_underlying_storage_impl": None,
        "te_post_all_gather_processing": None,
    },
    what="local layers' stored FP8 weights count as FP8 weights (stored_weights.py)",
    why="megatron-core 0.19 knows Transformer Engine's classes only, and local layers work without it",
    until="megatron-core asks a weight itself, or lets its caller register a class",
)
FIRST_VALUES = Patch(
    place="transformer_engine.pytorch.quantization:FP8GlobalStateManager",
    names={"with_high_precision_init_val": ()},
    what="layers under construction keep no copy of their weights' first values",
    why="Transformer Engine 2.12 copies undrawn FP8 weights to the host: 14 GB and over ten seconds for Llama 3 8B",
    until="weights can be drawn by TransformerEngineBaseModule.reset_parameters itself",
)
UNFILLED_GRADIENTS = Patch(
    place="transformer_engine.pytorch.attention.dot_product_attention.backends",
    names={"fused_attn_bwd": None},
    what="gradients of packed documents' queries, keys and values are written once (megatron/documents.py)",
    why="Transformer Engine 2.12 first fills them with zeros, for tokens between documents, of which there are none: "
    "three passes over 200 MB in each layer of GPT-2 small with 128 samples",
    until="fused_attn_bwd heeds fast_zero_fill=False in BF16, which DotProductAttention passes on",
)
RESIDUAL_GRADIENTS = Patch(
    place="transformer_engine_torch",
    names={"rmsnorm_bwd": None},
    what="the gradient of a residual stream is added by the norm's kernel beside it (kernels/residual_gradient.py)",
    why="linear layers with a norm call this one, though Transformer Engine 2.12 has one that adds, rmsnorm_bwd_add; "
    "autograd then adds in three passes over memory",
    until="Transformer Engine's LayerNormLinear also returns its input, as its operations do",
)
LAYERS = Patch(
    place="megatron.core.transformer.transformer_block",
    names={"build_module": ("spec_or_module", "args", "kwargs")},
    what="a layer whose weights will be sharded gives their memory back when it is built (weights.py)",
    why="megatron-core 0.19 builds all layers of a model chunk before its caller sees one",
    until="TransformerBlock builds layers on the meta device, and Transformer Engine's FP8 weights, too",
)

GRAPH_RECORDING = Patch(
    place="megatron.core.pipeline_parallel.schedules",
    names={"create_cudagraphs": ()},
    what="recording graphs restores random states, frees the first step's memory and cleans up after an error",
    why="megatron-core 0.19 leaves all three to its own training script, or undone",
    until="megatron-core's create_cudagraphs leaves nothing but graphs behind",
)
GRAPH_MEMORY = Patch(
    place="megatron.core.transformer.cuda_graphs",
    names={"HAVE_TQDM": None, "alloc_tensor_from_graph_mempool": ("meta",)},
    what="no progress bar, and a list of the uses of torch's graph pool",
    why="the console belongs to the run, and megatron-core 0.19 never calls _cuda_releasePool",
    until="delete_cuda_graphs gives the graphs' memory back",
)

CHECKPOINT_INDEX = Patch(
    place="torch.distributed.checkpoint.filesystem:FileSystemReader",
    names={"read_metadata": ("self", "args", "kwargs")},
    what="a checkpoint's index is unpickled by a list of names (pickles.py)",
    why="torch 2.11 unpickles it freely: whoever wrote the checkpoint can run code where it is loaded",
    until="torch reads .metadata by a list, or not as a pickle",
)
CHECKPOINT_OBJECTS = Patch(
    place="torch.distributed.checkpoint.default_planner:DefaultLoadPlanner",
    names={"load_bytes": ("self", "read_item", "value")},
    what="a checkpoint's objects are loaded with weights_only=True",
    why="torch 2.11 loads them with weights_only=False",
    until="torch's planner loads them with weights_only=True",
)


def _watched(place: str, *names: str) -> Patch:
    return Patch(
        place=place,
        names=dict.fromkeys(names),
        what="the proof and the statistics hear of the live layers' products while they watch",
        why="Transformer Engine has no hook at the products themselves",
        until="Transformer Engine tells a listener about each product (its debug tools write files)",
    )


_MODULES = "transformer_engine.pytorch.module"
LINEAR_PRODUCTS = _watched(f"{_MODULES}.linear", "general_gemm")
LINEAR_PASSES = _watched(f"{_MODULES}.linear:_Linear", "forward", "backward")
NORM_LINEAR_PRODUCTS = _watched(f"{_MODULES}.layernorm_linear", "general_gemm")
NORM_LINEAR_PASSES = _watched(f"{_MODULES}.layernorm_linear:_LayerNormLinear", "forward", "backward")
NORMS_OF_LINEARS = _watched(f"{_MODULES}.layernorm_linear", "apply_normalization")
GROUPED_PRODUCTS = _watched(f"{_MODULES}.grouped_linear", "general_grouped_gemm")
GROUPED_PASSES = _watched(f"{_MODULES}.grouped_linear:_GroupedLinear", "forward", "backward")
ATTENTION_PASSES = _watched(
    "transformer_engine.pytorch.attention.dot_product_attention.backends", "fused_attn_fwd", "fused_attn_bwd"
)


def _searched(place: str, name: str, parameters: _Parameters) -> Patch:
    return Patch(
        place=place,
        names={name: parameters},
        what="during a step tensors that are cast in blocks are searched for infinities (fp8/infinities.py)",
        why="Transformer Engine 2.12 turns an infinity into the largest code and keeps no amax of a block",
        until="Transformer Engine's casts keep or report an infinity",
    )


BLOCK_CASTS = _searched(
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor:Float8BlockQuantizer",
    "quantize_impl",
    ("self", "tensor"),
)
SPLIT_CASTS = _searched("transformer_engine_torch", "split_quantize", None)

PATCHES = tuple(value for value in vars().values() if isinstance(value, Patch))
