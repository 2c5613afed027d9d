"""`python -m gpt_pretrain.benchmark.picture`: see `commands.benchmark`."""

from gpt_pretrain.commands.benchmark import draw_picture

if __name__ == "__main__":
    raise SystemExit(draw_picture())
