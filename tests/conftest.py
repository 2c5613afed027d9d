"""Fixtures that several test files use, and what the marker `gpu` asks of the machine."""

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

# As the processes that tests start have it, and before torch is loaded: pytest's own processes share the cores, and the
# threads of one would spin away the time that another one's wait for. Training in this process took ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"
# torch.compile does not try the instruction sets that the CPU has: each process would compile, and import torch twice.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# Processes that wake up do not interrupt those that run. A thread of gloo's looks again and again for a message while
# another one holds the lock of the connection, and where ranks outnumber cores, the holder had been interrupted by the
# very process it had written to: a sum over two ranks on two cores took five times as long.
if sys.platform == "linux":
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import rank_zero_of, without_launcher
from gpt_pretrain.rules.check import config_problems
from tests.launching import REPOSITORY, SHARE_GPU
from tests.platforms import H200, spec_of
from tests.refusals import compose_quickly

# A shell starts what runs in its background with Ctrl-C ignored, nohup with SIGHUP; what those start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--share-gpu", action="store_true", help="let the ranks of a test share the first GPU")


def pytest_configure(config):
    if config.getoption("share_gpu"):
        os.environ[SHARE_GPU] = "1"
        path = str(REPOSITORY / "tests" / "one_gpu")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu`, `soak` or `gpu(count=2)` skip where so many GPUs or Transformer Engine are missing.

    With `--share-gpu` one GPU is enough, except for those marked `peer_access=True`.
    """
    marks = {item: [mark for mark in item.iter_markers() if mark.name in ("gpu", "soak")] for item in items}
    marks = {item: found for item, found in marks.items() if found}
    if not marks:
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = there > 0 and config.getoption("share_gpu")
    has_te = importlib.util.find_spec("transformer_engine") is not None
    for item, found in marks.items():
        needed = max(mark.kwargs.get("count", 1) for mark in found)
        if there < needed and not shared:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), and there are {there}"))
        elif shared and any(mark.kwargs.get("peer_access") for mark in found):
            item.add_marker(pytest.mark.skip(reason="needs GPUs that read each other's memory"))
        elif not has_te:
            item.add_marker(pytest.mark.skip(reason="needs Transformer Engine, which is not installed"))


def pytest_collection_finish(session):
    """What has been imported stays: a collector that looks through it again takes a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_model_outlives_its_test():
    """Its process groups keep their threads and sockets as long as anything refers to it."""
    yield
    module = sys.modules.get("megatron.core.models.common.embeddings.rotary_pos_embedding")
    if module is not None:
        # It refers to the last 32 models.
        module.RotaryEmbedding.forward.cache_clear()


@pytest.fixture
def no_launcher(monkeypatch):
    """The environment of a process that no launcher started, whatever started pytest."""
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        monkeypatch.delenv(name)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    """Where the runs of a test file keep their corpus and its index."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir):
    """The directory of a run with a checkpoint and a tokenizer, for reading alone."""
    from tests.runs import SAVED, run_small

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run_small(1, run_dir, cache_dir, SAVED)
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of it, to be spoiled."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Has a folder of a name filled once for all of pytest's own processes: whoever comes first does so."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        folder = shared / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                unfinished = tmp_path_factory.mktemp("unfinished")
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def parent():
    """The process that runs are forked from."""
    from tests.forked_runs import shared_parent

    return shared_parent()


@pytest.fixture
def compose_config() -> Callable[..., Config]:
    """Composes a configuration from overrides, as the command line does."""
    return lambda *overrides: compose_quickly(overrides)


@pytest.fixture
def broken_rules() -> Callable[..., list[str]]:
    """The cross-field rules that overrides break, in a run of `world_size` processes."""

    def problems(*overrides: str, world_size: int = 1, local_world_size: int | None = None) -> list[str]:
        launch = rank_zero_of(
            world_size,
            local_world_size=local_world_size or world_size,
            launcher="none" if world_size == 1 else "torchrun",
        )
        return config_problems(compose_quickly(overrides), launch)

    return problems


@pytest.fixture
def check_excluded(broken_rules: Callable[..., list[str]]) -> Callable[..., None]:
    """Asserts that settings exclude a fused kernel: true is refused, with their name, and null leaves it out."""

    def check(key: str, run: Sequence[str], overrides: Sequence[str], named: str) -> None:
        (message,) = broken_rules(*run, f"model.{key}=true", *overrides)
        assert message.startswith(f"model.{key}=true ")
        assert f" {named}: " in message
        assert message.endswith("use null or false")
        assert broken_rules(*run, *overrides) == []
        assert not spec_of(compose_quickly([*run, *overrides]), H200).kernels.features[key]

    return check
