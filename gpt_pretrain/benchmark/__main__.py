"""`python -m gpt_pretrain.benchmark`: see `commands.benchmark`."""

from gpt_pretrain.commands.benchmark import main

if __name__ == "__main__":
    raise SystemExit(main())
