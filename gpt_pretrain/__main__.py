"""`python -m gpt_pretrain`: see `commands.train`."""

from gpt_pretrain.commands.train import main

if __name__ == "__main__":
    raise SystemExit(main())
