"""`python -m gpt_pretrain.export`: see `commands.export`."""

import sys

from gpt_pretrain.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
