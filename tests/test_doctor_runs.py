"""The doctor on real Pythons: this one, one with libraries that kill it, one without megatron-core."""

import importlib.metadata
import os
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gpt_pretrain.doctor.__main__ import main
from gpt_pretrain.doctor.facts import Failure
from gpt_pretrain.doctor.probe import run_probes
from tests.launching import REPOSITORY, clean_environment, gpu_environment

# Without nvidia-smi a machine has no driver, also where these tests hide its GPUs from PyTorch alone.
NO_DRIVER = {"PATH": ""}


def ask_doctor(*arguments, python=sys.executable, **env):
    return subprocess.run(
        [python, "-m", "gpt_pretrain.doctor", *arguments],
        cwd=REPOSITORY,
        env=clean_environment(env),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_this_machine_trains_on_its_processor():
    done = ask_doctor(**NO_DRIVER)

    assert done.stderr == ""
    assert done.returncode == 3
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "training works on the CPU: small models"
    for name, distribution in (("PyTorch", "torch"), ("megatron-core", "megatron-core")):
        assert any(line.startswith(f"{name} {importlib.metadata.version(distribution)}") for line in lines)
    assert re.findall(r"^(note|no training|no FP8): (.*?) has", done.stdout, re.M) == [("note", "this machine")]


def beside(folder, name, version):
    """PYTHONPATH of a Python that takes what is in a folder for a package of that name."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), str(REPOSITORY)])


def test_a_transformer_engine_that_kills_python_is_named(tmp_path):
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").touch()
    # What a compiled part does that was built for another PyTorch and meets it too late for an ImportError.
    for name in ("__init__.py", "fp8.py"):
        (package / "pytorch" / name).write_text("import os\nos.abort()\n")
    done = ask_doctor("--assume-gpu", "h200", PYTHONPATH=beside(tmp_path, "transformer-engine", "2.12.0"))

    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    # megatron-core imports it as well, so that runs die with it.
    assert re.search(r"no training: training .*? SIGABRT", said)
    assert "python -m pip uninstall --yes transformer-engine" in said
    assert re.search(r"no FP8: Transformer Engine .*? SIGABRT", said)
    assert importlib.metadata.version("torch").split("+")[0] in said, "PyTorch beside it is found all the same"


@pytest.mark.parametrize(
    ("source", "problem", "ends_training"),
    [
        ("_flash_attn_fwd = _flash_attn_bwd = None", None, None),
        (
            "_flash_attn_fwd = None",
            "AttributeError: module 'flash_attn.cute.interface' has no attribute '_flash_attn_bwd'",
            None,
        ),
        ("import cutlass_of_another_name", "ModuleNotFoundError: No module named 'cutlass_of_another_name'", False),
        # megatron-core imports it as well, and catches no other error than the one above.
        (
            "raise OSError('libcute_dsl_runtime.so is missing\\nMore.')",
            "OSError: libcute_dsl_runtime.so is missing",
            True,
        ),
        ("import os\nos.abort()", "loading it ended Python with signal SIGABRT (Fatal Python error: Aborted)", None),
    ],
    ids=["loads", "has other kernels", "misses a module", "misses a library", "kills"],
)
def test_a_flash_attention_is_tried_in_a_process_of_its_own(source, problem, ends_training, tmp_path, monkeypatch):
    """What the doctor says of it is in `tests.test_doctor`; all of training is imported where that may end with it."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import interface")
    (package / "interface.py").write_text(source)

    monkeypatch.setenv("PYTHONPATH", beside(tmp_path, "flash-attn-4", "4.0.0b36"))

    answers = run_probes([["flash-attn-4"], *([] if ends_training is None else [["application_on_gpu"]])])

    found = answers["flash-attn-4"]
    assert (found.problem if isinstance(found, Failure) else None) == problem
    if ends_training is not None:
        assert isinstance(answers["application_on_gpu"], Failure) == ends_training


@pytest.fixture
def bare_python(tmp_path):
    """A Python with links to what this one has installed, without megatron-core, Hydra and rich."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (installed,) = [Path(folder) for folder in site.getsitepackages() if (Path(folder) / "torch").is_dir()]
    for entry in installed.iterdir():
        if not entry.name.startswith(("hydra", "megatron", "omegaconf", "rich")):
            (packages / entry.name).symlink_to(entry)
    return tmp_path / "venv" / "bin" / "python"


def test_missing_packages_are_told_with_the_commands_that_install_them(bare_python):
    done = ask_doctor(python=bare_python, **NO_DRIVER)

    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^no training: .*\n    (.*)", done.stdout, re.M) == [
        "python -m pip install 'hydra-core~=1.3'",
        "python -m pip install 'megatron-core~=0.19.2'",
        "python -m pip install 'omegaconf~=2.3'",
        "python -m pip install 'rich>=13.9'",
    ]


def test_probes_that_share_a_gpu_run_one_after_the_other(tmp_path, monkeypatch):
    """In place of Python a program that notes when it begins and ends, and pickles the probe's name."""
    log, fake = tmp_path / "log", tmp_path / "python"
    fake.write_text(
        f"""#!/bin/sh
        echo "begin $3" >>{log}
        sleep 0.5
        printf "S'$3'\\n." >"$4"
        echo "end $3" >>{log}
        """
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    answers = run_probes([["torch", "transformer_engine", "application"], ["driver"]])

    assert answers == {name: name for name in ("torch", "transformer_engine", "application", "driver")}
    on_gpu = [event for event in log.read_text().splitlines() if not event.endswith("driver")]
    assert on_gpu == [
        f"{what} {name}" for name in ("torch", "transformer_engine", "application") for what in ("begin", "end")
    ]


def test_wrong_arguments_are_refused(capsys):
    assert main(["--assume-gpu", "h900"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: assume_gpu=h900 ")
    assert "h100, h200, b200" in told


@pytest.mark.gpu
def test_a_gpu_with_transformer_engine_trains_in_fp8():
    done = ask_doctor(**gpu_environment(1))

    assert done.returncode == 0, done.stdout
    assert re.search(r"^FP8 +works: delayed", done.stdout, re.M)
    assert "does not compute" not in done.stdout
    assert "a small FP8 layer fails" not in done.stdout
