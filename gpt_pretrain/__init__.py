"""Hydra-configured, Megatron-style GPT pretraining with FP8 on NVIDIA Hopper and newer."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parent:
    # Python would take our megatron/ for megatron-core's.
    sys.stderr.write("error: start python -m gpt_pretrain … from outside of the folder gpt_pretrain/\n")
    sys.exit(2)
# The doctor says which packages are missing.
if find_spec("omegaconf") is None and not any(word.startswith("gpt_pretrain.doctor") for word in sys.orig_argv):
    sys.stderr.write(
        f"error: {sys.executable} lacks gpt_pretrain's packages; use the environment that has them: "
        "make install, then . .venv/bin/activate\n"
    )
    sys.exit(2)
