"""`python -m gpt_pretrain.benchmark.picture`: see `commands.picture`."""

from gpt_pretrain.commands.picture import main

if __name__ == "__main__":
    raise SystemExit(main())
