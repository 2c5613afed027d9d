"""`python -m gpt_pretrain.checkpoint`: see `commands.checkpoint`."""

from gpt_pretrain.commands.checkpoint import main

if __name__ == "__main__":
    raise SystemExit(main())
