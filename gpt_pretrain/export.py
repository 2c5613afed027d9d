"""`python -m gpt_pretrain.export`: see `commands.export`."""

from gpt_pretrain.commands.export import main

if __name__ == "__main__":
    raise SystemExit(main())
