"""`python -m gpt_pretrain.prepare_data`: see `commands.prepare_data`."""

from gpt_pretrain.commands.prepare_data import main

if __name__ == "__main__":
    raise SystemExit(main())
