"""`python -m gpt_pretrain`: see `commands.train`."""

import sys

from gpt_pretrain.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
