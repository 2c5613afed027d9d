"""Hydra-configured, Megatron-style GPT pretraining with FP8 on NVIDIA Hopper and newer."""

import os
import sys

# What Python says while it looks for the module of `python -m`; who imports the package keeps its own handlers.
if sys.argv[:1] == ["-m"]:
    from gpt_pretrain.launch.at_once import end_at_once

    end_at_once()

from importlib.util import find_spec
from pathlib import Path


def _end(problem: str, code: int) -> None:
    sys.stderr.write(f"error: {problem}\n")
    sys.exit(code)


if Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parent:
    # Python would take our megatron/ for megatron-core's.
    _end("start python -m gpt_pretrain … from outside of the folder gpt_pretrain/", 2)
# Who imports the package gets Python's own errors.
if sys.argv[:1] == ["-m"]:
    if sys.version_info < (3, 12):  # noqa: UP036  the doctor is asked by those who did not install it
        _end(
            f"this is Python {sys.version.split()[0]}, and gpt_pretrain needs 3.12 or newer; "
            "make install PYTHON=/path/to/python3.12",
            1,
        )
    _missing = [name for name in ("hydra", "omegaconf", "rich") if find_spec(name) is None]
    # The doctor answers without them.
    if _missing and not any("gpt_pretrain.doctor" in word for word in sys.orig_argv):
        from gpt_pretrain.launch.told import tell_once

        way_out = "activate the environment with . .venv/bin/activate (make install creates it)"
        tell_once([f"{sys.executable} lacks {', '.join(_missing)}; {way_out}\n"], "error: ")
        sys.exit(2)
