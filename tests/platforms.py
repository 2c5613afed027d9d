"""Machines for tests, as `features.resolve.detect_platform` would describe them."""

from dataclasses import replace

from gpt_pretrain.config.derived import model_parallel_size
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.launch.ranks import Launch, read_launch
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.run_spec import RunSpec

CPU = Platform(cuda=False, num_gpus=0, device_name="CPU")
H200_WITHOUT_TE = replace(
    CPU, cuda=True, num_gpus=8, device_name="NVIDIA H200", compute_capability=(9, 0), torch_cuda="13.0"
)
H200 = replace(H200_WITHOUT_TE, transformer_engine="2.12.0")
INSTALL_FLASH = "install it from the checkout with python -m pip install -c constraints.txt -e '.[flash]'"
# What a message about missing Transformer Engine ends with.
INSTALL_TE = (
    "install it from the checkout with python -m pip install --no-build-isolation -c constraints.txt -e '.[te]'"
)


def spec_of(
    config: Config, platform: Platform = CPU, launch: Launch | None = None, *, shards: int | None = None
) -> RunSpec:
    """The run on a machine, by this process's launcher unless told; on as many processes as the layout needs.

    Args:
        config: The run.
        platform: The machine.
        launch: The launcher's processes.
        shards: Data-parallel ranks, where there have to be as many.
    """
    launch = read_launch() if launch is None else launch
    needed = model_parallel_size(config.model) * (shards or 1)
    if launch.world_size < needed:
        launch = replace(launch, world_size=needed)
    return build_run_spec(config, launch, platform)
