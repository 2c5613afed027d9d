"""`python -m gpt_pretrain.plan`: see `commands.plan`."""

import sys

from gpt_pretrain.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
