"""Trains on two nodes of eight GPUs with Ray Train (https://docs.ray.io/en/latest/train), whose workers are the nodes.

    ray job submit --address http://HEAD:8265 --working-dir scripts -- python ray_train.py

The cluster's nodes run the project's image with `pip install 'ray[train]'`, and share /runs. Change the constants; with
DEVICE = "CPU" the job runs on any machine. Each worker starts torchrun, as on a cluster without Ray. A process of its
own can be told to save and end, which code in a thread of Ray cannot. It gets SIGTERM when Ray ends the worker.
"""

import os
import subprocess
import sys

NUM_NODES = 2
DEVICE, DEVICES_OF_A_NODE = "GPU", 8
# Where Ray keeps what it knows of the job; all nodes must see it.
STORAGE = "/runs/ray"
ARGUMENTS = [
    "experiment=llama3_8b_8gpu",
    "fp8=delayed",
    "model.num_distributed_optimizer_instances=2",
    "run_dir=/runs/llama3_8b",
]


def command_of(node: int, address: str) -> list[str]:
    """What a node runs, with the address of the first one."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NUM_NODES}", f"--node-rank={node}"]
    place = [f"--nproc-per-node={DEVICES_OF_A_NODE}", f"--master-addr={address}", "--master-port=29500"]
    return ["setpriv", "--pdeathsig", "TERM", *torchrun, *place, "-m", "gpt_pretrain", *ARGUMENTS]


def train_on_node() -> None:
    """A worker's part; Ray has told it the first one's address."""
    from ray import train

    subprocess.run(command_of(train.get_context().get_world_rank(), os.environ["MASTER_ADDR"]), check=True)


def main() -> None:
    """Starts the workers together, and all of them again, from the newest checkpoint, after any failure."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train_on_node,
        # The group of Ray's own, between nodes: ours is another one.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=NUM_NODES, use_gpu=DEVICE == "GPU", resources_per_worker={DEVICE: DEVICES_OF_A_NODE}
        ),
        run_config=RunConfig(name="llama3_8b", storage_path=STORAGE, failure_config=FailureConfig(max_failures=10)),
    ).fit()


if __name__ == "__main__":
    main()
