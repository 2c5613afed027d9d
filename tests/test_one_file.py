"""A built-in kernel, optimizer or data source is one module and its values: nothing else names it."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.extensions import TINY
from tests.launching import REPOSITORY, clean_environment

ON_TEXT = [each for each in TINY if not each.startswith(("data=", "model.vocab_size"))]
KERNEL = """
    from gpt_pretrain.features.feature import FusedKernel

    class Added(FusedKernel):
        \"""Help of the added key.\"""

        key = "added"

        def lacks(self, spec):
            yield "what nobody has", "it is a test"
"""
OPTIMIZER = """
    from gpt_pretrain import extend

    @extend.optimizer("added", states=["momentum_buffer"], elementwise=True, reads=["momentum"])
    def build(params, config):
        import torch

        return torch.optim.SGD(params, lr=config.model.optim.lr, momentum=config.model.optim.momentum)
"""
SOURCE = """
    from pathlib import Path
    from gpt_pretrain import extend

    @extend.data_source("added")
    class Added:
        def __init__(self, config):
            self.files = [Path(extend.__file__).with_name("training.py")]

        def documents(self, path):
            return path.read_text().splitlines()

        def identity(self):
            return None
"""


@pytest.fixture
def copy(tmp_path):
    """The program in another place; runs a command there."""
    for folder in ("gpt_pretrain", "conf"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def run(module, source, values, text, *arguments):
        (tmp_path / "gpt_pretrain" / module).write_text(textwrap.dedent(source))
        with (tmp_path / "conf" / values).open("a") as file:
            file.write(text)
        command = [sys.executable, "-m", "gpt_pretrain", *arguments]
        env = clean_environment({"PYTHONPATH": os.fspath(tmp_path)})
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


def test_a_kernel_is_a_module_with_its_key(copy):
    added = ("features/added.py", KERNEL, "model/base.yaml", "added: null\n", *TINY, "model.added=true")
    refused = copy(*added)
    assert refused.returncode == 2
    assert "model.added=true needs what nobody has" in refused.stderr


def test_an_optimizer_is_a_module(copy):
    values = "# @package model.optim\ndefaults: [sgd, _self_]\nname: added\n"
    added = ("run/optimizers/added.py", OPTIMIZER, "optimizer/added.yaml", values)
    done = copy(*added, *TINY, "optimizer=added", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr


def test_a_data_source_is_a_module(copy, tmp_path):
    values = "# @package model\ndefaults: [stdlib, _self_]\ndata: {data_impl: added}\n"
    added = ("data/sources/added.py", SOURCE, "data/added.yaml", values)
    places = [f"model.data.cache_dir={tmp_path / 'cache'}", "model.tokenizer.vocab_size=300", "trainer.max_steps=2"]
    done = copy(*added, *ON_TEXT, "data=added", *places, "model.vocab_size=320", "model.data.splits_string='700,300,0'")
    assert done.returncode == 0, done.stderr
