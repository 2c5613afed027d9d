"""`python -m gpt_pretrain.doctor`: see `commands.doctor`."""

from gpt_pretrain.commands.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
