"""`python -m gpt_pretrain.checkpoint`: see `commands.checkpoint`."""

import sys

from gpt_pretrain.commands.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
