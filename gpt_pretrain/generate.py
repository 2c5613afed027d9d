"""`python -m gpt_pretrain.generate`: see `commands.generate`."""

import sys

from gpt_pretrain.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
