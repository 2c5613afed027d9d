"""A run whose rank 1 has one more override than the others: EXTRA OVERRIDE…"""

import os
import sys

from gpt_pretrain.__main__ import main

if __name__ == "__main__":
    extra, *overrides = sys.argv[1:]
    sys.exit(main([*overrides, *([extra] if os.environ["RANK"] == "1" else [])]))
