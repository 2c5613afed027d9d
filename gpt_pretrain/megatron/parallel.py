"""Process groups: from the launcher's ranks to megatron-core's tensor, pipeline, context and data parallel groups.

Also what ranks do together outside of training (agree on the configuration, take an answer from rank 0), and the user
buffers of Transformer Engine (TE, `features.user_buffers`): memory of each rank that the others of its tensor parallel
group read and write. They hold the activations of one microbatch and are made before the layers.
"""

import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_batch_on_this_cp_rank
from torch._C._distributed_c10d import HashStore

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.extend.code import code_files
from gpt_pretrain.extend.registry import REGISTERED
from gpt_pretrain.launch.environment import limit_met
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.signals import ended_while_waiting
from gpt_pretrain.run.platform import MULTICAST_OFF, USER_BUFFERS_WITHOUT, Platform
from gpt_pretrain.run.run_spec import RunSpec

# Differences between ranks that an error names.
_KEYS_SHOWN = 5
# A process on a busy machine may wait this long.
_FAREWELL_S = 20.0
_STANDARD_OUTPUT = 1


@contextmanager
def process_groups(model: ModelConfig, launch: Launch, platform: Platform) -> Iterator[None]:
    """Opens torch.distributed and megatron-core's groups; closes them at the end.

    Rank order is Megatron-LM's (TP fastest, then CP, DP, PP), so a tensor parallel group sits on one node. A single
    process opens no port: its store lives in memory.

    Raises:
        UserError: The ranks do not have the same `model`.
    """
    if platform.cuda:
        # srun can show each task its own GPU only.
        torch.cuda.set_device(launch.local_rank if launch.local_rank < platform.num_gpus else 0)
    backend = "nccl" if platform.cuda else "gloo"
    timeout = timedelta(minutes=30)
    if launch.world_size == 1:
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        # torchrun has opened this store already; srun's ranks open it on the first host.
        os.environ["MASTER_ADDR"] = launch.master_addr
        os.environ["MASTER_PORT"] = str(launch.master_port)
        # Without a device argument torch opens NCCL's communicators at first use; with one, it opens all groups' at
        # once. On four GPUs 14 of 21 groups had one rank, which needs none; with 64 channels each those took over 5 GiB
        # of every GPU (NCCL 2.28; benchmarks/llama3_8b_4xh200.md).
        with ended_while_waiting():
            torch.distributed.init_process_group(
                backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout
            )
    try:
        # Ranks that disagree on the groups would wait for each other as they open.
        check_ranks_agree(dict(flatten(config_to_dict(model), "model")))
        lay_out_ranks(model)
        yield
    except BaseException:
        # Other ranks may wait in a collective that this one will never join. Closing NCCL's groups would wait for them,
        # and the error would never be printed; the end of the process closes the groups.
        if launch.world_size == 1:
            _close()
        raise
    _close()


def _close() -> None:
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def check_ranks_agree(values: Mapping[str, Any]) -> None:
    """Raises an error unless all ranks run the same configuration; all ranks call it.

    Each rank composes its own from files and an environment that may differ. Ranks that disagree would wait for each
    other in a collective, or train something that nobody asked for. `values` maps dotted keys to plain values.

    Raises:
        UserError: They differ. It names the keys, the values and a rank that has them.
    """
    _check_agree(
        {f"{key}=": value for key, value in values.items()},
        {f"{key}=": json.dumps(value) for key, value in values.items()},
        absent="null",
        problem="the ranks do not run the same configuration",
        way_out="Give all of them the same command line, and the same files where --config-dir or --config-path names "
        "some",
    )


def check_extensions_agree() -> None:
    """Raises an error unless all ranks run the same code of extensions, wherever it lies; all ranks call it.

    Raises:
        UserError: They have registered different things, or files differ. It names them and a rank that has each.
    """
    names = [f"{each.kind} {each.name!r} of {each.module}" for each in REGISTERED]
    files = {f"{name}: ": file for name, file in code_files().items()}
    has = {f"{name}: ": "registered" for name in names}
    _check_agree(
        {**has, **{name: file.sha256 for name, file in files.items()}},
        {**has, **{name: str(file) for name, file in files.items()}},
        absent="missing",
        problem="the ranks do not have the same extensions",
        way_out="Install the same version on all nodes, or point PYTHONPATH at the same folder on all of them; what a "
        "module registers may not depend on the rank",
    )


def _check_agree(
    values: Mapping[str, Any], told: Mapping[str, str], *, absent: str, problem: str, way_out: str
) -> None:
    """Raises a UserError if a value differs between ranks; `told` has the texts for it."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    world_size = torch.distributed.get_world_size()
    digests = [""] * world_size
    torch.distributed.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everybody: list[tuple[Mapping[str, Any], Mapping[str, str]]] = [({}, {})] * world_size
    torch.distributed.all_gather_object(everybody, (values, told))
    _wait_until_all_know()
    different = []
    for key in dict.fromkeys(key for of_rank, _ in everybody for key in of_rank):
        first = everybody[0][0].get(key)
        other = next((rank for rank, (of_rank, _) in enumerate(everybody) if of_rank.get(key) != first), None)
        if other is not None:
            texts = [everybody[rank][1].get(key, absent) for rank in (0, other)]
            different.append(f"{key}{texts[0]} on rank 0 and {texts[1]} on rank {other}")
    more = f" and {len(different) - _KEYS_SHOWN} more" if len(different) > _KEYS_SHOWN else ""
    raise UserError(f"{problem}: {'; '.join(different[:_KEYS_SHOWN])}{more}. {way_out}")


def _wait_until_all_know() -> None:
    """Keeps this rank until all have what they need: rank 0 may hold the store, and leaving breaks off an exchange."""
    store = torch.distributed.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _FAREWELL_S
    known = store.add("ranks that know they differ", 1)
    while known < torch.distributed.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        known = store.add("ranks that know they differ", 0)


def lay_out_ranks(model: ModelConfig) -> None:
    """Opens megatron-core's groups for a model's parallel sizes, and seeds dropout."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(model),
        num_distributed_optimizer_instances=model.num_distributed_optimizer_instances,
        # Those would be groups for CPU tensors beside NCCL's.
        create_gloo_process_groups=False,
    )
    track_random_states(in_graphs=False)
    seed_dropout(model.seed)


def track_random_states(*, in_graphs: bool) -> None:
    """Chooses the tracker of dropout's random states; CUDA graphs need TE's (`in_graphs`)."""
    tensor_parallel.random.initialize_rng_tracker(use_te_rng_tracker=in_graphs, force_reset=True)


def seed_dropout(seed: int) -> None:
    """Seeds dropout, differently on pipeline stages, and on tensor parallel ranks that split activations."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


def on_rank_zero[Result](function: Callable[[], Result]) -> Result:
    """Runs a function on rank 0 and gives its result to all ranks; all ranks call it.

    Its UserError or OSError is a UserError on all ranks. After any other error the other ranks would wait for rank 0.
    """
    answer: list[tuple[Result | None, str | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        try:
            answer = [(function(), None)]
        except UserError as error:
            answer = [(None, str(error))]
        except OSError as error:
            answer = [(None, limit_met(error) or f"{error.filename or 'the file system'}: {error.strerror or error}")]
    torch.distributed.broadcast_object_list(answer, src=0, device=torch.device(torch.cuda.current_device()))
    result, problem = answer[0]
    if problem is not None:
        raise UserError(problem)
    return cast("Result", result)


def sum_over(group: torch.distributed.ProcessGroup, values: torch.Tensor) -> None:
    """Sums `values` over a group in place; for one rank NCCL would open a communicator of 0.4 GiB for nothing."""
    if group.size() > 1:
        torch.distributed.all_reduce(values, group=group)


def context_parallel_slices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cuts tensors [b, s] to this rank's [b, s / CP]: a slice of each half, which balances the causal mask."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return tensors
    # By default megatron-core 0.19 slices over all ranks: CP 2 × DP 2 would skip half of each sequence.
    slices: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(tensors, is_hybrid_cp=False, cp_group=group)
    return slices


def data_parallel_rank() -> int:
    """This rank's index among those with different samples; context parallel ranks share theirs."""
    return int(parallel_state.get_data_parallel_rank())


def is_last_stage_writer() -> bool:
    """Whether this rank reports the loss for its tensor parallel group."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


@contextmanager
def user_buffers(spec: RunSpec) -> Iterator[None]:
    """Makes user buffers if `model.tp_comm_overlap` asks for them; process groups must be open.

    Raises:
        UserError: The GPUs have no multicast, and the environment does not say to do without.
    """
    model = spec.model
    if not model.tp_comm_overlap:
        yield
        return
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base

    without = MULTICAST_OFF[USER_BUFFERS_WITHOUT]
    if not tex.device_supports_multicast() and os.environ.get(USER_BUFFERS_WITHOUT) != without:
        raise UserError(
            "model.tp_comm_overlap=true makes user buffers with NVLink multicast, which these GPUs or their driver "
            f"lack; export {USER_BUFFERS_WITHOUT}={without}, or use false"
        )
    precisions = {linear.precision == "fp8" for linear in spec.linears if linear.layer >= 0}
    modes = base.UserBufferQuantizationMode
    with silent_output():
        base.initialize_ub(
            shape=[model.encoder_seq_length * model.micro_batch_size // model.context_parallel_size, model.hidden_size],
            tp_size=model.tensor_model_parallel_size,
            quantization_modes=[modes.FP8 if in_fp8 else modes.NONE for in_fp8 in sorted(precisions)],
            dtype=torch.bfloat16,
            bootstrap_backend="nccl",
        )
    yield
    # After an error this would wait for the GPU, which may be waiting for a rank that never comes.
    base.destroy_ub()


@contextmanager
def silent_output() -> Iterator[None]:
    """Discards standard output, also that of C libraries: TE reports every buffer there."""
    sys.stdout.flush()
    kept = os.dup(_STANDARD_OUTPUT)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), _STANDARD_OUTPUT)
        yield
    finally:
        sys.stdout.flush()
        # C has its own buffer.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)


@contextmanager
def without_user_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, forward passes without gradients exchange after their products and can have any length.

    With overlap TE cuts the output of a row-parallel product into pieces of the buffer's shape.
    """
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    overlapped = [module for module in modules if getattr(module, "ub_overlap_rs_fprop", False)]
    for module in overlapped:
        module.ub_overlap_rs_fprop = False
    try:
        yield
    finally:
        for module in overlapped:
            module.ub_overlap_rs_fprop = True
