"""`python -m gpt_pretrain.import_hf`: see `commands.import_hf`."""

from gpt_pretrain.commands.import_hf import main

if __name__ == "__main__":
    raise SystemExit(main())
