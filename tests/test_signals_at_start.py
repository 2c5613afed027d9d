"""Ctrl-C and SIGTERM while a command starts: it ends at once, with its exit code and without a word."""

import os
import random
import signal
import string
import subprocess
import sys
import time

import pytest

from gpt_pretrain.launch import signals
from tests.launching import REPOSITORY, clean_environment, run_ranks

MOMENTS = {
    "the first import": "import:hydra",
    "our own modules": "import:gpt_pretrain.commands.command",
    "reading a preset": "open:conf/model/tiny.yaml",
    # It puts a state back: OmegaConf takes what is raised there for an error of its own.
    "composing": "call:_invalidate_flags_cache",
    "the rules": "call:config_problems",
    "importing torch": "import:torch",
}
RUN = ["data=mock", "trainer.max_steps=1", "trainer.limit_val_batches=0"]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_a_start_at_once(moment, name, code, tmp_path):
    path = os.pathsep.join([str(REPOSITORY / "tests" / "signalled"), str(REPOSITORY)])
    env = {"PYTHONPATH": path, "SIGNALLED": f"{name}:{MOMENTS[moment]}"}
    done = run_ranks(1, ["-m", "gpt_pretrain", *RUN, f"run_dir={tmp_path / 'run'}"], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Text on which a tokenizer is trained for many seconds."""
    chance, path = random.Random(0), tmp_path_factory.mktemp("corpus") / "words.txt"
    words = ("".join(chance.choices(string.ascii_lowercase, k=10)) for _ in range(250_000))
    path.write_text(" ".join(words))
    return path


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_ends_the_training_of_a_tokenizer(name, code, words, tmp_path):
    """Rust does not return to Python before it is done."""
    large = ["model.vocab_size=60000", "model.tokenizer.vocab_size=60000", f"model.data.cache_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt_pretrain.prepare_data", "data=text", f"model.data.text_files=[{words}]", *large],
        cwd=REPOSITORY,
        env=clean_environment(None),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not any("training a BPE" in path.read_text() for path in tmp_path.glob("tokenizers/*.status.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Python hands the text over in a moment.
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(getattr(signal, name))
    began = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - began < signals._GRACE_S + 2
    assert process.returncode == code
    assert "Traceback" not in told


def test_a_second_signal_does_not_wait_for_the_end_that_the_first_began():
    program = (
        "import os, signal, time\n"
        "from gpt_pretrain.launch.signals import ended_by_signals\n"
        "with ended_by_signals():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
    )
    done = run_ranks(1, ["-c", program], timeout_s=30)
    assert (done.returncode, done.stderr) == (75, "")
