"""`python -m gpt_pretrain.benchmark`: see `commands.benchmark`."""

import sys

from gpt_pretrain.commands.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
