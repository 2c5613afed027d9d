"""`python -m gpt_pretrain.doctor`: see `commands.doctor`."""

import sys

from gpt_pretrain.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main())
