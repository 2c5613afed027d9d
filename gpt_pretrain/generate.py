"""`python -m gpt_pretrain.generate`: see `commands.generate`."""

from gpt_pretrain.commands.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
