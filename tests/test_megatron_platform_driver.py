"""What nvidia-smi answers, and how it fails to."""

import pytest

from gpt_pretrain.launch import environment
from gpt_pretrain.launch.environment import ask_driver, device_files


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name on the path."""

    def install(script):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return install


def test_version_and_gpus_are_read(nvidia_smi):
    nvidia_smi('[ "$1" = --query-gpu=driver_version,name ] && echo "580.95, NVIDIA H200\n580.95, NVIDIA H200"')
    assert ask_driver() == ("580.95", ["NVIDIA H200", "NVIDIA H200"])


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('echo "NVIDIA-SMI has failed"; exit 9', "NVIDIA-SMI has failed"),
        ('echo "No devices were found"', "No devices were found"),
        ("exec sleep 60", "nvidia-smi does not answer within 0.2 s"),
    ],
)
def test_a_driver_that_does_not_work_says_why(script, problem, nvidia_smi, monkeypatch):
    monkeypatch.setattr(environment, "_DRIVER_TIMEOUT_S", 0.2)
    nvidia_smi(script)
    with pytest.raises(RuntimeError) as failed:
        ask_driver()
    assert str(failed.value) == problem


def test_the_files_of_gpus_are_those_with_numbers(tmp_path):
    for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert device_files(tmp_path) == [f"{tmp_path}/nvidia0", f"{tmp_path}/nvidia1"]
