"""What has to be settled before torch and megatron-core are imported.

OpenMP, CUDA, NCCL and Transformer Engine read their environment variables once, when they load; megatron-core and
torch warn of their own deprecations and missing extras while they are imported.
"""

import getpass
import logging
import os
import warnings

from gpt_pretrain.config.schema import Config


def _name_user() -> None:
    """Names a user by number who has no name, as under `docker run --user 4242`: torch calls its caches by it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def set_environment(config: Config) -> None:
    """Sets what the run needs; call it before torch is imported. What the user has set stands."""
    model = config.model
    # OpenMP's threads spin while they wait for each other. With one other busy process on the machine they spin away
    # the time slices of the thread they wait for: a CPU step of the tiny model took 5 s instead of 0.5 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if model.tensor_model_parallel_size > 1 or model.context_parallel_size > 1:
        # One hardware queue keeps the order in which communication and the GEMM it overlaps with were launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.trainer.deterministic:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")


def prepare_libraries() -> None:
    """Lets torch be imported under any user, and leaves the console to the run; call it before torch is imported.

    The header of a run says itself which fused parts are active.
    """
    _name_user()
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)(\.|$)")
    # Warnings about a library's own calls name the module that the calls pass through on a machine without CUDA.
    ours = r"gpt_pretrain\.megatron\.cpu"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    # megatron-core's distributed optimizer asks its FP32 shards for .grad, which are views of parameters, no leaves.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning, module=ours
    )
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
