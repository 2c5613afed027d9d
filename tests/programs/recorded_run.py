"""A training run that notes which keys it acts on: FILE OVERRIDE…; the keys go to the file, one a line.

A read counts where it comes from the code that acts: not from the schema and the rules, which look at every key, nor
from `run`, whose fields the test compares itself, nor from what the run only says of itself.
"""

import sys
from pathlib import Path

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.keys import schema_sections
from gpt_pretrain.config.schema import Config
from gpt_pretrain.megatron.cpu import install_cpu_device

# These read for whoever calls them.
PASSED = ("gpt_pretrain.config.derived", "gpt_pretrain.config.schedule")
ROOMS = ("launch", "megatron", "fp8", "data", "checkpoint", "training", "report")
ACTS = tuple(f"gpt_pretrain.{room}." for room in ROOMS)
ONLY_SAYS = ("gpt_pretrain.training.header",)


def record(section, prefix, keys):
    def read(self, name):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in PASSED:
            frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        if module.startswith(ACTS) and module not in ONLY_SAYS:
            keys.add(f"{prefix}{name}")
        return object.__getattribute__(self, name)

    section.__getattribute__ = read


if __name__ == "__main__":
    file, *overrides = sys.argv[1:]
    install_cpu_device()
    keys = set()
    for path, section in {"": Config, **schema_sections()}.items():
        record(section, f"{path}." if path else "", keys)
    code = main(overrides)
    Path(file).write_text("\n".join(sorted(keys)), encoding="utf-8")
    sys.exit(code)
