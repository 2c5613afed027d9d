"""With `pytest -m gpu --share-gpu` every Python imports this first, and the ranks of a run share the first GPU.

NCCL 2.28 refuses two ranks of a host on one GPU, so each names a host of its own and they exchange through sockets. The
application takes as many processes as GPUs, unless srun shows each task a GPU of its own; so they say that srun did.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from dataclasses import replace

_MODULE = "gpt_pretrain.launch.ranks"


class _Finder(importlib.abc.MetaPathFinder):
    """Changes `read_launch` as soon as its module has been loaded."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.read_launch = _with_own_gpu(module.read_launch)

        spec.loader.exec_module = load_and_change
        return spec


def _with_own_gpu(read_launch):
    def read(env=None):
        launch = read_launch(env)
        if launch.world_size == 1:
            return launch
        os.environ |= {"NCCL_HOSTID": f"rank{launch.rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return replace(launch, launcher="srun")

    return read


sys.meta_path.insert(0, _Finder())
