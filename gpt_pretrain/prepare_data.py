"""`python -m gpt_pretrain.prepare_data`: see `commands.prepare_data`."""

import sys

from gpt_pretrain.commands.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
