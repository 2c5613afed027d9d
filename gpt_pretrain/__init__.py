"""Hydra-configured, Megatron-style GPT pretraining with FP8 on NVIDIA Hopper and newer."""

import os
import sys
from pathlib import Path

if Path(sys.path[0] or os.curdir).resolve() == Path(__file__).resolve().parent:
    # Python would take our megatron/ for megatron-core's.
    sys.stderr.write("error: start python -m gpt_pretrain … from outside of the folder gpt_pretrain/\n")
    sys.exit(2)
