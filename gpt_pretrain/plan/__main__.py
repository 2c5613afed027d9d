"""`python -m gpt_pretrain.plan`: see `commands.plan`."""

from gpt_pretrain.commands.plan import main

if __name__ == "__main__":
    raise SystemExit(main())
