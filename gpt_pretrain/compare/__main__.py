"""`python -m gpt_pretrain.compare`: see `commands.compare`."""

from gpt_pretrain.commands.compare import main

if __name__ == "__main__":
    raise SystemExit(main())
